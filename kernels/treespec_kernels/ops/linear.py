"""Entries of the linear layers, dense and quantised, of the norms and of the LM head."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from treespec_kernels.linear.lm_head import LmHeadConfig, block_stats_ref, lm_head_ref, lm_head_triton
from treespec_kernels.linear.quantized import QuantizedWeight
from treespec_kernels.linear.rms_norm import Norm, rms_norm_ref, rms_norm_triton
from treespec_kernels.linear.row_linear import (
    RowLinearConfig,
    activated_ref,
    activated_triton,
    row_linear_partials_triton,
    row_linear_ref,
    row_linear_triton,
)
from treespec_kernels.linear.row_linear_config import quantized_candidates
from treespec_kernels.ops.op import Case, Inputs, Op, Results, equal, near
from treespec_kernels.ops.shapes import LinearLayer, Setting

# Weights in the mean time minimised by tuning: a pass over one tree, plain decoding, a batch of trees.
TREE, PLAIN, BATCH = 0.6, 0.2, 0.2
PREFILL = 0.01  # weight of a prompt chunk: one per hundred passes
SPLITS = 4  # splits of the partial sums that a norm or RoPE adds
EPS = 1e-5


def key_of(setting: Setting, **sizes: int) -> dict[str, Any]:
    """Return the key of a problem with these sizes and the setting's dtype."""
    return {"dtype": str(setting.dtype).removeprefix("torch."), **sizes}


def loads_of(setting: Setting, prefill: int = 0) -> dict[int, float]:
    """Return the numbers of rows to tune a layer for, and their weights. `prefill`: rows of a prefill pass."""
    weights: dict[int, float] = {}
    counts = [(setting.nodes, TREE), (1, PLAIN), (setting.requests * setting.nodes, BATCH)]
    for rows, weight in counts + ([(prefill, PREFILL)] if prefill else []):
        weights[rows] = weights.get(rows, 0.0) + weight
    return weights


# --- linear layers


