"""The implementations that the cases of a kernel run with: Triton's is interpreted, or runs on a GPU."""

import importlib.util
from collections.abc import Sequence

import pytest

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def environments(*variables: str, others: Sequence[str] = ("ref",)) -> pytest.MarkDecorator:
    """Parametrizes `environment`, the variables that `run_cases` sets.

    Args:
        variables: those by which the cases choose an implementation; without any, Triton's is the only one.
        others: the implementations besides Triton's, which run on the CPU.
    """
    triton = dict.fromkeys(variables, "triton")
    cases = [pytest.param(dict.fromkeys(variables, other), id=other) for other in others if variables]
    cases.append(pytest.param(triton | {"TRITON_INTERPRET": "1"}, id="interpreter", marks=needs_triton))
    cases.append(pytest.param(triton | {"TRITON_INTERPRET": "0"}, id="gpu", marks=pytest.mark.gpu))
    return pytest.mark.parametrize("environment", cases)
