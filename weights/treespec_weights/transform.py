"""Transforms of a conversion's tensors: the `Transform` protocol, and the cast to another dtype."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from treespec_weights.load import Placement, cast, overflow_message
from treespec_weights.writer import NAMES, Output


class Transform(Protocol):
    """Transforms each tensor of a conversion into one or several output tensors."""

    def outputs(self, placement: Placement, dtype: torch.dtype) -> Sequence[Output]:
        """The outputs of one tensor of the stored dtype."""

    def apply(self, placement: Placement, tensor: Tensor) -> Sequence[Tensor]:
        """The output tensors, in the order of `outputs`. Raises OverflowError if a value does not fit the dtype."""

    def config(self, config: dict[str, Any]) -> dict[str, Any]:
        """The result's config.json."""


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
