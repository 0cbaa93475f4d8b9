"""Transforms of a request's logits, applied to one row at a time.

Plain decoding and tree nodes use the same code on each row alone, so a row's bits do not depend on the other rows.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from treespec.sampling.grammar import Grammar
from treespec.sampling.restriction import Restriction
from treespec.sampling_params import SamplingParams
from treespec.utils.torch_state import call_processor, outside_code

_NUCLEUS = 64  # most likely draft tokens considered for top_p


class Transforms:
    """Converts a row of logits to the scores that a request samples from, in the order stated in `SamplingParams`.

    Args:
        params: sampling parameters of the request; all token ids are within the vocabulary.
        num_prompt: number of prompt tokens.
        end_tokens: tokens masked before `min_tokens`.
        bad_words: token ids of each spelling.
        vocab_size: the target's vocabulary size.
        device: device of the logits.
        grammar: grammar of the structured output, if any.

    Attributes:
        restriction: allowed tokens, also for drafts; None = all.
    """

    def __init__(
        self,
        params: SamplingParams,
        num_prompt: int,
        end_tokens: Sequence[int],
        bad_words: Sequence[Sequence[int]],
        vocab_size: int,
        device: torch.device,
        grammar: Grammar | None = None,
    ):
        self.params, self._num_prompt = params, num_prompt
        self._bad_words = _BadWords(bad_words)
        self.restriction: Restriction | None = None
        if grammar is not None or params.allowed_token_ids is not None:
            self.restriction = Restriction(params.allowed_token_ids, grammar, vocab_size, device)
        bias = params.logit_bias or {}
        self._biased = torch.tensor(list(bias), dtype=torch.int64, device=device)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
        self._ends = torch.tensor([t for t in end_tokens if t < vocab_size], dtype=torch.int64, device=device)
        self._counts = TokenCounts(vocab_size, num_prompt) if params.has_penalties else None
        self._top_k = params.top_k if 0 < params.top_k < vocab_size else None

    def scores(self, logits: Tensor, tokens: Sequence[int], ancestors: Sequence[int]) -> Tensor:
        """Return float32 [vocab]: log-probabilities up to a constant, -inf for excluded tokens.

        Args:
            logits: the target's logits after the last of `ancestors`, [vocab]; not modified.
            tokens: prompt and output so far.
            ancestors: tree path after them.

        Raises:
            RequestError: a processor failed or returned invalid scores, or an error of `Restriction.excluded`.
        """
        params, scores = self.params, logits.float()
        if self.restriction is not None:
            scores = scores.masked_fill(self.restriction.excluded(tokens, ancestors), -torch.inf)
        if len(self._biased):
            scores = scores.index_add(0, self._biased, self._bias)
        if bad := self._bad_words.ends(tokens, ancestors):
            scores = scores.index_fill(0, torch.tensor(bad, dtype=torch.int64, device=scores.device), -torch.inf)
        if len(tokens) + len(ancestors) - self._num_prompt < params.min_tokens and len(self._ends):
            scores = scores.index_fill(0, self._ends, -torch.inf)
        if self._counts is not None:
            scores = self._counts.penalise(scores, params, tokens, ancestors)
        for processor in params.logits_processors:
            scores = _process(processor, scores, tokens, ancestors)
        if params.temperature == 0:
            return scores
        scores = scores / params.temperature
        if self._top_k is not None:
            scores = keep_best(scores, self._top_k)
        if params.top_p < 1:
            scores = keep_best(scores, nucleus_size(scores, params.top_p))
        if params.min_p > 0:
            scores = scores.masked_fill(scores < scores.max() + float(np.log(params.min_p)), -torch.inf)
        return scores


class _BadWords:
    """Forbidden token sequences.

    They are indexed by the tokens before their last one, so that the cost of a lookup does not grow with their number.

    Args:
        words: token ids of each spelling.
    """

    def __init__(self, words: Sequence[Sequence[int]]):
        self._ends: dict[tuple[int, ...], list[int]] = {}
        for word in words:
            self._ends.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._lengths = sorted({len(before) for before in self._ends})

    def ends(self, tokens: Sequence[int], ancestors: Sequence[int]) -> list[int]:
        """Return the last tokens of all words whose other tokens end the text."""
        if not self._lengths:
            return []
        near = (*tokens[len(tokens) - min(self._lengths[-1], len(tokens)) :], *ancestors)
        fitting = [length for length in self._lengths if length <= len(near)]
        return [end for length in fitting for end in self._ends.get(near[len(near) - length :], ())]


class TokenCounts:
    """Token counts of a request's output, and the set of its prompt tokens."""

    def __init__(self, vocab_size: int, num_prompt: int):
        self._in_prompt = np.zeros(vocab_size, dtype=bool)
        self._in_output = np.zeros(vocab_size, dtype=np.int64)
        self._num_prompt, self._known = num_prompt, 0

    def penalise(
        self, scores: Tensor, params: SamplingParams, tokens: Sequence[int], ancestors: Sequence[int]
    ) -> Tensor:
        """Apply repetition, frequency and presence penalties, in vLLM's order."""
        if not self._known:
            self._in_prompt[tokens[: self._num_prompt]] = True
            self._known = self._num_prompt
        np.add.at(self._in_output, tokens[self._known :], 1)
        self._known = len(tokens)
        path = np.array(ancestors, dtype=np.int64)
        np.add.at(self._in_output, path, 1)
        written = np.flatnonzero(self._in_output)
        times = torch.from_numpy(self._in_output[written]).to(scores.device, torch.float32)
        np.add.at(self._in_output, path, -1)
        scores = scores.clone()
        if params.repetition_penalty != 1:
            seen = torch.from_numpy(np.union1d(written, np.flatnonzero(self._in_prompt))).to(scores.device)
            old, factor = scores[seen], params.repetition_penalty
            scores[seen] = torch.where(old > 0, old / factor, old * factor)
        ids = torch.from_numpy(written).to(scores.device)
        scores[ids] = scores[ids] - times * params.frequency_penalty - params.presence_penalty
        return scores


