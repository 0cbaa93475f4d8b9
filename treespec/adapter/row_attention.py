"""Attention of every row alone: with any mask by position, soft-capped scores, and sinks.

A row's keys are gathered in the order of their positions, up to the end of the tile that holds its own, so all shapes
and sums depend on the row's position alone: a tree node has the bits of plain decoding by construction. It is for
what `tree_attention` does not know, sinks and masks that are no window, and slower: a row takes about seven calls.
"""

import numpy as np
import torch
from torch import Tensor

from treespec.adapter.route import MaskRule, visible_keys
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows


class RowPlan:
    """Where each row of a pass finds its path.

    Args:
        requests: the rows.
        device: of the cache.
    """

    def __init__(self, requests: list[RequestRows], device: torch.device):
        self.positions: list[int] = []
        self.slots: list[tuple[Tensor, Tensor]] = []  # page and offset by position, up to the end of a tile
        self._seen: dict[MaskRule, list[Tensor]] = {}
        for rows in requests:
            committed, ancestors = rows.context_len, rows.ancestors
            for row, position in enumerate(rows.positions.tolist()):
                logical = np.zeros((position // PAGE_SIZE + 1) * PAGE_SIZE, dtype=np.int64)
                logical[:committed] = np.arange(committed)
                logical[committed : position + 1] = committed + ancestors[row, : position + 1 - committed]
                pages, offsets = rows.pages[logical // PAGE_SIZE], logical % PAGE_SIZE
                self.positions.append(position)
                self.slots.append((torch.from_numpy(pages).to(device), torch.from_numpy(offsets).to(device)))
        self._keys = torch.arange(max(self.positions) + PAGE_SIZE, device=device)

    def hidden(self, mask: MaskRule) -> list[Tensor]:
        """By row: bool [num positions of its tiles], which of them it does not see. Computed once a pass."""
        if mask not in self._seen:
            rows = []
            for position, (pages, _) in zip(self.positions, self.slots, strict=True):
                keys = self._keys[: len(pages)]
                rows.append(~(visible_keys(mask, self._keys[position : position + 1], keys)[0] & (keys <= position)))
            self._seen[mask] = rows
        return self._seen[mask]


def attend_rows(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: RowPlan,
    mask: MaskRule,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the rows of a pass to their own paths, in float32.

    Args:
        q: [num_rows, num_heads, head_dim]; rows beyond the plan's are passed over.
        k_cache, v_cache: [num_pages, num_kv_heads, PAGE_SIZE, head_dim] of one layer. Slots that no row sees may hold
            any finite value.
        plan: of the pass.
        mask: what a row sees of its own path.
        scale: on the scores.
        softcap: c, where scores s become c tanh(s / c).
        sinks: [num_heads], scores of a key without a value.

    Returns:
        float32 [num_rows, num_heads, head_dim]; 0 in the rows that are passed over.
    """
    rows, heads, head_dim = q.shape
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    out = torch.zeros(rows, heads, head_dim, device=q.device, dtype=torch.float32)
    queries = (q.float() * scale).view(rows, kv_heads, group, head_dim)
    extra = None if sinks is None else sinks.float().view(kv_heads, group, 1)
    for row, ((pages, offsets), hidden) in enumerate(zip(plan.slots, plan.hidden(mask), strict=True)):
        keys = k_cache[pages, :, offsets].float().permute(1, 2, 0)  # [num_kv_heads, head_dim, positions]
        values = v_cache[pages, :, offsets].float().transpose(0, 1)
        scores = torch.bmm(queries[row], keys)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill_(hidden, -torch.inf)
        if extra is not None:
            scores = torch.cat((scores, extra), -1)
        weights = torch.softmax(scores, -1)[..., : len(hidden)]
        out[row] = torch.bmm(weights, values).view(heads, head_dim)
    return out
