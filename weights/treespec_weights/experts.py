"""Mixture-of-experts layers: their sizes in `ModelShape`, and the config.json keys of a family."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from treespec_weights.errors import Problem

MAX_EXPERTS = 4096

Scoring = Literal["softmax", "softmax_of_chosen", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Experts of a model's sparse layers, and the router that chooses `top_k` of them for each row.

    The router's scores are the softmax of its logits, of those of the chosen experts only ("softmax_of_chosen"), or
    their sigmoid. The row's output is the sum of the chosen experts' outputs, weighted by their scores.
    """

    count: int
    top_k: int
    size: int  # hidden units of an expert
    layers: tuple[int, ...]  # indices of the sparse layers; all others have a dense MLP
    shared_size: int = 0  # hidden units of the expert that computes every row, 0 for none
    shared_gate: bool = False  # the sigmoid of a projection of the row scales the shared expert's output
    bias: bool = False  # the router and the experts' projections have biases
    correction: bool = False  # experts are chosen by their score plus a parameter
    scoring: Scoring = "softmax"
    normalized: bool = True  # the weights of the chosen experts are divided by their sum
    scale: float = 1.0  # factor of the weights
    groups: int = 1  # groups of experts; a row uses the `chosen_groups` with the largest sums of two scores
    chosen_groups: int = 1
    gated: bool = True  # experts' MLPs have a gate
    latent_size: int = 0  # width of the projection that experts other than the shared one read and write; 0 for none
    # The shared expert is a dense MLP in parallel with the others; both have norms of their inputs and outputs. The
    # router has a norm of its inputs, and a factor on each expert's weight
    beside: bool = False

    def parameters(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the parameters of a sparse layer's MLP and their shapes, in order."""
        result: dict[str, tuple[int, ...]] = {"router": (self.count, hidden)}
        result |= {"router_bias": (self.count,)} if self.bias else {}
        result |= {"router_correction": (self.count,)} if self.correction else {}
        if self.shared_size:
            shared = mlp_parameters(self.shared_size, hidden, False, self.gated)
            result |= {f"shared.{name}": size for name, size in shared.items()}
        result |= {"shared.scale": (1, hidden)} if self.shared_gate else {}
        if self.latent_size:
            result |= {"latent_in": (self.latent_size, hidden), "latent_out": (hidden, self.latent_size)}
        if self.beside:
            norms = ("router_norm", "experts_norm", "experts_post_norm", "shared_post_norm")
            result |= {"expert_scales": (self.count,)} | dict.fromkeys(norms, (hidden,))
        expert = mlp_parameters(self.size, self.latent_size or hidden, self.bias, self.gated)
        return result | {f"experts.{e}.{name}": size for e in range(self.count) for name, size in expert.items()}


def mlp_parameters(inner: int, hidden: int, bias: bool, gated: bool) -> dict[str, tuple[int, ...]]:
    """Return the parameters of an MLP with `inner` hidden units, and their shapes."""
    sizes: dict[str, tuple[int, ...]] = {"gate": (inner, hidden)} if gated else {}
    sizes |= {"up": (inner, hidden), "down": (hidden, inner)}
    return sizes | ({f"{name}_bias": size[:1] for name, size in sizes.items()} if bias else {})


@dataclass(frozen=True, kw_only=True)
class ExpertRules:
    """Keys of config.json that describe a family's experts, and properties that the family fixes.

    Any family may have dense layers, given by the keys `dense`, `mlp_only_layers` and `decoder_sparse_step`, or by its
    layer types.
    """

    count: tuple[str, ...]  # alternative keys of the number of experts, which is 0 for a dense model
    switch: str | None = None  # key that is true for models with experts; None if all have them
    size: str = "moe_intermediate_size"  # key of the hidden units of an expert
    top_k: str = "num_experts_per_tok"  # key of the number of experts of a row
    dense: str = "first_k_dense_replace"  # key of the number of dense layers before the sparse ones
    types: str | None = None  # key of the layer types; sparse layers have "moe"
    shared_size: str | None = None  # key of the hidden units of the shared expert
    shared_count: str | None = None  # key of their number in units of `size`, instead of `shared_size`
    shared_gate: bool = False
    bias: bool = False
    correction: bool = False
    scoring: Scoring = "softmax"
    normalized: bool | None = None  # None: key norm_topk_prob
    scale: str | None = None  # key of the factor on the weights
    grouped: bool = False  # keys n_group and topk_group apply
    gated: bool = True
    latent_size: str | None = None  # key of `Experts.latent_size`
    beside: bool = False

    def read(self, config: Mapping[str, Any], num_layers: int, problems: list[Problem]) -> Experts | None:
        """Read a parsed config.json; adds to `problems` and returns None if a value is missing or wrong."""
        num_known = len(problems)

        def natural(key: str, most: int, least: int = 1, default: int | None = None) -> int:
            value = config.get(key, default)
            if type(value) is not int or not least <= value <= most:
                message = f"{value!r} is not a whole number from {least} to {most}"
                problems.append(Problem("config", repr(key), "missing from config.json" if value is None else message))
                return least
            return value

        def flag(key: str) -> bool:
            if not isinstance(value := config.get(key, False), bool):
                problems.append(Problem("config", repr(key), f"{value!r} is not true or false"))
            return value is True

        if self.switch is not None and not flag(self.switch):
            return None
        key = next((key for key in self.count if key in config), self.count[0])
        if config.get(key) == 0:
            return None
        count = natural(key, MAX_EXPERTS)
        size = natural(self.size, 2**31 - 1)
        shared = 0 if self.shared_size is None else natural(self.shared_size, 2**31 - 1)
        if self.shared_count is not None:
            shared = size * natural(self.shared_count, MAX_EXPERTS, default=1)
        latent = 0
        if self.latent_size is not None and config.get(self.latent_size) is not None:
            latent = natural(self.latent_size, 2**31 - 1)
        groups, chosen_groups = 1, 1
        if self.grouped:
            groups = natural("n_group", count, default=1)
            chosen_groups = natural("topk_group", groups, default=1)
            if count % groups or (groups > 1 and count // groups < 2):
                message = f"{groups!r} groups of {count} experts; valid: groups of equal size, at least 2"
                problems.append(Problem("config", "'n_group'", message))
        top_k = natural(self.top_k, max(chosen_groups * count // groups, 1))
        scale = 1.0 if self.scale is None else config.get(self.scale, 1.0)
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not scale > 0:
            problems.append(Problem("config", repr(self.scale), f"{scale!r} is not a positive number"))
        layers = self._sparse_layers(config, num_layers, natural, problems)
        normalized = flag("norm_topk_prob") if self.normalized is None else self.normalized
        if len(problems) > num_known:
            return None
        return Experts(
            count=count,
            top_k=top_k,
            size=size,
            layers=layers,
            shared_size=shared,
            shared_gate=self.shared_gate,
            bias=self.bias,
            correction=self.correction,
            scoring=self.scoring,
            normalized=normalized,
            scale=float(scale),
            groups=groups,
            chosen_groups=chosen_groups,
            gated=self.gated,
            latent_size=latent,
            beside=self.beside,
        )

    def _sparse_layers(
        self, config: Mapping[str, Any], num_layers: int, natural: Any, problems: list[Problem]
    ) -> tuple[int, ...]:
        if self.types is not None:
            types = config.get(self.types)
            return tuple(i for i, kind in enumerate(types) if kind == "moe") if isinstance(types, list) else ()
        first = natural(self.dense, num_layers, 0, 0)
        step = natural("decoder_sparse_step", 2**31 - 1, default=1)
        dense = config.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in dense):
            problems.append(Problem("config", "'mlp_only_layers'", f"{dense!r} are not layers below {num_layers}"))
            dense = []
        return tuple(layer for layer in range(first, num_layers) if layer not in dense and (layer + 1) % step == 0)
