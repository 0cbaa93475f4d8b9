"""RMSNorm: the cases of each implementation."""

from tests.child import run_cases
from tests.kernel_cases import environments


@environments("TREESPEC_RMS_NORM")
def test_cases(environment: dict[str, str]) -> None:
    run_cases("rms_norm_cases.py", environment)
