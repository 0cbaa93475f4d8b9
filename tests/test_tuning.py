"""The sweep over kernel configurations: its cases in Triton's interpreter."""

import pytest

from tests.child import run_cases


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_cases("tuning_cases.py", {"TRITON_INTERPRET": "1"})
