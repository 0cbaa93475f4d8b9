"""Decoder that runs transformers' model code on the flattened rows of a pass.

All rows form one sequence with explicit positions. A registered attention function writes their keys and values to the
planned slots and attends over the paged cache, so the model needs neither its own cache nor code changes.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treespec.adapter.probe import Probe
from treespec.adapter.route import AttentionCall, configs_of, routed, window_below
from treespec.adapter.row_attention import RowPlan, attend_rows
from treespec.adapter.source import Source
from treespec.adapter.trace import AdapterConfig, reference_attention, run, run_head, trace
from treespec.adapter.upcast import UpcastMode
from treespec.errors import KernelError, ModelError
from treespec.models.attention import make_attention
from treespec.models.decoder import Attention, Decoder, StreamInput, cache_slots, padded
from treespec.models.hidden_states import HiddenStates
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_kernels.linear.linear import Linear, LinearImpl, onednn_available

logger = logging.getLogger("treespec")

_NO_TAIL = 16  # rows without the SIMD tail of `AdapterDecoder`'s `multiple`


@dataclass(frozen=True, eq=False)
class AdapterPass:
    """Plan of a pass for models of one shape."""

    num_rows: int
    positions: Tensor  # int64 [num_rows]
    slots: Tensor  # int64 [num_rows, 2 * num_kv_heads]: rows of K, then V in a layer's pool viewed as [-1, head_dim]
    attention: list[Any]  # one plan per window
    requests: list[RequestRows]
    long: Tensor  # bool [num_rows], whether a row's request takes longrope's long factors
    rows: list[RowPlan] = field(default_factory=list)  # created by the first layer that needs it


class AdapterDecoder(Decoder):
    """Runs any causal language model of transformers that uses its attention interface."""

    backend = "transformers"
    quantization = None

    def __init__(
        self,
        config: AdapterConfig,  # result of `trace`
        model: nn.Module,  # must be in eval mode; only `pack` modifies it
        attention: Attention,  # used by causal layers without sinks; others attend row by row
        longest: int,  # positions of the longest request, scratch included
        min_rows: int = 2,  # minimum rows of a pass, by padding
        # Pads the number of rows to a multiple. ATen's activations compute the SIMD tail of a tensor with other code;
        # 16 rows of a width divisible by 4 have no tail
        multiple: int = 1,
        model_vocab: int | None = None,  # the model's own, if the config has a larger one; None = equal
        exact: bool = True,  # whether experts are row-invariant
    ):
        shape, parameter = config.shape, next(model.parameters())
        self.config: AdapterConfig = config  # type: ignore[assignment]
        self.attention, self.min_rows, self.multiple, self.exact = attention, min_rows, multiple, exact
        self._owned = model if config.source.model_ref is None else None
        self.heads, self.kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.vocab_size, self.model_vocab = shape.vocab_size, shape.vocab_size if model_vocab is None else model_vocab
        self.dtype, self.device = parameter.dtype, parameter.device
        packed = any(isinstance(module, PackedLinear) for module in model.modules())
        self.linear: LinearImpl = "onednn" if packed else "torch"
        self._configs = configs_of(model)
        masks = zip(config.masks, config.sinks, strict=True)
        try:
            windows = [None if sinks else window_below(mask, longest, self.device) for mask, sinks in masks]
        except ModelError as error:
            raise ModelError(f"{config.source.name}: {error}") from error
        self.windows = tuple(dict.fromkeys(window.size for window in windows if window is not None))
        # each layer's index into `AdapterPass.attention`; None = row by row
        self.plans = tuple(None if window is None else self.windows.index(window.size) for window in windows)
        self._calls_per_layer, base = 0, model.get_submodule(config.base)
        self._longropes = [name for name, module in base.named_modules() if _is_longrope(module)]
        self._stack, self._num_kept, self._num_kept_calls = self._find_layer_list(base)

    @property
    def model(self) -> nn.Module:
        """The model. In-memory models are referenced weakly and belong to the caller."""
        model_ref = self.config.source.model_ref
        model = self._owned if model_ref is None else model_ref()
        assert model is not None, "the in-memory model was garbage-collected"
        return model

    @cached_property
    def plan_key(self) -> tuple[object, ...]:
        """Models with equal keys can share a pass."""
        laid_out = self.min_rows, self.multiple, self.config.max_positions, self.config.short_context
        heads = self.heads, self.kv_heads, self.head_dim
        return "adapter", heads, laid_out, self.windows, self.attention.name, self.device

    @property
    def nbytes(self) -> int:
        packed = sum(module.nbytes for module in self.model.modules() if isinstance(module, PackedLinear))
        return packed + sum(tensor.nbytes for tensor in (*self.model.parameters(), *self.model.buffers()))

    def layer_subset(self, max_window: int) -> tuple[Decoder, int]:
        """Return the fewest leading layers that cover every kind (all if kinds are unknown), with clipped windows."""
        model = copy.copy(self)
        model.windows = tuple(None if window is None else min(window, max_window) for window in self.windows)
        return model, self._num_kept_calls

    @property
    def embed(self) -> Tensor:
        """Embeddings, [vocab_size, hidden_size]."""
        weight: Tensor = self._embedding.weight
        return weight

    @property
    def embed_scale(self) -> float:  # type: ignore[override]
        """Factor on the embeddings, if it is part of the embedding module."""
        return float(getattr(self._embedding, "embed_scale", 1.0))

    @property
    def _embedding(self) -> Any:
        return self.model.get_input_embeddings()  # type: ignore[operator]

    def check_states(self, of: Sequence[int]) -> None:
        if self._stack is None or self._calls_per_layer != 1:
            raise KernelError(
                f"hidden states of layers {list(of)}: not available from {self.config.source.name}, which has no list "
                "of layers with one attention each"
            )
        super().check_states(of)

    def plan(self, requests: list[RequestRows], kv: Tensor) -> AdapterPass:  # type: ignore[override]
        short_context, counts = self.config.short_context, [rows.num_rows for rows in requests]
        padded_rows = self._padded(sum(counts))
        # The self-test and cost measurements may exceed a model's learned positions; requests do not.
        positions = np.minimum(
            padded([rows.positions for rows in requests], padded_rows), self.config.max_positions - 1
        )
        long = np.repeat([rows.max_len > short_context for rows in requests], counts)
        return AdapterPass(
            padded_rows,
            torch.from_numpy(positions).to(self.device),
            torch.from_numpy(cache_slots(requests, kv, padded_rows)).to(self.device),
            [self.attention.plan(requests, padded_rows, window) for window in self.windows],
            requests,
            F.pad(torch.from_numpy(long), (0, padded_rows - len(long))).to(self.device),
        )

    def _padded(self, num_rows: int) -> int:
        return max(self.min_rows, -(-num_rows // self.multiple) * self.multiple)

    def forward(self, tokens: Tensor, layout: AdapterPass, kv: Tensor, num_layers: int | None = None) -> Tensor:  # type: ignore[override]
        """Run a pass and return the head's inputs; any `num_layers` runs the layers of `layer_subset`."""
        base = self.model.get_submodule(self.config.base)
        return self._run_base(base if num_layers is None else self._truncated(base), tokens, layout, kv)

    def forward_with_states(  # type: ignore[override]
        self, tokens: Tensor, layout: AdapterPass, kv: Tensor, of: Sequence[int], stream: StreamInput | None = None
    ) -> HiddenStates:
        assert stream is None
        states, num_layers = dict[int, Tensor](), self.config.shape.num_layers
        base = self._recording(self.model.get_submodule(self.config.base), of, states)
        final = self._run_base(base, tokens, layout, kv)
        states[num_layers + 1] = final
        return HiddenStates(final, torch.stack([states[layer] for layer in of], 1))

    def _run_base(self, base: nn.Module, tokens: Tensor, layout: AdapterPass, kv: Tensor) -> Tensor:
        """Run the model without its head."""
        if len(tokens) < layout.num_rows:
            tokens = F.pad(tokens, (0, layout.num_rows - len(tokens)))
        if self.model_vocab < self.vocab_size:  # replacing tokens that a draft lacks only costs acceptance
            tokens = tokens.clamp(max=self.model_vocab - 1)
        if self.model.training:
            raise ModelError(f"{self.config.folder} is in training mode, where dropout is random; call model.eval()")
        base = self._rotating(base, layout.long)
        with routed(self._configs, partial(self._attend_call, layout, kv), self.exact):
            return run(base, tokens, layout.positions).last_hidden_state[0]

    def _truncated(self, base: nn.Module) -> nn.Module:
        """Return a copy of the base model's leading layers, which shares its parameters, for the self-test."""
        if self._stack is None:
            return base
        truncated, stack = _copy(base, self._stack)
        stack._modules = dict(list(stack._modules.items())[: self._num_kept])
        return truncated

    def _recording(self, base: nn.Module, of: Sequence[int], states: dict[int, Tensor]) -> nn.Module:
        """Return a copy of the base model whose layers write the residual streams at the layers `of` to `states`.

        Unlike hooks, the copies' methods do not affect other threads that run the model. Each stream is copied, because
        a layer may change it in place.
        """
        assert self._stack is not None
        recording, stack = _copy(base, self._stack)
        last = len(stack._modules) - 1

        def recorded(index: int, run_layer: Callable[..., Any], *args: Any, **options: Any) -> Any:
            if index in of:
                hidden = args[0] if args else options["hidden_states"]
                states[index] = hidden[0].clone()
            result = run_layer(*args, **options)
            if index == last and last + 1 in of:
                states[last + 1] = (result if isinstance(result, Tensor) else result[0])[0].clone()
            return result

        for index, (name, layer) in enumerate(list(stack._modules.items())):
            if index in of or index == last:
                copied = _shallow_copy(layer)  # type: ignore[arg-type]
                copied.forward = partial(recorded, index, copied.forward)
                stack._modules[name] = copied
        return recording

    def _rotating(self, base: nn.Module, long: Tensor) -> nn.Module:
        """Return a copy of the base model that applies longrope's factors per row; the model itself without longrope.

        transformers chooses the factors of all rows by the largest position.
        """
        if not self.config.short_context:
            return base
        last = self.config.short_context - 1

        def rotated(rotate: Callable[..., Any], x: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> Any:
            short = rotate(x, torch.where(long, 0, position_ids).clamp(max=last), *args, **options)
            longer = F.pad(position_ids, (0, _NO_TAIL), value=last + 1)
            pairs = zip(rotate(x, longer, *args, **options), short, strict=True)
            return tuple(torch.where(long[:, None], ours[:, : len(long)], theirs) for ours, theirs in pairs)

        for name in self._longropes:
            base, module = _copy(base, name)
            # Copy the frequencies, because the choice of factors overwrites them.
            module._buffers = {key: None if value is None else value.clone() for key, value in module._buffers.items()}
            module.forward = partial(rotated, module.forward)
        return base

    def _find_layer_list(self, base: nn.Module) -> tuple[str | None, int, int]:
        """Find the module list of the layers: its name, and how many leading layers, with how many attention calls,
        cover every kind. Return (None, 0, number of all calls) if there is no such list."""
        calls = self.config.shape.num_layers
        for name, stack in base.named_modules():
            if isinstance(stack, nn.ModuleList) and len(stack) > 1 and calls % len(stack) == 0:
                step = calls // len(stack)
                kinds = [
                    (type(layer), shapes_of(layer), self.plans[i * step : i * step + step])
                    for i, layer in enumerate(stack)
                ]
                num_kept = max(kinds.index(kind) for kind in kinds) + 1
                tokens = torch.zeros(2, dtype=torch.int64, device=self.device)
                self._stack, self._num_kept = name, num_kept
                try:
                    with torch.inference_mode(), routed(self._configs, reference_attention) as route:
                        run(self._truncated(base), tokens, tokens)
                except Exception:  # model code may need all layers and raise anything
                    continue
                if route.calls == num_kept * step:
                    self._calls_per_layer = step
                    return name, num_kept, route.calls
        return None, 0, calls

    def _attend_call(self, layout: AdapterPass, kv: Tensor, call: AttentionCall) -> Tensor:
        """Write the rows' keys and values to the cache, and attend; narrow heads are zero-padded."""
        width, cache = self.head_dim, kv[call.index]
        q, k, v = (F.pad(tensor, (0, width - tensor.shape[2])) for tensor in (call.query, call.key, call.value))
        kv_rows = torch.cat((k, v), 1).to(cache.dtype)
        cache.view(-1, width).index_copy_(0, layout.slots.view(-1), kv_rows.view(-1, width))
        k_cache, v_cache = cache
        q = q.to(cache.dtype).contiguous()
        plan_index = self.plans[call.index]
        if plan_index is None:
            if not layout.rows:
                layout.rows.append(RowPlan(layout.requests, self.device))
            out = attend_rows(q, k_cache, v_cache, layout.rows[0], call.mask, call.scale, call.softcap, call.sinks)
        else:
            out = self.attention(q, k_cache, v_cache, layout.attention[plan_index], call.scale, call.softcap)
        return out[..., : call.value.shape[2]]

    def logits(self, hidden: Tensor, rows: Sequence[int] | Tensor | None = None) -> Tensor:
        if rows is not None:
            hidden = hidden[rows]
        n = len(hidden)
        hidden = F.pad(hidden, (0, 0, 0, self._padded(n) - n))
        model = self.model
        logits = run_head(model, model.get_submodule(self.config.base), hidden, self.config.output)[:n]
        return F.pad(logits, (0, self.vocab_size - self.model_vocab), value=-torch.inf)  # negative padding truncates


class UpcastDecoder(AdapterDecoder):
    """Decoder that computes in a wider dtype than its model, for comparisons without rounding noise.

    The mode is active while the model's code runs, and paused in attention, over a float32 cache.
    """

    def __init__(self, config: AdapterConfig, model: nn.Module, attention: Attention, longest: int, mode: UpcastMode):
        super().__init__(config, model, attention, longest)
        self._mode = mode

    def forward(self, tokens: Tensor, layout: AdapterPass, kv: Tensor, num_layers: int | None = None) -> Tensor:  # type: ignore[override]
        with self._mode:
            return super().forward(tokens, layout, kv, num_layers)

    def logits(self, hidden: Tensor, rows: Sequence[int] | Tensor | None = None) -> Tensor:
        with self._mode:
            return super().logits(hidden, rows)

    def _attend_call(self, layout: AdapterPass, kv: Tensor, call: AttentionCall) -> Tensor:
        with self._mode.paused():
            return super()._attend_call(layout, kv, call)


def _shallow_copy(module: nn.Module) -> nn.Module:
    """Copy a module so that its children can be replaced independently."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied


def _copy(base: nn.Module, name: str) -> tuple[nn.Module, nn.Module]:
    """Return a copy of a model with an independent copy of one submodule, and this submodule."""
    copied = parent = _shallow_copy(base)
    for child in name.split("."):
        parent._modules[child] = _shallow_copy(parent._modules[child])  # type: ignore[arg-type]
        parent = parent._modules[child]  # type: ignore[assignment]
    return copied, parent


def _is_longrope(module: nn.Module) -> bool:
    """Whether a module computes longrope's rotations, of any of its layer types."""
    kind = getattr(module, "rope_type", None)
    return "longrope" in (kind.values() if isinstance(kind, dict) else (kind,))


def shapes_of(layer: nn.Module) -> tuple[object, ...]:
    """Return the weight shapes of a layer, packed or not, to distinguish layers of one class."""
    packed = tuple((m.out_features, m.in_features) for m in layer.modules() if isinstance(m, PackedLinear))
    return packed, tuple(tuple(parameter.shape) for parameter in layer.parameters())


class PackedLinear(nn.Module):
    """Linear layer with weights reordered for oneDNN."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.linear = Linear(weight.detach(), None if bias is None else bias.detach(), "onednn")
        self.nbytes = self.linear.nbytes
        self.weight = torch.empty_like(weight, device="meta")  # model code may read its dtype or shape

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if len(rows) == 1:  # oneDNN uses another kernel for a single row of some shapes
            return self.linear(rows.expand(2, -1).contiguous())[:1].view(*x.shape[:-1], self.out_features)
        return self.linear(rows.contiguous()).view(*x.shape[:-1], self.out_features)


def pack(model: nn.Module) -> None:
    """Replace all plain linear layers by packed ones, one at a time to bound peak memory."""
    from transformers.pytorch_utils import Conv1D

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear or type(child) is Conv1D:
                weight, bias = child.get_parameter("weight"), getattr(child, "bias", None)
                if onednn_available(weight.dtype):
                    with torch.inference_mode(False), torch.no_grad():
                        setattr(module, name, PackedLinear(weight if type(child) is nn.Linear else weight.t(), bias))


def open_adapter(
    source: Source, dtype: torch.dtype, device: torch.device, attention: str, packed: bool = True
) -> tuple[AdapterConfig, nn.Module]:
    """Load and trace a model, and verify that the adapter reproduces its logits."""
    model = source.load(dtype, device)
    config = trace(source, model)
    probe = Probe(source, config, model)
    float32_attention = make_attention(attention, config.shape, torch.float32, device)
    probe.compare_structure(model, lambda mode: UpcastDecoder(config, model, float32_attention, probe.longest, mode))
    packed = packed and source.model_ref is None and device.type == "cpu" and onednn_available(dtype)
    if packed:
        pack(model)
    op = make_attention(attention, config.shape, dtype, device)
    try:
        probe.compare(AdapterDecoder(config, model, op, probe.longest), op.cache_dtype)
    except ModelError as error:
        if not packed:
            raise
        logger.info("%s with row-invariant linear layers: %s; trying torch's own", source.name, error)
        return open_adapter(source, dtype, device, attention, packed=False)
    return config, model
