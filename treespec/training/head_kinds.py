"""Draft heads that can be trained, by the value of `--head`, and their published folder."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from treespec.training.dflash import make_dflash
from treespec.training.eagle3 import make_head

HEAD_KINDS = {"eagle3": make_head, "dflash": make_dflash}


def write_head(head: Any, folder: Path, target_ids: np.ndarray, target: PreTrainedConfig) -> None:
    """Write a head in its published format, in bfloat16. `target_ids`: int64 [rows + 1]."""
    rows, size = torch.from_numpy(target_ids[:-1]), int(target.vocab_size)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}
    tensors["d2t"] = rows - torch.arange(len(rows), dtype=torch.int64, device="cpu")
    tensors["t2d"] = torch.zeros(size, dtype=torch.bool, device="cpu").index_fill_(0, rows, True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = json.dumps(head.published_config(target), indent=2, sort_keys=True, default=str)
    (folder / "config.json").write_text(config + "\n")
