"""Eager decoder of all native families, built from row-invariant ops.

`FamilyRules` and `ModelConfig` describe a family's layers. A pass computes any rows of any requests. The tree batch
defines the positions that each row attends to. Small models on a CPU are bound by the number of torch calls (1 to 15 us
each), so the decoder makes few calls and creates views once per pass.
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from treespec.errors import ConfigError
from treespec.models.head_vocabulary import HeadVocabulary
from treespec.models.hidden_states import HiddenStates, record_states
from treespec.models.layer import EAGER, Layer, LinearMaker, prepare, take_projection
from treespec.models.layer_kinds import RotaryEmbedding
from treespec.models.low_rank import LowRank, Updates, fused_updates
from treespec.models.model_config import ModelConfig
from treespec.models.norms import STREAMS, LayerStream, RmsStream
from treespec.models.per_layer import PerLayerInputs
from treespec.models.recurrent import RecurrentLayer, state_shape
from treespec.models.state_pass import RequestStates
from treespec.utils.memory import drop_mapped
from treespec_kernels.attention.tree_attention_cpu import SplitCache
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows, UpdatedRows, updated_rows
from treespec_kernels.cpu.decoder_cpu import PassEntries
from treespec_kernels.linear.activations import ACTIVATIONS, sigmoid, soft_cap
from treespec_kernels.linear.linear import LinearImpl
from treespec_kernels.linear.quantized import QuantizedWeight
from treespec_kernels.linear.rms_norm import norm_heads
from treespec_kernels.recurrent.request_state import StateShape
from treespec_weights.blocks import Blocks, Weights

if TYPE_CHECKING:
    from treespec.models.compiled import CompiledDecoder


class Attention(Protocol):
    """A tree attention backend, selected when the model is built."""

    name: str
    cache_dtype: torch.dtype

    def plan(self, requests: list[RequestRows], num_rows: int, window: int | None = None) -> Any:
        """Plan a pass for all layers with one window, padded to `num_rows` rows.

        `window` is the number of path positions visible to a row, including its own; None = all.
        """

    def __call__(
        self,
        q: Tensor,
        k_cache: Any,  # Tensor, or a `SplitCache` on a CPU
        v_cache: Any,
        plan: Any,
        scale: float,
        cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention. q: [num_rows, num_heads, head_dim] in `cache_dtype`; returns the same shape.

        `cap` applies a soft cap to the scores: cap tanh(x / cap). `sinks`, fp32 [num_heads], are scores that add to the
        sum of a row's weights, and weigh no value (arXiv 2309.17453).
        """


@dataclass(frozen=True, eq=False)
class Pass:
    """Plan of one forward pass of a model: positions and slots of its rows, and attention plans."""

    num_rows: int
    # cos and signed sin of each rope, fp32 [num_rows, 2 * num_ropes, head_dim]; compiled: by position; Triton: tables
    rotation: Any
    slots: Tensor  # int64 [num_rows * 2 * num_kv_heads]: rows of K and V in a layer's pool viewed as [-1, D]
    attention: Any  # a plan for each of the model's windows
    positions: Tensor | None = None  # int64 [num_rows], for learned positions
    updated: Sequence[UpdatedRows] = ()  # rows with the low-rank updates of adapters, results of `Decoder.updates`
    states: Any = None  # a `StatePass`, which updates the requests' recurrent states; None without recurrent layers


class StreamInput(NamedTuple):
    """Residual stream that a draft's pass begins with, instead of embeddings; in the model's dtype."""

    rows: Tensor  # [num_rows, hidden_size], the residual stream before the first layer
    # [num_rows, (num_heads + 2 * num_kv_heads) * head_dim], the first layer's projections before rotation; None if they
    # are those of `rows`
    qkv: Tensor | None


