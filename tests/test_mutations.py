"""The guards' guards: each planted fault turns the checks red."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import test_drafts, test_tree
from tests.exactness import Run, differences, run
from tests.models import OracleDrafter, greedy, open_llm, random_prompts, tiny
from treespec import LLM, SpecConfig
from treespec.cache.kv_cache import KVCache
from treespec.drafters.ssm.ssm_drafter import SsmDrafter
from treespec.engine import host_executor, runner
from treespec.errors import ExactnessError
from treespec.models.decoder import Decoder
from treespec.request import Request
from treespec.tree import TokenTree, merge
from treespec.verification.verify import Verified, verify_greedy
from treespec_kernels.attention import tree_attention_cpu
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_kernels.linear.linear import Linear, onednn_available

pytestmark = pytest.mark.slow

PARAMS = greedy(18)
LENGTHS = (20, 58, 61, 63, 126)  # trees cross tile borders
Patch = pytest.MonkeyPatch


def runs(
    plant: Callable[[Patch], None],
    lengths: Sequence[int] = LENGTHS,
    params: Any = PARAMS,
    nodes: int = 24,
    bushy: bool = False,
    both: bool = False,
) -> tuple[Run, Run]:
    """Runs plain decoding, and trees of an SSM and an oracle with the fault in place; with `both`, in both."""
    llm = open_llm(tiny()[0], [tiny()[1][0], OracleDrafter([], 4)], max_num_seqs=3)
    with Patch.context() as patch:
        if both:
            plant(patch)
        plain = run(llm, random_prompts(lengths), params, "off")
    llm.engine.sources.others[:] = [OracleDrafter(plain.sequences, 4, bushy=bushy)]
    with Patch.context() as patch:
        plant(patch)
        return plain, run(llm, plain.prompts, params, SpecConfig(nodes=nodes, max_depth=5))


def reduced_check(plant: Callable[[Patch], None]) -> list[str]:
    """The exactness check on one engine, with the fault in place during the tree runs only."""
    return differences(*runs(plant))


def test_without_a_fault_the_check_is_green() -> None:
    assert reduced_check(lambda patch: None) == []


# --- faults in what the target pass sees


def alter_rows(change: Callable[[RequestRows], dict[str, Any]]) -> Callable[[Patch], None]:
    """Change the rows of every tree of more than one node."""
    original = runner.tree_rows

    def altered(request: Request, tree: TokenTree) -> RequestRows:
        rows = original(request, tree)
        return rows if len(tree) == 1 else dataclasses.replace(rows, **change(rows))

    return lambda patch: patch.setattr(runner, "tree_rows", altered)


def flipped(rows: RequestRows, node: int, other: int) -> dict[str, Any]:
    visible = np.array(rows.visible)
    visible[node, other] ^= True
    return {"visible": visible}


def last_child(rows: RequestRows) -> int:
    """The last node below the root: the oracle's true one stands behind the wrong ones."""
    return int(np.flatnonzero(rows.depths == 1)[-1])


FAULTY_ROWS: dict[str, Callable[[RequestRows], dict[str, Any]]] = {
    "a node sees its sibling": lambda rows: flipped(rows, last_child(rows), 1),
    "a node does not see the root": lambda rows: flipped(rows, last_child(rows), 0),
    "the root sees a child": lambda rows: flipped(rows, 0, last_child(rows)),
    "columns in tree order": lambda rows: {"slot_depths": np.arange(rows.num_slots)},
    "positions one further": lambda rows: {"depths": rows.depths + (rows.depths > 0)},
    "positions by slot": lambda rows: {"depths": rows.nodes},
    "one committed slot too few": lambda rows: {"context_len": rows.context_len - 1},
}


@pytest.mark.parametrize("fault", FAULTY_ROWS)
def test_faulty_rows(fault: str) -> None:
    assert reduced_check(alter_rows(FAULTY_ROWS[fault]))


def test_a_mask_of_one_column_too_many() -> None:
    """For prefill and plain decoding too: a chain's row sees the slot behind it."""
    original = RequestRows.hidden_mask

    def generous(self: RequestRows, num_columns: int, first_column: int) -> np.ndarray:
        hidden = original(self, num_columns, first_column)
        hidden[:, min(self.context_len - first_column + self.num_slots, num_columns - 1)] = False
        return hidden

    assert reduced_check(lambda patch: patch.setattr(RequestRows, "hidden_mask", generous))


# --- faults in the cache


