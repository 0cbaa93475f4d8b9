"""Read LoRA adapters (arXiv 2106.09685) in the format of PEFT: adapter_config.json and adapter_model.safetensors."""

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treespec_weights.checkpoint import Checkpoint
from treespec_weights.dtypes import LOADABLE
from treespec_weights.errors import CheckpointConfigError, CheckpointError, Problem
from treespec_weights.files import file_inside, read_json, resolve_folder
from treespec_weights.load import Placement, cast, expected_tensors, overflow_message, unexpected_reason
from treespec_weights.rules import FamilyRules, ModelShape

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# parameters of the products that adapters may update
_UPDATED = re.compile(
    r"layers\.\d+\.(q|k|v|attn_gate|o|(shared\.)?(gate|up|down)|input_gate|input_out"
    r"|mix|mix_(q|k|v|gate|out)|beta|decay)"
)
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")
# Prefixes of layer names in transformers' modules, which may differ from those in checkpoints
_BASE = re.compile(r"^(model\.language_model|language_model\.model|model|backbone)\.(?=layers\.)")
_MERGE = "merge the adapter into the model (merge_and_unload of peft)"
# Config keys that change more than B A: values without effect, and the meaning of others.
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "use_dora": ((False,), "DoRA scales the rows of the merged matrices"),
    "bias": (("none",), "biases of the model were trained too"),
    "lora_bias": ((False,), "the low-rank products have biases"),
    "modules_to_save": (([],), "whole modules were trained too"),
    "layer_replication": (([],), "layers are repeated"),
    "trainable_token_indices": (([], {}), "embeddings were trained too"),
    "alora_invocation_tokens": (([],), "an activated LoRA begins within the prompt"),
    "use_qalora": ((False,), "QALoRA averages the inputs of groups"),
}
# Config keys, and the keys of their exceptions: values by regular expressions for the ends of module names
_PATTERNS = {"r": "rank_pattern", "lora_alpha": "alpha_pattern"}
_OF_TENSORS = {
    "lora_embedding_": "an update of the embedding, which is not a product of rows",
    "lora_magnitude_vector": "DoRA scales the rows of the merged matrices",
    "lora_B.bias": "the low-rank products have biases",
}


class LoraWeights(NamedTuple):
    """An adapter: W x becomes W x + B (A x)."""

    # by decoder parameter: A [rank, inputs], and B [outputs, rank] times the adapter's scale
    matrices: dict[str, tuple[Tensor, Tensor]]
    rank: int  # largest rank of a module
    digest: bytes  # hash of the files


def load_lora(folder: Path | str, shape: ModelShape, rules: FamilyRules, dtype: torch.dtype) -> LoraWeights:
    """Load an adapter for a model of this shape, in `dtype`.

    Raises CheckpointError with all problems (unsupported, not matching the model, incomplete), and FileNotFoundError or
    NotADirectoryError for a wrong folder.
    """
    root = resolve_folder(folder)
    config = _read_config(root)
    with Checkpoint.open(root, TENSORS) as checkpoint:
        modules_of = (match[1] for name in checkpoint.tensors if (match := _NAME.fullmatch(name)))
        base = next((match[0] for module in modules_of if (match := _BASE.match(module))), r"\g<0>")
        placements = {
            _BASE.sub(base, placement.name.removesuffix(".weight")): placement
            for placement in expected_tensors(shape, rules)
            if len(placement.shape) == 2
        }
        modules, problems = _match(checkpoint, placements, shape, rules)
        if problems:
            raise CheckpointError(root, problems)
        matrices: dict[str, tuple[Tensor, Tensor]] = {}
        for module, (rank, names) in modules.items():
            if (configured_rank := _value(config, "r", module)) != rank:
                problems.append(
                    Problem("config", repr(module), f"has rank {rank}, but {CONFIG} says {configured_rank}")
                )
            scale = _value(config, "lora_alpha", module) / (math.sqrt(rank) if config.get("use_rslora") else rank)
            placement, (down, up) = placements[module], map(checkpoint.tensor, names)
            stored = down, up.float() * scale  # scaled before it is rounded
            (down, _), (up, _) = casted = [cast(tensor, dtype) for tensor in stored]
            for name, tensor, (result, overflows) in zip(names, stored, casted, strict=True):
                problems += [Problem("value", repr(name), overflow_message(tensor, result))] if overflows else []
            up_by_param = placement.unpack(up.t() if placement.rule.layout == "transposed" else up)
            matrices |= {param: (down, up_part) for param, up_part in up_by_param.items()}
        if problems:
            raise CheckpointError(root, problems)
    digest = hashlib.sha256()
    for name in (CONFIG, TENSORS):
        digest.update(hashlib.sha256(file_inside(root, name).read_bytes()).digest())
    return LoraWeights(matrices, max(rank for rank, _ in modules.values()), digest.digest())


