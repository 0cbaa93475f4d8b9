"""Row top-k: what is refused, and the cases of each implementation."""

import pytest
import torch

from tests.child import run_cases
from treespec_kernels.linear.lm_head import BlockStats
from treespec_kernels.sampling.row_topk import row_topk_ref, row_topk_triton

CASES = "row_topk_cases.py"
NUMBERS = torch.zeros(2, dtype=torch.int64)
NOISE = {"temperatures": torch.ones(2), "seeds": NUMBERS, "samples": NUMBERS, "positions": NUMBERS}


def test_ref() -> None:
    run_cases(CASES, {"TREESPEC_ROW_TOPK": "ref"})


def test_triton_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, {"TREESPEC_ROW_TOPK": "triton", "TRITON_INTERPRET": "1"})


@pytest.mark.gpu
def test_triton_on_a_gpu() -> None:
    run_cases(CASES, {"TREESPEC_ROW_TOPK": "triton", "TRITON_INTERPRET": "0"})


@pytest.mark.parametrize("row_topk", [row_topk_ref, row_topk_triton])
def test_what_does_not_fit_is_refused(row_topk: object) -> None:
    assert callable(row_topk)
    logits = torch.zeros(2, 5)
    for k in (0, 6, -1):
        with pytest.raises(ValueError, match=f"k is {k}; it must be 1 to 16 and at most the vocabulary's 5"):
            row_topk(logits, k)
    with pytest.raises(ValueError, match="k is 17; it must be 1 to 16"):
        row_topk(torch.zeros(2, 100), 17)
    with pytest.raises(ValueError, match=r"logits has shape \[5\]; expected \[rows, vocab\]"):
        row_topk(logits[0], 1)
    with pytest.raises(ValueError, match=r"logits has dtype torch\.int32; convert it to torch\.float32"):
        row_topk(logits.int(), 1)
    with pytest.raises(ValueError, match="samples, positions must be given too"):
        row_topk(logits, 1, **NOISE | {"samples": None, "positions": None})
    with pytest.raises(ValueError, match="temperatures must be given too"):
        row_topk(logits, 1, **NOISE | {"temperatures": None})
    with pytest.raises(ValueError, match=r"seeds has dtype torch\.int32; convert it to torch\.int64"):
        row_topk(logits, 1, **NOISE | {"seeds": NUMBERS.int()})


def test_triton_refuses_strides_blocks_and_summaries() -> None:
    logits = torch.zeros(2, 100)
    with pytest.raises(ValueError, match="logits has stride 2 over its last dimension"):
        row_topk_triton(logits[:, ::2], 1)
    for block in (0, 8, 48, 2048):
        with pytest.raises(ValueError, match=f"block is {block}; it must be a power of two from 16 to 1024"):
            row_topk_triton(logits, 1, block=block)
    with pytest.raises(ValueError, match="pass either stats or temperatures"):
        row_topk_triton(logits, 1, stats=BlockStats.empty(2, 1, "cpu"), **NOISE)
    with pytest.raises(
        ValueError, match="stats has 3 blocks, which no block size from 16 to 1024 gives for 100 tokens"
    ):
        row_topk_triton(logits, 1, stats=BlockStats.empty(2, 3, "cpu"))
    with pytest.raises(ValueError, match=r"stats\.values is \[2, 4\] .* expected \[2, 7\]"):
        row_topk_triton(logits, 1, stats=BlockStats.empty(2, 4, "cpu"), block=16)
    with pytest.raises(ValueError, match=r"stats\.values is \[3, 4\] .* expected \[2, 4\]"):
        row_topk_triton(logits, 1, stats=BlockStats.empty(3, 4, "cpu"))
