"""Norms of the eager decoder. Each row is computed independently."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from treespec_weights.rules import NormKind


class Norm(NamedTuple):
    """RMSNorm (arXiv 1910.07467) or LayerNorm (arXiv 1607.06450) of rows.

    RMSNorm equals LayerNorm of [x, -x], whose mean is 0. That takes one kernel instead of the eight of `F.rms_norm` (7
    us vs. 12 us for 2 rows of 256), with the same bits in bf16. LayerNorm is row-independent.

    Attributes:
        weight: [hidden_size], or [2 hidden_size], twice the weight of an RMSNorm.
        bias: [hidden_size]; None for RMSNorm, or without one.
        eps: added to the variance.
        mirrored: whether it is an RMSNorm.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float
    mirrored: bool

    @classmethod
    def of(cls, kind: NormKind, weight: Tensor, bias: Tensor | None, eps: float) -> "Norm":
        """Return the norm of these parameters; `prepare` has added the 1 of "rms_plus_one"."""
        if kind == "layer":
            return cls(weight, bias, eps, False)
        assert bias is None, "RMSNorm has no bias"
        return cls(torch.cat((weight, weight)), None, eps, True)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """Return x normalised, [num_rows, hidden_size]."""
        both = torch.cat((x, -x), 1) if self.mirrored else x
        return F.layer_norm(both, self.weight.shape, self.weight, self.bias, self.eps)[:, : x.shape[1]].contiguous()


def take_head_norm(weights: dict[str, Tensor], prefix: str, num_heads: int, num_kv_heads: int) -> Tensor | None:
    """Pop the weights of a layer's query and key norms, fp32 [num_heads + num_kv_heads, head_dim].

    Returns None if the layer has none.
    """
    q_norm, k_norm = weights.pop(f"{prefix}q_norm", None), weights.pop(f"{prefix}k_norm", None)
    if q_norm is None or k_norm is None:
        return None
    return torch.cat((q_norm.float().expand(num_heads, -1), k_norm.float().expand(num_kv_heads, -1)))


def norm_heads(heads: Tensor, weight: Tensor, eps: float) -> None:
    """Apply RMSNorm to each head, in place.

    Args:
        heads: fp32 [num_rows, num_heads, head_dim].
        weight: fp32 [num_heads, head_dim].
    """
    head_dim = heads.shape[-1]
    both = F.layer_norm(torch.cat((heads, -heads), -1), (2 * head_dim,), None, None, eps)
    torch.mul(both[..., :head_dim], weight, out=heads)
