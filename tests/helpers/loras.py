"""Random LoRA adapters in PEFT's format, and the models into which they are merged by hand."""

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from treespec import LoRARequest

# Of all layers, except those of routers and of experts other than the shared one, which take no updates
MATRICES = r".*(layers|h)\.\d+\.(?!(\w+\.)*(gate$|router|experts\.|shared_expert_gate|fc\d)|block_sparse).*"
CONFIG = {"peft_type": "LORA", "r": 5, "lora_alpha": 12.5, "bias": "none", "use_rslora": False, "target_modules": ["x"]}


def matrices_of(target: Path, modules: str = MATRICES) -> dict[str, Tensor]:
    """The matrices of modules whose names match."""
    tensors = load_file(target / "model.safetensors").items()
    found = {name.removesuffix(".weight"): tensor for name, tensor in tensors if tensor.dim() == 2}
    return {name: tensor for name, tensor in found.items() if re.fullmatch(modules, name)}


def is_transposed(name: str) -> bool:
    """Whether a module is GPT-2's Conv1D, whose weight is [inputs, outputs]."""
    return ".h." in name


def make_lora(
    folder: Path,
    target: Path,
    seed: int,
    modules: str = MATRICES,
    ranks: Mapping[str, int] | None = None,  # by module, where they are not `r`
    dtype: torch.dtype = torch.float32,
    more: Mapping[str, Tensor] | None = None,  # further tensors
    **config: Any,
) -> Path:
    """An adapter whose updates are a third of the matrices' size."""
    folder.mkdir(parents=True, exist_ok=True)
    generator, settings = torch.Generator().manual_seed(seed), CONFIG | config
    tensors = dict(more or {})
    for name, matrix in matrices_of(target, modules).items():
        outputs, inputs = matrix.t().shape if is_transposed(name) else matrix.shape
        rank = (ranks or {}).get(name, settings["r"])
        gain = 0.3 * float(matrix.float().std()) / scale_of(settings, name, rank) * rank**-0.5
        down, up = (torch.randn(*shape, generator=generator) for shape in ((rank, inputs), (outputs, rank)))
        tensors |= {f"base_model.model.{name}.lora_A.weight": down.to(dtype)}
        tensors |= {f"base_model.model.{name}.lora_B.weight": (gain * up).to(dtype)}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def scale_of(config: Mapping[str, Any], name: str, rank: int) -> float:
    alpha = next((a for end, a in config.get("alpha_pattern", {}).items() if name.endswith(end)), config["lora_alpha"])
    return float(alpha / (math.sqrt(rank) if config["use_rslora"] else rank))


def merge(folder: Path, target: Path, lora: Path) -> Path:
    """The target with an adapter in its matrices."""
    shutil.copytree(target, folder)
    config = json.loads((lora / "adapter_config.json").read_text())
    tensors, updates = load_file(target / "model.safetensors"), load_file(lora / "adapter_model.safetensors")
    for key, up in updates.items():
        if "lora_B" in key:
            name = key.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
            down = updates[key.replace("lora_B", "lora_A")].float()
            update = scale_of(config, name, len(down)) * up.float() @ down
            matrix = tensors[f"{name}.weight"]
            merged = matrix.float() + (update.t() if is_transposed(name) else update)
            tensors[f"{name}.weight"] = merged.to(matrix.dtype).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def lora_request(folder: Path) -> LoRARequest:
    return LoRARequest(folder.name, 1, str(folder))
