"""Tree walk: each implementation against `verify_greedy`, and a whole round of the batch."""

from tests.child import run_cases
from tests.kernel_cases import environments


@environments("TREESPEC_TREE_WALK")
def test_cases(environment: dict[str, str]) -> None:
    run_cases(["tree_walk_cases.py", "tree_round_cases.py"], environment)
