"""How transformers' own model code reaches an attention of ours.

A model's attention modules look up a function by the name that their config holds, and masks are made by a function of
the same name. Both are registered here once. While a model is `routed`, each call goes to a handler, with the rule of
its mask in place of the mask: a pass of a token tree has no triangle of positions, so a rule is asked by position.

A config is the model's, and so every thread's, but a route is its own thread's: a thread without one that calls the
model meanwhile comes here too, and is sent on to the attention that the model has by itself.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from treespec.errors import ModelError

NAME = "treespec"

MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, position of the query, position of the key) -> whether the query sees the key; tensors broadcast."""

# What modules hand on that changes no score: transformers' own eager attention ignores it, or it says the same as the
# mask (`sliding_window`). Anything else would be lost, so a model that passes it is refused.
_WITHOUT_EFFECT = frozenset(
    "dropout sliding_window is_causal position_ids position_embeddings cache_position output_attentions "
    "output_hidden_states output_router_logits use_cache return_dict deterministic training past_key_values".split()
)


@dataclass(frozen=True, eq=False)
class Call:
    """One attention of a pass over flattened rows.

    Attributes:
        index: the how manieth of the pass: the layer, as far as the cache is concerned.
        query: [num_rows, num_heads, key width].
        key, value: [num_rows, num_kv_heads, key or value width], of these rows alone.
        mask: which keys a query sees by position, beside those of other requests and branches.
        scale: on the scores.
        softcap: c, where scores s become c tanh(s / c).
        sinks: [num_heads], scores of a key without a value.
    """

    index: int
    query: Tensor
    key: Tensor
    value: Tensor
    mask: MaskRule
    scale: float
    softcap: float | None
    sinks: Tensor | None


Handler = Callable[[Call], Tensor]
"""A call -> [num_rows, num_heads, value width], in any float dtype."""


@dataclass
class _Route:
    """Where a thread's attentions go: to a handler, or to transformers' own of another name."""

    handler: Handler | None
    own: str | None = None
    calls: int = 0
    masks: dict[int, tuple[Tensor, MaskRule]] = field(default_factory=dict)  # by address of what stands for the mask


# Model code decides what arguments reach its attention, so batch metadata cannot be one of them for every model.
_route: ContextVar[_Route | None] = ContextVar("treespec_route", default=None)


@dataclass
class _PatchedConfig:
    """A config that says `NAME` while somebody has a route, and what it says otherwise."""

    config: Any
    own: str | None
    routes: int = 0


_patched: dict[int, _PatchedConfig] = {}  # by address of the config, which the entry keeps alive
_guard = threading.Lock()


def is_routed() -> bool:
    """Whether this thread's attentions go to a handler."""
    return _route.get() is not None


def _own_name(config: Any) -> str | None:
    """The attention that a config names when nobody is routed."""
    with _guard:
        patched = _patched.get(id(config))
        own = config._attn_implementation_internal if patched is None else patched.own
    return "eager" if own == NAME else own  # a copy that was made while its original was routed


def _eager(module: nn.Module) -> Callable[..., Any]:
    """The eager attention beside a module's class, where transformers' models have it."""
    for kind in type(module).__mro__:
        found = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    raise ModelError(
        f"{type(module).__name__} has no eager attention beside it; call the model in one thread at a time"
    )


