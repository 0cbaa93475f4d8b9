"""Whole rounds on a GPU that is simulated, and their launches compiled for one that is real."""

from pathlib import Path

import pytest

from tests.helpers.child import run_cases, uninterpreted_document


@pytest.mark.parametrize(
    ("names", "fewest"),
    [("simulated_rounds simulated_gpu", 31), pytest.param("simulated_models", 8, marks=pytest.mark.slow)],
)
def test_rounds_and_the_launches_that_they_made(names: str, fewest: int, tmp_path: Path) -> None:
    """Every kind of launch compiles as Triton specialises it: sizes of 1, types and alignment as the engine has."""
    launches = str(tmp_path / "launches")
    run_cases(names, TREESPEC_LAUNCHES=launches)
    compiled = f"from tests.simulated_gpu.compile import compile_all; compile_all({launches!r}, 'sm_90')"
    report = uninterpreted_document(compiled)
    assert report["failed"] == [] and report["compiled"] >= fewest
