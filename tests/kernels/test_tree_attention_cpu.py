"""Exact tree attention on the CPU: equal bits wherever keys lie and whatever is computed beside a row."""

import functools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.exactness import threads
from treespec_kernels.attention.tree_attention import tree_attention_ref
from treespec_kernels.attention.tree_attention_cpu import AttentionMode, plan_tree_attention_cpu, tree_attention_cpu
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows
from treespec_kernels.tuning.testing import assert_close, path_to, tree_parents

CONTEXTS = (0, 1, 62, 63, 64, 65, 127, 128, 190, 640)
TREES = ("star-9", "chain-16", "deep-33", "random-64", "random-2", "random-100", "star-1", "deep-100", "random-16")
HEADS = ((4, 2), (3, 3), (8, 1), (16, 2))
DIMS = (32, 48, 64, 128, 16, 80)


def parents_of(kind: str) -> np.ndarray:
    """The parents of "star-9", "chain-16", "random-33" or "deep-33": a chain with a leaf beside every node."""
    shape, size = kind.split("-")
    if shape == "deep":
        return np.array([-1] + [(i - 1) // 2 * 2 for i in range(1, int(size))])
    return np.array(tree_parents(shape, int(size), torch.Generator().manual_seed(int(size))))


@dataclass(frozen=True, eq=False, repr=False)
class Case:
    """One request: K/V of its committed positions and of its tree, in pages with stale values everywhere else."""

    context_len: int
    parents: np.ndarray
    pages: np.ndarray
    q: Tensor  # [num_nodes, num_heads, head_dim]
    keys: Tensor  # [context_len + num_nodes, num_kv_heads, head_dim], by logical slot
    values: Tensor
    num_pages: int

    @classmethod
    def make(cls, context_len: int, kind: str, heads: tuple[int, int], head_dim: int, scattered: bool = True) -> "Case":
        parents = parents_of(kind)
        generator = torch.Generator().manual_seed(context_len * 131 + len(parents))
        count = -(-(context_len + len(parents) + 8) // PAGE_SIZE)
        shuffled = 1 + torch.randperm(count + 2, generator=generator).numpy()
        if (np.diff(shuffled[:count]) == 1).all():
            shuffled[: count + 1] = shuffled[: count + 1][::-1].copy()
        pages = shuffled if scattered else 1 + np.arange(count)

        def draw(rows: int, heads: int) -> Tensor:
            return torch.randn(rows, heads, head_dim, generator=generator)

        slots = context_len + len(parents)
        return cls(
            context_len,
            parents,
            pages[:count],
            2 * draw(len(parents), heads[0]),
            draw(slots, heads[1]),
            draw(slots, heads[1]),
            count + 3,
        )

    @functools.cached_property
    def depths(self) -> np.ndarray:
        return np.array([len(path_to(self.parents, node)) - 1 for node in range(len(self.parents))])

    @functools.cached_property
    def visible(self) -> np.ndarray:
        mask = np.zeros((len(self.parents), len(self.parents)), dtype=bool)
        for node in range(len(self.parents)):
            mask[node, path_to(self.parents, node)] = True
        return mask

    def rows(self, nodes: np.ndarray | None = None) -> RequestRows:
        nodes = np.arange(len(self.parents)) if nodes is None else nodes
        return RequestRows(self.context_len, nodes, self.depths[nodes], self.visible[nodes], self.depths, self.pages)

    def cache(self, slots: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """The pool with `slots` (None = all logical ones) in their places, packed to the front where given."""
        shape = (self.num_pages, self.keys.shape[1], PAGE_SIZE, self.keys.shape[2])
        slots = np.arange(len(self.keys)) if slots is None else slots
        at = np.arange(len(slots))
        page, offset = self.pages[at // PAGE_SIZE], at % PAGE_SIZE
        generator = torch.Generator().manual_seed(7)
        pools = []
        for content in (self.keys, self.values):
            pool = 50 * torch.randn(shape, generator=generator)
            pool[page, :, offset] = content[slots]
            pools.append(pool)
        return pools[0], pools[1]

    def compacted(self, node: int) -> np.ndarray:
        """Logical slots of the committed positions and of the node's path: what plain decoding has in its cache."""
        return np.concatenate([np.arange(self.context_len), self.context_len + np.array(path_to(self.parents, node))])


def attend(
    rows: RequestRows,
    mode: AttentionMode,
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    plan = plan_tree_attention_cpu([rows], q.shape[1], mode, window)
    return tree_attention_cpu(q, *cache, plan, q.shape[2] ** -0.5, cap)


def plain(case: Case, node: int, mode: AttentionMode) -> Tensor:
    """The node decoded alone: one row behind its own path in a compacted cache."""
    slots = case.compacted(node)
    rows = RequestRows.chain(len(slots) - 1, 1, case.pages)
    return attend(rows, mode, case.q[node : node + 1], case.cache(slots))[0]


def some_nodes(case: Case) -> list[int]:
    """All nodes of a small tree; of a large one the first, the last, the deepest and some others."""
    count = len(case.parents)
    return sorted({0, count - 1, int(case.depths.argmax()), *range(0, count, max(1, count // 4))})


# Every context with every tree; heads, sizes and the order of pages take turns.
GRID = {
    context: [
        (context, kind, HEADS[(i + j) % len(HEADS)], DIMS[(i * 2 + j) % len(DIMS)], (i + j) % 3 > 0)
        for j, kind in enumerate(TREES)
    ]
    for i, context in enumerate(CONTEXTS)
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_node_has_the_bits_of_plain_decoding(context: int) -> None:
    """With two threads, whose bits are those of one."""
    for case_of in GRID[context]:
        case = Case.make(*case_of)
        with threads(2):
            packed, gathered = (attend(case.rows(), mode, case.q, case.cache()) for mode in ("packed", "gathered"))
        assert torch.equal(packed, gathered), case_of
        with threads(1):
            assert torch.equal(attend(case.rows(), "packed", case.q, case.cache()), packed), case_of
            for node in some_nodes(case):
                for mode in ("packed", "gathered"):
                    assert torch.equal(packed[node], plain(case, node, mode)), (case_of, node, mode)


@pytest.mark.parametrize("head_dim", [12, 16, 20, 24, 32, 36, 40, 48, 64, 80, 96, 128])
def test_every_head_size(head_dim: int) -> None:
    """Behind 17 tiles, so that sums over tiles are long too; the trees cross a tile border."""
    for heads, kind in (((5, 1), "star-4"), ((4, 2), "deep-12"), ((3, 3), "deep-16"), ((16, 2), "deep-12")):
        case = Case.make(17 * PAGE_SIZE - 3, kind, heads, head_dim)
        packed = attend(case.rows(), "packed", case.q, case.cache())
        assert torch.equal(packed, attend(case.rows(), "gathered", case.q, case.cache()))
        for node in (0, 1, len(packed) - 1):
            assert torch.equal(packed[node], plain(case, node, "packed")), (heads, kind, node)


@pytest.mark.parametrize("mode", ["packed", "gathered"])
def test_where_pages_lie_changes_nothing(mode: AttentionMode) -> None:
    for context, kind in ((65, "random-16"), (190, "random-64"), (640, "deep-33")):
        scattered, in_line = (Case.make(context, kind, (4, 2), 32, scattered) for scattered in (True, False))
        assert not np.array_equal(scattered.pages, in_line.pages)
        results = [attend(c.rows(), mode, c.q, c.cache()) for c in (scattered, in_line)]
        assert torch.equal(*results)


@pytest.mark.parametrize("mode", ["packed", "gathered"])
@pytest.mark.parametrize("context", [0, 1, 62, 64, 127, 190])
def test_a_frontier_has_the_bits_of_the_whole_tree(context: int, mode: AttentionMode) -> None:
    """Rows that are some of the nodes, the others' K/V being in the cache already: how drafts grow a tree."""
    for kind in ("random-33", "star-9", "deep-100"):
        case = Case.make(context, kind, (4, 2), 32)
        whole = attend(case.rows(), mode, case.q, case.cache())
        last = len(case.parents) - 1
        for nodes in ([last], [0], [1, 4, last], list(range(last // 2, last + 1)), np.flatnonzero(case.depths == 1)):
            chosen = np.array(nodes)
            part = attend(case.rows(chosen), mode, case.q[chosen], case.cache())
            assert torch.equal(part, whole[chosen]), (kind, nodes)


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_chunks_of_a_prompt_have_equal_bits(chunk: int) -> None:
    """A prompt at once with two threads, and in chunks or one position after the other, as decoding does, with one."""
    case = Case.make(0, "chain-700", (8, 2), 32)
    cache = case.cache()
    with threads(2):
        whole = attend(RequestRows.chain(0, 700, case.pages), "packed", case.q, cache)
    with threads(1):
        for start in range(0, 700, chunk) if chunk > 7 else (*range(0, 140, chunk), 511, 640, 693):
            rows = RequestRows.chain(start, min(chunk, 700 - start), case.pages)
            part = attend(rows, "packed", case.q[start : start + rows.num_rows], cache)
            assert torch.equal(part, whole[start : start + rows.num_rows]), start


def test_other_requests_change_nothing() -> None:
    """Trees, a chain and a prompt chunk in one pass, against each alone; spare rows of q are passed over."""
    cases = [Case.make(c, kind, (4, 2), 48) for c, kind in ((63, "random-33"), (5, "star-1"), (130, "random-100"))]
    shift, pools, moved = 0, [], []
    for case in cases:
        pools.append(case.cache())
        moved.append(Case(**(case.__dict__ | {"pages": case.pages + shift})).rows())
        shift += case.num_pages
    cache = torch.cat([k for k, _ in pools]), torch.cat([v for _, v in pools])
    q = torch.cat([case.q for case in cases] + [torch.full((3, 4, 48), float("nan"))])
    plan = plan_tree_attention_cpu(moved, 4)
    together = tree_attention_cpu(q, *cache, plan, 48**-0.5)
    first = 0
    for case, pool in zip(cases, pools, strict=True):
        alone = attend(case.rows(), "packed", case.q, pool)
        assert torch.equal(together[first : first + len(alone)], alone)
        first += len(alone)
    assert first == plan.num_rows
    assert bool((together[first:] == 0).all())


@pytest.mark.parametrize("mode", ["packed", "gathered"])
@pytest.mark.parametrize("kind", TREES)
def test_close_to_the_reference(kind: str, mode: AttentionMode) -> None:
    for context, heads, head_dim in ((0, (4, 2), 32), (63, (8, 1), 48), (190, (3, 3), 128)):
        case = Case.make(context, kind, heads, head_dim)
        ancestors = torch.zeros(len(case.parents), int(case.depths.max()) + 1, dtype=torch.int32)
        for node in range(len(case.parents)):
            path = path_to(case.parents, node)
            ancestors[node, : len(path)] = torch.tensor(path)
        expected = tree_attention_ref(
            case.q,
            *case.cache(),
            scale=head_dim**-0.5,
            ancestors=ancestors,
            depths=torch.tensor(case.depths).int(),
            row_request=torch.zeros(len(case.parents), dtype=torch.int32),
            context_lens=torch.tensor([context], dtype=torch.int32),
            page_table=torch.tensor(case.pages)[None].int(),
        )
        actual = attend(case.rows(), mode, case.q, case.cache())
        assert_close(actual, expected, max_error=2e-5, rms_error=2e-6)


@pytest.mark.parametrize("length", [1, 65, 200])
def test_close_to_causal_attention(length: int) -> None:
    case = Case.make(0, f"chain-{length}", (4, 2), 32)
    actual = attend(RequestRows.chain(0, length, case.pages), "packed", case.q, case.cache())
    q, k, v = (x.transpose(0, 1)[None] for x in (case.q, case.keys, case.values))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert_close(actual, expected[0].transpose(0, 1), max_error=2e-5, rms_error=2e-6)


def test_a_long_chunk_is_taken_in_blocks() -> None:
    """Beyond 16 MiB of scores: the same bits as in small chunks."""
    case = Case.make(0, "chain-1500", (16, 2), 16)
    whole = attend(RequestRows.chain(0, 1500, case.pages), "packed", case.q, case.cache())
    assert len(plan_tree_attention_cpu([RequestRows.chain(0, 1500, case.pages)], 16).blocks) > 1
    for start in (0, 700, 1490):
        rows = RequestRows.chain(start, 10, case.pages)
        assert torch.equal(attend(rows, "packed", case.q[start : start + 10], case.cache()), whole[start : start + 10])
