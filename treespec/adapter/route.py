"""Routes the attention calls and the experts of transformers' models to treespec.

Modules look up their attention, mask and experts functions by a name in their config. This module registers all three
under `NAME`. While a model is `routed`, each attention call goes to a handler that receives the mask function instead
of a mask, because the rows of a token tree are not in causal order, and experts are row-invariant.

Configs are shared by all threads, routes are per thread: calls from a thread without a route are forwarded to the
model's own attention.
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

from treespec.adapter.experts import run_experts
from treespec.errors import ModelError, describe_error

NAME = "treespec"

MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query position, key position) -> whether the key is visible; tensors broadcast."""

# Attention arguments that do not affect scores: transformers' eager attention ignores them, or the mask covers them
# (`sliding_window`). Models that pass other arguments are rejected.
_WITHOUT_EFFECT = frozenset(
    "dropout sliding_window is_causal position_ids position_embeddings cache_position output_attentions "
    "output_hidden_states output_router_logits use_cache return_dict deterministic training "
    "past_key_values cache".split()
)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention call of a pass over flattened rows."""

    index: int  # position of the call in the pass, and layer of the KV cache
    query: Tensor  # [num_rows, num_heads, key width]
    key: Tensor  # [num_rows, num_kv_heads, key or value width], of the same rows
    value: Tensor
    mask: MaskRule  # visible keys by position, within the row's own path
    scale: float  # factor of the scores
    softcap: float | None  # c of s -> c tanh(s / c)
    sinks: Tensor | None  # [num_heads], attention sink scores


Handler = Callable[[AttentionCall], Tensor]
"""Maps a call to its attention output [num_rows, num_heads, value width], in any float dtype."""


@dataclass
class _Route:
    """Destination of a thread's attention calls: a handler, or a transformers attention by name."""

    handler: Handler | None
    attention: str | None = None
    exact: bool = True  # experts are row-invariant
    calls: int = 0
    masks: dict[int, tuple[Tensor, MaskRule]] = field(default_factory=dict)  # key: address of the mask placeholder


# A context variable, because model code may not forward extra arguments to its attention.
_route: ContextVar[_Route | None] = ContextVar("treespec_route", default=None)


@dataclass
class _PatchedConfig:
    """A config set to `NAME` while routes exist, and its original values of `_PATCHED`."""

    config: Any
    names: dict[str, str | None]
    routes: int = 0


_PATCHED = ("_attn_implementation_internal", "_experts_implementation_internal")
_patched: dict[int, _PatchedConfig] = {}  # key: id of the config, which the entry keeps alive
_guard = threading.Lock()


def is_routed() -> bool:
    return _route.get() is not None


def _own_name(config: Any, attribute: str = "_attn_implementation_internal") -> str | None:
    """Return a config's name of its attention (or experts) outside routes."""
    with _guard:
        patched = _patched.get(id(config))
        name = getattr(config, attribute) if patched is None else patched.names[attribute]
    return "eager" if name == NAME else name  # a config copied while its original was routed


def _eager(module: nn.Module) -> Callable[..., Any]:
    """Return the eager attention function from the Python module of a model's class."""
    for kind in type(module).__mro__:
        eager = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if eager is not None:
            return eager
    raise ModelError(
        f"{type(module).__name__} has no eager_attention_forward in its module; call the model in one thread at a time"
    )


