"""Quantised weights of linear layers: 8-bit or 4-bit integers, with scales per output and group of inputs.

A weight is (q - zero) * scale. Zero points are integers, or floating-point numbers for formats that store a minimum.
Only weights are quantised: activations stay in the model's dtype, integers are converted to it exactly, and sums are
fp32. The dtype of the values determines the format: int8 is one weight, uint8 two 4-bit weights.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST_GROUP = 16


class WeightForm(NamedTuple):
    """Quantisation format of a model's layers; kernels are compiled and tuned for it."""

    bits: int  # 8 or 4
    group: int | None = None  # number of inputs that share a scale; None for all of them
    has_zero: bool = False  # whether there are zero points

    def group_of(self, in_features: int) -> int:
        """Return the number of a layer's inputs that share a scale: all of them if groups do not divide them."""
        return in_features if self.group is None or in_features % self.group else self.group


class QuantizedWeight(NamedTuple):
    """Quantised weight of a projection."""

    # int8 [out_features, in_features], q itself; or uint8 [out_features, in_features / 2], pairs of 4-bit numbers q +
    # 8, the earlier input in the low bits
    values: Tensor
    scale: Tensor  # floating point [out_features, groups]; in_features / groups consecutive inputs share a scale
    zero: Tensor | None = None  # zero points, int8 or float32 [out_features, groups]; None if all are 0

    @property
    def bits(self) -> int:
        return 8 if self.values.dtype == torch.int8 else 4

    @property
    def shape(self) -> tuple[int, ...]:
        """[out_features, in_features], after any leading dimensions."""
        return (*self.values.shape[:-1], self.in_features)

    @property
    def out_features(self) -> int:
        return self.values.shape[-2]

    @property
    def in_features(self) -> int:
        return self.values.shape[-1] * (8 // self.bits)

    @property
    def group(self) -> int:
        """Number of inputs that share a scale."""
        return self.in_features // self.scale.shape[-1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes + (0 if self.zero is None else self.zero.nbytes)

    def check(self) -> None:
        """Assert that the tensors' shapes and dtypes match; a checkpoint's are checked when it is read."""
        groups = self.scale.shape[-1]
        assert self.values.dtype in (torch.int8, torch.uint8) and self.scale.shape[:-1] == self.values.shape[:-1]
        assert self.in_features % groups == 0 and (groups == 1 or self.group % SMALLEST_GROUP == 0)
        assert self.zero is None or self.zero.shape == self.scale.shape
        assert self.zero is None or self.zero.dtype in (torch.int8, torch.float32)


class BlockType(NamedTuple):
    """Block type of a GGUF file."""

    number: int  # number of the type in GGUF files
    num_bytes: int  # bytes per block
    num_values: int


BLOCK_TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(2, 18, 32),
    "Q4_1": BlockType(3, 20, 32),
    "Q5_0": BlockType(6, 22, 32),
    "Q5_1": BlockType(7, 24, 32),
    "Q8_0": BlockType(8, 34, 32),
    "Q2_K": BlockType(10, 84, 256),
    "Q3_K": BlockType(11, 110, 256),
    "Q4_K": BlockType(12, 144, 256),
    "Q5_K": BlockType(13, 176, 256),
    "Q6_K": BlockType(14, 210, 256),
    "IQ4_NL": BlockType(20, 18, 32),
    "IQ4_XS": BlockType(23, 136, 256),
    "MXFP4": BlockType(39, 17, 32),
}
"""Block types that the compiled library multiplies as stored."""


class BlockWeight(NamedTuple):
    """Weight of a projection in the blocks of a GGUF file, for compiled passes."""

    kind: str  # key of BLOCK_TYPES
    rows: Tensor  # uint8 [out_features, bytes], the blocks of each row
    release: Callable[[], None] = lambda: None  # drops pages of a mapped file; they are read again on access

    @property
    def shape(self) -> tuple[int, int]:
        """[out_features, in_features]."""
        block = BLOCK_TYPES[self.kind]
        return self.rows.shape[0], self.rows.shape[1] // block.num_bytes * block.num_values

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes


def integers(weight: QuantizedWeight) -> Tensor:
    """Return q, int8 [out_features, in_features] after any leading dimensions."""
    if weight.bits == 8:
        return weight.values
    low, high = weight.values & 15, weight.values >> 4
    return torch.stack((low, high), -1).flatten(-2).to(torch.int8) - 8


def dequantized(weight: QuantizedWeight) -> Tensor:
    """Return (q - zero) * scale, fp32 [out_features, in_features] after any leading dimensions (reference)."""
    q = integers(weight).float().unflatten(-1, (-1, weight.group))
    if weight.zero is not None:
        q = q - weight.zero.float().unsqueeze(-1)
    return (q * weight.scale.float().unsqueeze(-1)).flatten(-2)


def stacked(weights: Sequence[QuantizedWeight], dim: int = -2) -> QuantizedWeight:
    """Concatenate weights, by default along their outputs.

    Their bits and groups must be equal. If any weight has zero points, the others get zeros; if any zero points are
    float32, all are converted to float32.
    """
    zero = None
    if any(weight.zero is not None for weight in weights):
        zeros = [
            torch.zeros_like(weight.scale, dtype=torch.int8) if weight.zero is None else weight.zero
            for weight in weights
        ]
        zero = torch.cat(zeros, dim)
    values, scales = [weight.values for weight in weights], [weight.scale for weight in weights]
    return QuantizedWeight(torch.cat(values, dim), torch.cat(scales, dim), zero)
