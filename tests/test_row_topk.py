"""Row top-k: the cases of each implementation."""

from tests.child import run_cases
from tests.kernel_cases import environments


@environments("TREESPEC_ROW_TOPK")
def test_cases(environment: dict[str, str]) -> None:
    run_cases("row_topk_cases.py", environment)
