"""What a checkpoint is and what it costs, from its headers alone."""

import math
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from treespec_weights.checkpoint import Checkpoint
from treespec_weights.errors import UnsupportedModelError
from treespec_weights.files import resolve_folder
from treespec_weights.load import ignored_names, match
from treespec_weights.rules import ModelShape, family_of, read_config
from treespec_weights.tokenizer import read_vocabulary

MEMORY_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
ITEM_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "C64": 64}


def inspect_checkpoint(folder: Path | str) -> dict[str, Any]:
    """Describes a checkpoint as a JSON-ready dict; reads headers, config and tokenizer, no tensor.

    Keys: `folder`, `family` (model_type), `architectures`, `supported`, `unsupported_because`, `shape` (ModelShape
    as a dict, None if unsupported), `context` (positions), `config_dtype`, `parameters`, `bytes`, `files`, `dtypes`,
    `tensors` (rows of tensors that are alike but for the layer, `{i}`: name, count, dtype, shape, bytes of one),
    `ignored` (names), `problems` (how many `match` finds), `memory` (per dtype: weights_bytes, kv_bytes_per_token),
    `vocabulary` (sha256, tokens, max_id). `parameters` counts what is loaded: a tied head once, no ignored buffer.

    Raises as `Checkpoint.open`, and CheckpointConfigError for an unusable config.json.
    """
    root = resolve_folder(folder)
    config = read_config(root)
    model_type, architectures = config.get("model_type"), config.get("architectures")
    context = config.get("max_position_embeddings")
    vocabulary = read_vocabulary(root)
    with Checkpoint.open(root) as checkpoint:
        report: dict[str, Any] = {
            "folder": str(folder),
            "family": model_type if isinstance(model_type, str) else None,
            "architectures": [str(name) for name in architectures] if isinstance(architectures, list) else [],
            "context": context if type(context) is int and context > 0 else None,
            "config_dtype": config.get("dtype") or config.get("torch_dtype"),
            "files": checkpoint.files,
            "bytes": sum(_bytes(info.dtype, info.size) for info in checkpoint.tensors.values()),
            "dtypes": _dtypes(checkpoint),
            "tensors": _rows(checkpoint),
            "vocabulary": vocabulary._asdict() if vocabulary else None,
        }
        return report | _as_model(config, checkpoint)


def compare_draft(target: dict[str, Any], draft: dict[str, Any]) -> dict[str, Any]:
    """What a draft would share with a target, from two results of `inspect_checkpoint`.

    Keys: `folder`, `family`, `parameters`, `cost_ratio` (draft's parameters per target's), `same_vocab_size`,
    `same_vocabulary` (None where one has no tokenizer file), `same_hidden_size`, `usable` (as a draft of the same
    vocabulary), `reason`.
    """
    sizes = [report["shape"] and report["shape"]["vocab_size"] for report in (target, draft)]
    hidden = [report["shape"] and report["shape"]["hidden_size"] for report in (target, draft)]
    hashes = [report["vocabulary"] and report["vocabulary"]["sha256"] for report in (target, draft)]
    same_vocabulary = hashes[0] == hashes[1] if all(hashes) else None
    if not (target["supported"] and draft["supported"]):
        reason = target["unsupported_because"] or draft["unsupported_because"]
    elif broken := [report["folder"] for report in (target, draft) if report["problems"]]:
        reason = f"{broken[0]} has problems; `verify` lists them"
    elif sizes[0] != sizes[1]:
        reason = f"vocab_size differs: {sizes[1]:,}, the target's is {sizes[0]:,}"
    elif same_vocabulary is False:
        reason = "the tokenizers differ: the same ids mean other tokens"
    else:
        reason = None
    return {
        "folder": draft["folder"],
        "family": draft["family"],
        "parameters": draft["parameters"],
        "cost_ratio": draft["parameters"] / target["parameters"] if target["parameters"] else None,
        "same_vocab_size": sizes[0] == sizes[1] if all(sizes) else None,
        "same_vocabulary": same_vocabulary,
        "same_hidden_size": hidden[0] == hidden[1] if all(hidden) else None,
        "usable": reason is None,
        "reason": reason,
    }


def _as_model(config: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    shape: ModelShape | None = None
    reason: str | None = None
    problems: int | None = None
    kv_values: int | None = None
    ignored: list[str] = []
    try:
        rules = family_of(config, checkpoint.folder)
    except UnsupportedModelError as error:
        reason = error.problems[0].message
        parameters = sum(info.size for info in checkpoint.tensors.values())
    else:
        shape = ModelShape.from_hf(config, rules, checkpoint.folder)
        parameters = shape.num_parameters()
        kv_values = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
        problems = len(match(checkpoint, shape, rules)[1])
        ignored = sorted(ignored_names(shape, rules) & checkpoint.names())
    return {
        "supported": shape is not None,
        "unsupported_because": reason,
        "shape": asdict(shape) if shape else None,
        "parameters": parameters,
        "ignored": ignored,
        "problems": problems,
        "memory": {
            dtype: {"weights_bytes": parameters * size, "kv_bytes_per_token": kv_values and kv_values * size}
            for dtype, size in MEMORY_DTYPES.items()
        },
    }


def _bytes(dtype: str, size: int) -> int:
    bits = ITEM_BITS.get(dtype) or (8 if dtype.startswith("F8") else int(re.sub(r"\D", "", dtype)))
    return size * bits // 8


def _dtypes(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    result: dict[str, dict[str, int]] = {}
    for info in checkpoint.tensors.values():
        row = result.setdefault(info.dtype, {"tensors": 0, "values": 0, "bytes": 0})
        row["tensors"] += 1
        row["values"] += info.size
        row["bytes"] += _bytes(info.dtype, info.size)
    return result


def _rows(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    counts = Counter(
        (re.sub(r"(?<=\.)\d+(?=\.)", "{i}", name), info.dtype, info.shape) for name, info in checkpoint.tensors.items()
    )
    return [
        {"name": name, "count": count, "dtype": dtype, "shape": list(shape), "bytes": _bytes(dtype, math.prod(shape))}
        for (name, dtype, shape), count in counts.items()
    ]
