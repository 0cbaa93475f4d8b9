"""Mixtures of experts (arXiv 2101.03961) on a GPU, without host synchronisation, for passes of fixed shape.

The router chooses `top_k` experts for each row; `group_rows` lists the rows of each expert in tiles, and
`chosen_linear_triton` reads an expert's weights once for all rows of a tile. A row's bits do not depend on other rows:
the products are row-invariant wherever a row lies in a tile, and the outputs of a row's experts are added in the order
of their scores. An expert that no row chose is not read.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from treespec_kernels.launch.arguments import check_arguments
from treespec_kernels.launch.rows import FLOAT_TYPES, sum_of_splits
from treespec_kernels.launch.triton_launch import block_of, launch_options, load_kernels
from treespec_kernels.linear.activations import sigmoid
from treespec_kernels.linear.quantized import QuantizedWeight
from treespec_kernels.linear.row_linear import (
    REDUCE_BLOCK,
    REDUCE_WARPS,
    ChosenRows,
    RowLinearConfig,
    chosen_linear_ref,
    chosen_linear_triton,
    default_config,
)
from treespec_kernels.linear.row_linear_config import interpretable

_PAIRS = 1024  # pairs per step of `group_rows`


@dataclass(frozen=True)
class Routing:
    """Parameters of a router: the fields of `treespec_weights.experts.Experts` with these names."""

    count: int
    top_k: int
    scoring: str = "softmax"
    normalized: bool = True
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1

    @classmethod
    def of(cls, experts: Any) -> Self:
        """Return the fields of an object that has them."""
        return cls(*(getattr(experts, field.name) for field in fields(cls)))


class ExpertProducts(NamedTuple):
    """Weights of the experts of a layer, stacked; optionally quantised."""

    # [num_experts, 2 * size, hidden_size], rows of the gate, then of the up projection; without a gate, `size` rows
    gate_up: Tensor | QuantizedWeight
    gate_up_bias: Tensor | None
    down: Tensor | QuantizedWeight  # [num_experts, hidden_size, size]
    down_bias: Tensor | None

    @property
    def has_gate(self) -> bool:
        return self.gate_up.shape[-2] != self.down.shape[-1]


class ExpertConfigs(NamedTuple):
    """Configurations of both products, with equal block_m."""

    gate_up: RowLinearConfig
    down: RowLinearConfig

    @classmethod
    def default(cls, products: ExpertProducts, top_k: int, dtype: torch.dtype, target: str | None) -> Self:
        """Return configurations for `top_k` experts at once, the programs of one row."""

        def default(weight: Tensor | QuantizedWeight) -> RowLinearConfig:
            config = default_config(weight, dtype, target, silu_gate=True, at_once=top_k)  # a gate is not split
            return replace(interpretable(config), split_k=1, larger=())

        return cls(default(products.gate_up), default(products.down))


def route_ref(logits: Tensor, correction: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Choose experts by the router's logits, as in transformers (reference: eager torch, any device).

    Args:
        logits: [num_rows, num_experts], in the model's dtype, or fp32 for sigmoid scores.
        correction: fp32 [num_experts], added to the scores that experts are chosen by.

    Returns:
        The experts of each row by descending score, int64 [num_rows, top_k], and their weights.
    """
    if routing.scoring == "softmax_of_chosen":
        values, chosen = logits.topk(routing.top_k)
        return chosen, torch.softmax(values, -1)
    scores = sigmoid(logits) if routing.scoring == "sigmoid" else torch.softmax(logits.float(), -1)
    choice = scores if correction is None else scores + correction
    if routing.groups > 1:
        by_group = choice.unflatten(1, (routing.groups, -1))
        best = by_group.topk(2).values.sum(-1).topk(routing.chosen_groups).indices
        hidden = torch.ones(len(logits), routing.groups, dtype=torch.bool, device=logits.device)
        choice = by_group.masked_fill(hidden.scatter_(1, best, False)[:, :, None], -torch.inf).flatten(1)
    chosen = choice.topk(routing.top_k).indices
    weights = scores.gather(1, chosen)
    if routing.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * routing.scale


