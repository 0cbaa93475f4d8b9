"""KV commit: each implementation against a list-of-lists model, and what is refused."""

import pytest
import torch

from tests.child import run_cases
from treespec_kernels.attention.kv_commit import kv_commit_ref, kv_commit_triton
from treespec_kernels.tuning.testing import kv_commit_inputs

CASES = "kv_commit_cases.py"


@pytest.mark.parametrize("implementation", ["ref", "cpu"])
def test_on_the_cpu(implementation: str) -> None:
    run_cases(CASES, {"TREESPEC_KV_COMMIT": implementation})


def test_triton_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, {"TREESPEC_KV_COMMIT": "triton", "TRITON_INTERPRET": "1"})


@pytest.mark.gpu
def test_triton_on_a_gpu() -> None:
    run_cases(CASES, {"TREESPEC_KV_COMMIT": "triton", "TRITON_INTERPRET": "0"})


@pytest.mark.parametrize("kv_commit", [kv_commit_ref, kv_commit_triton])
def test_what_does_not_fit_is_refused(kv_commit: object) -> None:
    assert callable(kv_commit)
    inputs = kv_commit_inputs([3, 4], [[0, 2], [0]])
    tables = [inputs.page_table, inputs.context_lens, inputs.paths, inputs.path_lens]

    def commit(position: int, tensor: torch.Tensor) -> None:
        kv_commit(*[tensor if i == position else t for i, t in enumerate([inputs.kv_cache, *tables])])

    with pytest.raises(ValueError, match=r"kv_cache has shape .*; expected \[num_layers, 2, num_pages"):
        commit(0, inputs.kv_cache[0])
    with pytest.raises(ValueError, match=r"page_table has shape .*; expected \[num_requests, max_pages\]"):
        commit(1, inputs.page_table[0])
    with pytest.raises(ValueError, match=r"context_lens has shape \[1\]; expected \[2\]"):
        commit(2, inputs.context_lens[:1])
    with pytest.raises(ValueError, match=r"paths has shape \[1, .*\]; expected \[2, max_path\]"):
        commit(3, inputs.paths[:1])
    with pytest.raises(ValueError, match=r"path_lens has dtype torch\.int64; convert it to torch.int32"):
        commit(4, inputs.path_lens.long())
