"""Row-invariant linear layers on a CPU, dense or quantised, each one call of the compiled library."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from treespec_kernels.cpu.decoder_library import PackedLinear
from treespec_kernels.linear.quantized import QuantizedWeight


class CompiledLinear:
    """Linear layer with the interface of `Linear`; a row's bits do not depend on the number of rows.

    Args:
        library: from `decoder_library.build`, for `dtype`.
        weight: [out_features, in_features] in `dtype`, or quantised, with an even number of inputs.
        bias: [out_features] or None.
        dtype: dtype of x and y, float32 or bfloat16.
        num_threads: number of threads that share the outputs; bits do not depend on it.
        integer: quantise activations to int8 before products with quantised weights.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,
        dtype: torch.dtype,
        num_threads: int,
        integer: bool = False,
    ):
        self._library, self._dtype, self._threads = library, dtype, num_threads
        self._packed = PackedLinear(library, weight, bias, integer)
        self.out_features, self.in_features = weight.shape
        self.nbytes = sum(tensor.nbytes for tensor in self._packed.held)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer to x [num_rows, in_features]; returns [num_rows, out_features]."""
        assert x.dtype == self._dtype and x.shape[1] == self.in_features
        x = x.contiguous()
        out = torch.empty(len(x), self.out_features, dtype=self._dtype, device="cpu")
        self._library.treespec_linear(
            ctypes.byref(self._packed.struct), x.data_ptr(), len(x), out.data_ptr(), self._threads
        )
        return out