def experts_ref(
    x: Tensor,  # [num_rows, hidden_size]; float32, bfloat16 or float16
    # Partial sums of the router's product, fp32 [splits, num_rows, num_experts]; with `gated`, the product of the
    # shared expert's gate is a last column
    logits: Tensor,
    products: ExpertProducts,
    routing: Routing,
    *,
    bias: Tensor | None = None,  # the router's, [num_experts]
    correction: Tensor | None = None,  # as in `route_ref`
    scales: Tensor | None = None,  # fp32 [num_experts], factors on the weights of the chosen experts
    slots: Tensor | None = None,  # int64 [num_rows]; rows of slot 0 are padding, and choose no experts
    shared: Tensor | None = None,  # partial sums of the shared expert's output, fp32 [splits, num_rows, hidden_size]
    # int32 [1]; 1 if padding chooses experts too, with weights of 0, so that a pass of padding takes as long as others
    spreads: Tensor | None = None,
    gated: bool = False,
    activation: str = "silu",
) -> Tensor:
    """Compute a mixture of experts from the products of the router and the shared expert (reference: eager torch).

    Returns:
        [num_rows, hidden_size], in x's dtype.
    """
    total, dtype = sum_of_splits(logits), x.dtype if routing.scoring != "sigmoid" else torch.float32
    router_logits = total[:, : routing.count]
    chosen, weights = route_ref(
        (router_logits if bias is None else router_logits + bias.float()).to(dtype), correction, routing
    )
    weights = weights if scales is None else weights * scales[chosen]
    if slots is not None:
        chosen, weights = chosen.where(slots[:, None] != 0, routing.count), weights.where(slots[:, None] != 0, 0.0)
    pairs = chosen.flatten()
    inner = chosen_linear_ref(
        x, products.gate_up, pairs, bias=products.gate_up_bias, silu_gate=products.has_gate, activation=activation
    )
    outputs = chosen_linear_ref(inner, products.down, pairs, bias=products.down_bias)
    outputs = outputs.view(*chosen.shape, x.shape[1]).float()
    result = torch.zeros_like(x, dtype=torch.float32)
    for rank in range(routing.top_k):
        result += outputs[:, rank] * weights[:, rank : rank + 1].float()
    if shared is not None:
        output = sum_of_splits(shared).to(x.dtype).float()
        result += output * sigmoid(total[:, -1:].to(x.dtype)) if gated else output
    return result.to(x.dtype)


