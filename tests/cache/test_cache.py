"""The KV cache against a list-of-lists model: pages, commits in place, leaks, scrubbing."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from tests.helpers.models import quick
from treespec.cache.kv_cache import KVCache, pages_for
from treespec.cache.prefix_cache import PrefixCache, page_keys
from treespec_kernels.attention.tree_batch import PAGE_SIZE
from treespec_weights import ModelShape

SCRATCH = 48


def shape(layers: int, kv_heads: int, head_dim: int) -> ModelShape:
    return ModelShape(
        num_layers=layers,
        hidden_size=8,
        intermediate_size=8,
        num_heads=kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=8,
    )


SHAPES = [shape(2, 2, 2), shape(1, 1, 4)]


def new_cache(num_pages: int = 24, dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(SHAPES, num_pages, dtype, "cpu")


@dataclass
class Modelled:
    """A request as lists: per pool, the stamps that stand in its committed slots."""

    request_id: str
    pages: np.ndarray
    capacity: int
    lens: list[int] = field(default_factory=lambda: [0, 0])
    slots: list[list[int]] = field(default_factory=lambda: [[], []])


class Model:
    """Drives a cache and the lists beside it. Every written slot gets a stamp of its own."""

    def __init__(self, cache: KVCache, seed: int):
        self.cache, self.rng = cache, np.random.default_rng(seed)
        self.requests: list[Modelled] = []
        self.stamp = self.count = self.scattered = 0

    def admit(self) -> None:
        self.count += 1
        capacity = int(self.rng.integers(1, 6 * PAGE_SIZE))
        if not self.cache.can_reserve(capacity + SCRATCH):
            assert pages_for(capacity + SCRATCH) > self.cache.num_free
            return
        name = f"r{self.count}"
        pages = self.cache.reserve(name, capacity + SCRATCH)
        assert len(pages) == pages_for(capacity + SCRATCH) and len(set(pages.tolist())) == len(pages)
        self.scattered += bool((np.diff(pages) != 1).any())
        self.requests.append(Modelled(name, pages, capacity))

    def leave(self) -> None:
        gone = self.requests.pop(int(self.rng.integers(len(self.requests))))
        before = self.cache.num_free
        self.cache.release(gone.request_id, scrub=bool(self.rng.integers(2)))
        assert self.cache.num_free == before + len(gone.pages)

    def write(self, request: Modelled, pool: int, first: int, count: int) -> list[int]:
        """Stamp `count` logical slots from `first` on; returns the stamps."""
        stamps = list(range(self.stamp, self.stamp + count))
        self.stamp += count
        for slot, stamp in zip(range(first, first + count), stamps, strict=True):
            page, offset = request.pages[slot // PAGE_SIZE], slot % PAGE_SIZE
            self.cache.pools[pool][:, :, page, :, offset] = self.expected(pool, stamp)
        return stamps

    def expected(self, pool: int, stamp: int) -> torch.Tensor:
        """What a stamped slot holds: [num_layers, 2, num_kv_heads, head_dim] different numbers, exact in fp32."""
        layers, _, _, heads, _, dim = self.cache.pools[pool].shape
        size = layers * 2 * heads * dim
        return (stamp * size + torch.arange(size)).remainder(1 << 24).view(layers, 2, heads, dim).float()

    def round(self) -> int:
        """A tree per request behind its committed slots, and one commit over all of them; returns the paths taken."""
        pool = int(self.rng.integers(2))
        batch = [r for r in self.requests if r.lens[pool] < r.capacity and self.rng.random() < 0.8]
        if not batch:
            return 0
        lens, paths = [], []
        for request in batch:
            committed = request.lens[pool]
            nodes = int(self.rng.integers(1, SCRATCH + 1))
            stamps = self.write(request, pool, committed, nodes)
            longest = min(nodes, request.capacity - committed, 1 + int(self.rng.integers(12)))
            chosen = np.sort(self.rng.choice(np.arange(1, nodes), longest - 1, replace=False)) if longest > 1 else []
            kind = self.rng.integers(4)  # most paths move; some are in place, some empty
            path = np.arange(longest) if kind == 0 else np.array([0, *chosen], dtype=np.int64)
            path = path[:0] if kind == 1 and self.rng.random() < 0.2 else path
            lens.append(committed)
            paths.append(path)
            request.slots[pool] += [stamps[node] for node in path]
            request.lens[pool] += len(path)
        self.cache.commit(pool, [r.pages for r in batch], lens, paths)
        return len(batch)

    def compare(self) -> None:
        """Every committed slot of every request in every pool, and the pages."""
        self.cache.check_integrity()
        held = sum(len(request.pages) for request in self.requests)
        assert self.cache.num_free == self.cache.num_pages - held
        for request in self.requests:
            for pool, stamps in enumerate(request.slots):
                slots = np.arange(len(stamps))
                pages, offsets = request.pages[slots // PAGE_SIZE], slots % PAGE_SIZE
                found = self.cache.pools[pool][:, :, pages, :, offsets]  # [slots, layers, 2, heads, dim]
                if stamps:
                    expected = torch.stack([self.expected(pool, stamp) for stamp in stamps])
                    assert torch.equal(found, expected), (request.request_id, pool)
        for pool in self.cache.pools:
            assert not pool[:, :, 0].any(), "something was written to the null page"


@pytest.mark.parametrize("seed", quick(range(4), (0,)))
def test_random_accept_paths(seed: int) -> None:
    """1,200 paths each, over requests that come and go in fragmented pages."""
    model = Model(new_cache(), seed)
    paths, rounds = 0, 0
    while paths < 1200:
        if len(model.requests) < 5 and model.rng.random() < 0.3:
            model.admit()
        if model.requests and model.rng.random() < 0.03:
            model.leave()
        paths += model.round()
        rounds += 1
        if rounds % 40 == 0:
            model.compare()
    model.compare()
    assert 0 < model.scattered < model.count, "only one kind of page list was met"
    while model.requests:
        model.leave()
    model.cache.check_integrity()
    assert model.cache.num_free == model.cache.num_pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_commit_moves_bits(dtype: torch.dtype) -> None:
    """NaN payloads, infinities and negative zeros too; slots outside the path stay."""
    cache = new_cache(6, dtype)
    held = cache.reserve("a", 3 * PAGE_SIZE)
    size = {torch.float32: torch.int32}.get(dtype, torch.int16)
    limits = torch.iinfo(size)
    for pool in cache.pools:
        pool.view(size).random_(limits.min, limits.max)
    before = [pool.clone() for pool in cache.pools]
    path = np.array([0, 2, 3, 7, 40])
    cache.commit(0, [held], [PAGE_SIZE - 3], [path])
    assert torch.equal(cache.pools[1].view(size), before[1].view(size)), "another pool was touched"
    expected = before[0].clone()

    def at(slot: int) -> tuple[int, int]:
        return int(held[slot // PAGE_SIZE]), slot % PAGE_SIZE

    for step, node in enumerate(path):
        (to_page, to_offset), (page, offset) = at(PAGE_SIZE - 3 + step), at(PAGE_SIZE - 3 + int(node))
        expected[:, :, to_page, :, to_offset] = before[0][:, :, page, :, offset]
    assert torch.equal(cache.pools[0].view(size), expected.view(size))


def test_nothing_to_commit() -> None:
    cache = new_cache(4)
    cache.commit(0, [], [], [])
    pages = cache.reserve("a", 10)
    cache.commit(0, [pages], [3], [np.empty(0, dtype=np.int64)])
    cache.commit(1, [pages], [3], [np.arange(4)])
    assert not any(pool.any() for pool in cache.pools)


def test_pages_in_line_are_preferred() -> None:
    cache = new_cache(10)
    for name in "abcde":
        cache.reserve(name, 2 * PAGE_SIZE)
    cache.release("a")
    cache.release("c")
    cache.release("d")
    assert cache.reserve("f", 4 * PAGE_SIZE).tolist() == [5, 6, 7, 8]
    assert cache.reserve("g", PAGE_SIZE).tolist() == [1]
    cache.release("b")
    assert cache.reserve("h", 3 * PAGE_SIZE).tolist() == [2, 3, 4]
    cache.check_integrity()
    assert cache.num_free == 0
    assert not cache.can_reserve(1)
    assert cache.can_reserve(0)


def test_scattered_pages_serve_where_no_run_is_free() -> None:
    cache = new_cache(6)
    for i in range(6):
        cache.reserve(f"r{i}", PAGE_SIZE)
    for i in (0, 2, 4):
        cache.release(f"r{i}")
    assert cache.reserve("x", 3 * PAGE_SIZE).tolist() == [1, 3, 5]


def test_scrub_on_release() -> None:
    """0 * NaN from a stale slot would poison the next holder."""
    cache = new_cache(4)
    for name in ("bad", "good"):
        cache.reserve(name, 2 * PAGE_SIZE)
    for pool in cache.pools:
        pool[:, :, 1:] = float("nan")
    cache.release("bad", scrub=True)
    for pool in cache.pools:
        assert not pool[:, :, [1, 2]].any()
        assert pool[:, :, [3, 4]].isnan().all()
    cache.release("good")
    cache.check_integrity()


@pytest.mark.parametrize("pool", [0, 1])
@pytest.mark.parametrize("first, count", [(0, 1), (60, 10), (100, 92), (64, 64), (5, 0)])
def test_scrub_of_slots(first: int, count: int, pool: int) -> None:
    cache = new_cache(5)
    cache.reserve("other", PAGE_SIZE)
    pages = cache.reserve("a", 3 * PAGE_SIZE)[::-1].copy()  # scattered: not in ascending order
    for each in cache.pools:
        each.fill_(7.0)
    cache.scrub_slots(pool, pages, first, count)
    logical = cache.pools[pool][:, :, pages].permute(2, 4, 0, 1, 3, 5).reshape(3 * PAGE_SIZE, -1)
    zeroed = torch.zeros(3 * PAGE_SIZE, dtype=torch.bool)
    zeroed[first : first + count] = True
    assert torch.equal((logical == 0).all(1), zeroed)
    assert (logical[~zeroed] == 7).all()
    assert (cache.pools[pool][:, :, [0, 1, 5]] == 7).all()
    assert (cache.pools[1 - pool] == 7).all(), "another pool was touched"


def test_integrity_sees_what_is_wrong() -> None:
    def broken(change: str) -> KVCache:
        cache = new_cache(6)
        pages = cache.reserve("a", 2 * PAGE_SIZE)
        held, holders, dirty = cache._held, cache._holders, cache._dirty
        if change == "uncounted":
            held["b"] = pages[:1]
        elif change == "lost":
            held.pop("a")
        elif change == "free and held":
            holders[pages[0]] = 0
        elif change == "twice":
            held["a"] = pages[[0, 0]]
        elif change == "stale":
            dirty[6] = True
        else:
            holders[0] = 1
        return cache

    for change, message in {
        "uncounted": "more often than counted",
        "lost": "lost",
        "free and held": "more often than counted",
        "twice": "holds a page twice",
        "stale": "not scrubbed",
        "null": "null page",
    }.items():
        with pytest.raises(AssertionError, match=message):
            broken(change).check_integrity()


def test_misuse_is_refused() -> None:
    cache = new_cache(3)
    cache.reserve("a", PAGE_SIZE)
    with pytest.raises(AssertionError, match="holds pages already"):
        cache.reserve("a", PAGE_SIZE)
    with pytest.raises(AssertionError, match="can_reserve"):
        cache.reserve("b", 3 * PAGE_SIZE)
    cache.check_integrity()


def test_bytes_are_as_planned() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert new_cache(7, dtype).nbytes == 8 * KVCache.bytes_per_page(SHAPES, dtype)


def test_a_page_that_is_allocated_again_holds_no_cached_prefix() -> None:
    cache, keys = new_cache(2), page_keys(range(2 * PAGE_SIZE))
    cache.prefixes = PrefixCache(cache.num_pages + 1, num_drafts=0)
    cache.prefixes.insert(keys, cache.reserve("first", 2 * PAGE_SIZE), np.zeros(0, dtype=np.int64))
    cache.release("first")
    assert len(cache.prefixes.find(keys).pages) == 2
    cache.reserve("second", 2 * PAGE_SIZE)
    assert len(cache.prefixes.find(keys).pages) == 0
