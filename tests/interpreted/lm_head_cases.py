"""Cases of lm_head: the kernel against the reference."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from tests.interpreted.common import DEVICE, INF, INTERPRETED, NAN, check, each_dtype, normal, view_amid_nan
from treespec_kernels.comparison import assert_close
from treespec_kernels.linear.lm_head import BlockStats, LmHead, LmHeadConfig, block_stats_ref, lm_head_triton

pytestmark = pytest.mark.usefixtures("poisoned_allocations")
ERRORS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # one rounding of the largest logit

SMALL = LmHeadConfig(block_m=16, block_n=16, block_k=16, num_warps=4, num_stages=2)
WIDE = replace(SMALL, block_n=512, block_k=32)
TILED = LmHeadConfig(64, 32, 32, 4, 2, larger=((128, 8, 2),))
if INTERPRETED:  # a GPU has another instruction for 16 rows
    TILED = replace(SMALL, larger=((32, 8, 2),))


class Head(NamedTuple):
    rows: int
    vocab: int
    hidden: int
    groups: int | None = None
    cap: float | None = None
    config: LmHeadConfig = SMALL


HEADS = [
    Head(1, 1, 24),
    Head(2, 63, 40),
    Head(18, 64, 32),
    Head(17, 40, 24, groups=2),
    Head(3, 70, 48, cap=4.0),
    Head(2, 600, 33, config=WIDE),
    Head(33, 70, 40, config=TILED),
]


def arguments_of(head: Head, dtype: torch.dtype) -> dict[str, Any]:
    """x and weight, both inside larger matrices of NaN: nothing around them may be read."""
    draw, leading = normal(head.vocab), () if head.groups is None else (head.groups,)
    x = view_amid_nan(draw(*leading, head.rows, head.hidden, dtype=dtype))
    weight = (draw(*leading, head.vocab, head.hidden) * 3 * head.hidden**-0.5).to(dtype)
    return {"x": x, "weight": view_amid_nan(weight, rows=3), "logit_cap": head.cap}


def compare(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], config: Any) -> None:
    """The logits, and whether the summary is that of the actual logits."""
    logits, *stats = actual.values()
    right = next(iter(expected.values()))
    error = ERRORS[right.dtype] * max(1.0, float(right.abs().max()))
    assert_close(logits, right, max_error=error, rms_error=error / 4)
    check_stats(LmHead(logits, BlockStats(*stats)), config)


def check_stats(out: LmHead, config: LmHeadConfig = SMALL) -> None:
    expected = block_stats_ref(out.logits, config.block_n)
    assert torch.equal(out.stats.values, expected.values)
    assert torch.equal(out.stats.tokens, expected.tokens) and out.stats.tokens.dtype == torch.int32
    torch.testing.assert_close(out.stats.sums, expected.sums, rtol=1e-5, atol=0, equal_nan=False)


@each_dtype
@pytest.mark.parametrize("head", HEADS, ids=lambda head: "-".join(map(str, head[:-1])))
def test_logits_and_their_summary(head: Head, dtype: torch.dtype) -> None:
    arguments = arguments_of(head, dtype)
    check("lm_head", arguments, head.config, num_rows=head.rows, compare=compare)


def test_ties_go_to_the_first_token() -> None:
    arguments = arguments_of(Head(3, 40, 16), torch.float32)
    weight = arguments["weight"]
    weight[[7, 9, 15, 20, 35]] = weight[3].clone()  # equal within block 0 and across blocks
    arguments["x"][:] = weight[3] * 10
    out = lm_head_triton(**arguments, config=SMALL)
    check_stats(out)
    assert out.stats.tokens.tolist() == [[3, 20, 35]] * 3
    assert len(out.stats.values.unique()) == 1


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_not_finite_surfaces(value: float) -> None:
    """In the block of the token, and nowhere else. A NaN counts as +inf, and -inf is a token that nobody takes."""
    arguments = arguments_of(Head(2, 40, 16), torch.float32)
    arguments["x"][:, 0] = arguments["x"][:, 0].abs() + 1
    arguments["weight"][20, 0] = value
    out = lm_head_triton(**arguments, config=SMALL)
    check_stats(out)
    torch.testing.assert_close(out.logits[:, 20], torch.full((2,), value, device=DEVICE), equal_nan=True)
    assert out.stats.values[:, [0, 2]].isfinite().all()
    if value == -INF:
        assert out.stats.values[:, 1].isfinite().all() and (out.stats.tokens[:, 1] != 20).all()
    else:
        assert (out.stats.values[:, 1] == INF).all() and (out.stats.tokens[:, 1] == 20).all()
        assert (out.stats.sums[:, 1] == INF).all()
    arguments["weight"][16:32, 0] = -INF  # the whole block
    out = lm_head_triton(**arguments, config=SMALL)
    assert (out.stats.values[:, 1] == -INF).all() and (out.stats.sums[:, 1] == 0).all()
    assert out.stats.tokens[:, 1].tolist() == [16, 16]


def test_it_writes_into_given_buffers_and_nowhere_else() -> None:
    arguments = arguments_of(Head(5, 37, 24), torch.float32)
    expected = lm_head_triton(**arguments, config=SMALL)
    around = torch.full((7, 64), 123.0, device=DEVICE)
    stats = BlockStats.empty(5, 3, DEVICE)
    out = lm_head_triton(**arguments, config=SMALL, logits=around[1:6, 8:45], stats=stats)
    assert out.stats is stats and out.logits.data_ptr() == around[1:, 8:].data_ptr()
    assert torch.equal(out.logits, expected.logits)
    assert all(torch.equal(a, b) for a, b in zip(stats, expected.stats, strict=True))
    around[1:6, 8:45] = 123.0
    assert (around == 123.0).all()
