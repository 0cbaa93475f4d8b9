"""Transform a conversion's tensors: cast to another dtype, and quantise into compressed-tensors' format."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
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
FORMATS = (*BITS, *FP8_FORMATS)  # values of `--quantize`


@dataclass(frozen=True)
class Transform:
    """Casts tensors, then quantises matrices: the layers', with the same result as quantising on load, or any to fp8.

    Two conversions whose transforms have the same repr give the same files.
    """

    dtype: torch.dtype | None = None  # None keeps each tensor's dtype, as do tensors of a rule with `single`
    params: frozenset[str] = field(default=frozenset(), repr=False)  # the parameters to quantise
    bits: int = 8  # bits of quantised matrices; a `group` of None means one scale per output
    group: int | None = None
    floating: bool = False  # whether matrices become fp8 instead of integers
    head: str = field(default="", repr=False)  # name of the output head's module

    def outputs(self, placement: Placement, stored: torch.dtype) -> Sequence[Output]:
        """Return the outputs of one tensor of a stored dtype."""
        name, shape, dtype = placement.name, placement.shape, NAMES[self._dtype(placement) or stored]
        if not self._quantises(placement):
            return [Output(name, dtype, shape)]
        rows, inputs = shape
        if self.floating:
            return [Output(name, NAMES[FP8], shape), Output(f"{name}_scale", dtype, (rows, 1))]
        return [
            Output(f"{name}_packed", NAMES[torch.int32], (rows, inputs * self.bits // 32)),
            Output(f"{name}_scale", dtype, (rows, inputs // (self.group or inputs))),
            Output(f"{name}_shape", NAMES[torch.int64], (2,)),
        ]

    def apply(self, placement: Placement, tensor: Tensor) -> Sequence[Tensor]:
        """Return the tensors of `outputs`. Raises OverflowError if a value does not fit the dtype."""
        result, infinite = cast(tensor, self._dtype(placement))
        if infinite:
            raise OverflowError(overflow_message(tensor, result))
        if not self._quantises(placement):
            return [result]
        try:
            if self.floating:
                return quantize_fp8(result)
            return list(compressed_tensors(placement.name, quantize(result, self.bits, self.group)).values())
        except ValueError as error:
            raise OverflowError(str(error)) from error

    def config(self, config: dict[str, Any], unquantised: str | None = None) -> dict[str, Any]:
        """Return the result's config.json; `unquantised` is a name prefix of tensors that are not quantised."""
        if self.dtype is not None:
            older = {key: value for key, value in config.items() if key != "torch_dtype"}
            config = older | {"dtype": str(self.dtype).removeprefix("torch.")}
        if not self.params:
            return config
        embeddings = "embed" in self.params
        ignored = [] if embeddings else [self.head]
        if unquantised is not None:
            ignored.append(f"re:^{re.escape(unquantised)}")
        scheme = compressed_tensors_config(self.bits, self.group, ignored, self.floating, embeddings)
        return config | {"quantization_config": scheme}

    def _dtype(self, placement: Placement) -> torch.dtype | None:
        return None if placement.rule.single else self.dtype

    def _quantises(self, placement: Placement) -> bool:
        return any(param in self.params for param in placement.params)


def quantise_transform(
    quantization: str, dtype: torch.dtype | None, shape: ModelShape, rules: FamilyRules
) -> Transform:
    """Return the transform for a model in a family's layout. Raises OptionError if it cannot be quantised."""
    if quantization not in FORMATS:
        raise OptionError(f"--quantize {quantization}: valid are {', '.join(FORMATS)}")
    if any(rule.layout.endswith("transposed") for rule in rules.tensors):
        reason = f"{rules.model_type} stores its projections transposed, for which there is no published layout"
        raise OptionError(f"--quantize {quantization}: {reason}; use LLM(quantization=...)")
    matrices, head = quantizable(shape), rules.tied_copy.removesuffix(".weight")
    if quantization in FP8_FORMATS:
        ends = {"embed", "lm_head"} & set(shape.parameters()) if quantization == "fp8-all" else set()
        return Transform(dtype, frozenset({*matrices, *ends}), floating=True, head=head)
    bits = BITS[quantization]
    try:
        group = quantized_group(shape, quantization)
    except ValueError as error:
        raise OptionError(f"--quantize {quantization}: {error}") from error
    bad = sorted({size[1] for size in matrices.values() if size[1] * bits % 32})
    if bad:
        raise OptionError(f"--quantize {quantization}: {bad[0]} inputs do not fill int32 words")
    return Transform(dtype, frozenset(matrices), bits, group, head=head)
