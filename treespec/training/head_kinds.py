"""Draft heads that can be trained, by the value of `--head`: their loss, agreement and published folder."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from treespec.training.dflash import make_dflash
from treespec.training.distillation import BATCH_ROWS, Curriculum, distillation_losses
from treespec.training.eagle3 import make_head
from treespec.training.loop import StepLoss
from treespec.training.target_states import TargetStates

HEAD_KINDS = {"eagle3": make_head, "dflash": make_dflash}


def head_loss(head: Any, curriculum: Curriculum, states: TargetStates, step: int) -> StepLoss:
    """Return the loss of a step's lessons, the mean over all depths' predictions, weighted by depth."""
    total, weight, hits, count = torch.zeros(1, dtype=torch.float32, device=curriculum.device)[0], 0.0, 0.0, 0
    for number, batch in enumerate(curriculum.batches(step)):
        for depth, (logits, targets) in enumerate(head.predict(batch, states, (curriculum.seed, 5, step, number))):
            total = total + head.decay**depth * distillation_losses(logits, targets).sum()
            weight += head.decay**depth * len(logits)
            if depth == 0:
                hits += float((logits.detach().argmax(1) == targets.ids[:, 0]).sum())
                count += len(logits)
    return StepLoss(total / weight, count, hits / count)


@torch.inference_mode()
def head_agreement(head: Any, curriculum: Curriculum, states: TargetStates) -> float:
    """Return the share of the lessons' target tokens that are a head's top prediction."""
    head.eval()
    hits = count = 0
    for start in range(0, len(curriculum.lessons), BATCH_ROWS):
        batch = curriculum.of(range(start, min(start + BATCH_ROWS, len(curriculum.lessons))))
        logits, targets = next(head.predict(batch, states, (curriculum.seed, 6, start)))
        hits += int((logits.argmax(1) == targets.ids[:, 0]).sum())
        count += len(logits)
    return hits / count


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
