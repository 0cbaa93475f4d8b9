"""Cases of lm_head_triton."""

from dataclasses import replace

import pytest
import torch

from tests.interpreted.common import DEVICE, INF, INTERPRETED, NAN, each_dtype
from treespec_kernels.launch.triton_launch import target_of
from treespec_kernels.linear.lm_head import (
    BlockStats,
    LmHead,
    LmHeadConfig,
    block_stats_ref,
    lm_head_ref,
    lm_head_triton,
)
from treespec_kernels.sampling.row_topk import row_topk_ref, row_topk_triton
from treespec_kernels.tuning.testing import assert_close

pytestmark = pytest.mark.usefixtures("poisoned_allocations")
ERRORS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # one rounding of the largest logit

SMALL = LmHeadConfig(block_m=16, block_n=16, block_k=16, num_warps=4, num_stages=2)
WIDE = replace(SMALL, block_n=512, block_k=32)


def inputs(
    rows: int, vocab: int, hidden: int, dtype: torch.dtype, groups: int | None = None, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and weight, both inside larger matrices of NaN: nothing around them may be read."""
    generator = torch.Generator().manual_seed(seed)
    leading = () if groups is None else (groups,)
    x = torch.full((*leading, rows, hidden + 16), NAN)
    x[..., :hidden] = torch.randn(*leading, rows, hidden, generator=generator)
    weight = torch.full((*leading, vocab + 3, hidden + 32), NAN)
    weight[..., :vocab, :hidden] = torch.randn(*leading, vocab, hidden, generator=generator) * hidden**-0.5 * 3
    return x.to(DEVICE, dtype)[..., :hidden], weight.to(DEVICE, dtype)[..., :vocab, :hidden]


def project(x: torch.Tensor, weight: torch.Tensor, config: LmHeadConfig = SMALL) -> LmHead:
    """The head, with a check that its summary is that of its own logits."""
    out = lm_head_triton(x, weight, config=config)
    rows, vocab = x.shape[:-1].numel(), weight.shape[-2]
    assert (out.logits.shape, out.logits.dtype) == ((rows, vocab), x.dtype)
    check_stats(out, config)
    return out


def check_stats(out: LmHead, config: LmHeadConfig) -> None:
    expected = block_stats_ref(out.logits, config.block_n)
    assert torch.equal(out.stats.values, expected.values)
    assert torch.equal(out.stats.tokens, expected.tokens) and out.stats.tokens.dtype == torch.int32
    torch.testing.assert_close(out.stats.sums, expected.sums, rtol=1e-5, atol=0, equal_nan=False)


@each_dtype
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("vocab, hidden", [(1, 24), (5, 16), (63, 40), (64, 32), (1000, 16), (4099, 33)])
def test_logits_and_their_summary(rows: int, vocab: int, hidden: int, dtype: torch.dtype) -> None:
    config = WIDE if vocab >= 1000 else SMALL
    x, weight = inputs(rows, vocab, hidden, dtype)
    out = project(x, weight, config)
    expected = lm_head_ref(x, weight, config=config)
    error = ERRORS[dtype] * max(1.0, float(expected.logits.abs().max()))
    assert_close(out.logits, expected.logits, max_error=error, rms_error=error / 4)


@each_dtype
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_groups_are_heads_of_their_own(groups: int, dtype: torch.dtype) -> None:
    x, weight = inputs(18, 40, 24, dtype, groups)
    out = project(x, weight)
    for group in range(groups):
        alone = project(x[group], weight[group])
        part = slice(group * 18, (group + 1) * 18)
        assert torch.equal(out.logits[part], alone.logits)
        assert all(torch.equal(a[part], b) for a, b in zip(out.stats, alone.stats, strict=True))


@each_dtype
def test_a_row_has_the_same_bits_in_every_tile(dtype: torch.dtype) -> None:
    config = LmHeadConfig(64, 32, 32, 4, 2, larger=((128, 8, 2),))
    x, weight = inputs(300, 70, 40, dtype)
    expected = project(x, weight, config.with_tile(config.tiles[0]))
    for rows in (1, 63, 64, 65, 127, 128, 129, 255, 256, 300):
        some = project(x[-rows:], weight, config.with_tile(config.larger[0]))
        assert torch.equal(some.logits, expected.logits[-rows:]), rows
        assert all(torch.equal(a, b[-rows:]) for a, b in zip(some.stats, expected.stats, strict=True)), rows
    x, weight = inputs(100, 70 * 32, 16, dtype)  # so many columns that a launch takes the larger tile by itself
    assert config.for_rows(100, 70).block_m == 128
    assert torch.equal(project(x, weight, config).logits, project(x, weight, config.with_tile(config.tiles[0])).logits)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter's dot is not the GPU's")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("vocab, hidden", [(4096, 256), (32768, 2048)])
def test_every_candidate_is_row_invariant(vocab: int, hidden: int, dtype: torch.dtype) -> None:
    x, weight = inputs(257, vocab, hidden, dtype)
    expected = lm_head_ref(x, weight)
    error = ERRORS[dtype] * float(expected.logits.abs().max())
    for config in LmHeadConfig.candidates(dtype, vocab, hidden, target_of(DEVICE)):
        out = project(x, weight, config)
        assert_close(out.logits, expected.logits, max_error=error, rms_error=error / 4)
        for rows in (1, 2, 15, 16, 17, 63, 64, 65, 128):
            some = project(x[-rows:], weight, config)
            assert torch.equal(some.logits, out.logits[-rows:]), (config, rows)
            assert all(torch.equal(a, b[-rows:]) for a, b in zip(some.stats, out.stats, strict=True)), (config, rows)


def test_ties_go_to_the_first_token() -> None:
    x, weight = inputs(3, 40, 16, torch.float32)
    weight[[7, 9, 15, 20, 35]] = weight[3].clone()  # equal within block 0 and across blocks
    x[:] = weight[3] * 10
    out = project(x, weight)
    assert out.stats.tokens.tolist() == [[3, 20, 35]] * 3
    assert len(out.stats.values.unique()) == 1


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_not_finite_surfaces(value: float) -> None:
    """In the block of the token, and nowhere else. A NaN counts as +inf, and -inf is a token that nobody takes."""
    x, weight = inputs(2, 40, 16, torch.float32)
    x[:, 0] = x[:, 0].abs() + 1
    weight[20, 0] = value
    out = project(x, weight)
    torch.testing.assert_close(out.logits[:, 20], torch.full((2,), value, device=DEVICE), equal_nan=True)
    assert out.stats.values[:, [0, 2]].isfinite().all()
    if value == -INF:
        assert out.stats.values[:, 1].isfinite().all() and (out.stats.tokens[:, 1] != 20).all()
    else:
        assert (out.stats.values[:, 1] == INF).all() and (out.stats.tokens[:, 1] == 20).all()
        assert (out.stats.sums[:, 1] == INF).all()


def test_a_block_without_a_number_has_the_sum_zero() -> None:
    x, weight = inputs(2, 40, 16, torch.float32)
    x[:, 0] = 1.0
    weight[16:32, 0] = -INF
    out = project(x, weight)
    assert (out.stats.values[:, 1] == -INF).all() and (out.stats.sums[:, 1] == 0).all()
    assert out.stats.tokens[:, 1].tolist() == [16, 16]


def test_it_writes_into_given_buffers_and_nowhere_else() -> None:
    x, weight = inputs(5, 37, 24, torch.float32)
    expected = project(x, weight)
    around = torch.full((7, 64), 123.0, device=DEVICE)
    stats = BlockStats.empty(5, 3, DEVICE)
    out = lm_head_triton(x, weight, config=SMALL, logits=around[1:6, 8:45], stats=stats)
    assert out.stats is stats and out.logits.data_ptr() == around[1:, 8:].data_ptr()
    assert torch.equal(out.logits, expected.logits)
    assert all(torch.equal(a, b) for a, b in zip(stats, expected.stats, strict=True))
    around[1:6, 8:45] = 123.0
    assert (around == 123.0).all()


@each_dtype
def test_its_summary_serves_row_topk(dtype: torch.dtype) -> None:
    out = project(*inputs(7, 100, 24, dtype))
    for k in (1, 5):
        top, expected = row_topk_triton(out.logits, k, stats=out.stats), row_topk_ref(out.logits, k)
        assert torch.equal(top.tokens, expected.tokens) and torch.equal(top.values, expected.values)
        torch.testing.assert_close(top.lse, expected.lse, rtol=2e-6, atol=2e-6)
        assert top.finite.all()


@pytest.mark.skipif(not INTERPRETED, reason="about the interpreter")
def test_bfloat16_is_refused_in_the_interpreter() -> None:
    x, weight = inputs(1, 20, 16, torch.bfloat16)
    with pytest.raises(ValueError, match=r"bfloat16 wrongly; use float16 or float32"):
        lm_head_triton(x, weight, config=SMALL)
