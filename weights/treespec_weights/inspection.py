"""Describe a checkpoint from its headers, config and tokenizer, and compare drafts with a target."""

import re
from collections import Counter
from collections.abc import Set
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

from treespec_weights.blocks import FORMS
from treespec_weights.checkpoint import Checkpoint, TensorInfo
from treespec_weights.documents import read_config
from treespec_weights.dtypes import DTYPES, TORCH_DTYPES
from treespec_weights.errors import CheckpointError, UnsupportedModelError
from treespec_weights.families import FAMILIES, family_of
from treespec_weights.files import resolve_folder
from treespec_weights.load import ModelTensors
from treespec_weights.rules import FamilyRules, ModelShape
from treespec_weights.tokenizer import read_vocabulary
from treespec_weights.vocabularies import Connection, connect


def inspect_checkpoint(folder: Path | str) -> dict[str, Any]:
    """Describe a checkpoint as a JSON-ready dict, from headers, config and tokenizer, without reading tensors.

    `shape`, `made_of` and `unsupported_because` depend on whether its family is supported; `tensors` has one row per
    group of tensors that differ only in the layer `{i}`; `parameters` counts a tied head once, and no ignored buffers;
    `matrices` counts a GGUF file's matrices by type, and tells which ones compiled passes keep in blocks; `pass_bytes`
    is the number of weight bytes that such a pass reads; `problems` counts those of `ModelTensors`; `unused_ids` is the
    number of embedding rows after the tokenizer's last id.

    Raises the errors of `Checkpoint.open`, and CheckpointConfigError for an unusable config.json.
    """
    root = resolve_folder(folder)
    config = read_config(root)
    model_type, architectures = config.get("model_type"), config.get("architectures")
    rules = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    stated_dtype = config.get("dtype") or config.get("torch_dtype")
    context = config.get(rules.max_positions if rules else "max_position_embeddings")
    vocabulary = read_vocabulary(root)
    with Checkpoint.open(root) as checkpoint:
        report: dict[str, Any] = {
            "folder": str(folder),
            "family": model_type if isinstance(model_type, str) else None,
            "architectures": [str(name) for name in architectures] if isinstance(architectures, list) else [],
            "context": context if type(context) is int and context > 0 else None,
            "config_dtype": stated_dtype if isinstance(stated_dtype, str) else None,
            "files": checkpoint.files,
            "bytes": sum(info.nbytes for info in checkpoint.tensors.values()),
            "dtypes": _dtypes(checkpoint),
            "tensors": _rows(checkpoint),
            "vocabulary": vocabulary._asdict() if vocabulary else None,
        }
        report |= _as_model(config, checkpoint)
    shape, max_id = report["shape"], vocabulary.max_id if vocabulary else None
    report["unused_ids"] = max(shape["vocab_size"] - max_id - 1, 0) if shape and max_id is not None else None
    return report


def compare_draft(target: dict[str, Any], draft: dict[str, Any]) -> dict[str, Any]:
    """Compare a draft with a target, given two results of `inspect_checkpoint`; None stands for unknown."""
    sizes, hidden = (
        [report["shape"] and report["shape"][name] for report in (target, draft)]
        for name in ("vocab_size", "hidden_size")
    )
    hashes = [report["vocabulary"] and report["vocabulary"]["sha256"] for report in (target, draft)]
    connection: Connection | None = None
    if not (target["supported"] and draft["supported"]):
        reason = target["unsupported_because"] or draft["unsupported_because"]
    elif broken := [report["folder"] for report in (target, draft) if report["problems"]]:
        reason = f"{broken[0]} has problems; `verify` lists them"
    else:
        folders = [resolve_folder(report["folder"]) for report in (target, draft)]
        try:
            connection = connect(folders[0], sizes[0], folders[1], sizes[1])
            reason = connection.reason
        except CheckpointError as error:
            reason = f"a tokenizer cannot be read: {error}"
        if connection is not None and connection.kind == "none":
            reason = f"vocab_size differs: {sizes[1]:,}, the target's is {sizes[0]:,}; {reason}"
    return {
        "folder": draft["folder"],
        "family": draft["family"],
        "parameters": draft["parameters"],
        "cost_ratio": draft["parameters"] / target["parameters"] if target["parameters"] else None,
        "same_vocab_size": sizes[0] == sizes[1] if all(sizes) else None,
        "same_vocabulary": hashes[0] == hashes[1] if all(hashes) else None,
        "same_hidden_size": hidden[0] == hidden[1] if all(hidden) else None,
        "usable": reason is None,
        "connection": str(connection) if connection is not None and reason is None else None,
        "reason": reason,
    }


