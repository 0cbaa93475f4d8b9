"""Exact tree attention on the CPU: equal bits wherever keys lie and whatever is computed beside a row."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.exactness import threads
from tests.helpers.families import TYPICAL, make_model
from tests.helpers.models import open_llm
from treespec.errors import ExactnessError
from treespec_kernels.attention import tree_attention_cpu as tree_attention_cpu_module
from treespec_kernels.attention.tree_attention import tree_attention_ref
from treespec_kernels.attention.tree_attention_cpu import AttentionMode, plan_tree_attention_cpu, tree_attention_cpu
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows
from treespec_kernels.comparison import assert_close
from treespec_kernels.tuning.testing import path_to, tree_parents

CONTEXTS = (0, 1, 62, 63, 64, 65, 127, 128, 190, 640, 17 * PAGE_SIZE - 3)  # sums over 17 tiles are long, too
TREES = ("star-9", "chain-16", "deep-33", "random-64", "random-2", "random-100", "star-1", "deep-100", "random-16")
HEADS = ((4, 2), (3, 3), (8, 1), (16, 2))
DIMS = (32, 48, 64, 128, 16, 80, 12, 20, 24, 36, 40, 96)
WINDOWS = (None, 1, 2, 17, None, 63, 64, 65, None, 130, 700)
CAP = 1.5
MODES: tuple[AttentionMode, ...] = ("packed", "gathered")


def parents_of(kind: str) -> np.ndarray:
    """The parents of "star-9", "chain-16", "random-33" or "deep-33": a chain with a leaf beside every node."""
    shape, size = kind.split("-")
    if shape == "deep":
        return np.array([-1] + [(i - 1) // 2 * 2 for i in range(1, int(size))])
    return np.array(tree_parents(shape, int(size), torch.Generator().manual_seed(int(size))))


class Case:
    """One request: K/V of its committed positions and of its tree, in pages with stale values everywhere else."""

    def __init__(self, context_len: int, kind: str, heads: tuple[int, int], head_dim: int, scattered: bool = True):
        self.context_len, self.parents = context_len, parents_of(kind)
        num_nodes = len(self.parents)
        generator = torch.Generator().manual_seed(context_len * 131 + num_nodes)
        count = -(-(context_len + num_nodes + 8) // PAGE_SIZE)
        shuffled = 1 + torch.randperm(count + 2, generator=generator).numpy()
        if (np.diff(shuffled[:count]) == 1).all():
            shuffled[: count + 1] = shuffled[: count + 1][::-1].copy()
        self.pages, self.num_pages = shuffled[:count] if scattered else 1 + np.arange(count), count + 3
        self.whole = RequestRows.tree(context_len, self.parents, self.pages)

        def draw(rows: int, heads: int) -> Tensor:
            return torch.randn(rows, heads, head_dim, generator=generator)

        self.q = 2 * draw(num_nodes, heads[0])
        self.keys, self.values = (draw(context_len + num_nodes, heads[1]) for _ in range(2))  # by logical slot

    @property
    def depths(self) -> np.ndarray:
        return self.whole.depths

    def rows(self, nodes: np.ndarray) -> RequestRows:
        """Of some of the nodes."""
        assert self.whole.visible is not None
        return replace(self.whole, nodes=nodes, depths=self.depths[nodes], visible=self.whole.visible[nodes])

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


def plain(case: Case, node: int, mode: AttentionMode, *kind: float | None) -> Tensor:
    """The node decoded alone: one row behind its own path in a compacted cache."""
    slots = case.compacted(node)
    rows = RequestRows.chain(len(slots) - 1, 1, case.pages)
    return attend(rows, mode, case.q[node : node + 1], case.cache(slots), *kind)[0]


def some_nodes(case: Case) -> list[int]:
    """All nodes of a small tree; of a large one the first, the last, the deepest and some others."""
    count = len(case.parents)
    return sorted({0, count - 1, int(case.depths.argmax()), *range(0, count, max(1, count // 4))})


def reference(case: Case, window: int | None, cap: float | None) -> Tensor:
    paths = [path_to(case.parents, node) for node in range(len(case.parents))]
    return tree_attention_ref(
        case.q,
        *case.cache(),
        scale=case.q.shape[2] ** -0.5,
        ancestors=torch.tensor([[*path, *[0] * (int(case.depths.max()) + 1 - len(path))] for path in paths]).int(),
        depths=torch.tensor(case.depths).int(),
        row_request=torch.zeros(len(case.parents), dtype=torch.int32),
        context_lens=torch.tensor([case.context_len], dtype=torch.int32),
        page_table=torch.tensor(case.pages)[None].int(),
        window=window,
        score_cap=cap,
    )


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_node_has_the_bits_of_plain_decoding(context: int) -> None:
    """With two threads, and near the reference: every context with every tree; all else takes turns."""
    i = CONTEXTS.index(context)
    for j, tree in enumerate(TREES):
        case = Case(context, tree, HEADS[(i + j) % len(HEADS)], DIMS[(i * 5 + j) % len(DIMS)], (i + j) % 3 > 0)
        kind = window, cap = WINDOWS[(i + j) % len(WINDOWS)], CAP if (i + j) % 2 else None
        with threads(2):
            packed, gathered = (attend(case.whole, mode, case.q, case.cache(), *kind) for mode in MODES)
        assert torch.equal(packed, gathered), (tree, kind)
        assert_close(packed, reference(case, window, cap), max_error=2e-5, rms_error=2e-6)
        with threads(1):
            assert torch.equal(attend(case.whole, "packed", case.q, case.cache(), *kind), packed), (tree, kind)
            for node in some_nodes(case):
                for mode in MODES:
                    assert torch.equal(packed[node], plain(case, node, mode, *kind)), (tree, kind, node, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("context", "window"), [(0, None), (1, 17), (62, None), (64, 64), (127, 130), (190, None)])
def test_a_frontier_has_the_bits_of_the_whole_tree(context: int, window: int | None, mode: AttentionMode) -> None:
    """Rows that are some of the nodes, the others' K/V being in the cache already: how drafts grow a tree."""
    for kind in ("random-33", "star-9", "deep-100"):
        case = Case(context, kind, (4, 2), 32)
        whole = attend(case.whole, mode, case.q, case.cache(), window)
        last = len(case.parents) - 1
        for nodes in ([last], [0], [1, 4, last], list(range(last // 2, last + 1)), np.flatnonzero(case.depths == 1)):
            chosen = np.array(nodes)
            part = attend(case.rows(chosen), mode, case.q[chosen], case.cache(), window)
            assert torch.equal(part, whole[chosen]), (kind, nodes)


@pytest.mark.parametrize("window", [None, 17, 64, 130])
def test_chunks_of_a_prompt_have_equal_bits(window: int | None) -> None:
    """A prompt at once with two threads, and in chunks or one position after the other, as decoding does, with one."""
    case = Case(0, "chain-700", (8, 2), 32)
    cache = case.cache()
    with threads(2):
        whole = attend(RequestRows.chain(0, 700, case.pages), "packed", case.q, cache, window, CAP)
    with threads(1):
        for chunk in (1, 7, 64, 300, 512):
            for start in range(0, 700, chunk) if chunk > 7 else (*range(0, 140, chunk), 511, 640, 693):
                rows = RequestRows.chain(start, min(chunk, 700 - start), case.pages)
                part = attend(rows, "packed", case.q[start : start + rows.num_rows], cache, window, CAP)
                assert torch.equal(part, whole[start : start + rows.num_rows]), (chunk, start)


@pytest.mark.parametrize(
    ("heads", "first", "window", "rows", "count"),
    [((16, 2), 0, None, (0, 700, 1490), 10), ((4, 2), 1150, 1100, (1150, 1200, 1300, 1400, 1499), 1)],
    ids=["long chunk", "many tiles"],
)
def test_a_prompt_of_1500_tokens(
    heads: tuple[int, int], first: int, window: int | None, rows: Sequence[int], count: int
) -> None:
    """In blocks of up to 16 MiB of scores; and behind a window of more tiles than torch sums at a time, 16."""
    case = Case(0, "chain-1500", heads, 16)
    whole = RequestRows.chain(first, 1500 - first, case.pages)
    out = attend(whole, "packed", case.q[first:], case.cache(), window, CAP)
    assert (len(plan_tree_attention_cpu([whole], heads[0], "packed", window).blocks) > 1) == (first == 0)
    for row in rows:
        for mode in MODES:
            some = RequestRows.chain(row, count, case.pages)
            part = attend(some, mode, case.q[row : row + count], case.cache(), window, CAP)
            assert torch.equal(part, out[row - first : row - first + count]), (row, mode)


# --- the self-test of families with windows


def test_a_window_bounds_the_work() -> None:
    """Tiles that a block reads, whatever the context is."""
    for context in (500, 5000, 12000):
        tree = Case(context, "deep-4", (4, 2), 16)
        for rows in (tree.whole, RequestRows.chain(context, 1, tree.pages)):
            (block,) = plan_tree_attention_cpu([rows], 4, "packed", 100).blocks
            assert block.num_full + block.num_tail <= 100 // PAGE_SIZE + 2  # type: ignore[union-attr]
            (block,) = plan_tree_attention_cpu([rows], 4, "gathered", 100).blocks
            assert block.slots.shape[1] <= (100 // PAGE_SIZE + 2) * PAGE_SIZE  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["cpu-packed", "cpu-gathered"])
def test_the_self_test_refuses_windows_that_are_not_exact(
    attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault in layers with a window alone, the first of which is the second layer."""
    folder, original = make_model(tmp_path / "model", TYPICAL["qwen2"], 3), tree_attention_cpu_module.add_tiles

    def by_company(parts: Tensor, windowed: bool, total: Tensor) -> None:
        original(parts, windowed, total)
        if windowed and len(parts) > 1:
            total.mul_(1 + 2**-20 * (total > 0))

    monkeypatch.setattr(tree_attention_cpu_module, "add_tiles", by_company)
    with pytest.raises(ExactnessError, match="plain decoding"):
        open_llm(folder, prove=True, attention=attention, max_model_len=200)
