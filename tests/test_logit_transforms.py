"""Logit transforms: what is refused, and the cases of each implementation."""

from typing import Any

import pytest
import torch

from tests.child import run_cases
from tests.kernel_cases import environments
from treespec_kernels.sampling.logit_transforms import TransformInputs, logit_transforms_ref, logit_transforms_triton


@environments("TREESPEC_LOGIT_TRANSFORMS")
def test_cases(environment: dict[str, str]) -> None:
    run_cases("logit_transforms_cases.py", environment)


LOGITS = torch.zeros(4, 7)
INPUTS = TransformInputs(
    torch.ones(2, 6),
    torch.zeros(2, 3, dtype=torch.int32),
    torch.zeros(2, 1, dtype=torch.int32),
    torch.zeros(4, dtype=torch.int64),
    torch.zeros(4, 2, dtype=torch.int32),
    torch.zeros(3, 7),
    torch.zeros(3, 7, dtype=torch.int32),
)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"numbers": torch.ones(3, 6)}, r"options has shape \[2, 3\]; expected \[requests 3, 3\]"),
    ({"counts": torch.zeros(3, 8, dtype=torch.int32)}, r"counts has shape \[3, 8\]; expected \[slots 3, vocab 7\]"),
    ({"counts": torch.zeros(2, 7, dtype=torch.int32)}, r"counts has shape \[2, 7\]; expected \[slots 3, vocab 7\]"),
    ({"biases": torch.zeros(7, 3).T}, "biases has strides"),
]


@pytest.mark.parametrize("transforms", [logit_transforms_ref, logit_transforms_triton])
@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_what_does_not_fit_is_refused(transforms: Any, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transforms(LOGITS, INPUTS._replace(**changed))
    with pytest.raises(ValueError, match="numbers has 2 requests, of which 3 rows of logits are no multiple"):
        transforms(LOGITS[:3], INPUTS._replace(positions=INPUTS.positions[:3], paths=INPUTS.paths[:3]))
