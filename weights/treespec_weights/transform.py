"""What a conversion does to each tensor: the `Transform` protocol, and the cast to another dtype."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from treespec_weights.load import Placement, cast, overflow_message
from treespec_weights.writer import NAMES, Output


class Transform(Protocol):
    """What becomes of each tensor of the result."""

    def outputs(self, placement: Placement, dtype: torch.dtype) -> Sequence[Output]:
        """What one tensor, of a stored dtype, becomes."""

    def apply(self, placement: Placement, tensor: Tensor) -> Sequence[Tensor]:
        """That, in the same order. Raises OverflowError with the reason where a value does not fit."""

    def config(self, config: dict[str, Any]) -> dict[str, Any]:
        """The result's config.json."""


@dataclass(frozen=True)
class Cast:
    """Another dtype; None keeps each tensor's own."""

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
