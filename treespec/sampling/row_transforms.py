"""Logit transforms of a request as inputs of the kernels that captured rounds and the step-by-step sampler share."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec.sampling.restriction import Restriction
from treespec.sampling_params import SamplingParams
from treespec_kernels.sampling.logit_transforms import IN_PROMPT, TransformInputs, logit_transforms_triton

_STEP = 8  # numbers of end tokens and of a path's tokens are rounded up to multiples, for few variants of a kernel


def runs_by_kernels(params: SamplingParams) -> bool:
    """Return whether the kernels compute all transforms of a request.

    Bad words, structured outputs and logits processors need the host.
    """
    return not params.bad_words and not params.logits_processors and params.structured_outputs is None


def has_state(params: SamplingParams) -> bool:
    """Return whether the transforms need a row of biases and token counts."""
    return bool(params.has_penalties or params.logit_bias) or params.allowed_token_ids is not None


class TransformRow(NamedTuple):
    """Parameters of a request: a row of `TransformInputs.numbers`, and of its `options` behind the slot."""

    numbers: tuple[float, ...]
    options: tuple[int, int]

    @classmethod
    def of(cls, params: SamplingParams, num_prompt: int, vocab_size: int) -> "TransformRow":
        log_min_p = float(np.log(params.min_p)) if params.min_p > 0 else -np.inf
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        least = num_prompt + params.min_tokens if params.min_tokens else 0
        return cls((params.temperature, params.top_p, log_min_p, *penalties), (min(params.top_k, vocab_size), least))


def bias_row(params: SamplingParams, vocab_size: int) -> np.ndarray:
    """Return what is added to the logits, float32 [vocab]: -inf for excluded tokens."""
    allowed = params.allowed_token_ids
    row = np.full(vocab_size, 0.0 if allowed is None else -np.inf, dtype=np.float32)
    if allowed is not None:
        row[list(allowed)] = 0.0
    for token, bias in (params.logit_bias or {}).items():
        row[token] += np.float32(bias)
    return row


def count_row(tokens: Sequence[int], num_prompt: int, vocab_size: int) -> np.ndarray:
    """Return the row of `TransformInputs.counts` of a text, int32 [vocab]."""
    row = np.bincount(tokens[num_prompt:], minlength=vocab_size).astype(np.int32)
    row[np.unique(np.asarray(tokens[:num_prompt], dtype=np.int64))] += IN_PROMPT
    return row


class RowTransforms:
    """Transforms one row of logits at a time, with the bits of captured rounds.

    Args:
        params: sampling parameters of the request, which `runs_by_kernels`.
        num_prompt: number of prompt tokens.
        end_tokens: tokens masked before `min_tokens`.
        vocab_size, device: those of the target's logits.

    Attributes:
        restriction: allowed tokens, also for drafts; None = all.
    """

    def __init__(
        self,
        params: SamplingParams,
        num_prompt: int,
        end_tokens: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ):
        self._num_prompt, self._vocab_size, self._device = num_prompt, vocab_size, device
        self._has_state, self._truncates = has_state(params), params.truncates
        row = TransformRow.of(params, num_prompt, vocab_size)
        self._numbers = torch.tensor([row.numbers], dtype=torch.float32, device=device)
        slot = 0 if self._has_state else -1
        self._options = torch.tensor([[slot, *row.options]], dtype=torch.int32, device=device)
        self._ends = self._padded(end_tokens)
        biases = bias_row(params, vocab_size)[None] if self._has_state else np.zeros((0, vocab_size), np.float32)
        self._biases = torch.from_numpy(biases).to(device)
        self._counts = torch.zeros(len(biases), vocab_size, dtype=torch.int32, device=device)
        self._known = 0
        self.restriction: Restriction | None = None
        if params.allowed_token_ids is not None:
            self.restriction = Restriction(params.allowed_token_ids, None, vocab_size, device)

    def scores(self, logits: Tensor, tokens: Sequence[int], ancestors: Sequence[int]) -> Tensor:
        """Return float32 [vocab]: log-probabilities up to a constant, -inf for excluded tokens.

        Arguments as in `Transforms.scores`.
        """
        if self._has_state:
            self._count(tokens)
        positions = torch.tensor([len(tokens) + len(ancestors)], dtype=torch.int64, device=self._device)
        inputs = TransformInputs(
            self._numbers, self._options, self._ends, positions, self._padded(ancestors), self._biases, self._counts
        )
        return logit_transforms_triton(logits[None], inputs, self._truncates)[0]

    def _count(self, tokens: Sequence[int]) -> None:
        if not self._known:
            self._counts.copy_(torch.from_numpy(count_row(tokens, self._num_prompt, self._vocab_size))[None])
        elif self._known < len(tokens):
            new = torch.tensor(tokens[self._known :], dtype=torch.int64, device=self._device)
            self._counts[0].index_add_(0, new, torch.ones_like(new, dtype=torch.int32))
        self._known = len(tokens)

    def _padded(self, tokens: Sequence[int]) -> Tensor:
        """Return tokens as int32 [1, n], padded with -1."""
        row = np.full(-(-max(len(tokens), 1) // _STEP) * _STEP, -1, dtype=np.int32)
        row[: len(tokens)] = tokens
        return torch.from_numpy(row).to(self._device)[None]
