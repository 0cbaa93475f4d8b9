"""Paged KV cache: the target and its drafts share page tables; each model has its own K/V pool.

A request holds the same pages in every pool, so all models share one slot table: logical slot j of a request is
position j for committed tokens, followed by scratch slots for the token tree. Page 0 is the null page, to which padding
rows write.

Samples of one prompt share its full pages, and so do requests with a common prefix (prefix_cache.py). The target never
writes to a page with several holders; a draft that catches up may, with the values already present.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from treespec.cache.prefix_cache import PrefixCache
from treespec.cache.state_pool import StatePool
from treespec.utils.memory import lazy_zeros
from treespec_kernels.attention.kv_commit import kv_commit_cpu, kv_commit_triton
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows
from treespec_kernels.recurrent.request_state import RecurrentState
from treespec_weights.rules import ModelShape

NO_PAGES = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class FeatureShape:
    """Shape of the pool of features: hidden states of the target that draft heads read.

    A token's features use its slot and the layout of K and V: they are compacted, shared and zeroed like K and V.
    """

    layers: tuple[int, ...]  # target layers, as in `Decoder.forward_with_states`
    hidden_size: int  # hidden size of the target, even

    @property
    def kv_layers(self) -> int:
        return len(self.layers)

    @property
    def num_kv_heads(self) -> int:
        return self.hidden_size // (2 * self.head_dim)

    @property
    def head_dim(self) -> int:
        return next(size for size in (128, 64, 32, 16, 8, 4, 2, 1) if self.hidden_size % (2 * size) == 0)


def store_features(pool: Tensor, page: Tensor, offset: Tensor, states: Tensor) -> None:
    """Write hidden states [num_rows, number of layers, hidden_size] to a pool's slots, int64 [num_rows]."""
    halves = states.view(len(states), pool.shape[0], 2, pool.shape[3], pool.shape[5])
    pool[:, :, page, :, offset] = halves.to(pool.dtype)


def load_features(pool: Tensor, page: Tensor, offset: Tensor) -> Tensor:
    """Return the hidden states written to these slots, [num_rows, number of layers, hidden_size]."""
    halves = pool[:, :, page, :, offset]  # indexed dimensions come first
    return halves.reshape(len(page), pool.shape[0], 2 * pool.shape[3] * pool.shape[5])


