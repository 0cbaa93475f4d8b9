"""The KV cache: pages shared by the target and its drafts, one pool of K/V per model.

A request holds the same pages in every pool, so all models of an engine share one slot table: logical slot j of a
request is position j while committed, and scratch for the token tree behind that. Page 0 belongs to nobody: padding
rows write there.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from treespec_kernels.kv_commit import kv_commit_cpu, kv_commit_triton
from treespec_kernels.tree_batch import PAGE_SIZE
from treespec_weights.rules import ModelShape


def pages_for(num_slots: int) -> int:
    """Pages that hold `num_slots` slots."""
    return -(-num_slots // PAGE_SIZE)


class KVCache:
    """Pages, who holds them, and the pools.

    Args:
        shapes: the models, target first; one pool each.
        num_pages: pages to hand out; one more is kept as the null page.
        dtype, device: of the pools.
    """

    def __init__(self, shapes: Sequence[ModelShape], num_pages: int, dtype: torch.dtype, device: torch.device | str):
        self.num_pages = num_pages
        self.pools = [self.allocate(shape, num_pages + 1, dtype, device) for shape in shapes]
        self._free = np.ones(num_pages + 1, dtype=bool)
        self._free[0] = False
        self._held: dict[str, np.ndarray] = {}

    @staticmethod
    def allocate(shape: ModelShape, num_pages: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """[num_layers, 2, num_pages, num_kv_heads, PAGE_SIZE, head_dim] of zeros: stale slots stay finite."""
        size = (shape.num_layers, 2, num_pages, shape.num_kv_heads, PAGE_SIZE, shape.head_dim)
        return torch.zeros(size, dtype=dtype, device=device)

    @staticmethod
    def bytes_per_page(shapes: Sequence[ModelShape], dtype: torch.dtype) -> int:
        """Bytes that one page takes in all pools."""
        per_slot = sum(2 * shape.num_layers * shape.num_kv_heads * shape.head_dim for shape in shapes)
        return per_slot * PAGE_SIZE * dtype.itemsize

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)

    @property
    def num_free(self) -> int:
        return int(self._free.sum())

    def can_reserve(self, num_slots: int) -> bool:
        return pages_for(num_slots) <= self.num_free

    def reserve(self, request_id: str, num_slots: int) -> np.ndarray:
        """Give a request its pages, int64 [pages_for(num_slots)], in line where a run of that length is free."""
        count = pages_for(num_slots)
        free = np.flatnonzero(self._free)
        assert request_id not in self._held, f"{request_id} holds pages already"
        assert count <= len(free), "admission checks can_reserve first"
        pages = free[:count]
        runs = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1)
        if len(runs):
            pages = free[runs[0] : runs[0] + count]
        self._free[pages] = False
        self._held[request_id] = pages
        return pages

    def release(self, request_id: str, scrub: bool = False) -> None:
        """Take a request's pages back. `scrub` zeroes them: 0 * NaN from a stale slot would poison the next holder."""
        pages = self._held.pop(request_id)
        self._free[pages] = True
        if scrub:
            self.scrub(pages)

    @torch.inference_mode()
    def scrub(self, pages: np.ndarray) -> None:
        """Zero pages in every pool."""
        for pool in self.pools:
            pool[:, :, torch.from_numpy(pages).to(pool.device)] = 0

    def scrub_slots(self, pool: int, pages: np.ndarray, first: int, count: int) -> None:
        """Zero `count` logical slots from `first` on in one pool."""
        logical = np.arange(first, first + count)
        page, offset = torch.from_numpy(pages[logical // PAGE_SIZE]), torch.from_numpy(logical % PAGE_SIZE)
        device = self.pools[pool].device
        self.pools[pool][:, :, page.to(device), :, offset.to(device)] = 0

    def commit(
        self, pool: int, pages: Sequence[np.ndarray], context_lens: Sequence[int], paths: Sequence[np.ndarray]
    ) -> None:
        """Compact accepted slots in place, in all layers of one pool, for all requests at once.

        Args:
            pool: which model's.
            pages, context_lens, paths: by request; path[j] is the tree slot to move to slot context_len + j, strictly
                increasing. A path that is in place already (0, 1, 2 ...) costs nothing.
        """
        moving = [i for i, path in enumerate(paths) if len(path) and path[-1] != len(path) - 1]
        if not moving:
            return
        device = self.pools[pool].device
        if device.type == "cpu":
            own, bases = [pages[i] for i in moving], [context_lens[i] for i in moving]
            kv_commit_cpu(self.pools[pool], own, bases, [paths[i] for i in moving])
            return

        def table(rows: list[np.ndarray]) -> Tensor:
            width = max(len(row) for row in rows)
            padded = np.zeros((len(rows), width), dtype=np.int32)
            for i, row in enumerate(rows):
                padded[i, : len(row)] = row
            return torch.from_numpy(padded).to(device)

        kv_commit_triton(
            self.pools[pool],
            table([pages[i] for i in moving]),
            torch.tensor([context_lens[i] for i in moving], dtype=torch.int32, device=device),
            table([paths[i] for i in moving]),
            torch.tensor([len(paths[i]) for i in moving], dtype=torch.int32, device=device),
        )

    def check_integrity(self) -> None:
        """Assert that every page is free or held once, and the null page neither."""
        count = np.zeros(self.num_pages + 1, dtype=int)
        for pages in self._held.values():
            np.add.at(count, pages, 1)
        assert count.max(initial=0) <= 1, f"pages held twice: {np.flatnonzero(count > 1).tolist()}"
        lost = np.flatnonzero(count + self._free != 1)[1:]
        assert count[0] == 0 and not self._free[0], "the null page was handed out"
        assert not len(lost), f"pages lost or both free and held: {lost.tolist()}"
