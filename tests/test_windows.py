"""Windows and capped scores in the CPU's attention, and activations: equal bits in any company."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.exactness import threads
from tests.families import TYPICAL, VOCAB, make_model
from tests.models import greedy, open_llm, random_prompts
from tests.test_tree_attention_cpu import Case, some_nodes
from tests.test_tree_attention_cpu import attend as attend_tree
from treespec.errors import ExactnessError
from treespec_kernels.attention.tree_attention_cpu import plan_tree_attention_cpu, tree_attention_cpu
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows
from treespec_kernels.linear.activations import ACTIVATIONS, soft_cap
from treespec_kernels.tuning.testing import assert_close, path_to

CAP = 1.5
WINDOWS = (1, 2, 17, 63, 64, 65, 130, 700)
CASES = ((0, "random-16"), (1, "deep-33"), (62, "star-9"), (63, "random-64"), (127, "deep-100"), (190, "chain-16"))
attend = functools.partial(attend_tree, cap=CAP)


def reference(case: Case, node: int, window: int) -> Tensor:
    """One row's attention in float64: the last `window` positions of its path."""
    slots = np.concatenate([np.arange(case.context_len), case.context_len + np.array(path_to(case.parents, node))])
    seen = slots[-window:]
    group = case.q.shape[1] // case.keys.shape[1]
    keys, values = (part[seen].double().repeat_interleave(group, 1) for part in (case.keys, case.values))
    scores = torch.einsum("hd,nhd->hn", case.q[node].double(), keys) * case.q.shape[2] ** -0.5
    scores = CAP * torch.tanh(scores / CAP)
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), values).float()


@pytest.mark.parametrize("window", WINDOWS)
def test_a_node_has_the_bits_of_plain_decoding(window: int) -> None:
    """In a tree, among some rows only, and alone; and they are the right ones."""
    for context, kind in CASES:
        case = Case.make(context, kind, (4, 2), 48, scattered=context % 2 == 0)
        tree = attend(case.rows(), case.q, case.cache(), window)
        for node in some_nodes(case):
            slots = case.compacted(node)
            alone = RequestRows.chain(len(slots) - 1, 1, case.pages)
            row = attend(alone, case.q[node : node + 1], case.cache(slots), window)
            assert torch.equal(tree[node], row[0]), (context, kind, node)
            assert_close(tree[node], reference(case, node, window), max_error=2e-5, rms_error=2e-6)
        deepest = np.flatnonzero(case.depths == case.depths.max())
        part = attend(case.rows(deepest), case.q[deepest], case.cache(), window)
        assert torch.equal(part, tree[deepest])


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("window", [17, 64, 130])
def test_chunks_of_a_prompt_have_equal_bits(window: int, count: int) -> None:
    case = Case.make(0, "chain-700", (8, 2), 32)
    cache = case.cache()
    with threads(count):
        whole = attend(RequestRows.chain(0, 700, case.pages), case.q, cache, window)
        for chunk in (1, 7, 64, 300):
            for start in range(0, 700, chunk) if chunk > 7 else (0, 16, 17, 63, 64, 130, 511, 640, 693):
                rows = RequestRows.chain(start, min(chunk, 700 - start), case.pages)
                part = attend(rows, case.q[start : start + rows.num_rows], cache, window)
                assert torch.equal(part, whole[start : start + rows.num_rows]), (chunk, start)
    for row in (0, 16, 17, 300, 699):
        assert_close(whole[row], reference(case, row, window), max_error=2e-5, rms_error=2e-6)


def test_a_window_bounds_the_work() -> None:
    """Keys that are read, whatever the context is."""
    pages = np.arange(1, 200)
    parents = np.array([-1, 0, 0, 1])
    depths, visible = np.array([0, 1, 1, 2]), np.eye(4, dtype=bool) | (np.arange(4) == 0)[None]
    visible[3, 1] = True
    for context in (500, 5000, 12000):
        tree = RequestRows(context, np.arange(len(parents)), depths, visible, depths, pages)
        for rows in (tree, RequestRows.chain(context, 1, pages)):
            for batch in plan_tree_attention_cpu([rows], 100):
                assert batch.pages.shape[-1] <= (100 // PAGE_SIZE + 2) * PAGE_SIZE


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_has_equal_bits_for_any_number_of_rows(name: str, count: int) -> None:
    """At widths that are no multiple of a vector, where ATen's own differ."""
    function = ACTIVATIONS[name]
    exact = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "relu": torch.relu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }[name]
    generator = torch.Generator().manual_seed(0)
    with threads(count):
        for width in (1, 3, 7, 173, 509, 1365, 2730):
            x = 3 * torch.randn(40, width, generator=generator)
            whole = function(x)
            assert_close(whole, exact(x.double()).float(), max_error=2e-5, rms_error=2e-6)
            for start, rows in ((0, 1), (1, 1), (3, 2), (5, 7), (1, 16), (0, 33)):
                assert torch.equal(function(x[start : start + rows].clone()), whole[start : start + rows])


def test_capped_logits_have_equal_bits_for_any_number_of_rows() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = 20 * torch.randn(33, 509, generator=torch.Generator().manual_seed(0)).to(dtype)
        whole = soft_cap(logits, 30.0)
        for start, rows in ((0, 1), (1, 1), (3, 2), (5, 7), (16, 16)):
            assert torch.equal(soft_cap(logits[start : start + rows].clone(), 30.0), whole[start : start + rows])


@pytest.mark.slow
def test_the_self_test_passes_for_windows_and_caps(tmp_path: Path) -> None:
    """Both kinds of layers are tested."""
    folder = make_model(tmp_path / "model", TYPICAL["gemma2"], 3)
    llm = open_llm(folder, prove=True, max_model_len=200)
    (prompt,) = random_prompts((30,), vocab=VOCAB)
    assert len(llm.generate(prompt, greedy(4))[0].outputs[0].token_ids) == 4


@pytest.mark.slow
def test_the_self_test_refuses_windows_that_are_not_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in layers with a window alone, the first of which is the second layer."""
    folder = make_model(tmp_path / "model", TYPICAL["qwen2"], 3)

    def by_company(*args: Any) -> Tensor:
        out = tree_attention_cpu(*args)
        begins = {batch.pages.shape[-1] for batch in args[3]}
        return out * (1 + 2**-20) if args[3][0].hidden[..., 0].any() and len(begins) > 1 else out

    monkeypatch.setattr("treespec.models.attention.tree_attention_cpu", by_company)
    with pytest.raises(ExactnessError, match="plain decoding"):
        open_llm(folder, prove=True, max_model_len=200)
