"""Entry of mixtures of experts."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from treespec_kernels.linear.experts import ExpertConfigs, ExpertProducts, Routing, experts_ref, experts_triton
from treespec_kernels.linear.quantized import QuantizedWeight
from treespec_kernels.ops.linear import SPLITS, key_of, random_weight
from treespec_kernels.ops.op import Case, Inputs, Op, mapped
from treespec_kernels.ops.shapes import META, LinearLayer, Setting

COUNT, TOP_K = 6, 2
# Routings, and the parts of the layers: biases, a correction, scales, padding, a shared expert, and its gate.
KINDS = {
    "mixtral": (Routing(COUNT, TOP_K, normalized=False), ""),
    "qwen": (Routing(COUNT, TOP_K), "padding shared gated"),
    "glm": (Routing(COUNT, TOP_K, "sigmoid", True, 1.8, 3, 2), "correction shared"),
    "gemma": (Routing(COUNT, TOP_K), "scales"),
    "gpt-oss": (Routing(COUNT, TOP_K, "softmax_of_chosen"), "bias padding"),
}


def _inputs(setting: Setting, rows: int, kind: str, generator: torch.Generator) -> Inputs:
    shape, (routing, parts) = setting.shape, KINDS[kind]
    hidden, inner, gated = shape.hidden_size, shape.intermediate_size, "gated" in parts
    names = ["bias", "gate_up_bias", "down_bias"] if "bias" in parts else []
    sizes = {"bias": (COUNT,), "gate_up_bias": (COUNT, 2 * inner), "down_bias": (COUNT, hidden)}
    biases: dict[str, Any] = {name: setting.random(generator, *sizes[name]) for name in names}

    def weight(*size: int) -> Any:
        layer = LinearLayer("", COUNT * size[0], size[1])
        flat = random_weight(setting, layer, generator)
        if isinstance(flat, QuantizedWeight):
            return mapped(lambda part: part.view(COUNT, size[0], -1), flat)
        return flat.view(COUNT, *size)

    products = ExpertProducts(
        weight(2 * inner, hidden),
        biases.pop("gate_up_bias", None),
        weight(hidden, inner),
        biases.pop("down_bias", None),
    )
    arguments = {
        "x": setting.random(generator, rows, hidden),
        "logits": setting.random_fp32(generator, SPLITS, rows, COUNT + gated),
        "products": products,
        "routing": routing,
        "gated": gated,
        "activation": "clamped_swiglu" if kind == "gpt-oss" else "silu",
        **biases,
    }
    for name in ("correction", "scales"):
        if name in parts:
            arguments[name] = setting.random_fp32(generator, COUNT)
    if "padding" in parts:
        arguments["slots"] = torch.arange(rows, device=setting.device)  # the first row is padding
    if "shared" in parts:
        arguments["spreads"] = torch.ones(1, dtype=torch.int32, device=setting.device)
        arguments["shared"] = setting.random_fp32(generator, SPLITS, rows, hidden)
    return Inputs(arguments)


def _cases(op: Op, setting: Setting) -> Iterator[Case]:
    key = key_of(setting, hidden_size=setting.shape.hidden_size, size=setting.shape.intermediate_size)
    setting = replace(setting, groups=1)  # models with experts are not stacked
    for kind in KINDS:
        make = partial(_inputs, setting, setting.nodes, kind)
        yield Case(op, setting, key, kind, make, weight=0.0, num_rows=setting.nodes)


def _default(case: Case) -> ExpertConfigs:
    nothing = _inputs(replace(case.setting, device=META), 1, case.load, torch.Generator())
    return ExpertConfigs.default(nothing.arguments["products"], TOP_K, case.setting.dtype, case.setting.target)


OPS = (
    Op(
        "experts",
        experts_ref,
        experts_triton,
        _cases,
        lambda case: [_default(case)],
        rows={"x": 0, "logits": 1, "slots": 0, "shared": 1},
    ),
)
