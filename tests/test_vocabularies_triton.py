"""Drafts of other vocabularies on the Triton kernels."""

import pytest

from tests.child import run_cases


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_cases("vocabulary_cases.py", {"TRITON_INTERPRET": "1"})