def padded(arrays: Sequence[np.ndarray], size: int) -> np.ndarray:
    """Concatenate int64 arrays and append zeros, [size]."""
    if len(arrays) == 1 and len(arrays[0]) == size:
        return arrays[0]
    result = np.zeros(size, dtype=np.int64)
    np.concatenate(arrays, out=result[: sum(map(len, arrays))])
    return result


def cache_slots(requests: Sequence[RequestRows], kv: Tensor, num_rows: int) -> np.ndarray:
    """Return where a pass writes K and V in a layer's pool viewed as [-1, head_dim]: K of each head, then V.

    int64 [num_rows, 2 * num_kv_heads]; padding rows write to the null page, which is never read.
    """
    num_pages, kv_heads = kv.shape[2:4]
    first = [pages * (kv_heads * PAGE_SIZE) + offsets for pages, offsets in (rows.slots for rows in requests)]
    steps = np.arange(kv_heads) * PAGE_SIZE
    return padded(first, num_rows)[:, None] + np.concatenate((steps, steps + num_pages * kv_heads * PAGE_SIZE))


def _quantization(weights: Weights) -> str | None:
    """Describe quantised weights, such as "int8", "int4 groups of 128" or "gguf Q4_K, Q6_K"; None without any."""
    groups: dict[int, set[int]] = {}  # by bits: group sizes, unless per row
    for name, scale in weights.items():
        if name.endswith("_scale"):
            weight = QuantizedWeight(weights[name.removesuffix("_scale")], scale)
            groups.setdefault(weight.bits, set()).update({weight.group} if scale.shape[1] > 1 else ())
    forms = [f"int{bits}" + (f" groups of {min(sizes)}" if sizes else "") for bits, sizes in sorted(groups.items())]
    kinds = sorted({weight.kind for weight in weights.values() if isinstance(weight, Blocks)})
    return ", ".join([*forms, *([f"gguf {', '.join(kinds)}"] if kinds else [])]) or None


