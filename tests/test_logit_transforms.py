"""Logit transforms: the cases of each implementation."""

from tests.child import run_cases
from tests.kernel_cases import environments


@environments("TREESPEC_LOGIT_TRANSFORMS")
def test_cases(environment: dict[str, str]) -> None:
    run_cases("logit_transforms_cases.py", environment)
