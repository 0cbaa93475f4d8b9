"""Row top-k: what is refused, and the cases of each implementation."""

from typing import Any

import pytest
import torch

from tests.child import run_cases
from tests.kernel_cases import environments
from treespec_kernels.linear.lm_head import BlockStats
from treespec_kernels.sampling.row_topk import row_topk_ref, row_topk_triton

NUMBERS = torch.zeros(2, dtype=torch.int64)
NOISE = {"temperatures": torch.ones(2), "seeds": NUMBERS, "samples": NUMBERS, "positions": NUMBERS}


@environments("TREESPEC_ROW_TOPK")
def test_cases(environment: dict[str, str]) -> None:
    run_cases("row_topk_cases.py", environment)


LOGITS = torch.zeros(2, 5)
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"k": k}, f"k is {k}; it must be 1 to 16 and at most the vocabulary's 5") for k in (0, 6, -1)),
    ({"logits": torch.zeros(2, 100), "k": 17}, "k is 17; it must be 1 to 16"),
    (NOISE | {"samples": None, "positions": None}, "samples, positions must be given too"),
    (NOISE | {"temperatures": None}, "temperatures must be given too"),
]

WIDE = torch.zeros(2, 100)
REFUSED_BY_TRITON: list[tuple[dict[str, Any], str]] = [
    ({"logits": WIDE[:, ::2]}, "logits has stride 2 over its last dimension"),
    *(({"block": n}, f"block is {n}; it must be a power of two from 16 to 1024") for n in (0, 8, 48, 2048)),
    (NOISE | {"stats": BlockStats.empty(2, 1, "cpu")}, "pass either stats or temperatures"),
    (
        {"stats": BlockStats.empty(2, 3, "cpu")},
        "stats has 3 blocks, which no block size from 16 to 1024 gives for 100 tokens",
    ),
    (
        {"stats": BlockStats.empty(2, 4, "cpu"), "block": 16},
        r"values has shape \[2, 4\]; .*, num_blocks 7",
    ),
    ({"stats": BlockStats.empty(3, 4, "cpu")}, r"values has shape \[3, 4\]; expected \[rows 2, num_blocks 4\]"),
]


@pytest.mark.parametrize("row_topk", [row_topk_ref, row_topk_triton])
@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_does_not_fit_is_refused(row_topk: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        row_topk(**({"logits": LOGITS, "k": 1} | arguments))


@pytest.mark.parametrize(("arguments", "message"), REFUSED_BY_TRITON)
def test_triton_refuses_strides_blocks_and_summaries(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        row_topk_triton(**({"logits": WIDE, "k": 1} | arguments))
