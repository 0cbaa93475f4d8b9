"""Logit transforms of a request: as inputs of captured rounds' kernels, and applied to one row at a time.

Plain decoding and tree nodes run the same code on one row at a time, so other rows do not affect its bits.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec.errors import RequestError, describe_error
from treespec.sampling.grammar import Grammar
from treespec.sampling.restriction import Restriction
from treespec.sampling_params import SamplingParams
from treespec.utils.torch_state import one_thread, outside_code
from treespec_kernels.sampling.logit_transforms import (
    IN_PROMPT,
    TransformInputs,
    logit_transforms_triton,
    penalised_row,
    topk_rows,
    truncated_row,
)

_STEP = 8  # numbers of end tokens and of a path's tokens are rounded up to a multiple, to limit kernel variants
_NUCLEUS = 64  # maximum number of most likely draft tokens considered for top_p


def runs_by_kernels(params: SamplingParams) -> bool:
    """Return whether kernels can compute all transforms; bad words, grammars and logits processors need the host."""
    return not params.bad_words and not params.logits_processors and params.structured_outputs is None


def has_state(params: SamplingParams) -> bool:
    """Return whether the transforms need a row of biases and token counts."""
    return bool(params.has_penalties or params.logit_bias) or params.allowed_token_ids is not None


class TransformRow(NamedTuple):
    """Parameters of a request: a row of `TransformInputs.numbers`, and of its `options` without the slot."""

    numbers: tuple[float, ...]
    options: tuple[int, int]

    @classmethod
    def of(cls, params: SamplingParams, num_prompt: int, vocab_size: int) -> "TransformRow":
        log_min_p = float(np.log(params.min_p)) if params.min_p > 0 else -np.inf
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        least = num_prompt + params.min_tokens if params.min_tokens else 0
        return cls((params.temperature, params.top_p, log_min_p, *penalties), (min(params.top_k, vocab_size), least))


def bias_row(params: SamplingParams, vocab_size: int) -> np.ndarray:
    """Return the biases added to the logits, float32 [vocab]: -inf for excluded tokens."""
    allowed = params.allowed_token_ids
    row = np.full(vocab_size, 0.0 if allowed is None else -np.inf, dtype=np.float32)
    if allowed is not None:
        row[list(allowed)] = 0.0
    for token, bias in (params.logit_bias or {}).items():
        row[token] += np.float32(bias)
    return row


def count_row(tokens: Sequence[int], num_prompt: int, vocab_size: int) -> np.ndarray:
    """Return a text's row of `TransformInputs.counts`, int32 [vocab]."""
    row = np.bincount(tokens[num_prompt:], minlength=vocab_size).astype(np.int32)
    row[np.unique(np.asarray(tokens[:num_prompt], dtype=np.int64))] += IN_PROMPT
    return row


