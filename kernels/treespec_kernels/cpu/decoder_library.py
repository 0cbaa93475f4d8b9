"""The decoder's C++ library, compiled for one head size and dtype, and linear layers in its layout.

Compilation needs only a C++ compiler, no torch or Python headers, and takes about 10 seconds (`cpu_library`).
"""

import ctypes
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treespec_kernels.cpu.cpu_library import compile_library, read_structs
from treespec_kernels.cpu.huge_pages import HugePages
from treespec_kernels.linear.quantized import BLOCK_TYPES, BlockWeight, QuantizedWeight

SOURCE = Path(__file__).with_name("decoder_cpu.cpp")
_HEADERS = (
    *("vectors_cpu", "batch_cpu", "parallel_cpu", "products_cpu", "tiles_cpu", "quantized_cpu", "quantized_tiles_cpu"),
    *("integer_cpu", "blocks_cpu", "linear_cpu", "pointwise_cpu", "attention_cpu", "recurrent_cpu", "experts_cpu"),
)
PARTS = tuple(SOURCE.with_name(f"{name}.h") for name in _HEADERS)  # included headers
DTYPES = (torch.bfloat16, torch.float32)

_PANEL, LANES = 64, 16
_AT_ONCE = 16 << 20  # bytes to pack before dropping their file pages from memory
_INT8, _INT4 = -1, -2  # type numbers of integers with scales, in addition to the block types

Weight = Tensor | QuantizedWeight | BlockWeight

STRUCTS = read_structs(SOURCE, SOURCE.with_name("batch_cpu.h"))


@functools.cache
def build(compiler: tuple[str, ...], head_dim: int, dtype: torch.dtype, folder: Path) -> ctypes.CDLL:
    """Load or compile the library for one head size and dtype."""
    defines = f"-DHEAD_DIM={head_dim}", f"-DBF16={int(dtype == torch.bfloat16)}"
    return compile_library(compiler, (SOURCE, *PARTS), defines, folder)


