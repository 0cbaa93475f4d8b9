"""LM head: the summary's specification, what is refused, and the kernel's cases in the interpreter or on a GPU."""

from typing import Any

import pytest
import torch

from tests.child import run_cases
from tests.kernel_cases import environments
from treespec_kernels.linear.lm_head import BlockStats, LmHeadConfig, block_stats_ref, lm_head_ref, lm_head_triton

INF, NAN = float("inf"), float("nan")


@environments()
def test_cases(environment: dict[str, str]) -> None:
    run_cases("lm_head_cases.py", environment)


@pytest.mark.parametrize("block", [16, 64, 1024])
@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 1000, 4099])
def test_the_summary_restores_argmax_and_log_sum_exp(vocab: int, block: int) -> None:
    logits = torch.randn(7, vocab, generator=torch.Generator().manual_seed(0)) * 4
    stats = block_stats_ref(logits, block)
    assert stats.values.shape == stats.tokens.shape == stats.sums.shape == (7, -(-vocab // block))
    best = stats.values.argmax(dim=1, keepdim=True)
    assert torch.equal(stats.tokens.gather(1, best)[:, 0].long(), logits.argmax(dim=1))
    lse = (stats.sums.double().log() + stats.values).logsumexp(dim=1)
    torch.testing.assert_close(lse, logits.double().logsumexp(dim=1), rtol=1e-6, atol=1e-6)


def test_the_summary_of_what_is_not_finite() -> None:
    logits = torch.zeros(4, 32)
    logits[0, 5], logits[1, 17], logits[2, :16], logits[3, [9, 3]] = NAN, INF, -INF, torch.tensor([NAN, INF])
    stats = block_stats_ref(logits, 16)
    assert stats.values.tolist() == [[INF, 0], [0, INF], [-INF, 0], [INF, 0]]
    assert stats.tokens.tolist() == [[5, 16], [0, 17], [0, 16], [3, 16]]
    assert stats.sums.tolist() == [[INF, 16], [16, INF], [0, 16], [INF, 16]]


def test_ref_is_a_product_of_groups() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 2, 8, generator=generator), torch.randn(3, 21, 8, generator=generator)
    head = lm_head_ref(x.half(), weight.half())
    assert head.logits.dtype == torch.float16
    for group in range(3):
        expected = (x[group].half().double() @ weight[group].half().double().T).half()
        torch.testing.assert_close(head.logits[group * 2 : group * 2 + 2], expected, rtol=1e-3, atol=1e-3)
    block = LmHeadConfig.default(torch.float16, 21, 8).block_n
    assert torch.equal(head.stats.values, block_stats_ref(head.logits, block).values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("vocab, hidden", [(4096, 256), (128256, 2048), (128256, 4096), (1, 1)])
def test_candidates_are_distinct_and_start_with_the_default(dtype: torch.dtype, vocab: int, hidden: int) -> None:
    candidates = LmHeadConfig.candidates(dtype, vocab, hidden)
    assert candidates[0] == LmHeadConfig.default(dtype, vocab, hidden)
    assert len(set(candidates)) == len(candidates) > 3


def test_a_configuration_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="block_n is 24; it must be a power of two, 16 or more"):
        LmHeadConfig(16, 24, 16, 4, 2)
    with pytest.raises(ValueError, match="block_m is 8; it must be a power of two, 16 or more"):
        LmHeadConfig(8, 16, 16, 4, 2)
    with pytest.raises(ValueError, match=r"torch\.int8 is not supported; use float16"):
        LmHeadConfig.default(torch.int8, 64, 64)
    with pytest.raises(ValueError, match="vocab_size is 0; it must be 1 or more"):
        LmHeadConfig.default(torch.float16, 0, 64)


X, WEIGHT = torch.zeros(2, 8), torch.zeros(5, 8)


@pytest.mark.parametrize("lm_head", [lm_head_ref, lm_head_triton])
@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (X[None], WEIGHT, r"weight has shape \[5, 8\]; expected \[groups 1, vocab, hidden 8\]"),
        (X.expand(3, 2, 8), WEIGHT.expand(2, 5, 8), r"weight has shape \[2, 5, 8\]; expected \[groups 3, vocab"),
        (X, WEIGHT[:, :7], r"weight has shape \[5, 7\]; expected \[vocab 5, hidden 8\]"),
        (X, WEIGHT[:0], r"weight has shape \[0, 8\]; expected .*, vocab 1 or more"),
    ],
)
def test_what_does_not_fit_is_refused(lm_head: Any, x: torch.Tensor, weight: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lm_head(x, weight)


def test_triton_refuses_strides_and_buffers() -> None:
    config, stats = LmHeadConfig(16, 16, 16, 4, 2), BlockStats.empty(2, 1, "cpu")
    with pytest.raises(ValueError, match="x has stride 2 over its last dimension"):
        lm_head_triton(torch.zeros(2, 16)[:, ::2], WEIGHT)
    with pytest.raises(ValueError, match=r"x has stride 32 over groups and 8 over 2 rows"):
        lm_head_triton(torch.zeros(3, 4, 8)[:, :2], WEIGHT.expand(3, 5, 8))
    for buffers, message in [
        ({"logits": torch.zeros(2, 6)}, r"logits has shape \[2, 6\]; expected \[all_rows 2, vocab 5\]"),
        ({"logits": X[:, :5].half()}, r"logits has dtype torch\.float16; convert it to torch\.float32"),
        ({"stats": BlockStats.empty(2, 2, "cpu")}, r"values has shape \[2, 2\]; expected \[rows 2, num_blocks 1\]"),
        ({"stats": stats._replace(tokens=stats.tokens.long())}, r"tokens has dtype torch\.int64"),
        ({"stats": stats._replace(sums=X[:, :1])}, r"sums has strides \[8, 1\] .*; make it contiguous"),
    ]:
        with pytest.raises(ValueError, match=message):
            lm_head_triton(X, WEIGHT, config=config, **buffers)