def experts_triton(
    x: Tensor,
    logits: Tensor,
    products: ExpertProducts,
    routing: Routing,
    *,
    bias: Tensor | None = None,
    correction: Tensor | None = None,
    scales: Tensor | None = None,
    slots: Tensor | None = None,
    shared: Tensor | None = None,
    spreads: Tensor | None = None,
    gated: bool = False,
    activation: str = "silu",
    config: ExpertConfigs,
    pdl: bool = False,
) -> Tensor:
    """Compute `experts_ref` on a GPU, in five launches; seven with quantised weights.

    The bits of a row depend only on the row, its products, the weights and `config`.
    """
    columns, (inner, hidden) = routing.count + gated, products.gate_up.shape[-2:]
    size = inner // 2 if products.has_gate else inner
    dense = [None if isinstance(weight, QuantizedWeight) else weight for weight in (products.gate_up, products.down)]
    check_arguments(
        {"columns": columns, "experts": routing.count, "inner": inner, "size": size, "hidden": hidden},
        x=(x, "[rows hidden+]", FLOAT_TYPES),
        logits=(logits, "[splits rows columns]", torch.float32),
        bias=(bias, "[experts]", FLOAT_TYPES),
        correction=(correction, "[experts]", torch.float32),
        scales=(scales, "[experts]", torch.float32),
        slots=(slots, "[rows]", torch.int64),
        spreads=(spreads, "1", torch.int32),
        shared=(shared, "[shared_splits rows hidden]", torch.float32),
        gate_up=(dense[0], "[experts inner hidden]", x.dtype),
        down=(dense[1], "[experts hidden size]", x.dtype),
        gate_up_bias=(products.gate_up_bias, "[experts inner]", x.dtype),
        down_bias=(products.down_bias, "[experts hidden]", x.dtype),
    )
    num_rows, options = len(x), launch_options(pdl)
    out = torch.empty_like(x)
    if not num_rows:
        return out
    kernels, block_e = load_kernels("linear.experts", x), block_of(routing.count + 1)
    chosen = torch.empty(num_rows, routing.top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(num_rows, routing.top_k, dtype=torch.float32, device=x.device)
    kernels.route_rows[(num_rows,)](
        *(logits, bias, correction, scales, slots, spreads, logits if routing.scoring == "sigmoid" else x),
        *(chosen, weights, num_rows),
        SCALE=routing.scale,
        SCORING=routing.scoring,
        NORMALIZED=routing.normalized,
        NUM_EXPERTS=routing.count,
        COLUMNS=columns,
        TOP_K=routing.top_k,
        GROUPS=routing.groups,
        CHOSEN_GROUPS=routing.chosen_groups,
        SPLIT_K=len(logits),
        BLOCK_E=block_e,
        BLOCK_T=block_of(routing.top_k),
        num_warps=1,
        enable_fp_fusion=False,
        **options,
    )
    rows = group_rows(chosen, routing.count, config.gate_up.block_m, pdl)
    activated = chosen_linear_triton(
        x,
        products.gate_up,
        rows,
        config=config.gate_up,
        bias=products.gate_up_bias,
        silu_gate=products.has_gate,
        activation=activation,
        pdl=pdl,
    )
    options_of_down: dict[str, Any] = {"config": config.down, "bias": products.down_bias, "pdl": pdl}
    outputs = chosen_linear_triton(activated, products.down, rows._replace(per_row=1), **options_of_down)
    kernels.combine_rows[(num_rows, -(-hidden // REDUCE_BLOCK))](
        *(outputs, chosen, weights, shared, logits if gated else None, out, num_rows),
        NUM_EXPERTS=routing.count,
        TOP_K=routing.top_k,
        HIDDEN=hidden,
        COLUMNS=columns,
        SHARED_SPLITS=1 if shared is None else len(shared),
        SPLIT_K=len(logits),
        BLOCK_F=REDUCE_BLOCK,
        num_warps=REDUCE_WARPS,
        enable_fp_fusion=False,
        **options,
    )
    return out


def group_rows(chosen: Tensor, num_groups: int, block_m: int, pdl: bool = False) -> ChosenRows:
    """List the pairs of each group in tiles of `block_m`, in one launch.

    Args:
        chosen: [num_rows, per row] int32, the group of each pair; `num_groups` or more for none.
    """
    pairs, per_row = chosen.numel(), chosen.shape[1]
    num_tiles = min(num_groups, pairs) + pairs // block_m  # groups with rows may each have one tile that is not full
    tiles = torch.empty(num_tiles, dtype=torch.int32, device=chosen.device)
    members = torch.empty(num_tiles, block_m, dtype=torch.int32, device=chosen.device)
    load_kernels("linear.experts", chosen).group_rows[(num_groups,)](
        *(chosen, tiles, members, pairs, num_tiles),
        NUM_EXPERTS=num_groups,
        BLOCK_M=block_m,
        BLOCK_P=min(_PAIRS, block_of(pairs, 32)),
        BLOCK_E=block_of(num_groups + 1),
        num_warps=4,
        **launch_options(pdl),
    )
    return ChosenRows(chosen.flatten(), tiles, members, per_row)
