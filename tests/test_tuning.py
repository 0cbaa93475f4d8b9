"""The sweep over kernel configurations: its cases in Triton's interpreter."""

import pytest

from tests.child import run_cases


@pytest.mark.parametrize("cases", ["tuning_cases.py", "quantized_tuning_cases.py"])
def test_in_the_interpreter(cases: str) -> None:
    pytest.importorskip("triton")
    run_cases(cases, {"TRITON_INTERPRET": "1"})
