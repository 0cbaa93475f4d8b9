"""QKV and RoPE: the cases of each implementation, and the CPU's decoder as their witness."""

from tests.child import run_cases
from tests.kernel_cases import environments


@environments("TREESPEC_QKV_ROPE", "TREESPEC_DECODER_OPS")
def test_cases(environment: dict[str, str]) -> None:
    run_cases(["qkv_rope_cases.py", "decoder_ops_cases.py"], environment)
