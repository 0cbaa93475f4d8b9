"""LM head: the summary's specification, what is refused, and the kernel's cases in the interpreter or on a GPU."""

import pytest
import torch

from tests.child import run_cases
from treespec_kernels.linear.lm_head import BlockStats, LmHeadConfig, block_stats_ref, lm_head_ref, lm_head_triton

CASES = "lm_head_cases.py"
INF, NAN = float("inf"), float("nan")


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, {"TRITON_INTERPRET": "1"})


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    run_cases(CASES, {"TRITON_INTERPRET": "0"})


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


@pytest.mark.parametrize("lm_head", [lm_head_ref, lm_head_triton])
def test_what_does_not_fit_is_refused(lm_head: object) -> None:
    assert callable(lm_head)
    x, weight = torch.zeros(2, 8), torch.zeros(5, 8)
    with pytest.raises(ValueError, match=r"x has shape \[8\]; expected \[rows, hidden\] or \[groups, rows, hidden\]"):
        lm_head(x[0], weight)
    with pytest.raises(ValueError, match=r"weight has shape \[5, 8\]; expected \[1, vocab, hidden\]"):
        lm_head(x[None], weight)
    with pytest.raises(ValueError, match=r"weight has shape \[2, 5, 8\]; expected \[3, vocab, hidden\]"):
        lm_head(x.expand(3, 2, 8), weight.expand(2, 5, 8))
    with pytest.raises(ValueError, match="weight has hidden size 7 and x 8; they must be equal"):
        lm_head(x, weight[:, :7])
    with pytest.raises(ValueError, match=r"weight has shape \[0, 8\]; no size may be 0"):
        lm_head(x, weight[:0])
    with pytest.raises(ValueError, match=r"x has dtype torch\.float64; use torch\.float16"):
        lm_head(x.double(), weight)
    with pytest.raises(ValueError, match=r"weight has dtype torch\.float16 and x torch\.float32"):
        lm_head(x, weight.half())
    with pytest.raises(ValueError, match="weight is on meta and x on cpu; move it there"):
        lm_head(x, weight.to("meta"))


def test_triton_refuses_strides_and_buffers() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(5, 8)
    config = LmHeadConfig(16, 16, 16, 4, 2)
    with pytest.raises(ValueError, match="x has stride 2 over its last dimension"):
        lm_head_triton(torch.zeros(2, 16)[:, ::2], weight)
    with pytest.raises(ValueError, match=r"x has stride 32 over groups and 8 over 2 rows"):
        lm_head_triton(torch.zeros(3, 4, 8)[:, :2], weight.expand(3, 5, 8))
    with pytest.raises(ValueError, match=r"logits is \[2, 6\] torch\.float32 on cpu; expected \[2, 5\]"):
        lm_head_triton(x, weight, logits=torch.zeros(2, 6))
    with pytest.raises(ValueError, match=r"logits is \[2, 5\] torch\.float16 on cpu; expected \[2, 5\] torch\.float32"):
        lm_head_triton(x, weight, logits=torch.zeros(2, 5).half())
    with pytest.raises(ValueError, match=r"stats\.values is \[2, 2\] torch\.float32 on cpu; expected \[2, 1\]"):
        lm_head_triton(x, weight, config=config, stats=BlockStats.empty(2, 2, "cpu"))
    stats = BlockStats.empty(2, 1, "cpu")
    with pytest.raises(ValueError, match=r"stats\.tokens is \[2, 1\] torch\.int64"):
        lm_head_triton(x, weight, config=config, stats=stats._replace(tokens=stats.tokens.long()))
    with pytest.raises(ValueError, match=r"stats\.sums has strides \[2, 1\]; make it contiguous"):
        lm_head_triton(x, weight, config=config, stats=stats._replace(sums=torch.zeros(2, 2)[:, :1]))