def _read_config(root: Path) -> dict[str, Any]:
    config = read_json(root, CONFIG)
    if not isinstance(config, dict):
        raise CheckpointConfigError.of(root, "config", CONFIG, f"a JSON {type(config).__name__}, not an object")
    problems = []
    if config.get("peft_type") != "LORA":
        problems.append(Problem("config", "'peft_type'", f"{config.get('peft_type')!r}; supported: 'LORA'"))
    for key, (neutral, meaning) in _REFUSED.items():
        if (value := config.get(key)) is not None and value not in neutral:
            problems.append(Problem("config", repr(key), f"{value!r} is not supported: {meaning}; {_MERGE}"))
    if isinstance(start := config.get("init_lora_weights"), str) and re.match("pissa|olora|corda|loftq", start):
        meaning = "training changed the model's matrices; save it converted to LoRA (path_initial_model_for_weight_"
        problems.append(Problem("config", "'init_lora_weights'", f"{start!r}: {meaning}conversion of peft)"))
    for key in _PATTERNS:
        pattern = config.get(_PATTERNS[key]) or {}
        if not isinstance(pattern, dict):
            problems.append(Problem("config", repr(_PATTERNS[key]), f"{pattern!r}; expected an object"))
            continue
        for name, value in {key: config.get(key), **pattern}.items():
            is_number = type(value) is int or (type(value) is float and key != "r" and math.isfinite(value))
            if not is_number or value <= 0:
                problems.append(Problem("config", repr(key), f"{value!r} for {name!r}; expected a positive number"))
            try:
                re.compile(name)
            except re.error as error:
                problems.append(Problem("config", repr(_PATTERNS[key]), f"{name!r} is no regular expression: {error}"))
    if problems:
        raise CheckpointConfigError(root, problems)
    return config


def _value(config: Mapping[str, Any], key: str, module: str) -> Any:
    pattern = config.get(_PATTERNS[key]) or {}
    return next((value for end, value in pattern.items() if re.fullmatch(rf"(.*\.)?({end})", module)), config[key])


def _match(
    checkpoint: Checkpoint, placements: Mapping[str, Placement], shape: ModelShape, rules: FamilyRules
) -> tuple[dict[str, tuple[int, list[str]]], list[Problem]]:
    """Return each adapted module's rank and the names of its tensors A and B, and all problems."""
    pairs: dict[str, dict[str, str]] = {}
    problems = []
    for name in checkpoint.tensors:
        if (match := _NAME.fullmatch(name)) is None:
            meaning = next((text for part, text in _OF_TENSORS.items() if part in name), None)
            meaning = meaning or "neither lora_A nor lora_B of a module, so a part of the model itself"
            problems.append(Problem("unexpected", repr(name), f"not supported: {meaning}; {_MERGE}"))
            continue
        module, side = match.groups()
        if module not in placements and ".experts" not in module:  # PEFT names experts' tensors by parameters
            reason = unexpected_reason(f"{module}.weight", shape, rules)
            problems.append(Problem("unexpected", repr(name), f"does not fit the model: {reason}"))
        elif module not in placements or not all(map(_UPDATED.fullmatch, placements[module].params)):
            problems.append(Problem("unexpected", repr(name), f"updates of {module} are not supported; {_MERGE}"))
        else:
            pairs.setdefault(module, {})[side] = name
    modules: dict[str, tuple[int, list[str]]] = {}
    for module, names in pairs.items():
        if len(names) < 2:
            (missing,) = {"A", "B"} - names.keys()
            problems.append(Problem("missing", repr(module), f"lora_{missing} is missing"))
            continue
        infos = [checkpoint.info(names[side]) for side in "AB"]
        out, inputs = placements[module].shape
        if placements[module].rule.layout == "transposed":
            out, inputs = inputs, out
        rank = infos[0].shape[0] if infos[0].shape else 0
        for info, side, expected in zip(infos, "AB", ((rank, inputs), (out, rank)), strict=True):
            if info.shape != expected or not rank:
                message = (
                    f"has shape {list(info.shape)}, expected {['rank', inputs] if side == 'A' else list(expected)}"
                )
                problems.append(Problem("shape", repr(names[side]), message))
            if info.dtype not in LOADABLE:
                problems.append(
                    Problem("dtype", repr(names[side]), f"has dtype {info.dtype}, expected {', '.join(LOADABLE)}")
                )
        modules[module] = rank, [names[side] for side in "AB"]
    return modules, problems
