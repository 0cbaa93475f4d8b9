"""Residual stream with RMSNorm or LayerNorm. Each row is computed independently."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from treespec_weights.blocks import Weights
from treespec_weights.rules import ModelShape, NormKind


class Norm(NamedTuple):
    """Parameters of a norm, in the form of `F.layer_norm`'s arguments: [hidden_size], or mirrored [2 hidden_size]."""

    weight: Tensor
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class RmsStream:
    """Residual stream of a pass, `x`: [num_rows, hidden_size], with RMSNorm (arXiv 1910.07467).

    RMSNorm equals LayerNorm of [x, -x], whose mean is 0. That takes one kernel instead of the eight of `F.rms_norm` (7
    us vs. 12 us for 2 rows of 256), with the same bits in bf16. LayerNorm is row-independent.
    """

    def __init__(self, x: Tensor, eps: float):
        self.size, self.eps = x.shape[1], eps
        self._mirrored = torch.cat((x, x), 1)
        self.x, self._minus = self._mirrored[:, : self.size], self._mirrored[:, self.size :]

    @staticmethod
    def take(weight: Tensor, bias: Tensor | None) -> Norm:
        """Convert a norm's parameters for `norm`."""
        assert bias is None, "RMSNorm has no bias"
        return Norm(torch.cat((weight, weight)), None)

    def norm(self, norm: Norm | None) -> Tensor:
        """Return the stream normalised, or a copy of it without a norm."""
        if norm is None:
            return self.x.contiguous()
        torch.neg(self.x, out=self._minus)
        mirrored = F.layer_norm(self._mirrored, (2 * self.size,), norm.weight, None, self.eps)
        return mirrored[:, : self.size].contiguous()  # the copy takes 1.3 us; strided rows would cost oneDNN 2 us

    def norm_of(self, x: Tensor, norm: Norm) -> Tensor:
        """Return another tensor normalised, [num_rows, hidden_size]."""
        return F.layer_norm(torch.cat((x, -x), 1), (2 * self.size,), norm.weight, None, self.eps)[:, : self.size]


class LayerStream:
    """Residual stream of a pass with LayerNorm (arXiv 1607.06450)."""

    def __init__(self, x: Tensor, eps: float):
        self.size, self.eps, self.x = x.shape[1], eps, x

    @staticmethod
    def take(weight: Tensor, bias: Tensor | None) -> Norm:
        return Norm(weight, bias)

    def norm(self, norm: Norm | None) -> Tensor:
        return self.x.clone() if norm is None else self.norm_of(self.x, norm)

    def norm_of(self, x: Tensor, norm: Norm) -> Tensor:
        return F.layer_norm(x, (self.size,), norm.weight, norm.bias, self.eps)


STREAMS: dict[NormKind, type[RmsStream] | type[LayerStream]] = {
    "rms": RmsStream,
    "rms_plus_one": RmsStream,  # `prepare` adds the 1
    "layer": LayerStream,
}


def take_head_norm(weights: Weights, i: int, shape: ModelShape) -> Tensor | None:
    """Pop the norms of the heads of a layer's queries and keys, followed by those of values, if it has any.

    fp32 [num_heads + num_kv_heads, head_dim]; [num_heads + 2 * num_kv_heads, head_dim] with norms of values, and
    [num_heads, head_dim] without K/V of its own.
    """
    q_norm, k_norm = weights.pop(f"layers.{i}.q_norm", None), weights.pop(f"layers.{i}.k_norm", None)
    if q_norm is None:
        return None
    sizes, head_norms = shape.layer(i), [(q_norm, shape.num_heads)]
    if k_norm is not None:
        head_norms += [(norm, sizes.num_kv_heads) for norm in (k_norm, torch.ones_like(k_norm))[: 1 + shape.value_norm]]
    return torch.cat([norm.float().view(-1, sizes.head_dim).expand(heads, -1) for norm, heads in head_norms])