def _as_model(config: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    shape = reason = problems = kv_values = rules = scheme = pass_bytes = None
    ignored: list[str] = []
    try:
        rules = family_of(config, checkpoint.folder)
    except UnsupportedModelError as error:
        reason = error.problems[0].message
        parameters = sum(info.size for info in checkpoint.tensors.values())
    else:
        shape = ModelShape.from_hf(config, rules, checkpoint.folder)
        parameters = shape.num_parameters()
        kv_values = 2 * shape.kv_layers * shape.num_kv_heads * shape.head_dim
        tensors = ModelTensors(checkpoint, shape, rules)
        problems, ignored, scheme = len(tensors.problems()), sorted(tensors.ignored), tensors.scheme
        pass_bytes = _pass_bytes(tensors)
    return {
        "supported": shape is not None,
        "unsupported_because": reason,
        "shape": asdict(shape) if shape else None,
        "made_of": _made_of({**rules.assumed, **config}, rules) if rules else None,
        "parameters": parameters,
        "ignored": ignored,
        "problems": problems,
        "quantization": scheme.name if scheme else None,
        "matrices": _matrices(checkpoint, {*ignored}),
        "pass_bytes": pass_bytes,
        "memory": {
            name: {
                "weights_bytes": parameters * dtype.itemsize,
                "kv_bytes_per_token": kv_values and kv_values * dtype.itemsize,
            }
            for name, dtype in DTYPES.items()
        },
    }


def _made_of(config: dict[str, Any], rules: FamilyRules) -> dict[str, Any]:
    """Return properties of the layers.

    Values of a wrong type are dropped: config.json may hold NaN, which is not valid JSON.
    """
    windowed = rules.windows and config.get("use_sliding_window", True)
    activation, window = config.get(rules.activation), config.get("sliding_window") if windowed else None
    return {
        "norm": rules.norm,
        "activation": activation if isinstance(activation, str) else None,
        "window": window if type(window) is int else None,
        "parallel": rules.parallel is not None and config.get(rules.parallel, True) is True,
    }


def _dtypes(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    result: dict[str, dict[str, int]] = {}
    for info in checkpoint.tensors.values():
        row = result.setdefault(info.dtype, {"tensors": 0, "values": 0, "bytes": 0})
        row["tensors"] += 1
        row["values"] += info.size
        row["bytes"] += info.nbytes
    return result


def _rows(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    counts = Counter(
        (re.sub(r"(?<=\.)\d+(?=\.)", "{i}", name), info._replace(file="")) for name, info in checkpoint.tensors.items()
    )
    return [
        {"name": name, "count": count, "dtype": info.dtype, "shape": list(info.shape), "bytes": info.nbytes}
        for (name, info), count in counts.items()
    ]


def _matrices(checkpoint: Checkpoint, ignored: Set[str]) -> list[dict[str, Any]] | None:
    """Return number and memory of a GGUF file's matrices by type; None for safetensors."""
    if not checkpoint.folder.is_file():
        return None
    rows: dict[str, dict[str, Any]] = {}
    for name, info in checkpoint.tensors.items():
        if len(info.shape) >= 2 and name not in ignored:
            empty = {"type": info.dtype, "in_blocks": info.dtype in FORMS, "count": 0, "bytes": 0}
            row = rows.setdefault(info.dtype, empty)
            row["count"] += 1
            row["bytes"] += _held_bytes(info)
    return [*rows.values()]


def _held_bytes(info: TensorInfo) -> int:
    """Return a tensor's bytes in memory: as stored, or in 16 bits if compiled passes cannot read its blocks."""
    return info.nbytes if info.dtype in FORMS or info.dtype in TORCH_DTYPES else 2 * info.size


def _pass_bytes(model: ModelTensors) -> int:
    """Return the weight bytes that a pass over one row reads: layers, `top_k` experts each, and the head."""
    shape, head = model.shape, model.rules.tied_copy
    names = {rule.params[0]: rule.name for rule in model.rules.tensors}
    unread = {*model.ignored, names.get("input_embed")}  # a pass reads one row per token of an embedding
    if not shape.tied:
        unread.add(names["embed"])
    elif names["embed"] != head:
        unread.add(head)
    share = Fraction(shape.experts.top_k, shape.experts.count) if shape.experts else Fraction(1)
    sizes = {name: _held_bytes(info) for name, info in model.checkpoint.tensors.items() if name not in unread}
    return int(sum(size * share if ".experts." in name else size for name, size in sizes.items()))
