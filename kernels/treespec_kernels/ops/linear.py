"""Entries of the linear layers, dense and quantised, of the norms and of the LM head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from treespec_kernels.linear.lm_head import LmHeadConfig, block_stats_ref, lm_head_ref, lm_head_triton
from treespec_kernels.linear.quantized import QuantizedWeight
from treespec_kernels.linear.quantized_row_linear import quantized_candidates
from treespec_kernels.linear.rms_norm import rms_norm_ref, rms_norm_triton
from treespec_kernels.linear.row_linear import (
    RowLinearConfig,
    activated_ref,
    activated_triton,
    row_linear_partials_triton,
    row_linear_ref,
    row_linear_triton,
)
from treespec_kernels.ops.op import Case, Inputs, Op, Results, equal, near
from treespec_kernels.ops.shapes import LinearLayer, Setting

# Weights in the mean time that tuning minimises: of a pass over one tree, of plain decoding, and of a batch of trees.
TREE, PLAIN, BATCH = 0.6, 0.2, 0.2
PREFILL = 0.01  # one chunk of a prompt for a hundred passes
SPLITS = 4  # of the partial sums that a norm or RoPE adds
EPS = 1e-5


def key_of(setting: Setting, **sizes: int) -> dict[str, Any]:
    """Return the key of a problem with these sizes and the setting's dtype."""
    return {"dtype": str(setting.dtype).removeprefix("torch."), **sizes}


def loads_of(setting: Setting, prefill: int = 0) -> dict[int, float]:
    """Return the numbers of rows that a layer is tuned for, and their weights. `prefill`: rows of a prefill pass."""
    weights: dict[int, float] = {}
    counts = [(setting.nodes, TREE), (1, PLAIN), (setting.requests * setting.nodes, BATCH)]
    for rows, weight in counts + ([(prefill, PREFILL)] if prefill else []):
        weights[rows] = weights.get(rows, 0.0) + weight
    return weights


# --- linear layers


