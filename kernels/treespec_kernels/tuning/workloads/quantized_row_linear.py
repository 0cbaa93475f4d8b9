"""Workloads of the linear layers of a quantised model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from treespec_kernels.launch.triton_launch import target_of
from treespec_kernels.linear.quantized import QuantizedWeight
from treespec_kernels.linear.quantized_row_linear import quantized_candidates

from .base import Setting, Workload
from .row_linear import LinearInputs, RowLinearWorkload, layers_of


class QuantizedRowLinearWorkload(RowLinearWorkload):
    """One quantised layer of `rows` rows per group, with the kernel that adds its splits.

    The quantisation format is that of the setting's shape. `group` in the key is a number of inputs, even if all inputs
    share one scale.
    """

    op = "quantized_row_linear"

    def __init__(
        self,
        setting: Setting,
        out_features: int,
        in_features: int,
        rows: int,
        silu_gate: bool = False,
        weight: float = 1.0,
    ):
        super().__init__(setting, out_features, in_features, rows, silu_gate, weight)
        form = setting.shape.quantized
        assert form is not None
        self.bits, self.group, self.has_zero = form._replace(group=form.group_of(in_features))
        del self.key["silu_gate"]  # only affects the kernel that adds the splits
        self.key |= {"bits": self.bits, "group": self.group, "zero": int(self.has_zero)}
        size, itemsize = out_features * in_features, setting.dtype.itemsize
        weight_bytes = size * self.bits // 8 + size // self.group * (itemsize + self.has_zero)
        self.bytes += setting.groups * (weight_bytes - size * itemsize)

    def shipped(self) -> list[Any]:
        dtype, out_features, in_features, _ = self.sizes
        target = target_of(self.device)
        return quantized_candidates(dtype, out_features, in_features, self.group, self.bits, target)

    def make(self, generator: torch.Generator) -> LinearInputs:
        """Create uniform integers, and scales that keep the results near 1."""
        _, out_features, in_features, _ = self.sizes
        stack = self.setting.stack

        def integers(low: int, high: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, (*stack, *shape), generator=generator, device=self.device, dtype=dtype)

        x = self.random(generator, *stack, self.rows, in_features)
        kinds = (-128, 128, torch.int8) if self.bits == 8 else (0, 256, torch.uint8)
        values = integers(*kinds, out_features, in_features * self.bits // 8)
        grouped = out_features, in_features // self.group
        spread = torch.rand(*stack, *grouped, generator=generator, device=self.device, dtype=torch.float32) + 0.5
        scale = (spread * in_features**-0.5 / (1 << (self.bits - 2))).to(self.dtype)
        zero = integers(-4, 5, torch.int8, *grouped) if self.has_zero else None
        return LinearInputs(x, QuantizedWeight(values, scale, zero))

    def baselines(self) -> dict[str, Callable[[int], Any]]:
        """Return no baselines, because torch has no product of these formats."""
        return {}


def workloads(setting: Setting) -> list[Workload]:
    return [] if setting.shape.quantized is None else layers_of(setting, QuantizedRowLinearWorkload)
