"""The engine on the Triton kernels, in the interpreter."""

import pytest

from tests.child import run_cases


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_cases("engine_cases.py", {"TRITON_INTERPRET": "1"})