def _transformers_attention(name: str | None, module: nn.Module, *tensors: Tensor | None, **options: Any) -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function = ALL_ATTENTION_FUNCTIONS.get(name) if name is not None and name != "eager" else None
    return (_eager(module) if function is None else function)(module, *tensors, **options)


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def _attend(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_rows, width]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The registered attention function, with transformers' signature; returns no attention weights."""
    route, kind = _route.get(), type(module).__name__
    if route is None or route.handler is None:
        name = _own_name(module.config) if route is None else route.attention
        arguments = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux}
        options |= {name: value for name, value in arguments.items() if value is not None}
        return _transformers_attention(name, module, query, key, value, attention_mask, **options)
    if options.get("is_causal") is False:
        raise ModelError(f"{kind} uses bidirectional attention, which is not supported")
    unsupported = [name for name, value in options.items() if value is not None and name not in _WITHOUT_EFFECT]
    if unsupported:
        raise ModelError(f"{kind} passes unsupported arguments to attention: {', '.join(sorted(unsupported))}")
    if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise ModelError(
            f"{kind} attends from {list(query.shape)} to {list(key.shape)}; expected the same rows of one sequence"
        )
    mask: MaskRule = causal
    if attention_mask is not None:
        placeholder = route.masks.get(attention_mask.data_ptr())
        if placeholder is None:
            raise ModelError(f"{kind} builds its own mask or bias, which is not supported")
        mask = placeholder[1]
    out = route.handler(
        AttentionCall(
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
    """The registered mask function: returns a 4-byte zero, expanded, whose address identifies the mask rule."""
    route = _route.get()
    if route is None or route.handler is None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        make = ALL_MASK_ATTENTION_FUNCTIONS.get(_own_name(config) if route is None else route.attention)
        if make is None:  # attention without a mask function: no mask
            return None
        return make(
            mask_function=mask_function, q_length=q_length, kv_length=kv_length, device=device, config=config, **options
        )
    zeros = torch.zeros(1, device=device, dtype=torch.float32).expand(1, 1, q_length, kv_length)
    route.masks[zeros.data_ptr()] = zeros, mask_function
    return zeros


def _run_experts(module: Any, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """The registered experts function, with transformers' signature."""
    route = _route.get()
    if route is not None and route.handler is not None and route.exact:
        return run_experts(module, hidden, experts, weights)
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    name, eager = _own_name(module.config, "_experts_implementation_internal"), type(module).forward.__wrapped__
    result: Tensor = ALL_EXPERTS_FUNCTIONS.get_interface(name, eager)(module, hidden, experts, weights)
    return result


@cache
def _register() -> None:
    from transformers import AttentionInterface
    from transformers.integrations.moe import ExpertsInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _make_mask_placeholder)
    ExpertsInterface.register(NAME, _run_experts)


def configs_of(model: nn.Module) -> list[Any]:
    """Return the unique configs of a model and its submodules."""
    configs: dict[int, Any] = {}

    def add(config: Any) -> None:
        if not hasattr(config, "_attn_implementation_internal") or id(config) in configs:
            return
        configs[id(config)] = config
        for name in getattr(config, "sub_configs", {}):
            add(getattr(config, name, None))

    for module in model.modules():
        add(getattr(module, "config", None))
    return list(configs.values())


@contextmanager
def _activate(configs: list[Any], route: _Route) -> Iterator[_Route]:
    """Activate a route in this thread; the last route to end restores the configs."""
    _register()
    token = _route.set(route)
    activated: list[Any] = []
    try:
        with _guard:
            for config in configs:
                names = {attribute: getattr(config, attribute) for attribute in _PATCHED}
                _patched.setdefault(id(config), _PatchedConfig(config, names)).routes += 1
                activated.append(config)
                for attribute in _PATCHED:
                    setattr(config, attribute, NAME)
        yield route
    finally:
        _route.reset(token)
        with _guard:
            for config in activated:
                patched = _patched[id(config)]
                patched.routes -= 1
                if not patched.routes:
                    del _patched[id(config)]
                    for attribute, name in patched.names.items():
                        if getattr(config, attribute) == NAME:  # unless the owner has changed it
                            setattr(config, attribute, name)


def implementation(configs: list[Any], name: str) -> AbstractContextManager[_Route]:
    """Use a transformers attention by name for the models of these configs, in this thread."""
    return _activate(configs, _Route(None, attention=name))


def routed(configs: list[Any], handler: Handler, exact: bool = True) -> AbstractContextManager[_Route]:
    """Send attention calls of models of these configs to `handler`, in this thread; if `exact`, experts too."""
    return _activate(configs, _Route(handler, exact=exact))


def visible_keys(mask: MaskRule, queries: Tensor, keys: Tensor) -> Tensor:
    """Evaluate a mask rule: bool [num_queries, num_keys]. Raises ModelError if it is only for some positions."""
    nothing = torch.zeros((), dtype=torch.int64, device=queries.device)
    try:
        visible = mask(nothing, nothing, queries[:, None], keys[None, :])
    except Exception as error:  # model code may raise anything
        raise ModelError(
            f"its attention mask depends on more than positions, which is not supported ({describe_error(error)})"
        ) from error
    return torch.as_tensor(visible, dtype=torch.bool, device=queries.device).expand(len(queries), len(keys))


class Window(NamedTuple):
    """A causal mask that shows the last `size` positions of a row's path, including its own; None = all."""

    size: int | None


def window_below(mask: MaskRule, length: int, device: torch.device) -> Window | None:
    """Return the window that a mask rule implements for positions below `length`; None if it is no such window.

    Tests 64 positions, including the last one, and those around the window's edge.
    """
    positions = torch.arange(length, device=device)
    size = int(visible_keys(mask, positions[-1:], positions).sum())
    sampled = torch.linspace(0, length - 1, min(64, length), device=device, dtype=torch.float32).long()
    edge = torch.arange(size - 1, size + 2, device=device).clamp(0, length - 1)
    for query in torch.unique(torch.cat((sampled, edge))):
        if not torch.equal(
            visible_keys(mask, query[None], positions)[0], (positions <= query) & (positions > query - size)
        ):
            return None
    return Window(None if size == length else size)
