"""What the cases of kernels share: device, dtypes, bounds of errors, and passes of tree attention."""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from treespec_kernels.attention.tree_attention import (
    AttentionShape,
    TreeAttentionConfig,
    TreeAttentionPlan,
    plan_tree_attention,
)
from treespec_kernels.tuning.testing import TreeAttentionInputs, assert_close, tree_attention_inputs

IMPLEMENTATION = os.environ["TREESPEC_IMPLEMENTATION"]  # "triton", or one of the host
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if IMPLEMENTATION == "triton" and not INTERPRETED else "cpu"
DTYPES = [torch.float32, torch.float16] + (
    [] if INTERPRETED else [torch.bfloat16]
)  # which the interpreter computes wrongly
INF, NAN = float("inf"), float("nan")
# (max, rms) error relative to the RMS of the result, for one rounding to the dtype.
BOUNDS = {torch.float32: (1e-5, 1e-6), torch.float16: (1e-2, 1e-3), torch.bfloat16: (8e-2, 8e-3)}

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


def assert_near(
    actual: torch.Tensor, expected: torch.Tensor, bounds: dict[torch.dtype, tuple[float, float]] = BOUNDS
) -> None:
    max_error, rms_error = bounds[actual.dtype]
    assert_close(actual, expected, max_error=max_error, rms_error=rms_error)


def attention_inputs(
    lengths: Sequence[int],
    trees: Sequence[Sequence[int]],
    num_heads: int = 2,
    num_kv_heads: int = 1,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> TreeAttentionInputs:
    """`tree_attention_inputs` on the device, small where nothing else is said."""
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, dtype)
    return tree_attention_inputs(lengths, trees, shape, device=DEVICE, **options)


def poisoned_plan(inputs: TreeAttentionInputs, config: TreeAttentionConfig, **options: Any) -> TreeAttentionPlan:
    """The plan of a pass, with NaN in its buffers of partial results."""
    (_, num_heads, head_dim), dtype = inputs.q.shape, inputs.q.dtype
    shape = AttentionShape(num_heads, inputs.k_cache.shape[1], head_dim, dtype, inputs.rows.get("window"))
    plan = plan_tree_attention(**inputs.plan, shape=shape, device=inputs.q.device, config=config, **options)
    for partial in plan.partials:
        partial.fill_(NAN)
    return plan
