"""The KV cache: pages, commits in place, leaks, scrubbing."""

import numpy as np
import pytest
import torch

from tests.helpers.models import quick
from treespec.cache.kv_cache import KVCache, pages_for
from treespec.cache.prefix_cache import PrefixCache, page_keys
from treespec_kernels.attention.tree_batch import PAGE_SIZE
from treespec_weights import ModelShape


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_commit_moves_bits(dtype: torch.dtype) -> None:
    """Of several requests in scattered pages; NaN payloads, infinities and negative zeros too. All other slots stay."""
    rng, cache = np.random.default_rng(0), new_cache(16, dtype)
    bits = {torch.float32: torch.int32}.get(dtype, torch.int16)
    for case in range(60):
        pages = np.split(1 + rng.permutation(16), (2, 5, 12))
        lens, paths = [int(rng.integers(PAGE_SIZE * len(own) - 50)) for own in pages], []
        for _ in pages:  # most paths move; some are in place, some empty
            path = np.unique([0, *rng.integers(1, 50, rng.integers(12))])
            paths.append({0: np.arange(len(path)), 1: path[:0]}.get(int(rng.integers(8)), path))
        for pool in cache.pools:
            pool.view(bits).random_(torch.iinfo(bits).min, torch.iinfo(bits).max)
        expected = [pool.view(bits).clone() for pool in cache.pools]
        before = expected[case % 2].clone()
        for own, length, path in zip(pages, lens, paths, strict=True):
            for step, node in enumerate(path.tolist()):
                (to_page, to_slot), (page, slot) = (divmod(length + place, PAGE_SIZE) for place in (step, node))
                expected[case % 2][:, :, own[to_page], :, to_slot] = before[:, :, own[page], :, slot]
        cache.commit(case % 2, pages, lens, paths)
        for pool, wanted in zip(cache.pools, expected, strict=True):
            assert pool.view(bits).equal(wanted)


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


class BrokenCache(KVCache):
    def corrupt(self, message: str, pages: np.ndarray) -> None:
        if message == "not scrubbed":
            self._dirty[6] = True
        elif message == "null page":
            self._holders[0] = 1
        else:
            holders = {"lost": {}, "holds a page twice": {"a": pages[[0, 0]]}}
            self._held = holders.get(message, {"a": pages, "b": pages[:1]})


@pytest.mark.parametrize(
    "message", ["more holders than counted", "lost", "holds a page twice", "not scrubbed", "null page"]
)
def test_integrity_sees_what_is_wrong(message: str) -> None:
    cache = BrokenCache(SHAPES, 6, torch.float32, "cpu")
    cache.corrupt(message, cache.reserve("a", 2 * PAGE_SIZE))
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
    filled = [pool.fill_(torch.nan) for pool in cache.pools]  # 0 * NaN from a stale slot would poison the next holder
    for _ in range(1500):
        kind = rng.random()
        if kind < 0.5 or not held:
            slots, source = int(rng.integers(1, 5 * PAGE_SIZE)), list(held.values())[-1] if held else np.empty(0, int)
            shared = source[: int(rng.integers(0, min(len(source), pages_for(slots)) + 1))]
            fits = pages_for(slots) - len(shared) <= cache.num_free
            assert cache.can_reserve(slots, shared) == fits
            if fits:
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
                pool[:, :, list(free)] = torch.nan
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