def random_weight(setting: Setting, layer: LinearLayer, generator: torch.Generator) -> torch.Tensor | QuantizedWeight:
    """Create the weight of a layer, dense or in the format of the shape, that keeps the results near 1."""
    form, inputs, stack = setting.shape.quantized, layer.in_features, setting.stack
    if form is None:
        return setting.random(generator, *stack, layer.out_features, inputs, scale=inputs**-0.5)

    def integers(low: int, high: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        size = (*stack, layer.out_features, *shape)
        return torch.randint(low, high, size, generator=generator, device=setting.device, dtype=dtype)

    group, bits = form.group_of(inputs), form.bits
    values = integers(*((-128, 128, torch.int8) if bits == 8 else (0, 256, torch.uint8)), inputs * bits // 8)
    spread = torch.rand(
        (*stack, layer.out_features, inputs // group), generator=generator, device=setting.device, dtype=torch.float32
    )
    scale = ((spread + 0.5) * inputs**-0.5 / (1 << (bits - 2))).to(setting.dtype)
    return QuantizedWeight(values, scale, integers(-4, 5, torch.int8, inputs // group) if form.has_zero else None)


def _layer_inputs(
    setting: Setting, layer: LinearLayer, rows: int, generator: torch.Generator, added: str = "", **options: Any
) -> Inputs:
    """Create the arguments of a layer with silu_gate as of the layer; `added` may name bias and residual."""
    stack, features = setting.stack, layer.out_features // (1 + layer.silu_gate)
    options = {"x": setting.random(generator, *stack, rows, layer.in_features)} | options
    options |= {"weight": random_weight(setting, layer, generator)}
    if "bias" in added:
        options["bias"] = setting.random(generator, *stack, layer.out_features)
    if "residual" in added:
        options["residual"] = setting.random(generator, *stack, rows, features)
    return Inputs(options)


def _layer_key(setting: Setting, layer: LinearLayer) -> dict[str, Any]:
    """Return the key of a layer. `group` of a quantised one is a number of inputs, even if all share one scale."""
    form, sizes = setting.shape.quantized, layer._asdict()
    sizes = {name: int(sizes[name]) for name in ("out_features", "in_features", "silu_gate")}
    key = key_of(setting, **sizes, groups=setting.groups)
    if form is None:
        return key
    del key["silu_gate"]  # only affects the kernel that adds the splits
    return key | {"bits": form.bits, "group": form.group_of(layer.in_features), "zero": int(form.has_zero)}


def _layer_bytes(setting: Setting, layer: LinearLayer, rows: int) -> int:
    """Return the bytes of the weight, the rows and the result."""
    form, size, itemsize = setting.shape.quantized, layer.out_features * layer.in_features, setting.dtype.itemsize
    written = rows * layer.out_features // (1 + layer.silu_gate)
    weight = size * itemsize
    if form is not None:
        weight = size * form.bits // 8 + size // form.group_of(layer.in_features) * (itemsize + form.has_zero)
    return setting.groups * (weight + (rows * layer.in_features + written) * itemsize)


def layer_case(setting: Setting, layer: LinearLayer, rows: int, weight: float = 1.0) -> Case:
    """Return the case of a layer without bias and residual. Layers of equal size are one problem."""
    return Case(
        ROW_LINEAR if setting.shape.quantized is None else QUANTIZED_ROW_LINEAR,
        setting,
        _layer_key(setting, layer),
        f"rows {rows}",
        partial(_layer_inputs, setting, layer, rows, silu_gate=layer.silu_gate),
        _layer_bytes(setting, layer, rows),
        2 * setting.groups * rows * layer.out_features * layer.in_features,
        weight,
        rows,
    )


def _layer_cases(setting: Setting) -> list[Case]:
    """Return the timed cases of a model's layers, and those of their launches in a decoder."""
    shape, rows = setting.shape, setting.nodes
    sizes = sorted({layer[1:] for layer in shape.linear_layers})
    cases = [
        layer_case(setting, LinearLayer("", *size), count, weight)
        for size in sizes
        for count, weight in loads_of(setting, setting.prefill).items()
    ]
    plain = ROW_LINEAR if shape.quantized is None else QUANTIZED_ROW_LINEAR
    for layer in shape.linear_layers:
        made, key = partial(_layer_inputs, setting, layer, rows), _layer_key(setting, layer)
        bias, is_up = "bias " * shape.biased, layer.name.endswith("up")

        def untimed(op: Op, load: str, make: Any, key: dict[str, Any] = key) -> Case:
            return Case(op, setting, key, load, make, weight=0.0, num_rows=rows)

        if not is_up:  # added by RoPE, or by the norm that follows
            cases.append(untimed(replace(plain, **_PARTIALS), f"partial sums of {layer.name}", made))
        if layer.name in ("o", "down"):
            cases.append(untimed(plain, f"{layer.name} {bias}residual", partial(made, added=bias + "residual")))
        if is_up:
            options = {"silu_gate": layer.silu_gate, "activation": shape.activation}
            cases.append(untimed(plain, f"{bias}{shape.activation}", partial(made, added=bias, **options)))
        if is_up and shape.quantized is None:  # of a product by cuBLAS, with exact=False

            def product(generator: torch.Generator, layer: LinearLayer = layer, options: Any = options) -> Inputs:
                y = setting.random(generator, *setting.stack, rows, layer.out_features)
                b = setting.random(generator, *setting.stack, layer.out_features) if shape.biased else None
                return Inputs({"product": y, "bias": b, **options})

            activated = replace(
                plain, ref=activated_ref, run=activated_triton, plan=lambda i, c: {}, rows={"product": -2}
            )
            cases.append(untimed(activated, f"{shape.activation} of a product", product))
    return cases


def _sum_of_partials(x: torch.Tensor, weight: Any, config: RowLinearConfig, pdl: bool = False) -> torch.Tensor:
    partials = row_linear_partials_triton(x, weight, config=config, pdl=pdl)
    total = partials[0].clone()
    for part in partials[1:]:
        total += part
    return total.view(*x.shape[:-1], weight.shape[-2]).to(x.dtype)


_PARTIALS = {"run": _sum_of_partials}


def _torch_product(inputs: Inputs) -> torch.Tensor:
    """Multiply by torch, without the activation; the bits of a row depend on the number of rows."""
    x, weight = inputs.arguments["x"], inputs.arguments["weight"]
    return F.linear(x, weight) if x.dim() == 2 else torch.bmm(x, weight.mT)


def _layer_sizes(case: Case) -> tuple[torch.dtype, int, int]:
    return case.setting.dtype, case.key["out_features"], case.key["in_features"]


ROW_LINEAR = Op(
    "row_linear",
    row_linear_ref,
    row_linear_triton,
    lambda setting: _layer_cases(setting) if setting.shape.quantized is None else [],
    lambda case: RowLinearConfig.candidates(*_layer_sizes(case), bool(case.key["silu_gate"]), case.setting.target),
    rows={"x": -2, "residual": -2},
    row_dim=-2,
    baselines={"torch": _torch_product},
)
QUANTIZED_ROW_LINEAR = replace(
    ROW_LINEAR,
    name="quantized_row_linear",
    cases=lambda setting: _layer_cases(setting) if setting.shape.quantized is not None else [],
    configs=lambda case: quantized_candidates(
        *_layer_sizes(case), case.key["group"], case.key["bits"], case.setting.target
    ),
    baselines={},  # torch has no product of these formats
)


# --- norms


def _norm_inputs(setting: Setting, rows: int, splits: int, generator: torch.Generator, biased: bool = False) -> Inputs:
    """Create rows to norm, or the partial sums of splits to add to a residual.

    The sums are so small that a residual to which they are added repeatedly stays finite.
    """
    shape = setting.shape
    hidden = shape.hidden_size
    held = torch.float32 if shape.norm == "rms_plus_one" else setting.dtype

    def parameter() -> torch.Tensor:
        return setting.random(generator, hidden).to(held)

    arguments: dict[str, Any] = {"weight": parameter(), "eps": EPS, "kind": shape.norm}
    if shape.norm == "layer":
        arguments["shift"] = parameter()
    if not splits:
        return Inputs({"x": setting.random(generator, rows, hidden)} | arguments)
    arguments["x"] = setting.random_fp32(generator, splits, rows, hidden).mul_(1e-3)
    arguments["residual"] = setting.random(generator, rows, hidden)
    if biased:
        arguments["bias"] = setting.random(generator, hidden)
    if shape.post_norms:
        arguments["post_weight"] = parameter()
    return Inputs(arguments)


def _norm_cases(setting: Setting) -> list[Case]:
    hidden, itemsize = setting.shape.hidden_size, setting.dtype.itemsize
    key = key_of(setting, hidden_size=hidden, splits=SPLITS)
    timed = [
        Case(
            RMS_NORM,
            setting,
            key,
            f"rows {rows}",
            partial(_norm_inputs, setting, rows, SPLITS),
            rows * hidden * (4 * SPLITS + 3 * itemsize) + hidden * itemsize,
            rows * hidden * (SPLITS + 5),
            num_rows=rows,
        )
        for rows in setting.row_counts
    ]
    others = {"alone": (0, False), "of 2 splits": (2, False), "of 8 splits with a bias": (8, True)}
    return timed + [
        Case(
            replace(RMS_NORM, writes=("residual",) if splits else ()),
            setting,
            key,
            load,
            partial(_norm_inputs, setting, setting.nodes, splits, biased=biased),
            weight=0.0,
            num_rows=setting.nodes,
        )
        for load, (splits, biased) in others.items()
    ]


def _torch_norm(inputs: Inputs) -> torch.Tensor:
    x, weight, residual = (inputs.arguments[name] for name in ("x", "weight", "residual"))
    return F.rms_norm((residual + x.sum(0)).to(residual.dtype), residual.shape[1:], weight.to(residual.dtype), EPS)


RMS_NORM = Op(
    "rms_norm",
    rms_norm_ref,
    rms_norm_triton,
    _norm_cases,
    writes=("residual",),
    rows={"x": -2, "residual": -2},
    baselines={"torch": _torch_norm},
)


# --- LM head


def _head_cases(setting: Setting) -> list[Case]:
    shape, groups = setting.shape, setting.groups
    vocab, hidden = shape.vocab_size, shape.hidden_size

    def make(rows: int) -> Callable[[torch.Generator], Inputs]:
        def made(generator: torch.Generator) -> Inputs:
            x = setting.random(generator, *setting.stack, rows, hidden)
            weight = setting.random(generator, *setting.stack, vocab, hidden, scale=hidden**-0.5)
            return Inputs({"x": x, "weight": weight, "logit_cap": shape.cap})

        return made

    return [
        Case(
            LM_HEAD,
            setting,
            key_of(setting, vocab_size=vocab, hidden_size=hidden, groups=groups),
            f"rows {rows}",
            make(rows),
            groups * (vocab * hidden + rows * (hidden + vocab)) * setting.dtype.itemsize,
            2 * groups * rows * vocab * hidden,
            weight,
            rows,
        )
        for rows, weight in loads_of(setting).items()
    ]


def _compare_head(actual: Results, expected: Results, config: Any) -> None:
    """Raise AssertionError if the logits are wrong, or if the summary is not that of the actual logits."""
    logits, values, tokens, sums = actual.values()
    near(logits, next(iter(expected.values())))
    stats = block_stats_ref(logits, config.block_n)
    equal(values, stats.values, "the blocks' maxima")
    equal(tokens, stats.tokens, "the blocks' best tokens")
    torch.testing.assert_close(sums, stats.sums, rtol=1e-4, atol=0.0)


def _torch_head(inputs: Inputs) -> Any:
    """Compute torch's product with argmax and log-sum-exp over the logits."""
    logits = _torch_product(inputs)
    return logits.argmax(-1), logits.float().logsumexp(-1)


LM_HEAD = Op(
    "lm_head",
    lm_head_ref,
    lm_head_triton,
    _head_cases,
    lambda case: LmHeadConfig.candidates(
        case.setting.dtype, case.key["vocab_size"], case.key["hidden_size"], case.setting.target
    ),
    rows={"x": -2},
    row_dim=-2,
    by_row=lambda inputs, results: {
        name: tensor.view(*inputs.arguments["x"].shape[:-1], tensor.shape[-1]) for name, tensor in results.items()
    },
    compare=_compare_head,
    baselines={"torch with argmax and logsumexp": _torch_head},
)

OPS = (ROW_LINEAR, QUANTIZED_ROW_LINEAR, LM_HEAD, RMS_NORM)
