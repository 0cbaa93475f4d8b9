"""Row-invariant linear layers in torch: a row's bits do not depend on the other rows of the pass.

oneDNN and MKL choose kernels, and blocks of a sum, by the number of rows. oneDNN's products of two or more rows usually
have the same bits; a layer for whose shape they have not, by a probe, multiplies `ROWS` rows at a time, as MKL does.
On a CPU, weights are reordered once into oneDNN's blocked layout if it supports the dtype, which is 2 to 4 times as
fast as `F.linear`. Only this module uses the two ops, which are private to torch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from treespec_kernels.linear.quantized import QuantizedWeight, dequantized

ROWS = 16
PROBED = (2, 3, 5, 8, 17, 33, 256)  # numbers of rows

_invariant: dict[tuple[object, ...], bool] = {}  # by shape of a layer


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
        return False  # another torch release: private ops may change
    return torch.equal(probe, weight)


class Linear:
    """Linear layer y = x W^T + b.

    Args:
        weight: [out_features, in_features], or quantised: it is dequantised to `dtype`, because torch's weight-only
            products are slower (for a weight of 4096 x 1024 and 16 rows in bfloat16, `_weight_int8pack_mm` took 5.0 ms,
            `_weight_int4pack_mm_for_cpu` 2.6 ms, and oneDNN's dense product 1.5 ms).
        bias: [out_features] or None.
        dtype: of a quantised weight's layer.
    """

    def __init__(self, weight: Tensor | QuantizedWeight, bias: Tensor | None, dtype: torch.dtype | None = None):
        if isinstance(weight, QuantizedWeight):
            weight = dequantized(weight).to(dtype)
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight.contiguous(), None if bias is None else bias.contiguous()
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._reordered = weight.device.type == "cpu" and onednn_available(weight.dtype)
        if self._reordered:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer to x [num_rows, in_features]; returns [num_rows, out_features]."""
        if not (self._reordered and self._is_invariant()):
            return self._in_blocks(x)
        return self._product((x if len(x) > 1 else F.pad(x, (0, 0, 0, 1))).contiguous())[: len(x)]

    def _is_invariant(self) -> bool:
        shape = self.out_features, self.in_features, self.weight.dtype, self.bias is None, torch.get_num_threads()
        if shape not in _invariant:
            x = torch.randn(max(PROBED), self.in_features, generator=torch.Generator().manual_seed(0), device="cpu")
            x = x.to(self.weight.dtype)
            blocks = self._in_blocks(x)
            _invariant[shape] = all(torch.equal(self._product(x[:n]), blocks[:n]) for n in PROBED)
        return _invariant[shape]

    def _in_blocks(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x), self.out_features)
        for rows, to in zip(x.split(ROWS), out.split(ROWS), strict=True):
            to.copy_(self._product(F.pad(rows, (0, 0, 0, ROWS - len(rows))).contiguous())[: len(rows)])
        return out

    def _product(self, x: Tensor) -> Tensor:
        if self._reordered:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)
