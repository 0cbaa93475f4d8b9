"""The decoder on the Triton kernels: ten launches a layer, nine where rows are a chain, and no read on the host.

A pass over stacked models (SSMs of one shape) is one pass with more rows: those of model g follow those of model g - 1,
and only the linear layers, the norms' weights and the embeddings ask which model a row belongs to.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from treespec.config import ModelConfig
from treespec.models.attention_triton import TritonAttention
from treespec.models.decoder import Decoder, Pass
from treespec.models.triton_weights import LayerWeights, ModelWeights
from treespec_kernels.lm_head import LmHead, LmHeadConfig, lm_head_triton
from treespec_kernels.qkv_rope import qkv_rope_triton
from treespec_kernels.rms_norm import rms_norm_triton
from treespec_kernels.row_linear import RowLinearConfig, row_linear_partials_triton, row_linear_triton
from treespec_kernels.tree_batch import PAGE_SIZE, RequestRows
from treespec_kernels.triton_launch import is_interpreted, target_of
from treespec_kernels.tuned import KernelConfigs


@dataclass(frozen=True, eq=False)
class TritonPass(Pass):
    """A pass laid out on the device. `rotation` is the whole table, `slots` int64 [num_rows] by row."""

    positions: Tensor  # int32 [num_rows]


class PassKernels:
    """The kernels of a pass over stacked models, with the configuration of each frozen.

    Args:
        config: the models' architecture.
        weights: stacked.
        attention: of that shape.
        configs: what was tuned for this device.
        exact: False takes the vendor's matrix products, whose bits depend on the number of rows.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        attention: TritonAttention,
        configs: KernelConfigs,
        exact: bool = True,
    ):
        shape = config.shape
        self.weights, self.attention, self.exact = weights, attention, exact
        self.heads, self.kv_heads, self.head_dim, self.eps = (
            shape.num_heads, shape.num_kv_heads, shape.head_dim, config.norm_eps,
        )  # fmt: skip
        self.dtype = weights.embed.dtype
        first = weights.layers[0]
        self._qkv = self._linear_config(first.qkv, configs)
        self._o = self._linear_config(first.o, configs)
        self._gate_up = self._linear_config(first.gate_up, configs, silu_gate=True)
        self._down = self._linear_config(first.down, configs)
        vocab, hidden = weights.head.shape[1:]
        key = self._key() | {"vocab_size": vocab, "hidden_size": hidden}
        default = LmHeadConfig.default(self.dtype, vocab, hidden)
        if is_interpreted():  # the interpreter's dot is BLAS, and its time goes by the size of blocks
            default = replace(default, block_m=16, block_n=64, block_k=64, fixed_order_dot=True)
        self._head = configs.get("lm_head", key, default)

    def _key(self) -> dict[str, int | torch.dtype]:
        return {"dtype": self.dtype, "groups": self.weights.groups}

    def _linear_config(self, weight: Tensor, configs: KernelConfigs, silu_gate: bool = False) -> RowLinearConfig:
        out_features, in_features = weight.shape[1:]
        key = self._key() | {"out_features": out_features, "in_features": in_features, "silu_gate": int(silu_gate)}
        default = RowLinearConfig.default(self.dtype, out_features, in_features, silu_gate, target_of(weight.device))
        if is_interpreted():
            default = replace(
                default, block_m=16, block_n=64, block_k=64, split_k=min(default.split_k, 2), fixed_order_dot=True
            )
        return configs.get("row_linear", key, default)

    def hidden(self, tokens: Tensor, layout: TritonPass, kv: Tensor, num_layers: int | None = None) -> Tensor:
        """Hidden states after the final norm, [G * rows, hidden_size]; writes the rows' K/V to their slots.

        Args:
            tokens: int64 [G * rows], those of model g raised by g * vocab_size.
            layout: of these rows.
            kv: [num_layers, 2, num_pages, num_kv_heads, PAGE_SIZE, head_dim], the pool of all G models.
            num_layers: how many layers to run; None = all.
        """
        weights = self.weights
        layers = weights.layers[:num_layers]
        stream = F.embedding(tokens, weights.embed)
        h = rms_norm_triton(stream, layers[0].attn_norm, self.eps)
        norms = [*(layer.attn_norm for layer in layers[1:]), weights.final_norm]
        for layer, cache, norm in zip(layers, kv, norms, strict=False):
            mixed = self._attend(layer, h, layout, cache)
            h = self._product(mixed, layer.o, self._o, layer.mlp_norm, stream, layer.o_bias)
            mixed = self._gated(h, layer)
            h = self._product(mixed, layer.down, self._down, norm, stream, layer.down_bias)
        return h

    def logits(self, hidden: Tensor) -> LmHead:
        """Logits of rows of `hidden`, [G * rows, hidden_size], and the best of each block of the vocabulary."""
        return lm_head_triton(self._grouped(hidden), self._squeezed(self.weights.head), config=self._head)

    def _attend(self, layer: LayerWeights, h: Tensor, layout: TritonPass, cache: Tensor) -> Tensor:
        rows = len(h)
        q = torch.empty(rows, self.heads, self.head_dim, dtype=self.attention.cache_dtype, device=h.device)
        if self.exact:
            qkv = row_linear_partials_triton(self._grouped(h), self._squeezed(layer.qkv), config=self._qkv)
        else:
            qkv = torch.matmul(self._grouped(h), self._squeezed(layer.qkv).mT).flatten(0, -2)
        bias = None if layer.qkv_bias is None else self._squeezed(layer.qkv_bias)
        qkv_rope_triton(qkv, layout.rotation, layout.positions, layout.slots, cache, q, bias=bias)
        out = self.attention(q, cache[0], cache[1], layout.attention, self.head_dim**-0.5)
        return out.view(rows, -1)

    def _gated(self, h: Tensor, layer: LayerWeights) -> Tensor:
        weight, bias = self._squeezed(layer.gate_up), layer.gate_up_bias
        bias = None if bias is None else self._squeezed(bias)
        if self.exact:
            out = row_linear_triton(self._grouped(h), weight, bias=bias, silu_gate=True, config=self._gate_up)
            return out.flatten(0, -2)
        both = torch.matmul(self._grouped(h), weight.mT)
        both = both if bias is None else both + bias.unsqueeze(-2)
        gate, up = both.flatten(0, -2).chunk(2, dim=-1)
        return F.silu(gate) * up

    def _product(
        self, x: Tensor, weight: Tensor, config: RowLinearConfig, norm: Tensor, stream: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Adds x W^T to the residual stream, in place, and returns the norm of that."""
        grouped, weight = self._grouped(x), self._squeezed(weight)
        if self.exact:
            product = row_linear_partials_triton(grouped, weight, config=config)
        else:
            product = torch.matmul(grouped, weight.mT).flatten(0, -2)
        bias = None if bias is None else self._squeezed(bias)
        return rms_norm_triton(product, norm, self.eps, residual=stream, bias=bias)

    def _grouped(self, x: Tensor) -> Tensor:
        """[G * rows, n] -> [G, rows, n]; as it is for one model."""
        groups = self.weights.groups
        return x if groups == 1 else x.view(groups, len(x) // groups, -1)

    def _squeezed(self, weight: Tensor) -> Tensor:
        return weight[0] if self.weights.groups == 1 else weight


class TritonDecoder(Decoder):
    """A `Decoder` whose passes are Triton kernels, row-invariant for any number of rows.

    Args:
        config, weights: as the decoder's.
        attention: Triton's, of that shape.
        configs: what was tuned for this device.
        exact: False takes the vendor's matrix products.
        num_positions: that will ever be asked for.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        attention: TritonAttention,
        configs: KernelConfigs,
        exact: bool,
        num_positions: int,
    ):
        self._configs, self._exact, self.triton_attention = configs, exact, attention
        super().__init__(config, weights, attention, "triton", min_rows=1)
        # One table for all passes: a captured graph reads it at an address that never changes.
        self._table = self.rotation.table(num_positions)

    def _take(self, weights: dict[str, Tensor]) -> None:
        self.use(ModelWeights.take(self.embed, weights, self.config.shape))

    def use(self, weights: ModelWeights) -> None:
        """Compute with these weights from now on: equal ones, as views of a stack."""
        assert weights.groups == 1
        self.weights, self.embed = weights, weights.embed
        self.kernels = PassKernels(self.config, weights, self.triton_attention, self._configs, self._exact)

    @property
    def table(self) -> Tensor:
        """RoPE, fp32 [num_positions, 2, head_dim]."""
        return self._table

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes + self._table.nbytes

    def plan(self, requests: list[RequestRows], kv: Tensor) -> TritonPass:
        positions = np.concatenate([rows.positions for rows in requests])
        pages, offsets = (np.concatenate(parts) for parts in zip(*(rows.slots for rows in requests), strict=True))

        def uploaded(values: np.ndarray, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(values).to(self.device, dtype)

        return TritonPass(
            len(positions),
            self._table,
            uploaded(pages * PAGE_SIZE + offsets, torch.int64),
            self.attention.plan(requests, len(positions)),
            uploaded(positions, torch.int32),
        )

    def forward(self, tokens: Tensor, layout: Pass, kv: Tensor, num_layers: int | None = None) -> Tensor:
        assert isinstance(layout, TritonPass) and len(tokens) == layout.num_rows
        return self.kernels.hidden(tokens.to(self.device), layout, kv, num_layers)

    def logits(self, hidden: Tensor, rows: Sequence[int] | Tensor | None = None) -> Tensor:
        if rows is not None:
            hidden = hidden[torch.as_tensor(rows, device=self.device)]
        return self.kernels.logits(hidden.contiguous()).logits


def stacked(models: Sequence[TritonDecoder], configs: KernelConfigs) -> PassKernels:
    """The kernels of several models of one shape as one; the models go on with views of the stack.

    Their tables of RoPE must be equal, and so must be all that a config says.
    """
    assert len({model.plan_key for model in models}) == 1, "models of different shapes cannot be stacked"
    first = models[0]
    if len(models) == 1:
        return first.kernels
    weights = ModelWeights.stack([model.weights for model in models])
    for group, model in enumerate(models):
        model.use(weights.one(group))
    return PassKernels(first.config, weights, first.triton_attention, configs, first._exact)
