"""Log-probabilities: values, ranks and ties, and rows as they are packed."""

import math

import numpy as np
import pytest
import torch

from tests.sampling.test_sampling import VOCABS, likeliest_first, random_logits
from treespec.sampling.logprobs import LogprobRows, logprobs_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", VOCABS)
def test_logprobs_are_those_of_log_softmax(vocab: int, dtype: torch.dtype) -> None:
    for count in (0, 1, 3, 5, vocab):
        if count > vocab:
            continue
        logits = random_logits(vocab, count, dtype)
        before = logits.clone()
        expected = torch.log_softmax(logits.float(), 0)
        order = likeliest_first(logits)
        ranks = {token: rank for rank, token in enumerate(order, start=1)}
        for token in (order[0], order[1], order[vocab // 2], order[-1]):
            (found,) = logprobs_of(logits[None], [token], count)
            assert next(iter(found)) == token
            assert list(found)[1:] == [other for other in order[:count] if other != token]
            for other, each in found.items():
                assert each.logprob == float(expected[other])
                assert each.rank == ranks[other] and each.decoded_token is None
        assert torch.equal(logits, before)


def test_logprobs_of_a_row_do_not_depend_on_the_others() -> None:
    rows = torch.stack([random_logits(4099, seed, torch.bfloat16) for seed in range(70)])
    tokens = [7 * i for i in range(70)]
    together = logprobs_of(rows, tokens, 5)
    assert together == [logprobs_of(rows[i : i + 1], tokens[i : i + 1], 5)[0] for i in range(70)]


def test_ranks_of_ties_count_the_lower_ids_first() -> None:
    """Whatever is chosen, each token has one rank, and the same tokens are listed; zeros of either sign tie."""
    logits = torch.tensor([-1.0, 2.0, -0.0, 2.0, 0.0, -0.0, 2.0])
    ranks = {1: 1, 3: 2, 6: 3, 2: 4, 4: 5, 5: 6, 0: 7}
    for token in range(7):
        for count in range(8):
            (found,) = logprobs_of(logits[None], [token], count)
            assert {other: each.rank for other, each in found.items()} == {
                other: rank for other, rank in ranks.items() if rank <= count or other == token
            }


@pytest.mark.parametrize("count", [0, 1, 5])
def test_packed_rows_have_the_same_bits(count: int) -> None:
    logits, chosen = torch.stack([random_logits(99, seed, torch.bfloat16) for seed in range(7)]), list(range(0, 21, 3))
    rows = LogprobRows.of(logits, torch.tensor(chosen), count)
    packed = rows.packed().numpy()
    assert packed.shape == (7, 2 + 2 * count) and packed.dtype == np.int32
    assert all(map(torch.equal, LogprobRows.unpacked(packed), rows))
    assert LogprobRows.unpacked(packed[2:5]).named(chosen[2:5], count) == logprobs_of(logits[2:5], chosen[2:5], count)
    fewer = max(count - 1, 0)
    assert rows.named(chosen, fewer) == logprobs_of(logits, chosen, fewer)


def test_logprobs_of_forbidden_tokens() -> None:
    logits = random_logits(64)
    logits[::2] = -math.inf
    (found,) = logprobs_of(logits[None], [4], 40)
    assert found[4].logprob == -math.inf and found[4].rank == 32 + 3
    assert len(found) == 40 and {each.rank for each in found.values()} == set(range(1, 41))
