"""The decoder: RMSNorm, RoPE, grouped-query attention, gated MLP; every op row-invariant.

A pass computes any rows of any requests at once. What a row attends to is the tree batch's business; what it costs is
the number of torch calls, about 25 a layer, so projections are fused and residuals added inside the matrix products.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

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
    rotation: tuple[Tensor, Tensor]  # cos and signed sin, fp32 [num_rows, 1, head_dim]
    slots: Tensor  # int64 [num_rows * 2 * num_kv_heads]: where a row's K and V go in a layer's pool viewed as [-1, D]
    attention: Any


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

        # Cloned like the embedding: a mapped tensor keeps the whole file mapped.
        self.attn_norm = weights.pop(f"layers.{i}.attn_norm").clone()
        self.mlp_norm = weights.pop(f"layers.{i}.mlp_norm").clone()
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
        linear: LinearImpl,
        min_rows: int = 2,
    ):
        shape = config.shape
        self.config, self.attention, self.linear, self.min_rows = config, attention, linear, min_rows
        self.heads, self.kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.vocab_size = shape.vocab_size
        self.embed = weights.pop("embed").clone()
        self.dtype, self.device = self.embed.dtype, self.embed.device
        self.layers = [_Layer(weights, i, linear) for i in range(shape.num_layers)]
        self.final_norm = weights.pop("final_norm").clone()
        self.head = Linear(self.embed if shape.tied else weights.pop("lm_head"), None, linear)
        assert not weights, f"weights without a place: {sorted(weights)}"
        self.inv_freq = config.inv_freq.to(self.device)

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
        positions = np.concatenate([rows.positions for rows in requests])
        pages, offsets = (np.concatenate(parts) for parts in zip(*(rows.slots for rows in requests), strict=True))
        missing = self.min_rows - len(positions)
        if missing > 0:  # padding rows write to the null page's first slot and are seen by nobody
            positions, pages, offsets = (np.pad(part, (0, missing)) for part in (positions, pages, offsets))
        head = (pages[:, None] * self.kv_heads + np.arange(self.kv_heads)) * PAGE_SIZE + offsets[:, None]
        slots = np.concatenate([head, head + kv.shape[2] * self.kv_heads * PAGE_SIZE], axis=1)  # K, then V
        angle = torch.from_numpy(positions).to(self.device, torch.float32)[:, None] * self.inv_freq
        cos, sin = angle.cos() * self.config.rope_scale, angle.sin() * self.config.rope_scale
        rotation = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
        return Pass(
            len(positions),
            rotation,
            torch.from_numpy(slots.reshape(-1)).to(self.device),
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
        x = F.embedding(tokens, self.embed)
        for layer, cache in zip(self.layers[:num_layers], kv, strict=False):
            x = self._attend(layer, x, layout, cache)
            h = F.rms_norm(x, x.shape[1:], layer.mlp_norm, self.config.norm_eps)
            x = layer.down(layer.gate.silu(h).mul_(layer.up(h))).add_(x)
        return F.rms_norm(x, x.shape[1:], self.final_norm, self.config.norm_eps)

    def _attend(self, layer: _Layer, x: Tensor, layout: Pass, cache: Tensor) -> Tensor:
        """Attention with its residual; cache: [2, num_pages, kv_heads, PAGE_SIZE, head_dim], the layer's pool."""
        num_rows, heads, kv_heads, head_dim = len(x), self.heads, self.kv_heads, self.head_dim
        qkv = layer.qkv(F.rms_norm(x, x.shape[1:], layer.attn_norm, self.config.norm_eps))
        qkv = qkv.float().view(num_rows, heads + 2 * kv_heads, head_dim)
        cos, sin = layout.rotation
        qk = qkv[:, : heads + kv_heads]
        turned = qk.roll(head_dim // 2, -1).mul_(sin)
        qk.mul_(cos).add_(turned)  # not addcmul: each product and the sum are rounded alone, in body and tail alike
        new = qkv[:, heads:].reshape(-1, head_dim)  # K and V of a row side by side, as in `layout.slots`
        cache.view(-1, head_dim).index_copy_(0, layout.slots, new.to(cache.dtype))
        k_cache, v_cache = cache
        out = self.attention(qk[:, :heads].to(cache.dtype), k_cache, v_cache, layout.attention, head_dim**-0.5)
        return layer.o(out.view(num_rows, heads * head_dim).to(self.dtype)).add_(x)

    def logits(self, hidden: Tensor, rows: Sequence[int] | Tensor | None = None) -> Tensor:
        """[n, vocab] logits of chosen rows of `hidden`, or of all, in the model's dtype."""
        if rows is not None:
            hidden = hidden[rows]
        n = len(hidden)
        if n < self.min_rows:
            hidden = F.pad(hidden, (0, 0, 0, self.min_rows - n))
        return self.head(hidden)[:n]