def alter_commit(change: Callable[[list[int], list[np.ndarray]], tuple[list[int], list[np.ndarray]]]) -> Any:
    """Change (context_lens, paths) of the target's commits."""
    original = KVCache.commit

    def altered(self: KVCache, pool: int, pages: Any, lens: list[int], paths: list[np.ndarray]) -> None:
        original(self, pool, pages, *(change(list(lens), list(paths)) if pool == 0 else (lens, paths)))

    return lambda patch: patch.setattr(KVCache, "commit", altered)


def shifted(path: np.ndarray) -> np.ndarray:
    return path + (np.arange(len(path)) > 0)


FAULTY_COMMITS: dict[str, Callable[[list[int], list[np.ndarray]], tuple[list[int], list[np.ndarray]]]] = {
    "a stale slot: nothing is moved": lambda lens, paths: (lens, [path[:0] for path in paths]),
    "the path off by one": lambda lens, paths: (lens, [shifted(path) for path in paths]),
    "the context off by one": lambda lens, paths: ([n - 1 for n in lens], paths),
    "the last slot is left out": lambda lens, paths: (lens, [path[:-1] for path in paths]),
    "another request's path": lambda lens, paths: (lens, [*paths[1:], *paths[:1]]),
}


@pytest.mark.parametrize("fault", FAULTY_COMMITS)
def test_faulty_commits(fault: str) -> None:
    assert reduced_check(alter_commit(FAULTY_COMMITS[fault]))


def test_a_draft_cache_that_is_not_compacted() -> None:
    """It changes no token, so its own guard has to see it."""
    original = KVCache.commit

    def target_only(self: KVCache, pool: int, *rest: Any) -> None:
        if pool == 0:
            original(self, pool, *rest)

    with Patch.context() as patch:
        patch.setattr(KVCache, "commit", target_only)
        with pytest.raises(AssertionError):
            test_drafts.test_a_draft_that_is_the_target_loses_nothing(1, 4, torch.float32)
        with pytest.raises(AssertionError):
            test_drafts.test_a_tree_does_not_depend_on_the_rounds_before(test_drafts.SSMS_321)


def test_a_draft_cache_that_counts_one_position_too_many() -> None:
    original = SsmDrafter.commit

    def greedy_count(self: SsmDrafter, requests: Any, paths: Any) -> None:
        original(self, requests, paths)
        for request in requests:
            if request.request_id in self._states:
                self._states[request.request_id].valid += 1

    with Patch.context() as patch:
        patch.setattr(SsmDrafter, "commit", greedy_count)
        with pytest.raises(AssertionError):
            test_drafts.test_a_tree_does_not_depend_on_the_rounds_before(test_drafts.SSMS_321)


# --- faults in verification


def wrong_sibling(tree: TokenTree, choices: np.ndarray) -> Verified:
    """Takes a sibling of the last accepted node."""
    path, bonus = verify_greedy(tree, choices)
    siblings = np.flatnonzero(tree.parents == tree.parents[path[-1]])
    if len(siblings) == 1:
        return Verified(path, bonus)
    other = int(siblings[siblings != path[-1]][0])
    return Verified(np.append(path[:-1], other), int(choices[other]))


def late_bonus(tree: TokenTree, choices: np.ndarray) -> Verified:
    path, _ = verify_greedy(tree, choices)
    return Verified(path, int(choices[path[max(len(path) - 2, 0)]]))


def short_path(tree: TokenTree, choices: np.ndarray) -> Verified:
    """Keeps the bonus token and loses the node before it."""
    path, bonus = verify_greedy(tree, choices)
    return Verified(path[:-1], bonus) if len(path) > 1 else Verified(path, bonus)


@pytest.mark.parametrize("fault", [wrong_sibling, late_bonus, short_path], ids=lambda f: f.__name__)
def test_faulty_verification(fault: Callable[[TokenTree, np.ndarray], Verified]) -> None:
    assert reduced_check(lambda patch: patch.setattr(host_executor, "verify_greedy", fault))


# --- faults in the merge


def lossy_merge(trees: Sequence[TokenTree], *rest: Any) -> TokenTree:
    """A token that two sources drew keeps the first draw only."""
    merged = merge(trees, *rest)
    draws = merged.draws
    _, first = np.unique(draws.children, return_index=True)
    first = np.sort(first)
    kept = dataclasses.replace(
        draws, **{name: getattr(draws, name)[first] for name in ("parents", "children", "sources", "probs")}
    )
    return dataclasses.replace(merged, draws=kept)


