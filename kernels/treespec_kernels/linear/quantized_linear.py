"""Row-invariant linear layers with quantised weights on a CPU, one call of the compiled library each.

torch's own weight-only products were measured instead (a weight of 4096 x 1024, one thread, AVX-512): their rows were
invariant, but `_weight_int8pack_mm` took 5.0 ms for 16 rows in bfloat16 where oneDNN's dense product takes 1.5, and
`_weight_int4pack_mm_for_cpu` 2.6; in float32 both took more than 100. So without a compiler the weights are held as the
model's dtype instead.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from treespec_kernels.cpu.decoder_cpu import PackedLinear
from treespec_kernels.linear.activations import ACTIVATIONS
from treespec_kernels.linear.linear import Linear, LinearImpl
from treespec_kernels.linear.quantized import QuantizedWeight, dequantized


class QuantizedLinear:
    """y = x W^T + b, alone or with an activation, as `Linear`; the bits of a row do not depend on the number of rows.

    Args:
        library: from `decoder_cpu.build`, of `dtype`; in_features is even.
        weight: quantised.
        bias: [out_features] or None.
        dtype: of x and y, float32 or bfloat16.
        num_threads: that share the outputs. No bit depends on it.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: QuantizedWeight,
        bias: Tensor | None,
        dtype: torch.dtype,
        num_threads: int,
    ):
        self._library, self._dtype, self._threads = library, dtype, num_threads
        self._packed = PackedLinear(library, weight, bias)
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self.nbytes = sum(tensor.nbytes for tensor in self._packed.held)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_rows, in_features] -> [num_rows, out_features]."""
        assert x.dtype == self._dtype and x.shape[1] == self.in_features
        x = x.contiguous()
        out = torch.empty(len(x), self.out_features, dtype=self._dtype, device="cpu")
        self._library.treespec_linear(
            ctypes.byref(self._packed.struct), x.data_ptr(), len(x), out.data_ptr(), self._threads
        )
        return out

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the layer's output."""
        return ACTIVATIONS["silu"](self(x))

    def gelu(self, x: Tensor) -> Tensor:
        """GELU of the layer's output."""
        return ACTIVATIONS["gelu"](self(x))

    def gelu_tanh(self, x: Tensor) -> Tensor:
        """GELU's approximation by tanh, of the layer's output."""
        return ACTIVATIONS["gelu_tanh"](self(x))

    def relu(self, x: Tensor) -> Tensor:
        """ReLU of the layer's output."""
        return ACTIVATIONS["relu"](self(x))


def quantized_linear(
    weight: QuantizedWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    impl: LinearImpl,
    library: ctypes.CDLL | None,
) -> QuantizedLinear | Linear:
    """The layer for a quantised weight: the library's; without one, or with an odd number of inputs, which it does not
    take, a plain layer that holds the weight as `dtype`."""
    if library is None or weight.in_features % 2:
        return Linear(dequantized(weight).to(dtype), bias, impl)
    return QuantizedLinear(library, weight, bias, dtype, torch.get_num_threads())
