"""KV commit: each implementation against a list-of-lists model."""

from tests.child import run_cases
from tests.kernel_cases import environments


@environments("TREESPEC_KV_COMMIT", others=["ref", "cpu"])
def test_cases(environment: dict[str, str]) -> None:
    run_cases("kv_commit_cases.py", environment)
