"""Windows and capped scores in the CPU's attention, and activations: equal bits in any company."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.exactness import threads
from tests.helpers.families import TYPICAL, VOCAB, make_model
from tests.helpers.models import greedy, open_llm, quick, random_prompts
from tests.kernels.test_tree_attention_cpu import Case, some_nodes
from tests.kernels.test_tree_attention_cpu import attend as attend_tree
from treespec.errors import ExactnessError
from treespec_kernels.attention import tree_attention_cpu as tree_attention_cpu_module
from treespec_kernels.attention.tree_attention_cpu import plan_tree_attention_cpu
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows
from treespec_kernels.linear.activations import ACTIVATIONS, soft_cap
from treespec_kernels.linear.linear import Linear, onednn_available
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
    """In a tree, in both modes, among some rows only, and alone; and they are the right ones."""
    for context, kind in CASES:
        case = Case.make(context, kind, (4, 2), 48, scattered=context % 2 == 0)
        packed, gathered = (attend(case.rows(), mode, case.q, case.cache(), window) for mode in ("packed", "gathered"))
        assert torch.equal(packed, gathered), (context, kind)
        for node in some_nodes(case):
            slots = case.compacted(node)
            alone = RequestRows.chain(len(slots) - 1, 1, case.pages)
            for mode in ("packed", "gathered"):
                row = attend(alone, mode, case.q[node : node + 1], case.cache(slots), window)
                assert torch.equal(packed[node], row[0]), (context, kind, node, mode)
            assert_close(packed[node], reference(case, node, window), max_error=2e-5, rms_error=2e-6)
        deepest = np.flatnonzero(case.depths == case.depths.max())
        part = attend(case.rows(deepest), "packed", case.q[deepest], case.cache(), window)
        assert torch.equal(part, packed[deepest])


@pytest.mark.parametrize("count", quick((1, 2), (2,)))
@pytest.mark.parametrize("window", [17, 64, 130])
def test_chunks_of_a_prompt_have_equal_bits(window: int, count: int) -> None:
    case = Case.make(0, "chain-700", (8, 2), 32)
    cache = case.cache()
    with threads(count):
        whole = attend(RequestRows.chain(0, 700, case.pages), "packed", case.q, cache, window)
        for chunk in (1, 7, 64, 300):
            for start in range(0, 700, chunk) if chunk > 7 else (0, 16, 17, 63, 64, 130, 511, 640, 693):
                rows = RequestRows.chain(start, min(chunk, 700 - start), case.pages)
                part = attend(rows, "packed", case.q[start : start + rows.num_rows], cache, window)
                assert torch.equal(part, whole[start : start + rows.num_rows]), (chunk, start)
    for row in (0, 16, 17, 300, 699):
        assert_close(whole[row], reference(case, row, window), max_error=2e-5, rms_error=2e-6)


def sum_by_index(parts: Tensor, windowed: bool, total: Tensor) -> None:
    torch.sum(parts, 0, out=total)


@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "tiles grouped by index"])
def test_many_tiles_in_a_window(fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch sums 16 tiles at a time: a window that begins elsewhere beside other rows would change bits."""
    if fault:
        monkeypatch.setattr(tree_attention_cpu_module, "add_tiles", sum_by_index)
    case = Case.make(0, "chain-1500", (4, 2), 16)
    cache, equal = case.cache(), []
    whole = attend(RequestRows.chain(1150, 350, case.pages), "packed", case.q[1150:], cache, 1100)
    for row in (1150, 1200, 1300, 1400, 1499):
        for mode in ("packed", "gathered"):
            alone = attend(RequestRows.chain(row, 1, case.pages), mode, case.q[row : row + 1], cache, 1100)
            equal.append(torch.equal(alone[0], whole[row - 1150]))
    assert all(equal) != fault


def test_a_window_bounds_the_work() -> None:
    """Tiles that a block reads, whatever the context is."""
    pages = np.arange(1, 200)
    parents = np.array([-1, 0, 0, 1])
    depths, visible = np.array([0, 1, 1, 2]), np.eye(4, dtype=bool) | (np.arange(4) == 0)[None]
    visible[3, 1] = True
    for context in (500, 5000, 12000):
        tree = RequestRows(context, np.arange(len(parents)), depths, visible, depths, pages)
        for rows in (tree, RequestRows.chain(context, 1, pages)):
            (block,) = plan_tree_attention_cpu([rows], 4, "packed", 100).blocks
            assert block.num_full + block.num_tail <= 100 // PAGE_SIZE + 2  # type: ignore[union-attr]
            (block,) = plan_tree_attention_cpu([rows], 4, "gathered", 100).blocks
            assert block.slots.shape[1] <= (100 // PAGE_SIZE + 2) * PAGE_SIZE  # type: ignore[union-attr]


@pytest.mark.parametrize("count", quick((1, 3), (3,)))
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_has_equal_bits_for_any_number_of_rows(name: str, count: int) -> None:
    """At widths that are no multiple of a vector, where ATen's own differ; and after products of both kinds."""
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
        for dtype in (torch.float32, torch.bfloat16):
            if not onednn_available(dtype):
                continue
            for width in (173, 1365):
                weight, bias = torch.randn(width, 48, generator=generator) / 4, torch.randn(width, generator=generator)
                layer = Linear(weight.to(dtype), bias.to(dtype), "onednn")
                x = torch.randn(40, 48, generator=generator).to(dtype)
                whole = layer.activated(x, name)
                wanted = exact(x.double() @ weight.to(dtype).double().T + bias.to(dtype).double())
                error = 1e-5 if dtype == torch.float32 else 1e-2
                assert_close(whole.float(), wanted.float(), max_error=10 * error, rms_error=error)
                for start, rows in ((3, 2), (5, 7), (1, 16), (0, 33)):
                    assert torch.equal(
                        layer.activated(x[start : start + rows].clone(), name), whole[start : start + rows]
                    )


def test_capped_logits_have_equal_bits_for_any_number_of_rows() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = 20 * torch.randn(33, 509, generator=torch.Generator().manual_seed(0)).to(dtype)
        whole = soft_cap(logits, 30.0)
        for start, rows in ((0, 1), (1, 1), (3, 2), (5, 7), (16, 16)):
            assert torch.equal(soft_cap(logits[start : start + rows].clone(), 30.0), whole[start : start + rows])


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["cpu-packed", "cpu-gathered"])
@pytest.mark.parametrize("options", [{}, {"linear": "torch"}], ids=["onednn", "torch"])
def test_the_self_test_passes_for_windows_and_caps(attention: str, options: dict[str, str], tmp_path: Path) -> None:
    """Whichever way products are computed; and both kinds of layers are tested."""
    folder = make_model(tmp_path / "model", TYPICAL["gemma2"], 3)
    llm = open_llm(folder, prove=True, attention=attention, max_model_len=200, **options)
    (prompt,) = random_prompts((30,), vocab=VOCAB)
    assert len(llm.generate(prompt, greedy(4))[0].outputs[0].token_ids) == 4


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