def _transformers_attention(name: str | None, module: nn.Module, *tensors: Tensor | None, **options: Any) -> Any:
    """The attention that transformers has under a name."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = ALL_ATTENTION_FUNCTIONS.get(name) if name is not None and name != "eager" else None
    return (_eager(module) if known is None else known)(module, *tensors, **options)


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The rule of plain causal attention."""
    return key <= query


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The registered attention. query: [1, num_heads, num_rows, width] -> [1, num_rows, num_heads, value width]."""
    route, kind = _route.get(), type(module).__name__
    if route is None or route.handler is None:
        own = _own_name(module.config) if route is None else route.own
        given = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux}
        options |= {name: value for name, value in given.items() if value is not None}
        return _transformers_attention(own, module, query, key, value, attention_mask, **options)
    if options.get("is_causal") is False:
        raise ModelError(f"{kind} attends in both directions")
    strange = [name for name, value in options.items() if value is not None and name not in _WITHOUT_EFFECT]
    if strange:
        raise ModelError(f"{kind} hands {', '.join(sorted(strange))} to attention, which means nothing here")
    if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise ModelError(
            f"{kind} attends from {list(query.shape)} to {list(key.shape)}; expected the same rows of one sequence"
        )
    mask: MaskRule = causal
    if attention_mask is not None:
        placeholder = route.masks.get(attention_mask.data_ptr())
        if placeholder is None:
            raise ModelError(f"{kind} makes a mask or a bias of its own")
        mask = placeholder[1]
    out = route.handler(
        Call(
            route.calls,
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            mask,
            query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            None if softcap is None else float(softcap),
            s_aux,
        )
    )
    route.calls += 1
    return out.to(query.dtype).contiguous()[None], None


def _make_mask_placeholder(
    *,
    mask_function: MaskRule,
    q_length: int = 1,
    kv_length: int = 1,
    device: torch.device | None = None,
    config: Any = None,
    **options: Any,
) -> Tensor | None:
    """The registered mask: zeros of the mask's shape in four bytes, whose address says which rule is meant."""
    route = _route.get()
    if route is None or route.handler is None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        own = _own_name(config) if route is None else route.own
        make = ALL_MASK_ATTENTION_FUNCTIONS.get(own)
        if make is None:  # transformers makes none for an attention without a function for masks
            return None
        return make(
            mask_function=mask_function, q_length=q_length, kv_length=kv_length, device=device, config=config, **options
        )
    zeros = torch.zeros(1, device=device, dtype=torch.float32).expand(1, 1, q_length, kv_length)
    route.masks[zeros.data_ptr()] = zeros, mask_function
    return zeros


@cache
def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _make_mask_placeholder)


def configs_of(model: nn.Module) -> list[Any]:
    """The configs that a model and its parts hold, each once."""
    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        if not hasattr(config, "_attn_implementation_internal") or id(config) in found:
            return
        found[id(config)] = config
        for name in getattr(config, "sub_configs", {}):
            add(getattr(config, name, None))

    for module in model.modules():
        add(getattr(module, "config", None))
    return list(found.values())


@contextmanager
def _activate(configs: list[Any], route: _Route) -> Iterator[_Route]:
    """This thread has a route; afterwards the configs are as they were, unless another thread still has one."""
    _register()
    token = _route.set(route)
    taken: list[Any] = []
    try:
        with _guard:
            for config in configs:
                patched = _patched.setdefault(id(config), _PatchedConfig(config, config._attn_implementation_internal))
                patched.routes += 1
                taken.append(config)
                config._attn_implementation_internal = NAME
        yield route
    finally:
        _route.reset(token)
        with _guard:
            for config in taken:
                patched = _patched[id(config)]
                patched.routes -= 1
                if not patched.routes:
                    del _patched[id(config)]
                    if config._attn_implementation_internal == NAME:  # its owner may have named another meanwhile
                        config._attn_implementation_internal = patched.own


def implementation(configs: list[Any], name: str) -> AbstractContextManager[_Route]:
    """Let the models of these configs use an attention of transformers by name, in this thread."""
    return _activate(configs, _Route(None, own=name))


def routed(configs: list[Any], handler: Handler) -> AbstractContextManager[_Route]:
    """Send every attention of the models of these configs to `handler`, in this thread."""
    return _activate(configs, _Route(handler))


def visible_keys(mask: MaskRule, queries: Tensor, keys: Tensor) -> Tensor:
    """bool [num_queries, num_keys]; queries and keys: int64 positions."""
    nothing = torch.zeros((), dtype=torch.int64, device=queries.device)
    found = mask(nothing, nothing, queries[:, None], keys[None, :])
    return torch.as_tensor(found, dtype=torch.bool, device=queries.device).expand(len(queries), len(keys))


class Window(NamedTuple):
    """A row sees the last `size` positions of its path, its own included; None = all."""

    size: int | None


def window_below(mask: MaskRule, length: int, device: torch.device) -> Window | None:
    """The window that a rule comes to for positions below `length`; None where it is another mask.

    Asked of 64 positions, the last among them, and of those at which a window of its size begins to hide.
    """
    positions = torch.arange(length, device=device)
    size = int(visible_keys(mask, positions[-1:], positions).sum())
    asked = torch.linspace(0, length - 1, min(64, length), device=device, dtype=torch.float32).long()
    edge = torch.arange(size - 1, size + 2, device=device).clamp(0, length - 1)
    for one in torch.unique(torch.cat((asked, edge))):
        if not torch.equal(visible_keys(mask, one[None], positions)[0], (positions <= one) & (positions > one - size)):
            return None
    return Window(None if size == length else size)
