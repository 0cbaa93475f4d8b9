"""Parse the quantization_config of a checkpoint's config.json."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treespec_weights.blocks import GgufScheme, Mxfp4Scheme
from treespec_weights.errors import UnsupportedModelError
from treespec_weights.quant_schemes import METHODS, QuantScheme

KEY = "quantization_config"


def scheme_of(config: Mapping[str, Any], folder: Path | str = ".") -> QuantScheme | None:
    """Return the scheme of a config, or None if it is not quantised. Raises UnsupportedModelError."""
    section = config.get(KEY)
    if section is None:
        return None
    if Path(folder).is_file():
        return GgufScheme.of(section["types"])
    quant = _Reader(section if isinstance(section, dict) else {}, folder)
    method = quant.one("quant_method", tuple(method for method in METHODS if method != "gguf"))
    if method == "compressed-tensors":
        return _compressed_tensors(quant)
    if method == "mxfp4":
        return Mxfp4Scheme("mxfp4", 8, 32)
    if method == "fp8":
        block = quant.block("weight_block_size") if quant.value("weight_block_size") is not None else None
        quant.one("activation_scheme", ("dynamic", None))
        quant.one("scale_fmt", (None, "float", "ue8m0"))
        ignore = quant.names("modules_to_not_convert") or quant.names("ignored_layers")
        return QuantScheme("fp8", 8, floating=True, block=block, ignore=ignore)
    bits = quant.one("bits", (4,) if method == "awq" else (4, 8))
    group = quant.value("group_size")
    if not _is_positive_int(group) and group != -1:
        raise quant.refuse("group_size", group, "-1, or a multiple of 32")
    group = None if group == -1 else group
    if method == "awq":
        quant.one("version", (None, "gemm", "GEMM"))
        zero_point = quant.one("zero_point", (True, False, None)) is not False
        ignore = quant.names("modules_to_not_convert")
        return QuantScheme("awq", bits, group, symmetric=not zero_point, ignore=ignore)
    layout = quant.one("checkpoint_format", (None, "gptq", "gptq_v2"))
    quant.one("lm_head", (None, False))
    if quant.value("dynamic"):
        raise quant.refuse("dynamic", quant.value("dynamic"), "none (one scheme for all modules)")
    centred = quant.value("sym") is True
    return QuantScheme("gptq", bits, group, symmetric=False, zero_minus_one=layout != "gptq_v2", centred=centred)


def _compressed_tensors(quant: "_Reader") -> QuantScheme:
    layout = quant.one("format", ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"))
    quant.one("quantization_status", (None, "compressed", "frozen"))
    for key in ("kv_cache_scheme", "transform_config"):
        if quant.value(key):
            raise quant.refuse(key, quant.value(key), "null")
    groups = quant.value("config_groups")
    entries = list(groups.values()) if isinstance(groups, dict) else []
    if not entries or not all(isinstance(entry, dict) and isinstance(entry.get("weights"), dict) for entry in entries):
        raise quant.refuse("config_groups", groups, "one group with weights")
    if any(entry["weights"] != entries[0]["weights"] for entry in entries):
        raise quant.refuse("config_groups", list(groups), "one scheme for all weights")
    targets = [entry.get("targets") for entry in entries]
    embeddings = layout == "float-quantized" and targets == [["Linear", "Embedding"]]
    if not embeddings and any(names != ["Linear"] for names in targets):
        raise quant.refuse("targets", targets, '["Linear"], or ["Linear", "Embedding"] in the format "float-quantized"')
    activations = entries[0].get("input_activations")
    if activations and not (isinstance(activations, dict) and activations.get("dynamic")):
        raise quant.refuse("input_activations", activations, "null or dynamic ones, which are ignored")
    weights = _Reader(entries[0]["weights"], quant.folder)
    floating = weights.one("type", ("int", "float")) == "float"
    bits = weights.one("num_bits", (8,) if floating or layout == "int-quantized" else (4, 8))
    strategy = weights.one("strategy", ("tensor", "channel", "block") if floating else ("tensor", "channel", "group"))
    weights.one("actorder", (None, False, "static", "weight"))
    group = weights.value("group_size") if strategy == "group" else None
    if strategy == "group" and not _is_positive_int(group):
        raise weights.refuse("group_size", group, "a multiple of 32")
    block = weights.block("block_structure") if strategy == "block" else None
    if layout == "float-quantized" and not floating:
        raise weights.refuse("type", "int", '"float" in the format "float-quantized"')
    if layout in ("pack-quantized", "int-quantized") and floating:
        raise weights.refuse("type", "float", f'"int" in the format "{layout}"')
    ignore = quant.names("ignore")
    for entry in ignore:
        try:
            re.compile(entry.removeprefix("re:"))
        except re.error:
            raise quant.refuse("ignore", entry, "names, and patterns prefixed with 're:'") from None
    return QuantScheme(
        "compressed-tensors",
        bits,
        group,
        packed=layout == "pack-quantized",
        floating=floating,
        symmetric=weights.one("symmetric", (True, False)),
        block=block,
        embeddings=embeddings,
        ignore=ignore,
    )


def _is_positive_int(value: object) -> bool:
    return type(value) is int and value > 0


class _Reader:
    """Reads values of an object in `quantization_config`, and rejects unsupported ones."""

    def __init__(self, values: Mapping[str, Any], folder: Path | str):
        self.values, self.folder = values, folder

    def value(self, key: str) -> Any:
        return self.values.get(key)

    def one(self, key: str, valid: tuple[Any, ...]) -> Any:
        value = self.values.get(key)
        if not any(type(value) is type(choice) and value == choice for choice in valid):
            raise self.refuse(key, value, ", ".join(map(repr, valid)))
        return value

    def block(self, key: str) -> tuple[int, int]:
        match self.values.get(key):
            case [rows, columns] if _is_positive_int(rows) and _is_positive_int(columns):
                return rows, columns
            case value:
                raise self.refuse(key, value, "[128, 128]")

    def names(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.refuse(key, value, "a list of names")
        return tuple(value)

    def refuse(self, key: str, value: object, valid: str) -> UnsupportedModelError:
        message = f"{key!r} is {value!r}, which is not supported; supported: {valid}"
        return UnsupportedModelError.of(self.folder, "config", KEY, message)
