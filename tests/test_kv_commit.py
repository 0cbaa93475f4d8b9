"""KV commit: each implementation against a list-of-lists model, and what is refused."""

from typing import Any

import pytest
import torch

from tests.child import run_cases
from tests.kernel_cases import environments
from treespec_kernels.attention.kv_commit import kv_commit_ref, kv_commit_triton
from treespec_kernels.tuning.testing import kv_commit_inputs


@environments("TREESPEC_KV_COMMIT", others=["ref", "cpu"])
def test_cases(environment: dict[str, str]) -> None:
    run_cases("kv_commit_cases.py", environment)


FITTING = vars(kv_commit_inputs([3, 4], [[0, 2], [0]]))


@pytest.mark.parametrize("kv_commit", [kv_commit_ref, kv_commit_triton])
@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("kv_cache", FITTING["kv_cache"][0], r"kv_cache has shape .*; expected \[num_layers, 2, num_pages"),
        ("page_table", FITTING["page_table"][0], r"page_table has shape .*; expected \[num_requests, max_pages\]"),
        ("context_lens", FITTING["context_lens"][:1], r"context_lens has shape \[1\]; expected \[2\]"),
        ("paths", FITTING["paths"][:1], r"paths has shape \[1, .*\]; expected \[2, max_path\]"),
        ("path_lens", FITTING["path_lens"].long(), r"path_lens has dtype torch\.int64; convert it to torch.int32"),
    ],
)
def test_what_does_not_fit_is_refused(kv_commit: Any, name: str, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kv_commit(**(FITTING | {name: tensor}))
