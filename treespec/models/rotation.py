"""Cached rotary embedding tables (RoFormer, arXiv 2104.09864)."""

import numpy as np
import torch
from torch import Tensor

from treespec.models.layer_kinds import Rope


class RotaryEmbedding:
    """Table of cos and sin by position, extended on demand.

    Each row is computed once, so its bits do not depend on the positions requested with it. With longrope, the rows of
    the short factors come first: `ModelConfig.first_rotation` is the row of a request's position 0.
    """

    def __init__(self, rope: Rope, device: torch.device):
        self._rope, self._device = rope, device
        self._table = self._rows(rope.short or rope, 0, rope.short_context)

    def lookup(self, rows: np.ndarray) -> Tensor:
        """Return cos and signed sin in rows of the table, fp32 [num_rows, 2, head_dim]."""
        table = self.table(int(rows.max()) + 1)
        return table[torch.from_numpy(rows).to(table.device)]

    def table(self, num_positions: int) -> Tensor:
        """Return the table of at least positions 0 to `num_positions` - 1, fp32 [>= num_positions, 2, head_dim]."""
        covered = len(self._table) - self._rope.short_context
        if num_positions > covered:
            more = self._rows(self._rope, covered, max(num_positions, 2 * covered, 1024))
            self._table = torch.cat((self._table, more))
        return self._table

    def _rows(self, rope: Rope, first: int, last: int) -> Tensor:
        """Return the rows of the positions `first` to `last` - 1, fp32 [num_positions, 2, head_dim]."""
        scale, positions = rope.scale.to(self._device), torch.arange(first, last, device=self._device)
        angle = positions.float()[:, None] * rope.inv_freq.to(self._device)
        cos, sin = angle.cos() * scale, angle.sin() * scale
        return torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), 1)
