"""Transform a conversion's tensors: cast to another dtype, or quantise into compressed-tensors' format.

Every transform has three methods. `outputs` returns the outputs of one tensor of a stored dtype. `apply` returns the
output tensors in the same order, and raises OverflowError if a value does not fit the dtype. `config` returns the
result's config.json.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treespec_weights.dtypes import NAMES
from treespec_weights.errors import OptionError
from treespec_weights.load import Placement, cast, overflow_message, quantizable, quantized_group
from treespec_weights.quantize import BITS, FP8, compressed_tensors, compressed_tensors_config, quantize, quantize_fp8
from treespec_weights.rules import FamilyRules, ModelShape
from treespec_weights.writer import Output

FP8_FORMATS = ("fp8", "fp8-all")
FORMATS = (*BITS, *FP8_FORMATS)  # of `--quantize`


@dataclass(frozen=True)
class Cast:
    """Casts to another dtype; None keeps each tensor's dtype."""

    dtype: torch.dtype | None = None

    def outputs(self, placement: Placement, dtype: torch.dtype) -> Sequence[Output]:
        return [Output(placement.name, NAMES[self.dtype or dtype], placement.shape)]

    def apply(self, placement: Placement, tensor: Tensor) -> Sequence[Tensor]:
        result, infinite = cast(tensor, self.dtype)
        if infinite:
            raise OverflowError(overflow_message(tensor, result))
        return [result]

    def config(self, config: dict[str, Any]) -> dict[str, Any]:
        if self.dtype is None:
            return config
        older = {key: value for key, value in config.items() if key != "torch_dtype"}
        return older | {"dtype": str(self.dtype).removeprefix("torch.")}


@dataclass(frozen=True)
class Quantise:
    """Quantises matrices: the layers', with the same integers and scales as quantising on load, or any to fp8."""

    # bits, group: those of the matrices; group None for one scale per output
    bits: int
    group: int | None
    floating: bool  # whether they become fp8 instead of integers
    cast: Cast  # cast of all tensors, applied before quantising
    params: frozenset[str]  # the parameters to quantise
    head: str  # name of the output head's module

    def __repr__(self) -> str:  # omits the set, whose order differs between processes: `--resume` compares the repr
        return f"Quantise({self.bits}, {self.group}, {self.floating}, {self.cast})"

    def outputs(self, placement: Placement, dtype: torch.dtype) -> Sequence[Output]:
        if not self._covers(placement):
            return self.cast.outputs(placement, dtype)
        name, (rows, inputs) = placement.name, placement.shape
        if self.floating:
            scale = Output(f"{name}_scale", NAMES[self.cast.dtype or dtype], (rows, 1))
            return [Output(name, NAMES[FP8], placement.shape), scale]
        return [
            Output(f"{name}_packed", NAMES[torch.int32], (rows, inputs * self.bits // 32)),
            Output(f"{name}_scale", NAMES[self.cast.dtype or dtype], (rows, inputs // (self.group or inputs))),
            Output(f"{name}_shape", NAMES[torch.int64], (2,)),
        ]

    def apply(self, placement: Placement, tensor: Tensor) -> Sequence[Tensor]:
        (plain,) = self.cast.apply(placement, tensor)
        if not self._covers(placement):
            return [plain]
        try:
            if self.floating:
                return quantize_fp8(plain)
            return list(compressed_tensors(placement.name, quantize(plain, self.bits, self.group)).values())
        except ValueError as error:
            raise OverflowError(str(error)) from error

    def config(self, config: dict[str, Any]) -> dict[str, Any]:
        embeddings = "embed" in self.params
        ignored = [] if embeddings else [self.head]
        scheme = compressed_tensors_config(self.bits, self.group, ignored, self.floating, embeddings)
        return self.cast.config(config) | {"quantization_config": scheme}

    def _covers(self, placement: Placement) -> bool:
        return any(param in self.params for param in placement.params)


Transform = Cast | Quantise


def quantise_transform(quantization: str, cast: Cast, shape: ModelShape, rules: FamilyRules) -> Quantise:
    """Return the quantising transform for a model in a family's layout.

    Raises OptionError for one that cannot be quantised.
    """
    if quantization not in FORMATS:
        raise OptionError(f"--quantize {quantization}: valid are {', '.join(FORMATS)}")
    if any(rule.layout == "transposed" for rule in rules.tensors):
        reason = f"{rules.model_type} stores its projections transposed, for which there is no published layout"
        raise OptionError(f"--quantize {quantization}: {reason}; use LLM(quantization=...)")
    matrices, head = quantizable(shape), rules.tied_copy.removesuffix(".weight")
    if quantization in FP8_FORMATS:
        ends = {"embed", "lm_head"} & set(shape.parameters()) if quantization == "fp8-all" else set()
        return Quantise(8, None, True, cast, frozenset({*matrices, *ends}), head)
    bits = BITS[quantization]
    try:
        group = quantized_group(shape, quantization)
    except ValueError as error:
        raise OptionError(f"--quantize {quantization}: {error}") from error
    bad = sorted({size[1] for size in matrices.values() if size[1] * bits % 32})
    if bad:
        raise OptionError(f"--quantize {quantization}: {bad[0]} inputs do not fill int32 words")
    return Quantise(bits, group, False, cast, frozenset(matrices), head)
