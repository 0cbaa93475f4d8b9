"""Read blocks of GGUF tensors as quantised weights."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from treespec_weights.quant_schemes import Form, QuantScheme, StoredTensor
from treespec_weights.quantize import Quantized

BLOCK = 32  # values that share a scale
FORMS: Mapping[str, Form] = {
    "Q8_0": Form(8, BLOCK, False),
    "Q4_0": Form(4, BLOCK, False),
    "Q4_1": Form(4, BLOCK, True),
    "Q4_K": Form(4, BLOCK, True),
}
"""Forms of the block types that fit the kernels' layouts. Q6_K does not: it has a scale per 16 values."""


@dataclass(frozen=True)
class GgufScheme(QuantScheme):
    """Quantisation scheme of a GGUF file's matrices."""

    types: tuple[tuple[str, str], ...] = ()  # pairs of tensor name and block type (a key of `FORMS`)

    @classmethod
    def of(cls, types: Mapping[str, str]) -> "GgufScheme":
        """Return the scheme of matrices with these block types, by tensor name."""
        return cls("gguf", max(FORMS[kind].bits for kind in types.values()), BLOCK, types=tuple(types.items()))

    @functools.cached_property
    def _type_of(self) -> dict[str, str]:
        return dict(self.types)

    @property
    def name(self) -> str:
        return f"gguf {', '.join(sorted({*self._type_of.values()}))}"

    def covers(self, name: str, head: str) -> bool:
        return name in self._type_of

    def form(self, name: str) -> Form:
        return FORMS[self._type_of[name]]

    def stored_tensors(self, name: str, out: int, inputs: int) -> dict[str, StoredTensor]:
        return {name: StoredTensor(((out, inputs),), (self._type_of[name],))}

    def read(
        self, name: str, out: int, inputs: int, get: Callable[[str], Tensor | None], dtype: torch.dtype | None
    ) -> Quantized:
        rows = get(name)
        assert rows is not None
        return read_blocks(self._type_of[name], rows)


def read_blocks(kind: str, rows: Tensor) -> Quantized:
    """Convert blocks, uint8 [out, bytes] of a type of `FORMS`, to a quantised weight.

    Q8_0 and Q4_0 are d * q. Q4_1 is d * q + m, and so is Q4_K, where d and m are products of a super-block's scales and
    6-bit integers. Their zero points are -m / d, in float32.
    """
    if kind == "Q4_K":
        return _read_q4_k(rows.unflatten(1, (-1, 144)))
    if kind == "Q8_0":
        blocks = rows.unflatten(1, (-1, 2 + BLOCK))
        return Quantized(blocks[..., 2:].flatten(1).view(torch.int8), _halves(blocks[..., :2]))
    header = 4 if kind == "Q4_1" else 2
    blocks = rows.unflatten(1, (-1, header + BLOCK // 2))
    values, scale = _repacked(blocks[..., header:]).flatten(1), _halves(blocks[..., :2])
    if kind == "Q4_0":
        return Quantized(values, scale)
    result = _with_minimum(values, scale.float(), _halves(blocks[..., 2:4]).float())
    return result._replace(scale=result.scale.half())


def _read_q4_k(blocks: Tensor) -> Quantized:
    """Convert super-blocks, uint8 [out, n, 144]: two float16 scales, eight 6-bit scales and minima, 256 integers."""
    # Twelve bytes hold 6 bits of the scales and minima of groups 0 .. 3 in their low bits; those of groups 4 .. 7 have
    # 4 bits in the last four bytes and 2 in the high bits of the others.
    scales, minima, rest = blocks[..., 4:16].split(4, 2)
    scales = torch.cat((scales & 63, rest & 15 | scales >> 6 << 4), 2)
    minima = torch.cat((minima & 63, rest >> 4 | minima >> 6 << 4), 2)
    scale = (_halves(blocks[..., :2]).float().unsqueeze(2) * scales).flatten(1)
    minimum = (_halves(blocks[..., 2:4]).float().unsqueeze(2) * minima).flatten(1)
    return _with_minimum(_repacked(blocks[..., 16:].unflatten(2, (4, BLOCK))).flatten(1), scale, -minimum)


def _repacked(pairs: Tensor) -> Tensor:
    """Repack 4-bit integers, uint8 [..., n]: bytes of integers i and n + i become bytes of 2 i and 2 i + 1."""
    even, odd = pairs[..., ::2], pairs[..., 1::2]
    return torch.stack((even & 15 | odd << 4, even >> 4 | odd & 0xF0), -2).flatten(-2)


def _with_minimum(values: Tensor, scale: Tensor, minimum: Tensor) -> Quantized:
    """Return the weight scale * q + minimum: values uint8 [out, inputs / 2] of q, the others float32 [out, groups]."""
    constant = scale == 0
    zero = -minimum / scale - 8
    if bool(constant.any()):  # such a group is (0 - -1) * minimum
        values = torch.where(constant.unsqueeze(2), 0x88, values.unflatten(1, (-1, BLOCK // 2))).flatten(1)
        zero, scale = torch.where(constant, -1.0, zero), torch.where(constant, minimum, scale)
    return Quantized(values, scale, zero)


def _halves(data: Tensor) -> Tensor:
    """Reinterpret uint8 [..., 2] as float16 [...]."""
    return data.contiguous().view(torch.float16).squeeze(-1)
