"""Log-probabilities of tokens, from the model's untransformed logits."""

from collections.abc import Sequence
from ctypes import CDLL
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec_kernels.cpu.choice_cpu import row_logprobs
from treespec_kernels.sampling.logit_transforms import topk_rows

_ROWS = 64  # rows computed at once: 39 MB in float32 for a vocabulary of 152,000
_BLOCK = 64  # columns per block
BYTES_PER_LOGIT = 32  # maximum memory that `LogprobRows.of` needs


class Logprob(NamedTuple):
    """A token's log-probability and rank, from 1, in the untransformed distribution; ties prefer lower ids."""

    logprob: float
    rank: int
    decoded_token: str | None = None


class LogprobRows(NamedTuple):
    """Log-probabilities of the chosen token and of the most likely tokens of each row."""

    token_logprobs: Tensor  # float32 [num_rows], log-probabilities of the chosen tokens
    ranks: Tensor  # int64 [num_rows], ranks of the chosen tokens
    tokens: Tensor  # int64 [num_rows, count], the most likely tokens, best first; ties prefer lower ids
    values: Tensor  # float32 [num_rows, count], their log-probabilities

    @classmethod
    def of(cls, logits: Tensor, token_ids: Tensor, count: int) -> "LogprobRows":
        """Compute the rows from logits [num_rows, vocab], finite or -inf, and the chosen tokens, int64 [num_rows].

        All shapes are static, so CUDA graphs can capture it.
        """
        raw, index = logits.float(), token_ids[:, None]
        logprobs, score = torch.log_softmax(raw, 1), raw.gather(1, index)
        columns = torch.arange(raw.shape[1], dtype=torch.int64, device=raw.device)
        ranks = 1 + ((raw > score) | ((raw == score) & (columns < index))).sum(1)
        top_ids = _best(raw, count) if count else index[:, :0]
        return cls(logprobs.gather(1, index)[:, 0], ranks, top_ids, logprobs.gather(1, top_ids))

    def packed(self) -> Tensor:
        """Return the rows as int32 [num_rows, 2 + 2 * count], for a single copy to the host; see `unpacked`."""
        token_logprobs, values = self.token_logprobs.view(torch.int32), self.values.contiguous().view(torch.int32)
        return torch.cat((token_logprobs[:, None], self.ranks[:, None].int(), self.tokens.int(), values), 1)

    @classmethod
    def unpacked(cls, packed: np.ndarray) -> "LogprobRows":
        """Reconstruct rows from the result of `packed`."""
        rows = torch.from_numpy(packed)
        count = packed.shape[1] // 2 - 1
        token_logprobs, values = rows[:, :1].view(torch.float32)[:, 0], rows[:, 2 + count :].view(torch.float32)
        return cls(token_logprobs, rows[:, 1].long(), rows[:, 2 : 2 + count].long(), values)

    def named(self, token_ids: Sequence[int], count: int) -> list[dict[int, Logprob]]:
        """Return log-probabilities by token: the chosen token, then the `count` most likely ones."""
        entries = []
        rows = zip(token_ids, *(column.tolist() for column in self), strict=True)
        for token, logprob, rank, tokens, values in rows:
            entry = {token: Logprob(logprob, rank)}
            for top_rank, (top_token, value) in enumerate(zip(tokens[:count], values[:count], strict=True), 1):
                entry.setdefault(top_token, Logprob(value, top_rank))
            entries.append(entry)
        return entries


def logprobs_of(
    logits: Tensor, tokens: Sequence[int], count: int, library: CDLL | None = None
) -> list[dict[int, Logprob]]:
    """Return log-probabilities by token for each row: the chosen token, then the `count` most likely ones.

    `logits` are untransformed, [num_rows, vocab]; `library` as in `packed_logprobs`.
    """
    return LogprobRows.unpacked(packed_logprobs([logits], tokens, count, library)).named(tokens, count)


def packed_logprobs(
    logits_parts: Sequence[Tensor], tokens: Sequence[int], count: int, library: CDLL | None = None
) -> np.ndarray:
    """Return `LogprobRows.packed` for several logits [num_rows, vocab] and their chosen tokens.

    With a library from `growth_library`, the logits are a compiled decoder's and the op runs in C++. Its
    log-probabilities are rounded from float64, so they differ from torch's by the rounding of torch's sums.
    """
    if library is not None:
        return row_logprobs(library, logits_parts, tokens, count)
    logits = torch.cat(list(logits_parts))
    token_ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    chunks = zip(logits.split(_ROWS), token_ids.split(_ROWS), strict=True)
    return torch.cat([LogprobRows.of(rows, chosen_ids, count).packed() for rows, chosen_ids in chunks]).cpu().numpy()


def _best(raw: Tensor, count: int) -> Tensor:
    """Return the columns of each row's `count` largest scores, best first; among equal ones, lower columns win.

    They lie in the `count` blocks with the largest maxima, again preferring lower blocks. Only the scores of these
    blocks are ordered with their columns, in int64: for 16 rows of 151,936, this halves the time of `LogprobRows.of`.
    """
    (rows, width), columns = raw.shape, torch.arange(raw.shape[1], device=raw.device)
    if width % _BLOCK or width // _BLOCK <= count:
        return topk_rows(_ordered(raw, columns), count)[1]
    maxima = raw.view(rows, width // _BLOCK, _BLOCK).amax(2)
    blocks = _ordered(maxima, columns[: width // _BLOCK]).topk(count, dim=1, sorted=False).indices
    narrowed = (blocks[:, :, None] * _BLOCK + columns[:_BLOCK]).flatten(1)
    return narrowed.gather(1, _ordered(raw.gather(1, narrowed), narrowed).topk(count, dim=1).indices)


def _ordered(raw: Tensor, columns: Tensor) -> Tensor:
    """Return int64 keys in the order of float32 scores [num_rows, width]; among equal scores, lower columns win."""
    bits = (raw + 0.0).view(torch.int32)  # +0.0 makes -0 equal to 0
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # the bits of negative floats are in descending order
    return keys.bitwise_left_shift_(32).bitwise_or_(0x7FFFFFFF - columns)
