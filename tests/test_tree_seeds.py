"""Tree seeds: the cases of each implementation."""

import pytest

from tests.child import run_cases

CASES = "tree_seeds_cases.py"


def test_ref() -> None:
    run_cases(CASES, {"TREESPEC_TREE_SEEDS": "ref"})


def test_triton_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, {"TREESPEC_TREE_SEEDS": "triton", "TRITON_INTERPRET": "1"})


@pytest.mark.gpu
def test_triton_on_a_gpu() -> None:
    run_cases(CASES, {"TREESPEC_TREE_SEEDS": "triton", "TRITON_INTERPRET": "0"})