class Decoder:
    """Decoder of any native family."""

    backend = "native"
    offset = 0  # number of slots by which a token's K/V lie before the token's position; 1 for draft heads
    kept_nodes: int | None = None  # number of accepted nodes, root first, whose K/V stay valid; None for all
    max_depth: int | None = None  # number of levels that a draft predicts; None for any number
    block: int | None = None  # number of depths that a block draft predicts in one pass; None if it scores every level
    keeps_kv = True  # whether a draft has K/V of its own, so that it reads a request's tokens before it predicts
    columns: Sequence[int] = ()  # indices of the target's states that a draft head reads among the features
    growth: CDLL | None = None  # library of compiled tree growth
    entries: PassEntries | None = None  # entry points for calls from another library
    per_layer: PerLayerInputs | None = None
    head_vocabulary: HeadVocabulary | None = None  # tokens of a reduced head, set after loading
    embed_blocks: Blocks | None = None  # embeddings in the blocks of a GGUF file, dequantised by `embed`

    def __init__(
        self,
        config: ModelConfig,
        # Decoder parameters by name (`ModelShape.parameters`), in the compute dtype. The dict is emptied, so that
        # copies made by unpacking are freed one by one
        weights: Weights,
        attention: Attention,
        linear: LinearImpl | Literal["compiled", "triton"],
        # Number of rows to which smaller passes are padded: 2 if linear layers are row-invariant from two rows on,
        # otherwise the rows of the largest pass
        min_rows: int = 2,
        library: CDLL | None = None,  # computes quantised layers; None dequantises them to the model's dtype
    ):
        shape = config.shape
        self._library = library
        self.config, self.attention, self.linear, self.min_rows = config, attention, linear, min_rows
        self.heads, self.kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.vocab_size = shape.vocab_size
        self.quantization = _quantization(weights)
        embed = weights.pop("embed")
        if isinstance(embed, Blocks):
            self.embed_blocks, unquantized = embed, weights["final_norm"]
        else:
            self.embed = unquantized = embed.clone()  # a mapped tensor keeps the whole file mapped
            drop_mapped([embed])
        self.dtype, self.device = unquantized.dtype, unquantized.device
        self.embed_scale = config.embed_scale_in(self.dtype)
        self.first_scale = self.embed_scale / config.stream_scale  # factor on embeddings in the residual stream
        positions = weights.pop("positions", None)
        self.positions = None if positions is None else positions[config.rules.extra_positions :].clone()
        self.rotations = tuple(RotaryEmbedding(rope, self.device, shape.widest_head) for rope in config.ropes)
        self.windows = config.windows
        prepare(config, weights)
        self._take(weights)
        assert not weights, f"unused weights: {sorted(weights)}"

    @cached_property
    def embed(self) -> Tensor:
        """Embeddings, [vocab_size, hidden_size]; those in blocks are dequantised on first access."""
        assert self.embed_blocks is not None
        return self.embed_blocks.dequantize(self.dtype)

    def _take(self, weights: Weights) -> None:
        assert self.linear != "compiled" and self.linear != "triton"
        make_linear = LinearMaker(self.linear, self.dtype, self._library)
        kinds = [RecurrentLayer if kind.recurrent else Layer for kind in self.config.layers]
        self.layers: list[Layer] = [
            kind(weights, i, self.config, make_linear, self.min_rows) for i, kind in enumerate(kinds)
        ]
        if self.config.shape.per_layer_size:
            self.per_layer = PerLayerInputs(weights, self.config, make_linear)
        self._caches = self._cache_places(range(len(self.layers)))
        self._stream = STREAMS[self.config.rules.norm]
        self.final_norm = self._stream.take(weights.pop("final_norm"), weights.pop("final_norm_bias", None))
        self.head = make_linear(take_projection(weights, "", ("lm_head",)) if "lm_head" in weights else self.embed)

    @cached_property
    def plan_key(self) -> tuple[object, ...]:
        """Key that is equal for models that can share a `Pass`."""
        ropes, learned = tuple(rope.key for rope in self.config.ropes), self.config.shape.learned_positions
        return (
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.min_rows,
            ropes,
            learned,
            self.windows,
            self.attention.name,
            self.device,
            None if self.config.shape.recurrent is None else id(self),  # a pass has the states of one model
        )

    @property
    def compiled(self) -> "CompiledDecoder | None":
        """The decoder whose passes are one call of C++, or None."""
        return None

    @property
    def cost_key(self) -> list[object]:
        """The parameters that determine the cost of the model's passes, as JSON-serialisable values."""
        s = self.config.shape
        rows = s.vocab_size if self.head_vocabulary is None else len(self.head_vocabulary.tokens)
        sizes = [s.num_layers, s.hidden_size, s.intermediate_size, s.num_heads, s.num_kv_heads, s.head_dim, rows]
        sizes += [size for layer in s.sizes for size in (*layer, s.per_layer_size)]
        if (experts := s.experts) is not None:
            sizes += [len(experts.layers), experts.count, experts.top_k, experts.size, experts.shared_size]
        if (recurrent := s.recurrent) is not None:
            sizes += [len(recurrent.layers), recurrent.heads, recurrent.key_dim, recurrent.value_dim, len(s.mlp_only)]
        return [*sizes, *([] if self.backend == "native" else [self.config.folder.name, self.linear, self.min_rows])]

    @property
    def nbytes(self) -> int:
        stored: list[Any] = [self.embed, self.positions, self.per_layer, *self.layers, self.final_norm, self.head]
        return sum(weights.nbytes for weights in stored if weights is not None)

    def layer_subset(self, max_window: int) -> tuple["Decoder", int]:
        """Return a decoder with a layer of every kind, for the self-test, and its number of cache planes.

        Layers whose weights are stored in different forms are of different kinds. Windows are clipped so that short
        contexts suffice.
        """
        forms = zip(self.config.layers, self.weight_forms(), strict=True)
        kinds = {kind: i for i, kind in reversed([*enumerate(forms)])}
        shape = self.config.shape
        if len(kinds) == 1 and self.windows == (None,) and shape.recurrent is None:
            return self, 1  # a pass runs as many layers as its pool has
        model = copy.copy(self)
        model.windows = tuple(None if window is None else min(window, max_window) for window in self.windows)
        layers = sorted({source for i in kinds.values() for source in (i, shape.layer(i).kv_of)})
        model._select_layers(layers)
        return model, sum(map(shape.num_planes, layers))

    def state_shape(self, num_nodes: int) -> StateShape | None:
        """Return the sizes of a request's state, with trees of up to `num_nodes` nodes; None if it needs none."""
        return state_shape(self.config, num_nodes, self.dtype)

    def weight_forms(self) -> Sequence[object]:
        """Return for each layer a value that is equal for layers of one form, such as int4 in groups of 32."""
        return [None] * len(self.config.layers)

    def _select_layers(self, layers: Sequence[int]) -> None:
        self.layers, self._caches = [self.layers[i] for i in layers], self._cache_places(layers)

    def _cache_places(self, layers: Sequence[int]) -> list[slice]:
        return self.config.shape.cache_places(layers)

    def plan(self, requests: list[RequestRows], kv: Tensor) -> Pass:
        """Plan a pass over the rows of `requests`, in order, for the pool `kv` passed to `forward`."""
        num_rows = max(sum(rows.num_rows for rows in requests), self.min_rows)
        positions = padded([self._positions(rows) for rows in requests], num_rows)
        ropes = [rotation.lookup(positions) for rotation in self.rotations]
        ropes = ropes or [torch.empty(num_rows, 0, 0, dtype=torch.float32, device=self.device)]
        return Pass(
            num_rows,
            ropes[0] if len(ropes) == 1 else torch.cat(ropes, 1),
            torch.from_numpy(cache_slots(requests, kv, num_rows).reshape(-1)).to(self.device),
            [self.attention.plan(requests, len(positions), window) for window in self.windows],
            self._learned_at(positions),
            updated_rows((rows.adapter, rows.num_rows) for rows in requests),
            None if self.config.shape.recurrent is None else RequestStates(requests, num_rows),
        )

    def updates(self, matrices: Mapping[str, LowRank]) -> Any:
        """Return the low-rank updates of an adapter, by decoder parameter, in the form of `RequestRows.adapter`."""
        assert self.linear == "onednn" or self.linear == "torch"
        return Updates(fused_updates(self.config, matrices, EAGER), self.linear)

    def _positions(self, rows: RequestRows) -> np.ndarray:
        """Return positions as rows of the RoPE tables, or of the learned positions, int64 [num_rows]."""
        return rows.positions + self.config.first_rotation(rows.max_len)

    def _learned_at(self, positions: np.ndarray) -> Tensor | None:
        """Return the indices of the learned positions, int64 [num_rows], or None without a position embedding.

        They are clamped, because drafts beyond the last position are never accepted.
        """
        if self.positions is None:
            return None
        return torch.from_numpy(np.minimum(positions, len(self.positions) - 1)).to(self.device)

    def forward(self, tokens: Tensor, layout: Pass, kv: Tensor, num_layers: int | None = None) -> Tensor:
        """Run a pass: write the rows' K/V to their slots and return hidden states after the final norm.

        Tokens, int64 [num tokens], are in the order of the planned rows; `kv` is this model's pool, [num_planes, 2,
        num_pages, num_kv_heads, PAGE_SIZE, head_dim], of its layers with K/V (`ModelShape.planes`). Returns
        [layout.num_rows, hidden_size]; padding rows last.
        """
        return self._forward(tokens, layout, kv, num_layers, {})

    def forward_features(
        self, tokens: Tensor, features: Tensor, layout: Pass, kv: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Run `forward` through the interface of draft heads, `FeatureHead.forward_features`, without features."""
        return self.forward(tokens, layout, kv), None

    def features_of(self, states: Tensor) -> Tensor:
        raise AssertionError("only draft heads read features")

    def at_depth(self, depth: int) -> Self:
        """Return the model that scores nodes of a depth."""
        return self

    def forward_with_states(
        self, tokens: Tensor, layout: Pass, kv: Tensor, of: Sequence[int], stream: StreamInput | None = None
    ) -> HiddenStates:
        """Run `forward`, from `stream` if there is one, and also return the hidden states at the layers `of`.

        `check_states` accepts these layers.
        """
        forward = partial(self._forward, tokens, layout, kv, None, start=stream)
        return record_states(of, self.config, lambda states: forward(states=states))

    def forward_stream(self, stream: StreamInput, layout: Pass, kv: Tensor) -> HiddenStates:
        """Run a pass that begins with a given residual stream; `streams` is the stream after the last layer."""
        tokens = torch.empty(len(stream.rows), dtype=torch.int64, device=self.device)
        return self.forward_with_states(tokens, layout, kv, [self.config.shape.num_layers], stream)

    def write_context(self, rows: Tensor, layout: Pass, kv: Tensor) -> None:
        """Write K/V to the slots of a pass: every layer projects the same given rows, [num_rows, hidden_size]."""
        rows = F.pad(rows, (0, 0, 0, layout.num_rows - len(rows)))
        rotation = layout.rotation.split(1, 1)
        for layer, planes in zip(self.layers, self._caches, strict=True):
            assert layer.qkv is not None
            self._write(layer, layer.qkv(rows), rotation, layout, kv[planes])

    def check_states(self, of: Sequence[int]) -> None:
        """Raise ConfigError for layers that do not exist, and KernelError if a pass cannot return hidden states.

        Layer l means its input (0 = embeddings), num_layers the output of the last layer before the final norm,
        num_layers + 1 after it.
        """
        last = self.config.shape.num_layers + 1
        if not of or not all(type(layer) is int and 0 <= layer <= last for layer in of):
            raise ConfigError(f"hidden states of layers {tuple(of)!r}; valid: ints from 0 to {last}")

    def _forward(
        self,
        tokens: Tensor,
        layout: Pass,
        kv: Tensor,
        num_layers: int | None,
        states: dict[int, Tensor | None],
        start: StreamInput | None = None,
    ) -> Tensor:
        """Run the pass, from `start` if there is one, and store residual streams at the keys of `states`."""
        num_rows, missing, qkv = len(tokens), layout.num_rows - len(tokens), None
        if start is None:
            tokens = F.pad(tokens, (0, missing)) if missing else tokens
            x = self._embed(tokens, layout)
        else:
            x = F.pad(start.rows, (0, 0, 0, missing))
            qkv = None if start.qkv is None else F.pad(start.qkv, (0, 0, 0, missing))
        rotation = layout.rotation.split(1, 1)
        stream = self._stream(x, self.config.norm_eps)
        inputs = None if self.per_layer is None else self.per_layer(tokens, x)
        recurrent = itertools.count()
        for i, layer in enumerate(self.layers[:num_layers]):
            if i in states:
                states[i] = stream.x.clone()
            number = None if layer.mixer is None else next(recurrent)
            self._run(layer, stream, rotation, layout, kv[self._caches[i]], number, None if i else qkv, num_rows)
            if inputs is not None and layer.input_gate is not None and layer.input_norm is not None:
                update = self._apply("input_gate", layer, stream.norm(None), layout, self.config.activation)
                update = self._apply("input_out", layer, update.mul_(inputs[layer.index]), layout)
                stream.x.add_(stream.norm_of(update, layer.input_norm))
            if layer.scalar is not None:
                stream.x.mul_(layer.scalar)
        if layout.states is not None:
            layout.states.finish()
        if len(self.layers) in states:
            states[len(self.layers)] = stream.x.clone()
        return stream.norm(self.final_norm)

    def _embed(self, tokens: Tensor, layout: Pass) -> Tensor:
        x = F.embedding(tokens, self.embed)
        if self.first_scale != 1.0:
            x.mul_(self.first_scale)
        if layout.positions is not None and self.positions is not None:
            x.add_(F.embedding(layout.positions, self.positions))
        return x

    def _run(
        self,
        layer: Layer,
        stream: RmsStream | LayerStream,
        rotation: tuple[Tensor, ...],
        layout: Pass,
        cache: Tensor,  # the layer's planes of the pool
        number: int | None,  # index among the recurrent layers; None for other layers
        qkv: Tensor | None,  # the layer's projections, if they are given
        num_rows: int,  # number of rows without padding
    ) -> None:
        """Run one layer in place on the stream."""
        h = stream.norm(layer.mlp_norm) if self.config.parallel else None  # the MLP does not see the attention output
        if not self.config.layers[layer.index].mlp_only:
            normed: Any = stream.norm(layer.attn_norm) if qkv is None else None
            update: Any = None
            if layer.mixer is not None:
                mixed = layer.mixer(lambda name: self._apply(name, layer.mixer, normed, layout), layout.states, number)
                update = self._apply("mix_out", layer, mixed, layout)
            if layer.o is not None:
                qkv = self._apply("qkv", layer, normed, layout) if qkv is None else qkv
                attended = self._attend(layer, qkv, rotation, layout, cache)
                update = attended if update is None else attended.add_(update)
            if layer.attn_post_norm is not None:
                update = stream.norm_of(update, layer.attn_post_norm)
            stream.x.add_(update)
        if self.config.layers[layer.index].without_mlp:
            return
        if h is None:
            h = stream.norm(layer.mlp_norm)
        update = None
        if layer.up is not None:
            update = self._apply("up" if layer.gate is None else "gate", layer, h, layout, self.config.activation)
            update = update if layer.gate is None else update.mul_(self._apply("up", layer, h, layout))
            update = self._apply("down", layer, update, layout)
        if layer.sparse is not None:
            update = layer.sparse(h, num_rows, stream, update)
        if layer.mlp_post_norm is not None:
            update = stream.norm_of(update, layer.mlp_post_norm)
        stream.x.add_(update)

    def _attend(self, layer: Layer, qkv: Tensor, rotation: tuple[Tensor, ...], layout: Pass, cache: Tensor) -> Tensor:
        """Run the attention block on the projections of all rows, including its output projection."""
        q = self._write(layer, qkv, rotation, layout, cache)
        k_cache, v_cache = SplitCache.of(cache, layer.kv_heads, layer.head_dim, self.attention.cache_dtype)
        plan = layout.attention[layer.window]
        scale, cap = self.config.query_scale, self.config.score_cap
        out = self.attention(q, k_cache, v_cache, plan, scale, cap, layer.sinks)
        out = out.view(len(qkv), -1)
        if self.config.shape.output_gate:
            out = out.float() * sigmoid(qkv[:, -out.shape[1] :])
        return self._apply("o", layer, out.to(self.dtype), layout)

    def _apply(self, name: str, layer: Any, x: Tensor, layout: Pass, activation: str | None = None) -> Tensor:
        """Apply a product of a layer or mixer, add the low-rank updates of adapters' rows, and apply an activation."""
        linear = getattr(layer, name)
        y: Tensor = linear(x) if activation is None else linear.activated(x, activation)
        for adapter, first, num_rows in layout.updated:
            if (update := adapter.of(layer.index, name, x)) is not None:
                rows = slice(first, first + num_rows)
                updated = ((y if activation is None else linear(x)) + update)[rows]
                y[rows] = updated if activation is None else ACTIVATIONS[activation](updated)
        return y

    def _write(self, layer: Layer, qkv: Tensor, rotation: tuple[Tensor, ...], layout: Pass, cache: Tensor) -> Tensor:
        """Write the K/V of all rows to their slots, and return the rotated queries, [num_rows, num_heads, head_dim]."""
        heads, head_dim, num_rows = self.heads, layer.head_dim, len(qkv)
        qkv = qkv.float().view(num_rows, -1, head_dim)
        qk = qkv[:, : heads + layer.kv_heads] if layer.owns_kv else qkv
        if not self.config.rules.norm_after_rope:
            self._norm_heads(layer, qkv)
        if self.rotations:
            heads_by_rope = [(qk, layer.rope)]
            if layer.query_rope != layer.rope:
                heads_by_rope = [(qk[:, :heads], layer.query_rope), (qk[:, heads:], layer.rope)]
            for rotated, rope in heads_by_rope:
                cos, sin = (table[..., :head_dim] for table in rotation[rope : rope + 2])
                turned = rotated.roll(head_dim // 2, -1).mul_(sin)
                rotated.mul_(cos).add_(turned)  # not addcmul: SIMD body and tail both round products and sum separately
        if self.config.rules.norm_after_rope:
            self._norm_heads(layer, qkv)
        if self.config.value_scale != 1:
            qkv[:, heads + layer.kv_heads : heads + 2 * layer.kv_heads].mul_(self.config.value_scale)
        if layer.owns_kv:  # K and V of a row adjacent, as in `layout.slots`
            new = qkv[:, heads : heads + 2 * layer.kv_heads].reshape(num_rows, 2, len(cache), -1, self.head_dim)
            for plane, part in zip(cache, new.to(cache.dtype).unbind(2), strict=True):
                plane.view(-1, self.head_dim).index_copy_(0, layout.slots, part.reshape(-1, self.head_dim))
        return qkv[:, :heads].to(self.attention.cache_dtype)

    def _norm_heads(self, layer: Layer, qkv: Tensor) -> None:
        """Normalise the heads that have a norm in this layer in place; `qkv` is [num_rows, heads, head_dim]."""
        if layer.head_norm is None:
            return
        qk = qkv[:, : len(layer.head_norm)]
        heads_and_weights = [(qk, layer.head_norm)]
        if self.config.shape.wide_qk_norm:  # one norm over all heads of Q, and one over those of K
            sizes = (self.heads, layer.kv_heads)
            heads_and_weights = [
                (heads.view(len(qk), 1, -1), weight.view(1, -1))
                for heads, weight in zip(qk.split(sizes, 1), layer.head_norm.split(sizes), strict=True)
            ]
        for heads, weight in heads_and_weights:
            norm_heads(heads, weight, self.config.norm_eps)

    def logits(self, hidden: Tensor, rows: Sequence[int] | Tensor | None = None) -> Tensor:
        """Compute the logits of selected (or all) rows of `hidden`, [n, vocab], in the model's dtype."""
        if rows is not None:
            hidden = hidden[rows]
        n = len(hidden)
        if n < self.min_rows:
            hidden = F.pad(hidden, (0, 0, 0, self.min_rows - n))
        return self._finish_logits(self.head(hidden)[:n])

    def _finish_logits(self, logits: Tensor) -> Tensor:
        """Apply the soft cap, and expand the logits of a reduced head, in which all other tokens are -inf."""
        if self.config.logit_cap is not None:
            logits = soft_cap(logits, self.config.logit_cap)
        return logits if self.head_vocabulary is None else self.head_vocabulary.expand(logits, -torch.inf)

    def probs(self, hidden: Tensor) -> Tensor:
        """Return next-token probabilities, fp32 [num_rows, width]: of the tokens of `head_vocabulary`, if reduced."""
        logits = self.logits(hidden).float()
        if self.head_vocabulary is not None:
            logits = logits[:, self.head_vocabulary.index]
        return torch.softmax(logits, -1)

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the maximum of each row of logits (NaN if the row has one) and its first token, [n] each."""
        values, tokens = logits.max(dim=-1)
        return values, tokens
