"""Row-by-row attention with arbitrary position masks, soft caps and sinks.

A row's keys are gathered in position order up to the end of its tile. Shapes and summation order therefore depend only
on the row's position, and tree nodes are bit-identical to plain decoding by construction. Used for layers that
`tree_attention` does not support (sinks, masks that are not windows); takes about seven torch calls per row.
"""

import numpy as np
import torch
from torch import Tensor

from treespec.adapter.route import MaskRule, visible_keys
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows


class RowPlan:
    """Cache slots of each row's path."""

    def __init__(self, requests: list[RequestRows], device: torch.device):
        self.positions: list[int] = []
        self.slots: list[tuple[Tensor, Tensor]] = []  # pages and offsets by position, up to the end of the tile
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
        """Return by row the masked positions: bool [num positions of its tiles]. Computed once per pass and rule."""
        if mask not in self._seen:
            rows = []
            for position, (pages, _) in zip(self.positions, self.slots, strict=True):
                keys = self._keys[: len(pages)]
                rows.append(~(visible_keys(mask, self._keys[position : position + 1], keys)[0] & (keys <= position)))
            self._seen[mask] = rows
        return self._seen[mask]


def attend_rows(
    q: Tensor,  # [num_rows, num_heads, head_dim]; rows beyond the plan's are skipped
    # Caches of one layer, [num_pages, num_kv_heads, PAGE_SIZE, head_dim]; slots that no row attends to may hold any
    # finite value
    k_cache: Tensor,
    v_cache: Tensor,
    plan: RowPlan,  # plan of the pass
    mask: MaskRule,  # visibility within a row's path
    scale: float,  # factor of the scores
    softcap: float | None = None,  # c of s -> c tanh(s / c)
    sinks: Tensor | None = None,  # [num_heads], attention sink scores
) -> Tensor:
    """Attend from each row of a pass to its path: float32 [num_rows, num_heads, head_dim]; 0 in skipped rows."""
    rows, heads, head_dim = q.shape
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    out = torch.zeros(rows, heads, head_dim, device=q.device, dtype=torch.float32)
    queries = (q.float() * scale).view(rows, kv_heads, group, head_dim)
    sink_scores = None if sinks is None else sinks.float().view(kv_heads, group, 1)
    for row, ((pages, offsets), hidden) in enumerate(zip(plan.slots, plan.hidden(mask), strict=True)):
        keys = k_cache[pages, :, offsets].float().permute(1, 2, 0)  # [num_kv_heads, head_dim, positions]
        values = v_cache[pages, :, offsets].float().transpose(0, 1)
        scores = torch.bmm(queries[row], keys)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill_(hidden, -torch.inf)
        if sink_scores is not None:
            scores = torch.cat((scores, sink_scores), -1)
        weights = torch.softmax(scores, -1)[..., : len(hidden)]
        out[row] = torch.bmm(weights, values).view(heads, head_dim)
    return out
