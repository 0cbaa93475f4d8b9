"""Low-rank updates of a few adapters in fixed GPU memory, whose addresses captured graphs contain."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from treespec.models.layer import TRITON, present
from treespec.models.low_rank import RANK_STEP, LowRank
from treespec.models.model_config import ModelConfig
from treespec_kernels.launch.triton_launch import target_of
from treespec_kernels.linear.experts import group_rows
from treespec_kernels.linear.row_linear import ChosenRows, RowLinearConfig, chosen_linear_triton, default_config
from treespec_kernels.linear.row_linear_config import interpretable

NO_ADAPTER = 1 << 30  # slot of rows without an adapter
MAX_RANK = 64  # default of `max_lora_rank` on a GPU


@dataclass(frozen=True, eq=False)
class FusedUpdates:
    """Low-rank updates of one adapter, a value of `RequestRows.adapter`."""

    layers: Sequence[dict[str, LowRank]]  # by layer and product, from `fused_updates`

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for layer in self.layers for pair in layer.values() for matrix in pair)


class SlotLimits(NamedTuple):
    """Maximum number of adapters in a pass, and their maximum rank."""

    adapters: int
    rank: int

    def shapes(self, config: ModelConfig, i: int) -> dict[str, tuple[tuple[int, int, int], tuple[int, int, int]]]:
        """Return the shapes of A and B of the slots of layer i, by product."""
        parameters, key = config.shape.parameters(), f"layers.{i}.k"
        if key in parameters and not config.shape.layer(i).has_v:
            parameters[f"layers.{i}.v"] = parameters[key]
        shapes = {}
        for product, names in TRITON.items():
            if sizes := [parameters[f"layers.{i}.{name}"] for name in present(names, f"layers.{i}.", parameters)]:
                rank = -(-len(sizes) * self.rank // RANK_STEP) * RANK_STEP
                shapes[product] = (
                    (self.adapters, rank, sizes[0][1]),
                    (self.adapters, sum(size[0] for size in sizes), rank),
                )
        return shapes

    def nbytes(self, config: ModelConfig, dtype: torch.dtype) -> int:
        """Return the memory of all slots."""
        layers = [self.shapes(config, i) for i in range(config.shape.num_layers)]
        sizes = [torch.Size(size).numel() for layer in layers for pair in layer.values() for size in pair]
        return sum(sizes) * dtype.itemsize


class AdapterSlots:
    """Slots of adapters, and their products with the rows of a pass."""

    def __init__(self, config: ModelConfig, limits: SlotLimits, dtype: torch.dtype, device: torch.device):
        self.layers: list[dict[str, LowRank]] = []
        for i in range(config.shape.num_layers):
            shapes = limits.shapes(config, i)
            self.layers.append(
                {
                    name: (torch.zeros(down, dtype=dtype, device=device), torch.zeros(up, dtype=dtype, device=device))
                    for name, (down, up) in shapes.items()
                }
            )
        self._held: dict[int, FusedUpdates] = {}  # by slot, least recently used first
        self._count, self._target, self._dtype = limits.adapters, target_of(device), dtype

    @property
    def nbytes(self) -> int:
        return FusedUpdates(self.layers).nbytes

    def of(self, adapters: Sequence[FusedUpdates | None]) -> list[int]:
        """Return the slot of each adapter, `NO_ADAPTER` for None; at most as many different adapters as slots.

        Adapters without a slot replace the least recently used ones, after the passes launched so far.
        """
        asked = list(dict.fromkeys(adapter for adapter in adapters if adapter is not None))
        assert len(asked) <= self._count, f"{len(asked)} adapters in {self._count} slots"
        slots = {adapter: slot for slot, adapter in self._held.items() if adapter in asked}
        free = [slot for slot in range(self._count) if slot not in self._held]
        free += [slot for slot, adapter in self._held.items() if adapter not in asked]
        for adapter in asked:
            if adapter not in slots:
                slots[adapter] = free.pop(0)
                self._copy(adapter, slots[adapter])
            self._held.pop(slots[adapter], None)
            self._held[slots[adapter]] = adapter
        return [NO_ADAPTER if adapter is None else slots[adapter] for adapter in adapters]

    def _copy(self, adapter: FusedUpdates, slot: int) -> None:
        for slots, updates in zip(self.layers, adapter.layers, strict=True):
            for name, (down, up) in slots.items():
                down[slot].zero_()  # not only B: 0 times an infinity left in A would be NaN
                up[slot].zero_()
                if name in updates:
                    new_down, new_up = updates[name]
                    down[slot, : len(new_down)] = new_down.to(down.device)
                    up[slot, :, : len(new_down)] = new_up.to(up.device)

    def rows(self, slots: Tensor) -> ChosenRows:
        """List the rows of each slot, from the slots of the rows, int32 [num_rows]."""
        down, _ = next(pair for layer in self.layers for pair in layer.values())
        block_m = self._config(down, 1).block_m  # the same for all matrices
        return group_rows(slots[:, None].contiguous(), self._count, block_m)

    def add(self, layer: int, product: str, x: Tensor, rows: ChosenRows, out: Tensor, pdl: bool) -> None:
        """Add the updates of a product of rows x [num_rows, inputs] to `out`, [num_rows, outputs], in place."""
        if (pair := self.layers[layer].get(product)) is None:
            return
        down, up = pair
        split_k = max(1, min(8, down.shape[2] // 512))  # A has few outputs
        inner = chosen_linear_triton(x, down, rows, config=self._config(down, split_k), pdl=pdl)
        chosen_linear_triton(inner, up, rows, config=self._config(up, 1), residual=out, out=out, pdl=pdl)

    def _config(self, weight: Tensor, split_k: int) -> RowLinearConfig:
        config = default_config(weight, self._dtype, self._target, silu_gate=True)
        return interpretable(replace(config, split_k=split_k, larger=()))
