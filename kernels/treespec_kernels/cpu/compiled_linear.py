"""Row-invariant linear layers on a CPU, dense or quantised, each one call of the compiled library.

torch's products of quantised weights are row-invariant too, but slower than oneDNN's dense one (5.0 and 2.6 ms instead
of 1.5 for 16 rows of 4096 x 1024 in bfloat16). Without a compiler, weights are therefore dequantised.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from treespec_kernels.cpu.decoder_library import PanelLinear, Weight
from treespec_kernels.linear.activations import ACTIVATIONS
from treespec_kernels.linear.linear import Linear, LinearImpl
from treespec_kernels.linear.quantized import QuantizedWeight, dequantized


class CompiledLinear(PanelLinear):
    """Linear layer with the interface of `Linear`; a row's bits do not depend on the number of rows."""

    def __init__(
        self,
        library: ctypes.CDLL,  # from `decoder_library.build`, for `dtype`
        # [out_features, in_features] in `dtype`, or quantised, with an even number of inputs
        weight: Weight | Sequence[Weight],
        bias: Tensor | None,  # [out_features] or None
        dtype: torch.dtype,  # dtype of x and y, float32 or bfloat16
        num_threads: int,  # number of threads among which outputs are divided; bits do not depend on it
        integer: bool = False,  # whether to quantise activations to int8 before products with quantised weights
    ):
        super().__init__(library, weight, bias, integer)
        self._dtype, self._threads = dtype, num_threads

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer to x [num_rows, in_features]; returns [num_rows, out_features]."""
        assert x.dtype == self._dtype and x.shape[1] == self.in_features
        x = x.contiguous()
        out = torch.empty(len(x), self.out_features, dtype=self._dtype, device="cpu")
        self._library.treespec_linear(ctypes.byref(self.struct), x.data_ptr(), len(x), out.data_ptr(), self._threads)
        return out

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """Apply the layer, then one of `ACTIVATIONS`."""
        return ACTIVATIONS[activation](self(x))


def quantized_linear(
    weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, impl: LinearImpl, library: ctypes.CDLL | None
) -> CompiledLinear | Linear:
    """Return a linear layer for a quantised weight.

    Without a library, or with an odd number of inputs, which the library does not support, the layer is a dense one
    with the dequantised weight.
    """
    if library is None or weight.in_features % 2:
        return Linear(dequantized(weight).to(dtype), bias, impl)
    return CompiledLinear(library, weight, bias, dtype, torch.get_num_threads())