def pages_for(num_slots: int) -> int:
    return -(-num_slots // PAGE_SIZE)


class KVCache:
    """Page pools with reference counts."""

    states: StatePool | None = None  # states of the target's recurrent layers; None without such layers
    prefixes: PrefixCache | None = None  # contents of pages that later requests may share; None without prefix caching

    def __init__(
        self,
        shapes: Sequence[ModelShape],  # shapes of the models, target first; one pool each
        num_pages: int,  # allocatable pages, excluding the null page
        dtype: torch.dtype,
        device: torch.device | str,
        # Sizes of groups of consecutive models of equal shape that share one tensor, so that they can run as one model;
        # None: separate tensors
        stacks: Sequence[int] | None = None,
        features: FeatureShape | None = None,  # shape of the target's hidden states; None without draft heads
    ):
        self.num_pages, self.features = num_pages, features
        # By model, [num_layers, 2, num_pages + 1, num_kv_heads, PAGE_SIZE, head_dim]; the pool of features is last.
        self.pools: list[Tensor] = []
        self.stacked: list[Tensor] = []  # by stack, the pools of its models concatenated along their pages
        for count in stacks if stacks is not None else [1] * len(shapes):
            self.stacked.append(self.allocate(shapes[len(self.pools)], count * (num_pages + 1), dtype, device))
            self.pools += self.stacked[-1].chunk(count, dim=2)
        assert len(self.pools) == len(shapes), "stacks do not add up"
        if features is not None:
            self.pools.append(self.allocate(features, num_pages + 1, dtype, device))
        self._of_target = [0] if features is None else [0, len(shapes)]
        self._held: dict[str, np.ndarray] = {}
        self._holders = np.zeros(num_pages + 1, dtype=np.int64)  # reference count of each page
        self._dirty = np.zeros(num_pages + 1, dtype=bool)  # pages to zero when their last holder releases them

    @staticmethod
    def allocate(
        shape: ModelShape | FeatureShape, num_pages: int, dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """Allocate zeros [kv_layers, 2, num_pages, num_kv_heads, PAGE_SIZE, head_dim]: unwritten slots stay finite. On
        a CPU, memory is committed on first write."""
        size = (shape.kv_layers, 2, num_pages, shape.num_kv_heads, PAGE_SIZE, shape.head_dim)
        return lazy_zeros(size, dtype, torch.device(device))

    @staticmethod
    def bytes_per_page(shapes: Sequence[ModelShape | FeatureShape], dtype: torch.dtype) -> int:
        per_slot = sum(2 * shape.kv_layers * shape.num_kv_heads * shape.head_dim for shape in shapes)
        return max(per_slot * PAGE_SIZE * dtype.itemsize, 1)  # models without attention have empty pages

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)

    @property
    def num_free(self) -> int:
        return self.num_pages - int(np.count_nonzero(self._holders))

    def num_holders(self, pages: np.ndarray) -> np.ndarray:
        """Reference count of each page, int64 like `pages`. Pages with more than one holder must not be written."""
        return self._holders[pages]

    def can_reserve(self, num_slots: int, shared: np.ndarray = NO_PAGES) -> bool:
        """Return whether enough pages are free for `num_slots` slots, in addition to the `shared` pages."""
        return pages_for(num_slots) - int(np.count_nonzero(self._holders[shared])) <= self.num_free

    def reserve(self, request_id: str, num_slots: int, shared: np.ndarray = NO_PAGES) -> np.ndarray:
        """Allocate a holder's pages, int64 [pages_for(num_slots)]; contiguous if such a run is free.

        `shared` pages, from another holder or from `prefixes`, are used read-only as the first pages.
        """
        assert request_id not in self._held, f"{request_id} already holds pages"
        assert self.prefixes is not None or self._holders[shared].all(), "a shared page has no holder"
        assert self.can_reserve(num_slots, shared), "admission checks can_reserve first"
        assert len(shared) <= pages_for(num_slots), "more pages are shared than needed"
        self._holders[shared] += 1
        self._held[request_id] = shared
        if self.prefixes is not None:
            self.prefixes.touch(shared)
        return self.grow(request_id, num_slots)

    def reserve_state(self, request_id: str, length: int = 0) -> RecurrentState | None:
        """Reserve a zero recurrent state at position `length`; None if the target has no recurrent layers."""
        if self.states is None:
            return None
        state = self.states.reserve(request_id)
        state.length = length
        return state

    def grow(self, request_id: str, num_slots: int) -> np.ndarray:
        """Allocate the pages that a holder lacks for `num_slots` slots; return all of its pages."""
        held = self._held[request_id]
        count, free = pages_for(num_slots) - len(held), 1 + np.flatnonzero(self._holders[1:] == 0)
        assert 0 <= count <= len(free), "growth checks can_reserve first"
        if self.prefixes is not None:
            free = np.sort(self.prefixes.oldest_first(free)[: max(count, self.prefixes.num_empty(free))])
        allocated = free[:count]
        runs = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1) if count else NO_PAGES
        if len(runs):
            allocated = free[runs[0] : runs[0] + count]
        if self.prefixes is not None:
            self.prefixes.forget(allocated)
        self._holders[allocated] += 1
        pages = self._held[request_id] = np.concatenate((held, allocated))
        return pages

    def release(self, request_id: str, scrub: bool = False) -> None:
        """Free a request's pages. `scrub` zeroes them: 0 * NaN from a stale slot would reach the next holder.

        Pages with other holders are zeroed when the last holder releases them.
        """
        if self.states is not None:
            self.states.release(request_id)
        pages = self._held.pop(request_id)
        self._holders[pages] -= 1
        self._dirty[pages] |= scrub
        if scrub and self.prefixes is not None:
            self.prefixes.forget(pages)
        stale = pages[(self._holders[pages] == 0) & self._dirty[pages]]
        if len(stale):
            self.scrub(stale)

    def transfer(self, request_id: str, new_holder: str, num_slots: int, scrub: bool = False) -> np.ndarray:
        """Release a request; transfer the pages of its first `num_slots` slots to `new_holder` and return them.

        Zeroes the rest of the last page, which must have no other holder.
        """
        pages = self.reserve(new_holder, num_slots, self._held[request_id][: pages_for(num_slots)])
        self.release(request_id, scrub)
        if num_slots % PAGE_SIZE:
            if self.prefixes is not None:
                self.prefixes.forget(pages[-1:])
            for pool in range(len(self.pools)):
                self.scrub_slots(pool, pages, num_slots, PAGE_SIZE - num_slots % PAGE_SIZE)
        return pages

    @torch.inference_mode()
    def copy_slots(self, source: int, page: int, count: int) -> None:
        """Copy the first `count` slots of a page to another page, in every pool."""
        assert self._holders[page] == 1, "a shared page is never written"
        self._dirty[page] |= self._dirty[source]
        for pool in self.pools:
            pool[:, :, page, :, :count] = pool[:, :, source, :, :count]

    @torch.inference_mode()
    def scrub(self, pages: np.ndarray) -> None:
        if self.prefixes is not None:
            self.prefixes.forget(pages)
        self._dirty[pages] = False
        for pool in self.pools:
            pool[:, :, torch.from_numpy(pages).to(pool.device)] = 0

    @torch.inference_mode()
    def scrub_slots(self, pool: int, pages: np.ndarray, first: int, count: int) -> None:
        """Zero `count` logical slots of one pool, starting at `first`."""
        scrubbed = pages[first // PAGE_SIZE : pages_for(first + count)]
        assert (self._holders[scrubbed] == 1).all(), "a shared page is never written"
        page, offset = self._places(pages, first, first + count)
        self.pools[pool][:, :, page, :, offset] = 0

    def _places(self, pages: np.ndarray, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return the pages and offsets of the logical slots first .. last - 1, int64 on the pools' device."""
        slots, device = np.arange(first, last), self.pools[0].device
        return torch.from_numpy(pages[slots // PAGE_SIZE]).to(device), torch.from_numpy(slots % PAGE_SIZE).to(device)

    def write_features(self, rows: Sequence[RequestRows], states: Tensor) -> None:
        """Write hidden states [num_rows, number of layers, hidden_size] to the slots of the rows of a target pass."""
        slots = zip(*(request_rows.slots for request_rows in rows), strict=True)
        page, offset = (torch.from_numpy(np.concatenate(column)).to(self.pools[-1].device) for column in slots)
        store_features(self.pools[-1], page, offset, states)

    def read_features(self, pages: np.ndarray, first: int, last: int) -> Tensor:
        """Return features of a request's positions first .. last - 1: [positions, number of layers, hidden_size]."""
        return load_features(self.pools[-1], *self._places(pages, first, last))

    def commit_target(
        self, pages: Sequence[np.ndarray], context_lens: Sequence[int], paths: Sequence[np.ndarray]
    ) -> None:
        """Compact the accepted slots of the target's K/V and features; arguments as in `commit`."""
        for pool in self._of_target:
            self.commit(pool, pages, context_lens, paths)

    @property
    def target_pools(self) -> list[Tensor]:
        """The pools of the target's K/V and features."""
        return [self.pools[pool] for pool in self._of_target]

    def commit(
        self, pool: int, pages: Sequence[np.ndarray], context_lens: Sequence[int], paths: Sequence[np.ndarray]
    ) -> None:
        """Compact accepted slots in place, in all layers of one model's pool, for all requests.

        The tree slot path[j] moves to slot context_len + j; paths are strictly increasing. Paths already in place
        (0, 1, 2 ...) cost nothing.
        """
        moving = [i for i, path in enumerate(paths) if len(path) and path[-1] != len(path) - 1]
        if not moving:
            return
        device = self.pools[pool].device
        if device.type == "cpu":
            moved_pages, bases = [pages[i] for i in moving], [context_lens[i] for i in moving]
            kv_commit_cpu(self.pools[pool], moved_pages, bases, [paths[i] for i in moving])
            return

        def table(rows: list[np.ndarray]) -> Tensor:
            return pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True).to(device, torch.int32)

        kv_commit_triton(
            self.pools[pool],
            table([pages[i] for i in moving]),
            torch.tensor([context_lens[i] for i in moving], dtype=torch.int32, device=device),
            table([paths[i] for i in moving]),
            torch.tensor([len(paths[i]) for i in moving], dtype=torch.int32, device=device),
        )

    def check_integrity(self) -> None:
        """Assert that reference counts match the holders, the null page is unused and free pages are clean."""
        count = np.zeros(self.num_pages + 1, dtype=np.int64)
        for holder, pages in self._held.items():
            assert len(np.unique(pages)) == len(pages), f"{holder} holds a page twice: {pages.tolist()}"
            count[pages] += 1
        assert count[0] == 0 == self._holders[0], "the null page was allocated"
        uncounted, lost = np.flatnonzero(count > self._holders), np.flatnonzero(count < self._holders)
        assert not len(uncounted), f"pages with more holders than counted: {uncounted.tolist()}"
        assert not len(lost), f"lost pages, counted without a holder: {lost.tolist()}"
        stale = np.flatnonzero(self._dirty & (count == 0))
        assert not len(stale), f"free pages that were not scrubbed: {stale.tolist()}"
