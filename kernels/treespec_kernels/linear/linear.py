"""Row-invariant linear layers: a row's bits do not depend on how many rows are computed beside it.

On a CPU the weights are reordered once into oneDNN's blocked layout. That is 2 to 4 times as fast as `F.linear` for few
rows, and its bits were measured to be the same for 2 to 1,024 rows, in fp32 and in bf16 (a single row takes another
path for some shapes, so a pass has at least two). With AMX bf16 products have them for 2 to 32 rows only: from 33 rows
on oneDNN sums in other blocks, and one element in some thousands rounds differently (19 of 24 shapes on a Sapphire
Rapids; none of them below). There more rows are computed in parts of at most 32. The two ops are private to torch and
stand in this module only.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from treespec_kernels.linear.activations import ACTIVATIONS

LinearImpl = Literal["onednn", "torch"]

_FUSED = {"silu": ("swish", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", "")}
"""oneDNN's name and algorithm of each activation; their bits were the same for 2 to 33 rows at widths such as 1365."""


_AMX_ROWS = 32


def onednn_available(dtype: torch.dtype) -> bool:
    """Whether oneDNN's reordered linear layers can be used on this machine for `dtype`."""
    if not torch.backends.mkldnn.is_available() or dtype not in (torch.float32, torch.bfloat16):
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    try:
        weight = torch.eye(32, dtype=dtype, device="cpu")
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        probe = torch.ops.mkldnn._linear_pointwise(weight, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False  # another torch release: these ops carry no promise
    return torch.equal(probe, weight)


class Linear:
    """y = x W^T + b, alone or with an activation.

    Sums and products that follow are left to the caller: oneDNN's fused `add` and `mul` took 9 us more than the plain
    product for 8 rows and 256 features on one thread, an in-place `add_` takes 1.

    Args:
        weight: [out_features, in_features].
        bias: [out_features] or None.
        impl: "onednn" (reordered weights, CPU) or "torch" (`F.linear`, which is not row-invariant in fp32: the caller
            must then keep the number of rows fixed). Chosen explicitly; it never falls back.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, impl: LinearImpl):
        self.impl = impl
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.contiguous()
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._splits = impl == "onednn" and weight.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
        if impl == "onednn":
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)
        else:
            self.weight = weight.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_rows, in_features] -> [num_rows, out_features]."""
        if self.impl == "onednn":
            return self._pointwise(x, "none", "")
        return F.linear(x, self.weight, self.bias)

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the layer's output."""
        return self._activated(x, "silu")

    def gelu(self, x: Tensor) -> Tensor:
        """GELU of the layer's output."""
        return self._activated(x, "gelu")

    def gelu_tanh(self, x: Tensor) -> Tensor:
        """GELU's approximation by tanh, of the layer's output."""
        return self._activated(x, "gelu_tanh")

    def relu(self, x: Tensor) -> Tensor:
        """ReLU of the layer's output."""
        return self._activated(x, "relu")

    def _activated(self, x: Tensor, activation: str) -> Tensor:
        if self.impl == "onednn":
            return self._pointwise(x, *_FUSED[activation])
        return ACTIVATIONS[activation](F.linear(x, self.weight, self.bias))

    def _pointwise(self, x: Tensor, name: str, algorithm: str) -> Tensor:
        """oneDNN's product with an activation, in parts where many rows would be summed in other blocks."""
        if not self._splits or len(x) <= _AMX_ROWS:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, name, [], algorithm)
        out = x.new_empty(len(x), self.out_features)
        parts = -(-len(x) // _AMX_ROWS)  # of nearly the same size, so that none has a single row
        for rows, to in zip(x.tensor_split(parts), out.tensor_split(parts), strict=True):
            to.copy_(torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, name, [], algorithm))
        return out
