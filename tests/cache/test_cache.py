"""The KV cache against a list-of-lists model: pages, commits in place, leaks, scrubbing."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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


@pytest.mark.parametrize("seed", quick(range(2), (0,)))
def test_random_accept_paths(seed: int) -> None:
    """600 paths each, over requests that come and go in fragmented pages."""
    model = Model(new_cache(), seed)
    paths, rounds = 0, 0
    while paths < 600:
        if len(model.requests) < 5 and model.rng.random() < 0.3:
            model.admit()
        if model.requests and model.rng.random() < 0.03:
            model.leave()
        paths += model.round()
        rounds += 1
        if rounds % 30 == 0:
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


BROKEN: dict[str, Callable[[KVCache, np.ndarray], Any]] = {
    "more often than counted": lambda cache, pages: cache._held.update(b=pages[:1]),
    "lost": lambda cache, pages: cache._held.pop("a"),
    "holds a page twice": lambda cache, pages: cache._held.update(a=pages[[0, 0]]),
    "not scrubbed": lambda cache, pages: cache._dirty.__setitem__(6, True),
    "null page": lambda cache, pages: cache._holders.__setitem__(0, 1),
}


@pytest.mark.parametrize("message", BROKEN)
def test_integrity_sees_what_is_wrong(message: str) -> None:
    cache = new_cache(6)
    BROKEN[message](cache, cache.reserve("a", 2 * PAGE_SIZE))
    with pytest.raises(AssertionError, match=message):
        cache.check_integrity()


def test_a_page_that_is_allocated_again_holds_no_cached_prefix() -> None:
    cache, keys = new_cache(2), page_keys(range(2 * PAGE_SIZE))
    cache.prefixes = PrefixCache(cache.num_pages + 1, num_drafts=0)
    cache.prefixes.insert(keys, cache.reserve("first", 2 * PAGE_SIZE), np.zeros(0, dtype=np.int64))
    cache.release("first")
    assert len(cache.prefixes.find(keys).pages) == 2
    cache.reserve("second", 2 * PAGE_SIZE)
    assert len(cache.prefixes.find(keys).pages) == 0


# --- pages with several holders


@pytest.mark.parametrize("seed", quick(range(3), (0,)))
def test_random_holders(seed: int) -> None:
    """Reference counts against sets: pages are free as soon as nobody holds them, and zeroed if anybody asked."""
    cache = new_cache(20)
    rng, held, dirty, count = np.random.default_rng(seed), {}, set(), 0
    filled = [pool.fill_(1.0) for pool in cache.pools]
    for _ in range(1500):
        kind = rng.random()
        if kind < 0.5 or not held:
            slots, source = int(rng.integers(1, 5 * PAGE_SIZE)), list(held.values())[-1] if held else np.empty(0, int)
            shared = source[: int(rng.integers(0, min(len(source), pages_for(slots)) + 1))]
            if cache.can_reserve(slots, len(shared)):
                count += 1
                pages = cache.reserve(f"r{count}", slots, shared)
                assert pages[: len(shared)].tolist() == shared.tolist() and len(pages) == pages_for(slots)
                held[f"r{count}"] = pages
        else:
            name, scrub = str(rng.choice(list(held))), bool(rng.integers(2))
            gone = set(held.pop(name).tolist())
            cache.release(name, scrub)
            dirty |= gone if scrub else set()
            free = gone - {page for pages in held.values() for page in pages.tolist()}
            for pool in filled:
                for page in gone:
                    assert bool(pool[:, :, page].any()) != (page in dirty and page in free)
                pool[:, :, list(free)] = 1.0
            dirty -= free
        every = [page for pages in held.values() for page in pages.tolist()]
        assert cache.num_holders(np.arange(21)).tolist() == [every.count(page) for page in range(21)]
        assert cache.num_free == 20 - len(set(every))
        cache.check_integrity()


def test_what_is_handed_over() -> None:
    """The first slots stay, in every pool; what stands behind them in their page is zeroed, and the rest is free."""
    cache = new_cache(6)
    pages = cache.reserve("leader", 4 * PAGE_SIZE)
    for pool in cache.pools:
        pool.fill_(float("nan"))
        pool[:, :, pages[0]] = 2.0
        pool[:, :, pages[1], :, :10] = 3.0
    other = cache.reserve("other", 2 * PAGE_SIZE, pages[:1])
    cache.copy_slots(pages[1], other[1], 10)
    kept = cache.transfer("leader", "group", PAGE_SIZE + 10, scrub=True)
    assert kept.tolist() == pages[:2].tolist()
    assert cache.num_holders(pages).tolist() == [2, 1, 0, 0]
    for pool in cache.pools:
        assert (pool[:, :, pages[0]] == 2).all()
        for page in (pages[1], other[1]):
            assert (pool[:, :, page, :, :10] == 3).all()
        assert not pool[:, :, pages[1], :, 10:].any() and not pool[:, :, pages[2:]].any()
    cache.release("group")
    cache.release("other")
    for pool in cache.pools:
        assert not pool[:, :, pages].any(), "the leader asked for clean pages"
    cache.check_integrity()


@pytest.mark.slow
def test_shared_pages_are_not_written() -> None:
    cache = new_cache(6)
    pages = cache.reserve("a", 2 * PAGE_SIZE)
    cache.reserve("b", 3 * PAGE_SIZE, pages[:1])
    refused: list[Any] = [
        lambda: cache.copy_slots(pages[1], pages[0], 5),
        lambda: cache.scrub_slots(0, pages, 0, 1),
        lambda: cache.reserve("c", PAGE_SIZE, np.array([6])),
        lambda: cache.reserve("c", PAGE_SIZE, pages),
    ]
    for misuse in refused:
        with pytest.raises(AssertionError):
            misuse()
    cache.check_integrity()
