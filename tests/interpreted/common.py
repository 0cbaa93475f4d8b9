"""What the cases of kernels share: device, dtypes, bounds of errors, and passes of tree attention."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from treespec_kernels.attention.tree_attention import (
    AttentionShape,
    TreeAttentionConfig,
    TreeAttentionPlan,
    plan_tree_attention,
)
from treespec_kernels.comparison import assert_close, same_bits
from treespec_kernels.ops import OPS
from treespec_kernels.ops.op import Case, Inputs, equal, mapped, named_tensors
from treespec_kernels.ops.shapes import KernelShape, Setting
from treespec_kernels.tuning.testing import TreeAttentionInputs, tree_attention_inputs

IMPLEMENTATION = os.environ["TREESPEC_IMPLEMENTATION"]  # "triton", or one of the host
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if IMPLEMENTATION == "triton" and not INTERPRETED else "cpu"
DTYPES = [torch.float32, torch.float16] + (
    [] if INTERPRETED else [torch.bfloat16]
)  # which the interpreter computes wrongly
INF, NAN = float("inf"), float("nan")
# (max, rms) error relative to the RMS of the result, for one rounding to the dtype.
BOUNDS = {torch.float32: (1e-5, 1e-6), torch.float16: (1e-2, 1e-3), torch.bfloat16: (8e-2, 8e-3)}

LLAMA = KernelShape(torch.float32, 16, 4, 2, 32, 48, 100)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
in_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="about the interpreter")
on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


def normal(seed: int) -> Callable[..., torch.Tensor]:
    """Draws normally distributed numbers: of a shape, and of a dtype if that is named."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    return draw


def amid_nan(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with NaN before and behind it that starts at a multiple of 16 bytes; integers and views as they are."""
    if not tensor.is_floating_point() or not tensor.is_contiguous():
        return tensor
    flat = tensor.new_full((tensor.numel() + 128,), NAN)
    return flat[64 : 64 + tensor.numel()].view(tensor.shape).copy_(tensor)


def view_amid_nan(tensor: torch.Tensor, columns: tuple[int, int] = (16, 8), rows: int = 0) -> torch.Tensor:
    """A copy in a larger tensor of NaN: that many columns before and behind it, and rows behind it."""
    wide = torch.nn.functional.pad(tensor, (*columns, 0, rows), value=NAN)
    return wide[..., : tensor.shape[-2], columns[0] : columns[0] + tensor.shape[-1]]


def split_sums(draw: Callable[..., torch.Tensor], splits: int | None, *size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows in the dtype, or float32 partial sums of them in a larger buffer."""
    if splits is None:
        return draw(*size, dtype=dtype)
    return view_amid_nan(draw(splits, *size), (0, 0), rows=5)


def by_row(parameter: torch.Tensor, rows: int) -> torch.Tensor:
    """float64 [rows, width], of a parameter of all rows or of those of each group."""
    stacked = parameter.double().view(-1, parameter.shape[-1])
    return stacked.repeat_interleave(rows // len(stacked), 0)


def check(
    op: str,
    arguments: dict[str, Any],
    config: Any = None,
    *,
    num_rows: int = 1,
    bounds: dict[torch.dtype, tuple[float, float]] = BOUNDS,
    equal_bits: tuple[str, ...] = (),
    grouped: tuple[str, ...] = (),
    **changes: Any,
) -> None:
    """Runs an op over arguments amid NaN, which stay as they are where the op does not write them.

    Its results must be those of its reference, and the bits of each row must not depend on other rows.

    Args:
        config: configuration of the kernel, None for an op without any.
        equal_bits: results that must have the reference's.
        grouped: parameters that groups of rows may have of their own.
        changes: of the op's entry in the table of ops.
    """

    def compare(results: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], config: Any) -> None:
        for (name, result), right in zip(results.items(), expected.values(), strict=True):
            if entry.exact or name in equal_bits or not right.is_floating_point():
                equal(result, right, name)
            else:
                assert_near(result, right, bounds)

    def some_rows(inputs: Inputs, index: list[int]) -> Inputs:
        """Each row as a group."""
        some = OPS[op].rows_of(inputs, index)

        def of_rows(parameter: torch.Tensor) -> torch.Tensor:
            count = len(parameter)
            return parameter if parameter.dim() == 1 else parameter[[row * count // num_rows for row in index]]

        given = [name for name in grouped if name in some.arguments]
        return some._replace(arguments=some.arguments | {n: mapped(of_rows, some.arguments[n]) for n in given})

    entry = replace(OPS[op], **({"compare": compare} | ({"some_rows": some_rows} if grouped else {}) | changes))
    inputs = Inputs({name: mapped(amid_nan, value) for name, value in arguments.items()})
    case = Case(entry, Setting(LLAMA, torch.device(DEVICE)), {}, "", lambda _: inputs, num_rows=num_rows)
    with unchanged({name: value for name, value in inputs.arguments.items() if name not in entry.writes}):
        case.check(config)


@contextlib.contextmanager
def unchanged(arguments: dict[str, Any]) -> Iterator[None]:
    """Asserts that arguments of an op stay as they are."""
    kept = {name: mapped(torch.clone, value) for name, value in arguments.items()}
    yield
    for name, value in kept.items():
        now = named_tensors(arguments[name], name)
        assert all(same_bits(now[part], tensor) for part, tensor in named_tensors(value, name).items()), name


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