class Transforms:
    """Converts a row of logits to the scores that a request samples from, in the order stated in `SamplingParams`."""

    def __init__(
        self,
        params: SamplingParams,  # all token ids are within the vocabulary
        num_prompt: int,
        end_tokens: Sequence[int],  # tokens masked before `min_tokens`
        bad_words: Sequence[Sequence[int]],  # token ids of each spelling
        vocab_size: int,  # the target's vocabulary size
        device: torch.device,  # device of the logits
        grammar: Grammar | None = None,
        by_kernel: bool = False,  # if `runs_by_kernels`, use captured rounds' kernel, not its reference
    ):
        self.params, self._num_prompt, self._vocab_size, self._device = params, num_prompt, vocab_size, device
        by_kernel = by_kernel and runs_by_kernels(params)
        self._bad_words, self._grammar, self._by_kernel = _BadWords(bad_words), grammar, by_kernel
        # Whether `penalised` changes the logits
        self.modifies = params.transforms_logits or bool(bad_words) or grammar is not None
        self.restriction: Restriction | None = None  # allowed tokens, also for drafts; None allows all
        if grammar is not None or params.allowed_token_ids is not None:
            self.restriction = Restriction(params.allowed_token_ids, grammar, vocab_size, device)
        self._row, self._num_counted = TransformRow.of(params, num_prompt, vocab_size), 0
        biases = bias_row(params, vocab_size)[None] if has_state(params) else np.zeros((0, vocab_size), np.float32)
        self._biases = torch.from_numpy(biases).to(device)
        self._counts = torch.zeros_like(self._biases, dtype=torch.int32)
        self._numbers = torch.tensor([self._row.numbers], dtype=torch.float32, device=device)
        slot = 0 if len(biases) else -1
        self._options = torch.tensor([[slot, *self._row.options]], dtype=torch.int32, device=device)
        end_tokens = [token for token in end_tokens if token < vocab_size]
        self._ends = (
            self._padded(end_tokens) if by_kernel else torch.tensor(end_tokens, dtype=torch.int64, device=device)
        )

    def scores(self, logits: Tensor, tokens: Sequence[int], ancestors: Sequence[int]) -> Tensor:
        """Return float32 [vocab]: log-probabilities up to a constant, -inf for excluded tokens.

        `logits`, [vocab], are the target's after prompt and output `tokens` and the tree path `ancestors`.
        """
        if self._by_kernel:
            if len(self._biases):
                self._count(tokens)
            position = len(tokens) + len(ancestors)
            positions = torch.tensor([position], dtype=torch.int64, device=self._device)
            row_inputs = self._numbers, self._options, self._ends, positions, self._padded(ancestors)
            inputs = TransformInputs(*row_inputs, self._biases, self._counts)
            return logit_transforms_triton(logits[None], inputs, self.params.truncates)[0]
        return self.truncated(self.penalised(logits, tokens, ancestors))

    def penalised(self, logits: Tensor, tokens: Sequence[int], ancestors: Sequence[int]) -> Tensor:
        """Return the first part of `scores`: the input of `truncated`, [vocab], float32 or the logits themselves."""
        if not self.modifies:
            return logits
        with one_thread():
            return self._penalised(logits, tokens, ancestors)

    def _penalised(self, logits: Tensor, tokens: Sequence[int], ancestors: Sequence[int]) -> Tensor:
        if len(self._biases):
            self._count(tokens)
        position, (numbers, (_, least_position)) = len(tokens) + len(ancestors), self._row
        scores = logits.float()
        if self._grammar is not None:
            scores = scores.masked_fill(self._grammar.excluded(tokens, ancestors), -torch.inf)
        if bad := self._bad_words.ends(tokens, ancestors):
            scores = scores.index_fill(0, torch.tensor(bad, dtype=torch.int64, device=scores.device), -torch.inf)
        state = (self._biases[0], self._counts[0]) if len(self._biases) else None
        path = torch.tensor(ancestors, dtype=torch.int64, device=scores.device)
        ends = self._ends if position < least_position else self._ends[:0]
        scores = penalised_row(scores, state, path, ends, *numbers[3:])
        for processor in self.params.logits_processors or ():
            scores = _process(processor, scores, tokens, ancestors)
        return scores

    def truncated(self, scores: Tensor) -> Tensor:
        """Return the second part of `scores`: temperature and truncation."""
        temperature, top_k, top_p, log_min_p = self.truncation
        return truncated_row(scores.float(), temperature, top_k, top_p, log_min_p)

    @property
    def truncation(self) -> tuple[float, int, float, float]:
        """Temperature, top_k (0 for all), top_p, and the logarithm of min_p."""
        (temperature, top_p, log_min_p, *_), (top_k, _) = self._row
        return temperature, top_k, top_p, log_min_p

    def _count(self, tokens: Sequence[int]) -> None:
        """Count the tokens added since the last call."""
        if not self._num_counted:
            self._counts.copy_(torch.from_numpy(count_row(tokens, self._num_prompt, self._vocab_size))[None])
        elif self._num_counted < len(tokens):
            new_tokens = torch.tensor(tokens[self._num_counted :], dtype=torch.int64, device=self._device)
            self._counts[0].index_add_(0, new_tokens, torch.ones_like(new_tokens, dtype=torch.int32))
        self._num_counted = len(tokens)

    def _padded(self, tokens: Sequence[int]) -> Tensor:
        """Return tokens as int32 [1, n], padded with -1."""
        row = np.full(-(-max(len(tokens), 1) // _STEP) * _STEP, -1, dtype=np.int32)
        row[: len(tokens)] = tokens
        return torch.from_numpy(row).to(self._device)[None]


class _BadWords:
    """Forbidden sequences, indexed by all tokens but the last, so that lookups take constant time."""

    def __init__(self, words: Sequence[Sequence[int]]):
        self._ends: dict[tuple[int, ...], list[int]] = {}
        for word in words:
            self._ends.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._lengths = sorted({len(prefix) for prefix in self._ends})

    def ends(self, tokens: Sequence[int], ancestors: Sequence[int]) -> list[int]:
        """Return the last tokens of all words whose other tokens end the text."""
        if not self._lengths:
            return []
        tail = (*tokens[len(tokens) - min(self._lengths[-1], len(tokens)) :], *ancestors)
        fitting = [length for length in self._lengths if length <= len(tail)]
        return [end for length in fitting for end in self._ends.get(tail[len(tail) - length :], ())]


def _process(processor: object, scores: Tensor, tokens: Sequence[int], ancestors: Sequence[int]) -> Tensor:
    name = getattr(processor, "__name__", type(processor).__name__)
    with outside_code():
        ids = torch.tensor([[*tokens, *ancestors]], dtype=torch.int64, device=scores.device)
        batch = scores[None].clone()
        return call_processor(
            f"logits processor {name}",
            lambda: processor(ids, batch),  # type: ignore[operator]
            len(scores),
            scores.device,
        )


def truncate_rows(logits: Tensor, params: SamplingParams) -> None:
    """Apply top_k, top_p and min_p in place to draft logits: float32 [num_rows, vocab], divided by the temperature.

    Drafts are truncated approximately: ties at the threshold stay, and a nucleus of over `_NUCLEUS` tokens is not
    truncated.
    """
    vocab_size = logits.shape[1]
    if params.min_p > 0:
        least = logits.amax(1, keepdim=True) + float(np.log(params.min_p))
        logits.masked_fill_(logits < least, -torch.inf)
    if 0 < params.top_k < min(vocab_size, _NUCLEUS):
        least = topk_rows(logits, params.top_k)[0][:, -1:]
        logits.masked_fill_(logits < least, -torch.inf)
    if params.top_p < 1:
        top = topk_rows(torch.softmax(logits, 1), _NUCLEUS)[0]
        count = (top.cumsum(1) - top < params.top_p).sum(1, keepdim=True).clamp(min=1)  # 0 if a row is NaN
        values = topk_rows(logits, top.shape[1])[0]
        least = torch.where(count < top.shape[1], values.gather(1, count - 1), -torch.inf)
        logits.masked_fill_(logits < least, -torch.inf)


def call_processor(name: str, call: Callable[[], Any], size: int, device: torch.device) -> Tensor:
    """Call a logits processor and return a copy of its scores, float32 [size], since it may keep and modify them.

    Raises RequestError if it fails or returns anything but dense floating-point scores [1, size].
    """
    scores = torch.empty(size, dtype=torch.float32, device=device)
    try:
        result = call()
        if isinstance(result, Tensor) and result.shape == (1, size) and result.is_floating_point():
            return scores.copy_(result[0])
    except Exception as error:  # user code may raise anything; only this request fails
        raise RequestError(f"{name} failed: {describe_error(error)}") from error
    if isinstance(result, Tensor):
        description = f"{result.dtype} {list(result.shape)}"
        raise RequestError(f"{name} returned {description}; expected floating point [1, {size}]")
    raise RequestError(f"{name} returned {type(result).__name__} instead of a tensor")
