"""Cached rotary embedding tables (RoFormer, arXiv 2104.09864)."""

import numpy as np
import torch
from torch import Tensor


class RotaryEmbedding:
    """Table of cos and sin by position, extended on demand.

    Each row is computed once, so its bits do not depend on the positions requested with it.

    Args:
        inv_freq, scale: those of a `Rope`, fp32 [head_dim / 2].
    """

    def __init__(self, inv_freq: Tensor, scale: Tensor):
        self.inv_freq, self.scale = inv_freq, scale
        self._table = torch.empty(0, 2, 2 * len(inv_freq), device=inv_freq.device, dtype=torch.float32)

    def at(self, positions: np.ndarray) -> Tensor:
        """Return cos and signed sin, fp32 [num_rows, 2, head_dim]."""
        table = self.table(int(positions.max()) + 1)
        return table[torch.from_numpy(positions).to(table.device)]

    def table(self, num_positions: int) -> Tensor:
        """Return the table of at least positions 0 to `num_positions` - 1, fp32 [>= num_positions, 2, head_dim]."""
        known = len(self._table)
        if num_positions > known:
            more = torch.arange(known, max(num_positions, 2 * known, 1024), device=self.inv_freq.device)
            angle = more.float()[:, None] * self.inv_freq
            cos, sin = angle.cos() * self.scale, angle.sin() * self.scale
            rows = torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), 1)
            self._table = torch.cat((self._table, rows))
        return self._table