def _process(processor: object, scores: Tensor, tokens: Sequence[int], ancestors: Sequence[int]) -> Tensor:
    """Apply a Hugging Face logits processor."""
    with outside_code():
        ids = torch.tensor([[*tokens, *ancestors]], dtype=torch.int64, device=scores.device)
        given = scores[None].clone()
        return call_processor(
            f"logits processor {_name_of(processor)}",
            lambda: processor(ids, given),  # type: ignore[operator]
            len(scores),
            scores.device,
        )


def _name_of(processor: object) -> str:
    """Return a processor's name for messages: its __name__ or its class name."""
    try:
        name = getattr(processor, "__name__", None)
    except Exception:  # user classes may raise anything from attribute access
        name = None
    return name if isinstance(name, str) else type(processor).__name__


def topk_rows(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values of each row, descending, and their columns. x: [num_rows, width].

    First selects the k blocks with the largest maxima, which contain the k largest values. With 24 rows, k = 8 and one
    thread it takes 62 us vs. torch.topk's 84 us at width 4,096, and 452 us vs. 2,283 us at 131,072.
    """
    rows, width = x.shape
    block = 64
    k = min(k, width)
    if width % block or width // block <= k:
        return x.topk(k, dim=1)
    blocks = x.view(rows, width // block, block)
    best = blocks.amax(2).topk(k, dim=1, sorted=False).indices
    narrowed = blocks.gather(1, best[:, :, None].expand(-1, -1, block)).view(rows, k * block)
    values, columns = narrowed.topk(k, dim=1)
    return values, best.gather(1, columns // block) * block + columns % block


def keep_best(scores: Tensor, count: int) -> Tensor:
    """Set all but the `count` best scores ([vocab]) to -inf. Ties prefer lower ids. NaN is kept."""
    if count >= len(scores):
        return scores
    return scores.masked_fill(~_best(scores, count), -torch.inf)


def _best(scores: Tensor, count: int) -> Tensor:
    """Return bool [vocab]: True for the `count` best scores and for NaN."""
    least = topk_rows(scores[None], count)[0][0, -1]
    best = ~(scores < least)
    spare = int(best.sum()) - count
    if spare > 0:  # bfloat16 logits tie in several percent of rows
        best[torch.nonzero(scores == least)[-spare:, 0]] = False
    return best


def nucleus_size(scores: Tensor, top_p: float) -> int:
    """Return the number of most likely tokens (at least 1) with total probability `top_p`. scores: [vocab]."""
    shares = torch.softmax(scores, 0)  # torch.exp of a long row would run on the threads of MKL
    wanted, count = top_p * float(shares.sum(dtype=torch.float64)), 64
    while True:  # sorting all 131,072 tokens takes 9 ms; a few hundred usually suffice
        best = topk_rows(shares[None], count)[0][0].double().cumsum(0)
        reached = best >= wanted
        if bool(reached[-1]):
            return int(reached.to(torch.int64).argmax()) + 1
        if count >= len(scores):
            return len(scores)  # the two sums may round differently
        count *= 4


def truncate_rows(logits: Tensor, params: SamplingParams) -> None:
    """Apply top_k, top_p and min_p to draft logits in place.

    Drafts are truncated approximately: ties at the threshold stay, and a nucleus of more than `_NUCLEUS` tokens is not
    truncated.

    Args:
        logits: float32 [num_rows, vocab], already divided by the temperature.
        params: sampling parameters of the request.
    """
    wide = logits.shape[1]
    if params.min_p > 0:
        least = logits.amax(1, keepdim=True) + float(np.log(params.min_p))
        logits.masked_fill_(logits < least, -torch.inf)
    if 0 < params.top_k < min(wide, _NUCLEUS):
        least = topk_rows(logits, params.top_k)[0][:, -1:]
        logits.masked_fill_(logits < least, -torch.inf)
    if params.top_p < 1:
        best = topk_rows(torch.softmax(logits, 1), _NUCLEUS)[0]
        inside = (best.cumsum(1) - best < params.top_p).sum(1, keepdim=True).clamp(min=1)  # 0 if a row is NaN
        values = topk_rows(logits, best.shape[1])[0]
        least = torch.where(inside < best.shape[1], values.gather(1, inside - 1), -torch.inf)
        logits.masked_fill_(logits < least, -torch.inf)
