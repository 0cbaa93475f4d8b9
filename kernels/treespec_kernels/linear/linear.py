"""Row-invariant linear layers on a CPU: a row's bits do not depend on the other rows of the pass.

Weights are reordered once into oneDNN's blocked layout. For few rows this is 2 to 4 times as fast as `F.linear`, and
bits were measured to be equal for 2 to 1,024 rows, in fp32 and bf16 (a single row uses another code path for some
shapes, so a pass has at least two). In two cases oneDNN sums more rows in other blocks, so that one element in several
thousand rounds differently, and larger passes are computed in parts: with AMX in bf16 from 33 rows on (19 of 24 shapes
on a Sapphire Rapids), and before torch 2.12 in fp32 from 16 rows on (3 of 17 shapes, with 1,024 or 2,048 inputs). Only
this module uses the two ops, which are private to torch.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from treespec_kernels.linear.activations import ACTIVATIONS

LinearImpl = Literal["onednn", "torch"]

_FUSED = {"silu": ("swish", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", "")}
"""oneDNN's name and algorithm of activations. Bits were measured to be equal for 2 to 33 rows, at widths such as
1365."""


def _rows_per_call(dtype: torch.dtype) -> int | None:
    """Return the maximum number of rows with the same bits as 2 rows; None for any number."""
    if dtype == torch.bfloat16:
        return 32 if torch.cpu._is_amx_tile_supported() else None
    return 15 if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12) else None


def onednn_available(dtype: torch.dtype) -> bool:
    """Return whether this machine supports oneDNN's reordered linear layers for `dtype`."""
    if not torch.backends.mkldnn.is_available() or dtype not in (torch.float32, torch.bfloat16):
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    try:
        weight = torch.eye(32, dtype=dtype, device="cpu")
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        probe = torch.ops.mkldnn._linear_pointwise(weight, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False  # the private ops may change in other torch releases
    return torch.equal(probe, weight)


class Linear:
    """Linear layer y = x W^T + b, optionally with an activation.

    Subsequent additions and products are not fused: for 8 rows and 256 features on one thread, oneDNN's fused `add` and
    `mul` add 9 us to the product, an in-place `add_` 1 us.

    Args:
        weight: [out_features, in_features].
        bias: [out_features] or None.
        impl: "onednn" (reordered weights, CPU) or "torch" (`F.linear`, which is not row-invariant in fp32, so the
            caller must keep the number of rows fixed). There is no fallback.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, impl: LinearImpl):
        self.impl = impl
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.contiguous()
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._rows_per_call = _rows_per_call(weight.dtype)
        if impl == "onednn":
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)
        else:
            self.weight = weight.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer to x [num_rows, in_features]; returns [num_rows, out_features]."""
        if self.impl == "onednn":
            return self._pointwise(x, "none", "")
        return F.linear(x, self.weight, self.bias)

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """Apply the layer, then one of `ACTIVATIONS`."""
        if self.impl == "onednn" and activation in _FUSED:
            return self._pointwise(x, *_FUSED[activation])
        return ACTIVATIONS[activation](self(x))

    def _pointwise(self, x: Tensor, name: str, algorithm: str) -> Tensor:
        """Compute oneDNN's product with an activation, in parts if oneDNN would sum that many rows in other blocks."""
        if self._rows_per_call is None or len(x) <= self._rows_per_call:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, name, [], algorithm)
        out = x.new_empty(len(x), self.out_features)
        num_calls = -(-len(x) // self._rows_per_call)  # parts of nearly equal size, so none has a single row
        for rows, to in zip(x.tensor_split(num_calls), out.tensor_split(num_calls), strict=True):
            to.copy_(torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, name, [], algorithm))
        return out