def by_token(trees: Sequence[TokenTree], *rest: Any) -> TokenTree:
    """Equal tokens of one depth become one node, whatever their parents."""
    merged = merge(trees, *rest)
    seen: set[tuple[int, int]] = set()
    keep: list[int] = []
    for node in range(len(merged)):
        key = (int(merged.depths[node]), int(merged.tokens[node]))
        if key not in seen and (node == 0 or int(merged.parents[node]) in keep):
            seen.add(key)
            keep.append(node)
    return merged.keep(np.array(keep))


def in_reverse(trees: Sequence[TokenTree], *rest: Any) -> TokenTree:
    """The draws of the last tree first."""
    return merge(trees[::-1], *rest)


A = test_tree.build([(1,), (1, 2)], [0.5, 0.4], [((1,), "a", 0.5), ((1, 2), "a", 0.4)], ("a",))
B = test_tree.build([(3,), (1,), (3, 2)], [0.6, 0.3, 0.1], [(p, "b", 0.3) for p in ((1,), (3,), (3, 2))], ("b",))


@pytest.mark.parametrize(
    "fault, guards",
    [
        (None, []),
        (lossy_merge, ["test_merge_keeps_every_draw_in_order"]),
        (by_token, ["test_merge_keeps_every_draw_in_order", "test_merge_is_the_union_of_paths"]),
        (in_reverse, ["test_merge_keeps_every_draw_in_order"]),
    ],
    ids=["none", "a dropped draw", "by token instead of by path", "another draw order"],
)
def test_faulty_merges(fault: Any, guards: list[str]) -> None:
    with Patch.context() as patch:
        patch.setattr(test_tree, "merge", fault or merge)
        for name in ("test_merge_keeps_every_draw_in_order", "test_merge_is_the_union_of_paths"):
            guard = getattr(test_tree, name).hypothesis.inner_test  # on this one example
            if name in guards:
                with pytest.raises((AssertionError, KeyError)):
                    guard([A, B])
            else:
                guard([A, B])


# --- faults in the arithmetic: the engine's own self-test has to see them


def faulty_engine(plant: Callable[[Patch], None]) -> LLM:
    with Patch.context() as patch:
        plant(patch)
        linear = "onednn" if onednn_available(torch.float32) else "torch"  # asked for: nothing else is tried
        return open_llm(tiny()[0], prove=True, attention="cpu-packed", linear=linear)


def bits_by_rows(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A matrix product whose last bit depends on how many rows there are."""

    def product(self: Linear, x: Tensor, *rest: Any) -> Tensor:
        y = original(self, x, *rest)
        return y * (1 + 2**-22) if len(x) % 3 == 1 else y

    return product


def wrong_tiles(q: Tensor, *rest: Any) -> Tensor:
    """Attention whose sums depend on the number of rows."""
    out = tree_attention_cpu.tree_attention_cpu(q, *rest)
    return out * (1 + 2**-22) if len(q) > 8 else out


def test_the_self_test_refuses_what_is_not_exact() -> None:
    assert faulty_engine(lambda patch: None).config.exact
    for name in ("__call__", "activated"):
        with pytest.raises(ExactnessError, match="plain decoding"):
            faulty_engine(lambda patch, name=name: patch.setattr(Linear, name, bits_by_rows(getattr(Linear, name))))
    with pytest.raises(ExactnessError, match="plain decoding"):
        faulty_engine(lambda patch: patch.setattr("treespec.models.attention.tree_attention_cpu", wrong_tiles))
    with pytest.raises(ExactnessError, match="plain decoding"):
        faulty_engine(
            lambda patch: patch.setattr(
                Decoder, "logits", lambda self, hidden, rows=None, f=Decoder.logits: f(self, hidden, rows) * len(hidden)
            )
        )


def test_a_faulty_product_is_seen_from_outside_too() -> None:
    assert reduced_check(lambda patch: patch.setattr(Linear, "activated", bits_by_rows(Linear.activated)))


def test_the_check_sees_a_missing_row() -> None:
    """A run that scored fewer prefixes than plain decoding is no proof."""
    llm = open_llm(tiny()[0])
    plain = run(llm, random_prompts((9,)), greedy(5))
    assert not differences(plain, plain)
    fewer = Run(plain.prompts, plain.outputs, dict(list(plain.logits.items())[1:]), [])
    assert differences(plain, fewer)
