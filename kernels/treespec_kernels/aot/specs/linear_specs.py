"""Specs of the linear layers, the norms and the LM head."""

from __future__ import annotations

from dataclasses import asdict, replace

import torch

from treespec_kernels.aot.kernel_spec import AOT_FORMS, TRITON_TYPES, KernelShape, KernelSpec, LinearLayer
from treespec_kernels.launch.rows import alignment
from treespec_kernels.linear.lm_head import LmHeadConfig
from treespec_kernels.linear.lm_head_kernels import project_to_vocab
from treespec_kernels.linear.quantized_row_linear import quantized_default
from treespec_kernels.linear.quantized_row_linear_kernels import multiply_quantized
from treespec_kernels.linear.rms_norm import block_of_hidden, warps_of_block
from treespec_kernels.linear.rms_norm_kernels import norm_rows
from treespec_kernels.linear.row_linear import REDUCE_BLOCK, REDUCE_WARPS
from treespec_kernels.linear.row_linear_config import RowLinearConfig
from treespec_kernels.linear.row_linear_kernels import add_splits, multiply_rows
from treespec_kernels.linear.row_tiles import RowTiledConfig


def row_linear(shape: KernelShape, target: str | None) -> list[KernelSpec]:
    """Return specs of the linear layers of a shape in their default configurations, as launched by a decoder.

    Layers with split K write partial sums; for o and down, `add_splits` adds them and the residual. gate_up (up, in an
    MLP without a gate) applies its activation, also to a product of cuBLAS. A quantised shape has no specs.
    """
    specs: list[KernelSpec] = []
    for layer in shape.linear_layers if shape.quantized is None else ():
        out_features, in_features = layer.out_features, layer.in_features
        config = RowLinearConfig.default(shape.dtype, out_features, in_features, layer.silu_gate, target)
        is_split = config.split_k > 1
        epilogue = _epilogue(shape, layer)
        described = {"dtype": shape.element, "out_features": out_features, "in_features": in_features}
        described["activation"] = epilogue["ACTIVATION"]
        multiply = epilogue | {
            "OUT_FEATURES": out_features,
            "STRIDE_WEIGHT": in_features,
            "IN_FEATURES": in_features,
            "BYTES_IN": alignment(shape.dtype.itemsize, in_features),
            "PARTIALS": is_split,
            **config.constants,
        }
        if is_split:
            multiply |= {"BYTES_OUT": alignment(4, out_features), "SILU_GATE": False, "HAS_RESIDUAL": False}
            multiply |= {"ACTIVATION": "none", "HAS_BIAS": False}
        types = _row_linear_types(shape) | ({"out": "*fp32"} if is_split else {})
        spec = KernelSpec(multiply_rows, types, multiply, config.options, described | asdict(config))
        found = [spec, *_larger(spec, config)]
        if is_split and layer.name != "qkv":
            found.append(_add_splits_spec(shape, layer, config.split_k))
        if layer.name.endswith("up"):  # of products by cuBLAS, with exact=False
            found.append(_add_splits_spec(shape, layer, 1, shape.dtype))
        specs += [spec for spec in found if spec not in specs]
    return specs


