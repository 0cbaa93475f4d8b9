"""Matrices in the blocks of a GGUF file: their bytes for kernels that read blocks, and quantised weights for others.

Integers and scales are taken from the file, and minima become zero points. Integers of up to 4 bits become int4, unless
a table gives their values (IQ4, MXFP4); all others become int8. IQ1 to IQ3, TQ and NVFP4 are not supported.
"""

import functools
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec_weights.quant_schemes import Form, QuantScheme, StoredTensor
from treespec_weights.quantize import Quantized, packed, unpacked

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled
_CHUNK = 1 << 22  # bytes of blocks dequantised at a time


class Blocks(NamedTuple):
    """Matrix in the blocks of a GGUF file. Blocks of zero bytes hold zeros."""

    kind: str  # block type, a key of `FORMS`
    rows: Tensor  # uint8 [out_features, bytes], usually a view of the mapped file
    file: Any  # mmap.mmap, the private mapping of the file; None for rows in memory

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the values, [out_features, in_features]."""
        import gguf

        kind, (outputs, row_bytes) = gguf.GGMLQuantizationType[self.kind], self.rows.shape
        block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        result = torch.empty(outputs, row_bytes // block_bytes * block_values, dtype=dtype, device="cpu")
        size = max(1, _CHUNK // row_bytes)
        for rows, values in zip(self.rows.split(size), result.split(size), strict=True):
            values.copy_(torch.from_numpy(gguf.quants.dequantize(rows.numpy(), kind)))
        return result

    def release(self) -> None:
        """Drop the rows' pages from memory if they belong to the file, which is read again on access."""
        if self.file is None:
            return
        first, ends = np.frombuffer(self.file, np.uint8).ctypes.data, self.rows.data_ptr() + self.rows.nbytes
        start = -(-(self.rows.data_ptr() - first) // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (ends - first - start) // mmap.PAGESIZE * mmap.PAGESIZE
        if start >= 0 and ends <= first + len(self.file) and size > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self.file.madvise(mmap.MADV_DONTNEED, start, size)


Weights = dict[str, Any]
"""Decoder parameters by name: tensors, and `Blocks` of matrices that were loaded as such."""


def common_form(forms: Iterable[Form]) -> Form:
    """Return the form to which all matrices of a fused product can be widened without rounding."""
    bits, groups, zeros = zip(*forms, strict=True)
    return Form(max(bits), min(groups), any(zeros))


@dataclass(frozen=True)
class GgufScheme(QuantScheme):
    """Quantisation scheme of a GGUF file's matrices."""

    # tensor name, block type (a key of `FORMS`), and form in memory, at least as wide as the type's
    types: tuple[tuple[str, str, Form], ...] = ()

    @classmethod
    def of(cls, types: Mapping[str, Sequence[Any]]) -> "GgufScheme":
        """Return the scheme of matrices with these block types and forms, by tensor name."""
        matrices = tuple((name, str(kind), Form(*form)) for name, (kind, *form) in types.items())
        return cls("gguf", max(form.bits for _, _, form in matrices), types=matrices)

    @functools.cached_property
    def _type_of(self) -> dict[str, tuple[str, Form]]:
        return {name: (kind, form) for name, kind, form in self.types}

    @property
    def name(self) -> str:
        return f"gguf {', '.join(sorted({kind for _, kind, _ in self.types}))}"

    def covers(self, name: str, head: str) -> bool:
        return name in self._type_of

    def form(self, name: str) -> Form:
        return self._type_of[name][1]

    def stored_tensors(self, name: str, out: int, inputs: int) -> dict[str, StoredTensor]:
        return {name: StoredTensor(((out, inputs),), (self._type_of[name][0],))}

    def read(
        self, name: str, out: int, inputs: int, get: Callable[[str], Tensor | None], dtype: torch.dtype | None
    ) -> Quantized:
        rows = get(name)
        assert rows is not None
        kind, form = self._type_of[name]
        return _widened(read_blocks(kind, rows), form)


@dataclass(frozen=True)
class Mxfp4Scheme(QuantScheme):
    """MXFP4 of gpt-oss's experts: blocks of E2M1 pairs, [..., groups, 16], and their E8M0 exponents."""

    def covers(self, name: str, head: str) -> bool:
        return name.endswith("_blocks")

    def form(self, name: str) -> Form:
        return FORMS["MXFP4"]

    def stored_tensors(self, name: str, out: int, inputs: int) -> dict[str, StoredTensor]:
        if inputs % 32:
            raise ValueError(f"{inputs} inputs in groups of 32")
        blocks, exponents = (out, inputs // 32, 16), (out, inputs // 32)
        scales = f"{name.removesuffix('blocks')}scales"
        return {name: StoredTensor((blocks,), ("U8",)), scales: StoredTensor((exponents,), ("U8",))}

    def read(
        self, name: str, out: int, inputs: int, get: Callable[[str], Tensor | None], dtype: torch.dtype | None
    ) -> Quantized:
        return read_blocks("MXFP4", self.rows(name, get))

    def rows(self, name: str, get: Callable[[str], Tensor | None]) -> Tensor:
        """Return the matrix `name` as rows of GGUF blocks, which hold values 0 to 15 of 32 in the low bits."""
        pairs, exponents = get(name), get(f"{name.removesuffix('blocks')}scales")
        assert pairs is not None and exponents is not None
        even, odd = (half.unflatten(-1, (2, 8)).unbind(-2) for half in (pairs & 15, pairs >> 4))
        low, high = (torch.stack(half, -1).flatten(-2) for half in zip(even, odd, strict=True))
        return torch.cat((exponents.unsqueeze(-1), low | high << 4), -1).flatten(-2)


def _widened(weight: Quantized, form: Form) -> Quantized:
    """Return a weight with 8 bits, or with smaller groups, if the form has them."""
    values, scale, zero = weight
    if form.bits == 8 and values.dtype == torch.uint8:
        values = unpacked(values)
    inputs = values.shape[1] * (8 // form.bits)
    assert form.group is not None
    repeats = inputs // form.group // scale.shape[1]
    if repeats > 1:
        scale = scale.repeat_interleave(repeats, 1)
        zero = None if zero is None else zero.repeat_interleave(repeats, 1)
    return Quantized(values, scale, zero)


def read_blocks(kind: str, rows: Tensor) -> Quantized:
    """Convert blocks, uint8 [out, bytes] of a type of `FORMS`, to a quantised weight of its form.

    A value is d * q, or d * q + m, where d and m may be products of a super-block's scales and integers. The zero point
    of m is -m / d, in float32.
    """
    form, num_bytes, read_parts = _TYPES[kind]
    values, scale, minimum = read_parts(rows.unflatten(1, (-1, num_bytes)))
    values, scale = values.flatten(1), scale.flatten(1)
    if form.bits == 4 and values.dtype == torch.int8:
        values = packed(values)
    if minimum is None:
        return Quantized(values, scale)
    result = _with_minimum(values, scale.float(), minimum.flatten(1).float(), form)
    return result._replace(scale=result.scale.to(scale.dtype))


_Read = tuple[Tensor, Tensor, Tensor | None]  # by block: integers (pairs of 4 bits, or int8), and d and m of groups


def _read_q8_0(blocks: Tensor) -> _Read:
    return blocks[..., 2:].view(torch.int8), _halves(blocks[..., :2]), None


def _read_q4(blocks: Tensor, header: int) -> _Read:
    minimum = _halves(blocks[..., 2:4]) if header == 4 else None
    return _repacked(blocks[..., header:]), _halves(blocks[..., :2]), minimum


def _read_q5(blocks: Tensor, header: int) -> _Read:
    """Layout after the header: 4 bytes with the highest bits of 32 integers, 16 with the other four bits of each."""
    q = _nibbles(blocks[..., header + 4 :]) | _planes(blocks[..., header : header + 4], 1).flatten(-2) << 4
    minimum = _halves(blocks[..., 2:4]) if header == 4 else None
    return q if header == 4 else q - 16, _halves(blocks[..., :2]), minimum


def _read_q2_k(blocks: Tensor) -> _Read:
    """Layout: 16 bytes of scales and minima, 256 integers of 2 bits, d, the minima's d."""
    scales, minima = blocks[..., :16] & 15, blocks[..., :16] >> 4
    q = _columns(blocks[..., 16:80].unflatten(-1, (2, 32)), 2).flatten(-3) - 8
    return q, _products(blocks[..., 80:82], scales), -_products(blocks[..., 82:84], minima)


def _read_q3_k(blocks: Tensor) -> _Read:
    """Layout: 256 highest bits, the other two of each integer, 16 scales of 6 bits, d. Integers are offset by 4."""
    low, high = blocks[..., 96:104], _columns(blocks[..., 104:108], 2).flatten(-2)
    scales = (torch.cat((low & 15, low >> 4), -1).to(torch.int8) | high << 4) - 32
    q = _columns(blocks[..., 32:96].unflatten(-1, (2, 32)), 2).flatten(-3, -2)
    q = q + (_columns(blocks[..., :32], 1) << 2) - 4
    return q.flatten(-2), _products(blocks[..., 108:110], scales), None


def _read_q4_k(blocks: Tensor) -> _Read:
    """Layout: d, the minima's d, 8 scales and minima, 256 integers of 4 bits."""
    return _repacked(blocks[..., 16:].unflatten(2, (4, 32))), *_scales_and_minima(blocks)


def _read_q5_k(blocks: Tensor) -> _Read:
    """Layout: as Q4_K, with the highest bits of the integers before the other four."""
    q = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    q = q | _columns(blocks[..., 16:48], 1) << 4
    return q.flatten(-2), *_scales_and_minima(blocks)


def _read_q6_k(blocks: Tensor) -> _Read:
    """Layout: the low 4 and the high 2 bits of 256 integers, offset by 32; 16 int8 scales, d."""
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).flatten(-2)
    high = _columns(blocks[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(-3)
    return (low | high << 4) - 32, _products(blocks[..., 208:210], blocks[..., 192:208].view(torch.int8)), None


def _read_iq4_nl(blocks: Tensor) -> _Read:
    """Layout: d, and 32 indices into a table."""
    return _looked_up(_IQ4, blocks[..., 2:]), _halves(blocks[..., :2]), None


def _read_iq4_xs(blocks: Tensor) -> _Read:
    """Layout: d, the high 2 and the low 4 bits of 8 scales, offset by 32, and 256 indices into the table."""
    low, high = blocks[..., 4:8], _planes(blocks[..., 2:4], 2).flatten(-2)
    low = torch.stack((low & 15, low >> 4), -1).flatten(-2).to(torch.int8)
    return (
        _looked_up(_IQ4, blocks[..., 8:].unflatten(-1, (8, 16))).flatten(-2),
        _products(blocks[..., :2], (low | high << 4) - 32),
        None,
    )


def _read_mxfp4(blocks: Tensor) -> _Read:
    """Layout: an E8M0 exponent, and 32 E2M1 values. The table is doubled, so the scale is halved."""
    exponents = blocks[..., 0].int()
    halved = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    return _looked_up(_E2M1, blocks[..., 1:]), halved.view(torch.float32), None


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return d and m of the groups of Q4_K and Q5_K: 6-bit integers times the super-block's scales."""
    # Twelve bytes hold 6 bits of the scales and minima of groups 0 .. 3 in their low bits; those of groups 4 .. 7 have
    # 4 bits in the last four bytes and 2 in the high bits of the others.
    scales, minima, high_bits = blocks[..., 4:16].split(4, 2)
    scales = torch.cat((scales & 63, high_bits & 15 | scales >> 6 << 4), 2)
    minima = torch.cat((minima & 63, high_bits >> 4 | minima >> 6 << 4), 2)
    return _products(blocks[..., :2], scales), -_products(blocks[..., 2:4], minima)


def _products(halves: Tensor, integers: Tensor) -> Tensor:
    """Multiply integers [..., n] by each block's float16, given as bytes: float32, exact."""
    return _halves(halves).float().unsqueeze(-1) * integers


def _nibbles(data: Tensor) -> Tensor:
    """Return the low 4 bits of bytes [..., n], then the high 4, int8 [..., 2 n]."""
    return torch.cat((data & 15, data >> 4), -1).to(torch.int8)


def _planes(data: Tensor, bits: int) -> Tensor:
    """Return the integers of `bits` bits in each byte [..., n], lowest first: int8 [..., n, 8 / bits]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
    return (data.unsqueeze(-1) >> shifts & (1 << bits) - 1).to(torch.int8)


def _columns(data: Tensor, bits: int) -> Tensor:
    """Return the lowest `bits` bits of bytes [..., n], then the next ones, int8 [..., 8 / bits, n]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device).unsqueeze(-1)
    return (data.unsqueeze(-2) >> shifts & (1 << bits) - 1).to(torch.int8)


def _looked_up(table: Sequence[int], data: Tensor) -> Tensor:
    """Look up the low 4 bits of bytes [..., n], then the high 4, in a table: int8 [..., 2 n]."""
    return torch.tensor(table, dtype=torch.int8, device=data.device)[_nibbles(data).int()]


def _repacked(pairs: Tensor) -> Tensor:
    """Repack 4-bit integers, uint8 [..., n]: bytes of integers i and n + i become bytes of 2 i and 2 i + 1."""
    even, odd = pairs[..., ::2], pairs[..., 1::2]
    return torch.stack((even & 15 | odd << 4, even >> 4 | odd & 0xF0), -2).flatten(-2)


def _with_minimum(values: Tensor, scale: Tensor, minimum: Tensor, form: Form) -> Quantized:
    """Return the weight scale * q + minimum: `values` of q (4 bits: of q - 8), the others float32 [out, groups]."""
    constant = scale == 0
    zero = -minimum / scale - (8 if form.bits == 4 else 0)
    if bool(constant.any()):  # such a group is (0 - -1) * minimum
        groups = values.unflatten(1, (scale.shape[1], -1))
        values = torch.where(constant.unsqueeze(2), 0x88 if form.bits == 4 else 0, groups).flatten(1)
        zero, scale = torch.where(constant, -1.0, zero), torch.where(constant, minimum, scale)
    return Quantized(values, scale, zero)


def _halves(data: Tensor) -> Tensor:
    """Reinterpret uint8 [..., 2] as float16 [...]."""
    return data.contiguous().view(torch.float16).squeeze(-1)


class _BlockType(NamedTuple):
    form: Form  # form in memory
    num_bytes: int  # size of a block
    read: Callable[[Tensor], _Read]


_TYPES: Mapping[str, _BlockType] = {
    "Q8_0": _BlockType(Form(8, 32, False), 34, _read_q8_0),
    "Q4_0": _BlockType(Form(4, 32, False), 18, functools.partial(_read_q4, header=2)),
    "Q4_1": _BlockType(Form(4, 32, True), 20, functools.partial(_read_q4, header=4)),
    "Q5_0": _BlockType(Form(8, 32, False), 22, functools.partial(_read_q5, header=2)),
    "Q5_1": _BlockType(Form(8, 32, True), 24, functools.partial(_read_q5, header=4)),
    "Q2_K": _BlockType(Form(4, 16, True), 84, _read_q2_k),
    "Q3_K": _BlockType(Form(4, 16, False), 110, _read_q3_k),
    "Q4_K": _BlockType(Form(4, 32, True), 144, _read_q4_k),
    "Q5_K": _BlockType(Form(8, 32, True), 176, _read_q5_k),
    "Q6_K": _BlockType(Form(8, 16, False), 210, _read_q6_k),
    "IQ4_NL": _BlockType(Form(8, 32, False), 18, _read_iq4_nl),
    "IQ4_XS": _BlockType(Form(8, 32, False), 136, _read_iq4_xs),
    "MXFP4": _BlockType(Form(8, 32, False), 17, _read_mxfp4),
}
FORMS: Mapping[str, Form] = {kind: block_type.form for kind, block_type in _TYPES.items()}
"""Form in memory of each block type that is read as a quantised weight."""