def pack(weights: Sequence[Tensor], memory: HugePages) -> Tensor:
    """Reorder vertically concatenated weights [outputs, inputs] to [panels, inputs, width] in `memory`.

    In bf16, pairs of inputs are adjacent: [panels, inputs / 2, width, 2]. Panels have 64 outputs; that of a matrix with
    fewer is as narrow, in steps of 16. Reads the weights once.
    """
    inputs, dtype, pair = weights[0].shape[1], weights[0].dtype, 2 if weights[0].dtype == torch.bfloat16 else 1
    outputs = sum(len(weight) for weight in weights)
    width = min(-(-outputs // LANES) * LANES, _PANEL)
    panels = -(-outputs // width)
    packed = memory.allocate(panels * width * inputs * dtype.itemsize).view(dtype)
    packed = packed.view(panels, inputs // pair, width, pair)
    packed[-1].zero_()  # the last panel may have padding
    end = 0
    for weight in weights:
        start, end = end, end + len(weight)
        blocks = weight.reshape(len(weight), inputs // pair, pair)
        # Copies whole panels at once; other weights share the partial panels at both ends.
        first = min(-(-start // width) * width, end)
        last = max(end // width * width, first)
        for begin, stop in ((start, first), (last, end)):
            if begin < stop:
                rows = blocks[begin - start : stop - start].transpose(0, 1)
                packed[begin // width, :, begin % width : begin % width + stop - begin] = rows
        whole = blocks[first - start : last - start].view(-1, width, inputs // pair, pair)
        packed[first // width : last // width] = whole.transpose(1, 2)
    return packed


def in_panels(tensor: Tensor) -> Tensor:
    """Reorder a tensor [outputs, groups] to fp32 [panels, groups, 64], padded with zeros."""
    outputs, groups = tensor.shape
    padded = torch.nn.functional.pad(tensor.float(), (0, 0, 0, -outputs % _PANEL))
    return padded.view(-1, _PANEL, groups).transpose(1, 2).contiguous()


class PanelLinear:
    """Linear layer in the library's layout. `struct` points to the tensors in `held`.

    Outputs of several matrices, such as Q, K and V, are concatenated. Consecutive matrices of equal form are merged.
    """

    def __init__(
        self,
        library: ctypes.CDLL,  # from `build`
        # [outputs, inputs] in the library's dtype, or quantised with an even number of inputs; or several of them with
        # equal inputs
        weight: Weight | Sequence[Weight],
        bias: Tensor | None,  # [outputs] or None
        # Whether to quantise activations to int8 per row and group of inputs. Ignored for unquantised weights, and if
        # groups are not multiples of 16
        integer: bool = False,
        memory: HugePages | None = None,  # allocator for the weights; None for a new one
        padded: bool = False,  # rows of outputs end with a whole vector
    ):
        self.held: list[Tensor] = []
        weights = [weight] if isinstance(weight, (Tensor, QuantizedWeight, BlockWeight)) else list(weight)
        self.out_features, self.in_features = sum(part.shape[0] for part in weights), weights[0].shape[1]
        self._stride = -(-self.out_features // LANES) * LANES if padded else self.out_features
        self._library, self._integer, self._memory = library, integer, memory or HugePages(smallest=None)
        self._parts: list[ctypes.Structure] = []  # structs of the matrices, last one first
        end = self.out_features
        for _, group in reversed([(form, list(parts)) for form, parts in itertools.groupby(weights, form_of)]):
            start = end - sum(part.shape[0] for part in group)
            self._parts.append(self._pack(group, None if bias is None else bias[start:end]))
            end = start
        self.struct = self._parts[-1]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.held)

    def _pack(self, weights: Sequence[Any], bias: Tensor | None) -> ctypes.Structure:
        """Pack one matrix of the product; its struct links to the previously packed one."""
        outputs = sum(part.shape[0] for part in weights)
        struct = STRUCTS["Linear"](inputs=self.in_features, outputs=outputs, stride=self._stride)
        struct.rest = ctypes.addressof(self._parts[-1]) if self._parts else None
        struct.bias = None if bias is None else self._hold(in_panels(bias[:, None]).clone())
        if isinstance(weights[0], Tensor):
            packed = pack(weights, self._memory)
            struct.narrow, struct.weight = packed.shape[2] % _PANEL, self._hold(packed)
            return struct
        sources = (STRUCTS["Source"] * len(weights))()
        tensors: list[Tensor] = []  # keeps the tensors of the sources alive

        def address(tensor: Tensor) -> int:
            tensors.append(tensor.contiguous())
            return tensors[-1].data_ptr()

        for source, part in zip(sources, weights, strict=True):
            source.outputs = part.shape[0]
            if isinstance(part, BlockWeight):
                kind, source.values = BLOCK_TYPES[part.kind].number, address(part.rows)
                continue
            part.check()
            kind, struct.group = _INT8 if part.bits == 8 else _INT4, part.group
            source.values, source.scale = address(part.values), address(part.scale.float())
            if part.zero is not None:
                struct.has_min, source.zero = True, address(part.zero.float())
        panel_bytes = self._library.treespec_format(ctypes.byref(struct), kind)
        struct.integer = self._integer and struct.group % 16 == 0
        panels, step = -(-outputs // _PANEL), max(_AT_ONCE // panel_bytes, 1)
        packed = self._memory.allocate(panels * panel_bytes)
        pointers = ctypes.byref(struct), kind, ctypes.byref(sources), len(sources), packed.data_ptr()
        for first in range(0, panels, step):
            self._library.treespec_pack(*pointers, first, min(first + step, panels), torch.get_num_threads())
            for part in weights:
                if isinstance(part, BlockWeight):
                    part.release()
        struct.weight = self._hold(packed)
        return struct

    def _hold(self, tensor: Tensor) -> int:
        self.held.append(tensor)
        return tensor.data_ptr()


def form_of(weight: Weight) -> object:
    """Return the form of a weight; weights of equal form can be packed as one."""
    if isinstance(weight, BlockWeight):
        return weight.kind
    return (weight.bits, weight.group) if isinstance(weight, QuantizedWeight) else None


def unsupported_reason(hidden: int, mlps: Sequence[int], head_dim: int, dtype: torch.dtype) -> str | None:
    """Return why a model of these sizes cannot be compiled, or None if it can."""
    if dtype not in DTYPES:
        return f"dtype {dtype}; valid: float32, bfloat16"
    sizes = (("hidden size", hidden), *(("MLP size", mlp) for mlp in mlps), ("head size", head_dim))
    for name, size in sizes:
        if size % LANES:
            return f"a {name} of {size}, which is not a multiple of {LANES}"
    return None
