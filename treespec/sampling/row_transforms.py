"""Logit transforms of a request as inputs of `logit_transforms`, in captured rounds and step by step."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from treespec.sampling_params import SamplingParams
from treespec_kernels.sampling.logit_transforms import IN_PROMPT


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
