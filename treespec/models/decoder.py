"""The decoder: RMSNorm, RoPE, grouped-query attention, gated MLP; every op row-invariant.

A pass computes any rows of any requests at once. What a row attends to is the tree batch's business. What a small model
costs on a CPU is the number of torch calls, at 1 to 15 us each, so they are few, and views are made once a pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from treespec.config import ModelConfig
from treespec_kernels.linear import Linear, LinearImpl
from treespec_kernels.tree_batch import PAGE_SIZE, RequestRows


class Attention(Protocol):
    """An implementation of tree attention, chosen when the model is built."""

    name: str
    cache_dtype: torch.dtype

    def plan(self, requests: list[RequestRows], num_rows: int) -> Any:
        """Lay out a pass once for all layers; rows beyond the requests' own are padding, up to `num_rows`."""

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Any, scale: float) -> Tensor:
        """q: [num_rows, num_heads, head_dim] in `cache_dtype` -> the same shape."""


@dataclass(frozen=True, eq=False)
class Pass:
    """A pass laid out for one model: positions and slots of its rows, and the attention's plan."""

    num_rows: int
    rotation: Tensor  # cos and signed sin, fp32 [num_rows, 2, head_dim]
    slots: Tensor  # int64 [num_rows * 2 * num_kv_heads]: where a row's K and V go in a layer's pool viewed as [-1, D]
    attention: Any


def mirrored(weight: Tensor) -> Tensor:
    """A norm's weight as `_Stream` takes it."""
    return torch.cat((weight, weight))


class _Stream:
    """The residual stream of a pass, `x`: [num_rows, hidden_size].

    Its RMSNorm is the LayerNorm of [x, -x], whose mean is zero: one kernel instead of the eight of `F.rms_norm`, 7 us
    instead of 12 for 2 rows of 256, and the same bits in bf16. LayerNorm computes every row alone.
    """

    def __init__(self, x: Tensor, eps: float):
        self.size, self.eps = x.shape[1], eps
        self._both = torch.cat((x, x), 1)
        self.x, self._minus = self._both[:, : self.size], self._both[:, self.size :]

    def norm(self, weight: Tensor) -> Tensor:
        """RMSNorm; weight: `mirrored`."""
        torch.neg(self.x, out=self._minus)
        both = F.layer_norm(self._both, (2 * self.size,), weight, None, self.eps)
        return both[:, : self.size].contiguous()  # a copy of 1.3 us: oneDNN takes 2 us more for strided rows


class Rotation:
    """RoPE by position, computed once an engine and grown as positions come up.

    A position's row is computed once and never again, so its bits cannot depend on what was asked for beside it.
    """

    def __init__(self, inv_freq: Tensor, scale: float):
        self.inv_freq, self.scale = inv_freq, scale
        self._table = torch.empty(0, 2, 2 * len(inv_freq), device=inv_freq.device)

    def at(self, positions: np.ndarray) -> Tensor:
        """cos and signed sin, fp32 [num_rows, 2, head_dim]."""
        table = self.table(int(positions.max()) + 1)
        return table[torch.from_numpy(positions).to(table.device)]

    def table(self, num_positions: int) -> Tensor:
        """The same of positions 0 to `num_positions` - 1, and perhaps of more, by position."""
        known = len(self._table)
        if num_positions > known:
            more = torch.arange(known, max(num_positions, 2 * known, 1024), device=self.inv_freq.device)
            angle = more.float()[:, None] * self.inv_freq
            cos, sin = angle.cos() * self.scale, angle.sin() * self.scale
            rows = torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), 1)
            self._table = torch.cat((self._table, rows))
        return self._table


class _Layer:
    """Weights of one layer, projections fused."""

    def __init__(self, weights: dict[str, Tensor], i: int, impl: LinearImpl):
        def take(*names: str) -> Tensor | None:
            parts = [weights.pop(f"layers.{i}.{name}", None) for name in names]
            present = [part for part in parts if part is not None]
            return (torch.cat(present) if len(present) > 1 else present[0]) if present else None

        def linear(*names: str) -> Linear:
            weight = take(*names)
            assert weight is not None
            return Linear(weight, take(*(f"{name}_bias" for name in names)), impl)

        self.attn_norm = mirrored(weights.pop(f"layers.{i}.attn_norm"))
        self.mlp_norm = mirrored(weights.pop(f"layers.{i}.mlp_norm"))
        self.qkv = linear("q", "k", "v")
        self.o = linear("o")
        self.gate, self.up, self.down = linear("gate"), linear("up"), linear("down")


