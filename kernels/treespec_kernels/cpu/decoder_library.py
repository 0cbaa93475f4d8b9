"""The decoder's C++ library, compiled for one head size and dtype, and linear layers in its layout.

Compilation needs only a C++ compiler, no headers of torch or Python, and takes about 10 seconds (`cpu_library`).
"""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from treespec_kernels.cpu.cpu_library import compile_library, read_structs
from treespec_kernels.cpu.huge_pages import HugePages
from treespec_kernels.linear.quantized import QuantizedWeight

SOURCE = Path(__file__).with_name("decoder_cpu.cpp")
_HEADERS = ("vectors_cpu", "batch_cpu", "parallel_cpu", "products_cpu", "tiles_cpu", "quantized_cpu", "integer_cpu")
_HEADERS += ("linear_cpu", "pointwise_cpu", "attention_cpu")
PARTS = tuple(SOURCE.with_name(f"{name}.h") for name in _HEADERS)  # included files
DTYPES = (torch.bfloat16, torch.float32)

_PANEL = 64
_NIBBLE_BIAS = 24.0  # as NIBBLE_BIAS in quantized_cpu.h


STRUCTS = read_structs(SOURCE, SOURCE.with_name("batch_cpu.h"))


@functools.cache
def build(compiler: tuple[str, ...], head_dim: int, dtype: torch.dtype, folder: Path) -> ctypes.CDLL:
    """Load or compile the library for one head size and dtype."""
    defines = f"-DHEAD_DIM={head_dim}", f"-DBF16={int(dtype == torch.bfloat16)}"
    return compile_library(compiler, (SOURCE, *PARTS), defines, folder)


def pack(weight: Tensor) -> Tensor:
    """Reorder a weight [outputs, inputs] to [panels, inputs, 64], or in bf16 to [panels, inputs / 2, 64, 2].

    bf16 has pairs of inputs next to each other.
    """
    outputs, inputs = weight.shape
    panels = -(-outputs // _PANEL)
    whole = torch.nn.functional.pad(weight, (0, 0, 0, panels * _PANEL - outputs)).view(panels, _PANEL, inputs)
    if weight.dtype == torch.bfloat16:
        return whole.view(panels, _PANEL, inputs // 2, 2).transpose(1, 2).contiguous()
    return whole.transpose(1, 2).contiguous()


def in_panels(tensor: Tensor) -> Tensor:
    """Reorder a tensor [outputs, groups] to fp32 [panels, groups, 64], padded with zeros."""
    outputs, groups = tensor.shape
    padded = torch.nn.functional.pad(tensor.float(), (0, 0, 0, -outputs % _PANEL))
    return padded.view(-1, _PANEL, groups).transpose(1, 2).contiguous()


class PanelLinear:
    """Linear layer in the library's layout. `struct` has addresses of the tensors in `held`."""

    def __init__(
        self,
        library: ctypes.CDLL,  # from `build`
        # [outputs, inputs] in the library's dtype, or quantised with an even number of inputs
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,  # [outputs] or None
        # Quantise activations to int8 per row and group of inputs. Ignored for weights that are not quantised, or whose
        # groups are not multiples of 16
        integer: bool = False,
        memory: HugePages | None = None,  # for the weights; None for memory of their own
    ):
        self.held: list[Tensor] = []
        self.out_features, self.in_features = weight.shape
        bits, group, scale, zero = 0, 0, None, None
        integer = integer and isinstance(weight, QuantizedWeight) and weight.group % 16 == 0
        if isinstance(weight, QuantizedWeight):
            weight.check()
            bits, group = weight.bits, weight.group
            values = weight.values.contiguous()
            sizes = self.out_features, self.in_features, bits
            rows = -(-self.out_features // _PANEL) * _PANEL
            packed = torch.empty(rows * self.in_features * bits // 8, dtype=torch.uint8, device="cpu")
            library.treespec_pack(values.data_ptr(), *sizes, integer, packed.data_ptr())
            scale = self._hold(in_panels(weight.scale))
            shift = _NIBBLE_BIAS if bits == 4 and not integer else 0.0
            zero = None if weight.zero is None else self._hold(in_panels(weight.zero.float() + shift))
        else:
            packed = pack(weight)
        if memory is not None:
            packed = memory.place(packed)
        self.struct = STRUCTS["Linear"](
            weight=self._hold(packed),
            bias=None if bias is None else self._hold(in_panels(bias[:, None]).clone()),
            inputs=self.in_features,
            outputs=self.out_features,
            bits=bits,
            group=group,
            integer=integer,
            scale=scale,
            zero=zero,
        )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.held)

    def _hold(self, tensor: Tensor) -> int:
        self.held.append(tensor)
        return tensor.data_ptr()
