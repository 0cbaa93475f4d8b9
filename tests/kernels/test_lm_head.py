"""LM head: the summary's specification, and configurations."""

import pytest
import torch

from treespec_kernels.linear.lm_head import block_stats_ref

INF, NAN = float("inf"), float("nan")


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
