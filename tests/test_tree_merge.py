"""Tree merge and tree root: each implementation against a dictionary of paths."""

from tests.child import run_cases
from tests.kernel_cases import environments


@environments("TREESPEC_TREE_MERGE")
def test_cases(environment: dict[str, str]) -> None:
    run_cases("tree_merge_cases.py", environment)