def quantized_row_linear(shape: KernelShape, target: str | None) -> list[KernelSpec]:
    """Return specs of the quantised linear layers of a shape in their default configurations, as launched by a decoder.

    The format is the shape's, or each of `AOT_FORMS`. `add_splits` adds the partial sums of all layers but qkv, even
    those of a single split.
    """
    specs: list[KernelSpec] = []
    for layer in shape.linear_layers:
        out_features, in_features = layer.out_features, layer.in_features
        for form in AOT_FORMS if shape.quantized is None else (shape.quantized,):
            bits, group = form.bits, form.group_of(in_features)
            config = quantized_default(shape.dtype, out_features, in_features, group, bits, target)
            constants = {
                "BITS": bits,
                "GROUP": group,
                "HAS_ZERO": form.has_zero,
                "OUT_FEATURES": out_features,
                "IN_FEATURES": in_features,
                "BYTES_X": alignment(shape.dtype.itemsize, in_features),
                "BYTES_VALUES": alignment(1, in_features * bits // 8),
                "BYTES_OUT": alignment(4, out_features),
                "PDL": False,
                **config.constants,
            }
            types = {
                "x": f"*{shape.element}",
                "values": "*i8" if bits == 8 else "*u8",
                "scale": f"*{shape.element}",
                "zero": "*i8",
                "out": "*fp32",
            }
            described = {"dtype": shape.element, "out_features": out_features, "in_features": in_features}
            spec = KernelSpec(
                multiply_quantized,
                types,
                constants,
                config.options,
                described | {"bits": bits, "group": group, "zero": form.has_zero} | asdict(config),
            )
            found = [spec] if layer.name == "qkv" else [spec, _add_splits_spec(shape, layer, config.split_k)]
            specs += [spec for spec in found if spec not in specs]
    return specs


def rms_norm(shape: KernelShape, target: str | None) -> list[KernelSpec]:
    """Return specs of the norm alone, and of the norm fused with the residual add of 2 and 8 partial sums."""
    block = block_of_hidden(shape.hidden_size)
    names = ("weight", "residual", "bias", "shift", "post_weight", "out")
    tensors = dict.fromkeys(names, f"*{shape.element}")
    if shape.norm == "rms_plus_one":
        tensors |= {"weight": "*fp32", "post_weight": "*fp32"}
    return [
        KernelSpec(
            kernel=norm_rows,
            types=tensors | {"x": "*fp32" if has_residual else f"*{shape.element}", "eps": "fp32"},
            constants={
                "HIDDEN": shape.hidden_size,
                "NUM_SPLITS": num_splits,
                "HAS_RESIDUAL": has_residual,
                "HAS_BIAS": has_bias,
                "HAS_POST": shape.post_norms and has_residual,
                "CENTRED": shape.norm == "layer",
                "HAS_SHIFT": shape.norm == "layer",
                "BLOCK_H": block,
                "PDL": False,
            },
            options={"num_warps": warps_of_block(block), "enable_fp_fusion": False},
            config={
                "dtype": shape.element,
                "hidden_size": shape.hidden_size,
                "norm": shape.norm,
                "splits": num_splits,
            },
        )
        for num_splits, has_residual, has_bias in ((1, False, False), (2, True, False), (8, True, True))
    ]


def lm_head(shape: KernelShape, target: str | None) -> list[KernelSpec]:
    """Return the specs of the default configuration for the model's vocabulary."""
    config = LmHeadConfig.default(shape.dtype, shape.vocab_size, shape.hidden_size, target)
    sizes = {"vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size, "cap": shape.capped}
    spec = KernelSpec(
        kernel=project_to_vocab,
        types=dict.fromkeys(("x", "weight", "logits"), f"*{shape.element}")
        | {"best_values": "*fp32", "sums": "*fp32", "logit_cap": "fp32"},
        constants={
            "VOCAB": shape.vocab_size,
            "HIDDEN": shape.hidden_size,
            "HAS_CAP": shape.capped,
            "PDL": False,
            **config.constants,
        },
        options=config.options,
        config={"dtype": shape.element} | sizes | asdict(config),
    )
    return [spec, *_larger(spec, config)]


def _larger(first: KernelSpec, config: RowTiledConfig) -> list[KernelSpec]:
    """Return the specs of a configuration's larger tiles."""
    tiled = [config.with_tile(tile) for tile in config.larger]
    return [
        replace(
            first,
            constants=first.constants | own.constants,
            options=own.options,
            config=first.config | own.tiles[0]._asdict() | {"larger": ()},
            first=first,
        )
        for own in tiled
    ]


def _add_splits_spec(
    shape: KernelShape, layer: LinearLayer, split_k: int, dtype: torch.dtype = torch.float32
) -> KernelSpec:
    """Return the spec of `add_splits` for the partial sums of a layer, which are in `dtype`."""
    features = layer.out_features // 2 if layer.silu_gate else layer.out_features
    constants = _epilogue(shape, layer) | {
        "OUT_FEATURES": layer.out_features,
        "SPLIT_K": split_k,
        "BYTES_PARTIAL": alignment(dtype.itemsize, features),
        "BLOCK_F": REDUCE_BLOCK,
    }
    launch = {"num_warps": REDUCE_WARPS, "enable_fp_fusion": False}
    types = _row_linear_types(shape) | {"partials": f"*{TRITON_TYPES[dtype]}"}
    return KernelSpec(add_splits, types, constants, launch, {"dtype": shape.element} | constants)


def _epilogue(shape: KernelShape, layer: LinearLayer) -> dict[str, int | bool | str]:
    features = layer.out_features // 2 if layer.silu_gate else layer.out_features
    return {
        "BYTES_OUT": alignment(shape.dtype.itemsize, features),
        "SILU_GATE": layer.silu_gate,
        "ACTIVATION": shape.activation if layer.name.endswith("up") else "none",
        "HAS_BIAS": shape.norm == "layer" and layer.name != "qkv",
        "HAS_RESIDUAL": layer.name in ("o", "down"),
        "PDL": False,
    }


def _row_linear_types(shape: KernelShape) -> dict[str, str]:
    names = ("x", "weight", "bias", "residual", "out")
    return dict.fromkeys(names, f"*{shape.element}") | {"partials": "*fp32"}