class Decoder:
    """A Llama-type model.

    Args:
        config: the architecture.
        weights: decoder parameters by name (`ModelShape.parameters`), in the dtype to compute in; emptied, so that
            unpacked copies are released one by one.
        attention: the implementation of tree attention.
        linear: the implementation of linear layers.
        min_rows: rows that every pass is padded to; 2 where linear layers are row-invariant from two rows on, the
            largest pass where they are not.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        attention: Attention,
        linear: LinearImpl | Literal["compiled", "triton"],
        min_rows: int = 2,
    ):
        shape = config.shape
        self.config, self.attention, self.linear, self.min_rows = config, attention, linear, min_rows
        self.heads, self.kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.vocab_size = shape.vocab_size
        self.embed = weights.pop("embed").clone()  # a mapped tensor keeps the whole file mapped
        self.dtype, self.device = self.embed.dtype, self.embed.device
        self.rotation = Rotation(config.inv_freq.to(self.device), config.rope_scale)
        self._take(weights)
        assert not weights, f"weights without a place: {sorted(weights)}"

    def _take(self, weights: dict[str, Tensor]) -> None:
        """Layers, final norm and head."""
        shape = self.config.shape
        assert self.linear != "compiled" and self.linear != "triton"
        self.layers = [_Layer(weights, i, self.linear) for i in range(shape.num_layers)]
        self.final_norm = mirrored(weights.pop("final_norm"))
        self.head = Linear(self.embed if shape.tied else weights.pop("lm_head"), None, self.linear)

    @cached_property
    def plan_key(self) -> tuple[object, ...]:
        """Models of equal keys can share a `Pass`."""
        rope = (tuple(self.config.inv_freq.tolist()), self.config.rope_scale)
        return self.heads, self.kv_heads, self.head_dim, self.min_rows, rope, self.attention.name, self.device

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as they are held."""
        linears = [part for layer in self.layers for part in (layer.qkv, layer.o, layer.gate, layer.up, layer.down)]
        norms = sum(layer.attn_norm.nbytes + layer.mlp_norm.nbytes for layer in self.layers)
        head = self.head.nbytes
        return self.embed.nbytes + norms + self.final_norm.nbytes + head + sum(part.nbytes for part in linears)

    def plan(self, requests: list[RequestRows], kv: Tensor) -> Pass:
        """Lay out a pass over the rows of `requests`, in their order, over the pool `kv` that `forward` gets."""
        if len(requests) == 1:
            positions, (pages, offsets) = requests[0].positions, requests[0].slots
        else:
            positions = np.concatenate([rows.positions for rows in requests])
            pages, offsets = (np.concatenate(parts) for parts in zip(*(rows.slots for rows in requests), strict=True))
        missing = self.min_rows - len(positions)
        if missing > 0:  # padding rows write to the null page's first slot and are seen by nobody
            nothing = np.zeros(missing, dtype=np.int64)
            positions, pages, offsets = (np.concatenate((part, nothing)) for part in (positions, pages, offsets))
        first = pages * (self.kv_heads * PAGE_SIZE) + offsets  # of KV head 0 in a layer's pool viewed as [-1, D]
        steps = np.arange(self.kv_heads) * PAGE_SIZE
        steps = np.concatenate((steps, steps + kv.shape[2] * self.kv_heads * PAGE_SIZE))  # K, then V
        slots = (first[:, None] + steps).reshape(-1)
        return Pass(
            len(positions),
            self.rotation.at(positions),
            torch.from_numpy(slots).to(self.device),
            self.attention.plan(requests, len(positions)),
        )

    def forward(self, tokens: Tensor, layout: Pass, kv: Tensor, num_layers: int | None = None) -> Tensor:
        """Hidden states of a pass, after the final norm. Writes the rows' K/V to their slots.

        Args:
            tokens: int64 [num tokens], in the order of the planned rows.
            layout: from `plan`.
            kv: [num_layers, 2, num_pages, num_kv_heads, PAGE_SIZE, head_dim], this model's pool.
            num_layers: how many layers to run; None = all.

        Returns:
            [layout.num_rows, hidden_size]; padding rows last.
        """
        if len(tokens) < layout.num_rows:
            tokens = F.pad(tokens, (0, layout.num_rows - len(tokens)))
        rotation = layout.rotation.split(1, 1)
        stream = _Stream(F.embedding(tokens, self.embed), self.config.norm_eps)
        for layer, cache in zip(self.layers[:num_layers], kv, strict=False):
            stream.x.add_(self._attend(layer, stream.norm(layer.attn_norm), rotation, layout, cache))
            h = stream.norm(layer.mlp_norm)
            stream.x.add_(layer.down(layer.gate.silu(h).mul_(layer.up(h))))
        return stream.norm(self.final_norm)

    def _attend(self, layer: _Layer, x: Tensor, rotation: tuple[Tensor, ...], layout: Pass, cache: Tensor) -> Tensor:
        """Attention of normed rows; cache: [2, num_pages, kv_heads, PAGE_SIZE, head_dim], the layer's pool."""
        heads, head_dim = self.heads, self.head_dim
        qkv = layer.qkv(x).float().view(len(x), -1, head_dim)
        qk = qkv[:, : heads + self.kv_heads]
        cos, sin = rotation
        turned = qk.roll(head_dim // 2, -1).mul_(sin)
        qk.mul_(cos).add_(turned)  # not addcmul: each product and the sum are rounded alone, in body and tail alike
        new = qkv[:, heads:].reshape(-1, head_dim)  # K and V of a row side by side, as in `layout.slots`
        cache.view(-1, head_dim).index_copy_(0, layout.slots, new.to(cache.dtype))
        k_cache, v_cache = cache
        q = qkv[:, :heads].to(cache.dtype)
        out = self.attention(q, k_cache, v_cache, layout.attention, head_dim**-0.5)
        return layer.o(out.view(len(x), -1).to(self.dtype))

    def logits(self, hidden: Tensor, rows: Sequence[int] | Tensor | None = None) -> Tensor:
        """[n, vocab] logits of chosen rows of `hidden`, or of all, in the model's dtype."""
        if rows is not None:
            hidden = hidden[rows]
        n = len(hidden)
        if n < self.min_rows:
            hidden = F.pad(hidden, (0, 0, 0, self.min_rows - n))
        return self.head(hidden)[:n]