def random_weight(setting: Setting, layer: LinearLayer, generator: torch.Generator) -> torch.Tensor | QuantizedWeight:
    """Create the weight of a layer, dense or in the shape's format, that keeps results near 1."""
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
    setting: Setting, layer: LinearLayer, rows: int, generator: torch.Generator, **options: Any
) -> Inputs:
    """Create the arguments of a layer; options bias and residual: whether they are added."""
    random = partial(setting.random, generator, *setting.stack)
    arguments = {"x": random(rows, layer.in_features), "weight": random_weight(setting, layer, generator), **options}
    if "bias" in options:
        arguments["bias"] = random(layer.out_features) if options["bias"] else None
    if "residual" in options:
        arguments["residual"] = random(rows, layer.out_features // (1 + layer.silu_gate))
    return Inputs(arguments)


def _product_inputs(
    setting: Setting, layer: LinearLayer, rows: int, generator: torch.Generator, bias: bool, **options: Any
) -> Inputs:
    """Create a layer's cuBLAS product (for exact=False), which the kernel activates."""
    random = partial(setting.random, generator, *setting.stack)
    product = random(rows, layer.out_features)
    return Inputs({"product": product, "bias": random(layer.out_features) if bias else None, **options})


def _layer_key(setting: Setting, layer: LinearLayer) -> dict[str, Any]:
    """Return the key of a layer. `group` of a quantised layer is a number of inputs, even if all share one scale."""
    form = setting.shape.quantized
    key = key_of(setting, out_features=layer.out_features, in_features=layer.in_features, groups=setting.groups)
    if form is None:
        return key | {"silu_gate": int(layer.silu_gate)}  # otherwise it only affects the kernel that adds the splits
    return key | {"bits": form.bits, "group": form.group_of(layer.in_features), "zero": int(form.has_zero)}


def _layer_bytes(setting: Setting, layer: LinearLayer, rows: int) -> int:
    """Return the bytes of the weight, the rows and the result."""
    form, size, itemsize = setting.shape.quantized, layer.out_features * layer.in_features, setting.dtype.itemsize
    written = rows * layer.out_features // (1 + layer.silu_gate)
    weight = size * itemsize
    if form is not None:
        weight = size * form.bits // 8 + size // form.group_of(layer.in_features) * (itemsize + form.has_zero)
    return setting.groups * (weight + (rows * layer.in_features + written) * itemsize)


def layer_case(op: Op, setting: Setting, layer: LinearLayer, rows: int, weight: float = 1.0) -> Case:
    """Return the case of a layer without bias and residual. Layers of equal size are a single problem."""
    make = partial(_layer_inputs, setting, layer, rows, silu_gate=layer.silu_gate)
    key, moved = _layer_key(setting, layer), _layer_bytes(setting, layer, rows)
    return Case(op, setting, key, f"rows {rows}", make, moved, weight, rows)


def _layer_cases(op: Op, setting: Setting) -> Iterator[Case]:
    """Yield the timed cases of a model's layers, and cases of their launches in a decoder."""
    shape, rows = setting.shape, setting.nodes
    if (shape.quantized is None) != (op.name == "row_linear"):
        return
    for size in sorted({layer[1:] for layer in shape.linear_layers}):
        for count, weight in loads_of(setting, setting.prefill).items():
            yield layer_case(op, setting, LinearLayer("", *size), count, weight)
    for layer in shape.linear_layers:
        make = partial(_layer_inputs, setting, layer, rows)
        bias, key = "bias " * shape.biased, _layer_key(setting, layer)

        def untimed(load: str, make: Any, key: dict[str, Any] = key, **changes: Any) -> Case:
            return Case(replace(op, **changes), setting, key, load, make, weight=0.0, num_rows=rows)

        if "up" not in layer.name:  # RoPE or the following norm adds the partial sums
            yield untimed(f"partial sums of {layer.name}", make, run=_sum_of_partials)
        if layer.name in ("o", "down"):
            yield untimed(f"{layer.name} {bias}residual", partial(make, bias=shape.biased, residual=True))
        if "up" in layer.name:
            options: dict[str, Any] = {
                "silu_gate": layer.silu_gate,
                "activation": shape.activation,
                "bias": shape.biased,
            }
            yield untimed(f"{bias}{shape.activation}", partial(make, **options))
            changes: dict[str, Any] = {"ref": activated_ref, "run": activated_triton, "plan": lambda inputs, config: {}}
            make = partial(_product_inputs, setting, layer, rows, **options)
            if shape.quantized is None:
                yield untimed(f"{shape.activation} of a product", make, rows={"product": -2}, **changes)


def _sum_of_partials(x: torch.Tensor, weight: Any, config: RowLinearConfig, pdl: bool = False) -> torch.Tensor:
    partials = row_linear_partials_triton(x, weight, config=config, pdl=pdl)
    total = sum(partials[1:], partials[0])
    return total.view(*x.shape[:-1], weight.shape[-2]).to(x.dtype)


def _torch_product(inputs: Inputs) -> torch.Tensor:
    """Multiply with torch, without the activation; the bits of a row depend on the number of rows."""
    x, weight = inputs.arguments["x"], inputs.arguments["weight"]
    return F.linear(x, weight) if x.dim() == 2 else torch.bmm(x, weight.mT)


def _layer_sizes(case: Case) -> tuple[torch.dtype, int, int]:
    return case.setting.dtype, case.key["out_features"], case.key["in_features"]


ROW_LINEAR = Op(
    "row_linear",
    row_linear_ref,
    row_linear_triton,
    _layer_cases,
    lambda case: RowLinearConfig.candidates(*_layer_sizes(case), bool(case.key["silu_gate"]), case.setting.target),
    rows={"x": -2, "residual": -2},
    row_dim=-2,
    baselines={"torch": _torch_product},
)
QUANTIZED_ROW_LINEAR = replace(
    ROW_LINEAR,
    name="quantized_row_linear",
    configs=lambda case: quantized_candidates(
        *_layer_sizes(case), case.key["group"], case.key["bits"], case.setting.target
    ),
    baselines={},  # torch has no products in these formats
)


# --- norms


def _norm_inputs(setting: Setting, rows: int, splits: int, biased: bool, generator: torch.Generator) -> Inputs:
    """Create rows to normalise, or partial sums of splits to add to a residual.

    The sums are small enough to keep a residual finite when they are added repeatedly.
    """
    shape, hidden = setting.shape, setting.shape.hidden_size
    dtype = torch.float32 if shape.norm == "rms_plus_one" else setting.dtype
    names = ["weight", *["shift"] * (shape.norm == "layer"), *["post_weight"] * (shape.post_norms and splits > 0)]
    weights = {name: setting.random(generator, hidden).to(dtype) for name in names}
    if shape.planes is not None and splits:
        weights["scale"] = setting.random_fp32(generator, 1)
    arguments: dict[str, Any] = {"norm": Norm(**weights, eps=EPS, kind=shape.norm)}
    if not splits:
        return Inputs({"x": setting.random(generator, rows, hidden), **arguments})
    if biased:
        arguments["bias"] = setting.random(generator, hidden)
    sums = setting.random_fp32(generator, splits, rows, hidden).mul_(1e-3)
    return Inputs({"x": sums, "residual": setting.random(generator, rows, hidden), **arguments})


def _norm_cases(op: Op, setting: Setting) -> list[Case]:
    hidden, itemsize = setting.shape.hidden_size, setting.dtype.itemsize
    key = key_of(setting, hidden_size=hidden, splits=SPLITS)

    def case(load: str, rows: int, splits: int, biased: bool = False, weight: float = 0.0) -> Case:
        entry = op if splits else replace(op, writes=())
        moved = rows * hidden * (4 * splits + 3 * itemsize) + hidden * itemsize
        make = partial(_norm_inputs, setting, rows, splits, biased)
        return Case(entry, setting, key, load, make, moved, weight, rows)

    return [
        *(case(f"rows {rows}", rows, SPLITS, weight=1.0) for rows in setting.row_counts),
        case("alone", setting.nodes, 0),
        case("of 2 splits", setting.nodes, 2),
        case("of 8 splits with a bias", setting.nodes, 8, True),
    ]


def _torch_norm(inputs: Inputs) -> torch.Tensor:
    x, norm, residual = (inputs.arguments[name] for name in ("x", "norm", "residual"))
    weight = norm.weight.to(residual.dtype)
    return F.rms_norm((residual + x.sum(0)).to(residual.dtype), residual.shape[1:], weight, EPS)


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


def _head_inputs(setting: Setting, rows: int, generator: torch.Generator) -> Inputs:
    shape, random = setting.shape, partial(setting.random, generator, *setting.stack)
    weight = random(shape.vocab_size, shape.hidden_size, scale=shape.hidden_size**-0.5)
    return Inputs({"x": random(rows, shape.hidden_size), "weight": weight, "logit_cap": shape.cap})


def _head_cases(op: Op, setting: Setting) -> Iterator[Case]:
    vocab, hidden, groups = setting.shape.vocab_size, setting.shape.hidden_size, setting.groups
    key = key_of(setting, vocab_size=vocab, hidden_size=hidden, groups=groups)
    for rows, weight in loads_of(setting).items():
        moved = groups * (vocab * hidden + rows * (hidden + vocab)) * setting.dtype.itemsize
        yield Case(op, setting, key, f"rows {rows}", partial(_head_inputs, setting, rows), moved, weight, rows)


def _compare_head(actual: Results, expected: Results, config: Any) -> None:
    """Raise AssertionError if the logits are wrong, or if the summary does not match the actual logits."""
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
