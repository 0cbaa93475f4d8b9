"""The residual stream and its norms: RMSNorm and LayerNorm, every row computed alone."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from treespec_weights.rules import NormKind


class Norm(NamedTuple):
    """`weight`, `bias`: as a stream's LayerNorm takes them, [hidden_size] or mirrored [2 hidden_size]."""

    weight: Tensor
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class RmsStream:
    """The residual stream of a pass, `x`: [num_rows, hidden_size], under RMSNorm (arXiv 1910.07467).

    RMSNorm is the LayerNorm of [x, -x], whose mean is zero: one kernel instead of the eight of `F.rms_norm`, 7 us
    instead of 12 for 2 rows of 256, and the same bits in bf16. LayerNorm computes every row alone.
    """

    def __init__(self, x: Tensor, eps: float):
        self.size, self.eps = x.shape[1], eps
        self._both = torch.cat((x, x), 1)
        self.x, self._minus = self._both[:, : self.size], self._both[:, self.size :]

    @staticmethod
    def take(weight: Tensor, bias: Tensor | None) -> Norm:
        """A norm's parameters as `norm` takes them."""
        assert bias is None, "RMSNorm has no bias"
        return Norm(torch.cat((weight, weight)), None)

    def norm(self, norm: Norm) -> Tensor:
        """The norm of the stream."""
        torch.neg(self.x, out=self._minus)
        both = F.layer_norm(self._both, (2 * self.size,), norm.weight, None, self.eps)
        return both[:, : self.size].contiguous()  # a copy of 1.3 us: oneDNN takes 2 us more for strided rows

    def norm_of(self, x: Tensor, norm: Norm) -> Tensor:
        """The norm of something else, [num_rows, hidden_size]."""
        both = torch.cat((x, -x), 1)
        return F.layer_norm(both, (2 * self.size,), norm.weight, None, self.eps)[:, : self.size]


class LayerStream:
    """The residual stream of a pass under LayerNorm (arXiv 1607.06450)."""

    def __init__(self, x: Tensor, eps: float):
        self.size, self.eps, self.x = x.shape[1], eps, x

    @staticmethod
    def take(weight: Tensor, bias: Tensor | None) -> Norm:
        return Norm(weight, bias)

    def norm(self, norm: Norm) -> Tensor:
        return self.norm_of(self.x, norm)

    def norm_of(self, x: Tensor, norm: Norm) -> Tensor:
        return F.layer_norm(x, (self.size,), norm.weight, norm.bias, self.eps)


STREAMS: dict[NormKind, type[RmsStream] | type[LayerStream]] = {
    "rms": RmsStream,
    "rms_plus_one": RmsStream,  # `prepare` has added the one
    "layer": LayerStream,
}


def take_head_norm(weights: dict[str, Tensor], prefix: str, num_heads: int, num_kv_heads: int) -> Tensor | None:
    """The norms of a layer's query and key heads, fp32 [num_heads + num_kv_heads, head_dim], taken out of `weights`;
    None where it has none."""
    q_norm, k_norm = weights.pop(f"{prefix}q_norm", None), weights.pop(f"{prefix}k_norm", None)
    if q_norm is None or k_norm is None:
        return None
    return torch.cat((q_norm.float().expand(num_heads, -1), k_norm.float().expand(num_kv_heads, -1)))


def norm_heads(heads: Tensor, weight: Tensor, eps: float) -> None:
    """RMSNorm of each head, in place.

    Args:
        heads: fp32 [num_rows, num_heads, head_dim].
        weight: fp32 [num_heads, head_dim].
    """
    head_dim = heads.shape[-1]
    both = F.layer_norm(torch.cat((heads, -heads), -1), (2 * head_dim,), None, None, eps)
    torch.mul(both[..., :head_dim], weight, out=heads)
