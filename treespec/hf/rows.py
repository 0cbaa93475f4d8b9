"""Requests for the rows of a `generate` call, with transformers' processors and stopping criteria."""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treespec.config.configs import SpecConfig
from treespec.errors import ConfigError, RequestError, describe_error
from treespec.request import Request
from treespec.sampling.sampler import Sampler
from treespec.sampling.transforms import call_processor
from treespec.sampling_params import LEAST_TEMPERATURE, SamplingParams
from treespec.utils.torch_state import outside_code


def processors_of_row(processors: Sequence[Any], row: int) -> list[Any]:
    """Restrict processors to one row. Batch-aware processors are copied and sliced."""
    restricted = []
    for processor in processors:
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, Tensor):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = ignored[row : row + 1]
        if type(processor).__name__ == "PrefixConstrainedLogitsProcessor":
            function = processor._prefix_allowed_tokens_fn
            processor = copy.copy(processor)
            processor._prefix_allowed_tokens_fn = lambda _, ids, function=function: function(row, ids)
        restricted.append(processor)
    return restricted


def with_delayed_start(criteria: Sequence[Any], seconds: float) -> list[Any]:
    """Return the criteria, with copies of time criteria started `seconds` later."""
    delayed = []
    for criterion in criteria:
        if hasattr(criterion, "max_time") and hasattr(criterion, "initial_timestamp"):
            criterion = copy.copy(criterion)
            criterion.initial_timestamp += seconds
        delayed.append(criterion)
    return delayed


class ProcessorScoring:
    """Applies transformers' processors and warpers to the padded prefix of a row.

    `padding`, int64 [n], are the tokens before the row's; `records` keeps logits and scores.
    """

    def __init__(self, processors: Any, padding: Tensor, records: bool):
        self._processors, self._padding = processors, padding
        self.records: dict[int, tuple[Tensor, Tensor]] | None = {} if records else None  # position -> (logits, scores)

    @outside_code()
    def scores(self, logits: Tensor, tokens: Sequence[int], ancestors: Sequence[int]) -> Tensor:
        """Return the processed scores, float32 [vocab]. Raises RequestError if a processor fails."""
        prefix = [*tokens, *ancestors]
        sequence = torch.tensor(prefix, dtype=torch.int64, device=logits.device)
        ids = torch.cat((self._padding.to(logits.device), sequence))[None]
        raw = logits.to(torch.float32, copy=True)
        batch = raw[None].clone()
        scores = call_processor("a logits processor", lambda: self._processors(ids, batch), len(raw), logits.device)
        if self.records is not None:
            self.records[len(prefix)] = raw, scores  # later paths overwrite it
        return scores


@dataclass(eq=False)
class Row(Request):
    """A request that ends by transformers' stopping criteria, which are called after each token."""

    criteria: Any = None
    padding: Tensor | None = None
    keeps_scores: bool = False

    @outside_code()
    def accept(self, tokens: Sequence[int]) -> list[int]:
        """Return the verified tokens to emit, up to the first at which a criterion fires; a failure ends this row."""
        assert self.padding is not None
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        before = torch.cat((self.padding, torch.tensor(self.tokens, dtype=torch.int64, device=self.padding.device)))
        ids = torch.cat((before, torch.tensor(list(tokens), dtype=torch.int64, device=before.device)))[None]
        for count in range(1, len(tokens) + 1):
            if self._stops(ids[:, : len(before) + count], count):
                self.ended = "stop"
            elif self.num_generated + count >= self.max_tokens:
                self.ended = "length"
            if self.failure is not None:
                self.ended = "error"
            if self.ended is not None:
                return list(tokens[:count])
        return list(tokens)

    def _stops(self, ids: Tensor, count: int) -> bool:
        """Return whether a criterion fires after `count` new tokens. Sets `failure` if one raises."""
        try:
            scores = tuple(scores[None] for _, scores in self.recorded(count)) if self.keeps_scores else None
            done = self.criteria(ids, scores)
            return bool(done.all() if isinstance(done, Tensor) else done)
        except Exception as error:  # user code may raise anything; only this row fails
            self.failure = RequestError(f"a stopping criterion failed: {describe_error(error)}")
            self.failure.__cause__ = error
            return False

    def recorded(self, more: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Return logits and scores, [vocab] each, of the output tokens and `more` upcoming ones."""
        assert self.sampler is not None
        records = self.sampler.transforms.records  # type: ignore[attr-defined]
        return [records[position] for position in range(self.num_prompt, len(self.tokens) + more)]


def temperature_of(config: Any) -> float:
    """Return the temperature of the drafts. The target's is applied by one of the processors."""
    if not config.do_sample:
        return 0.0
    value = 1.0 if config.temperature is None else float(config.temperature)
    if value < LEAST_TEMPERATURE:
        raise ConfigError(f"temperature={value!r} with do_sample=True; valid: {LEAST_TEMPERATURE} and more")
    return value


class RowOptions(NamedTuple):
    """What all rows of a call have in common."""

    config: Any  # transformers' prepared GenerationConfig
    params: SamplingParams  # maximum number of new tokens, and the temperature of the drafts
    spec: SpecConfig
    seed: int
    logits_of: tuple[int, torch.device]  # vocabulary size and device of the target's logits


def make_row(tokens: list[int], row: int, processors: Any, criteria: Any, padding: Tensor, options: RowOptions) -> Row:
    """Create the request of one row, with transformers' prepared processors and criteria for this row.

    `row` is the sample index of the seed, and `padding` the tokens before the prompt, int64 [n].
    """
    config, params, spec, seed, logits_of = options
    ends = getattr(config, "_eos_token_tensor", None)
    end_tokens = tuple(ends.reshape(-1).tolist()) if isinstance(ends, Tensor) else ()
    keeps = bool(config.return_dict_in_generate and config.output_scores)
    records = keeps or bool(config.return_dict_in_generate and config.output_logits)
    request = Row(
        tokens,
        params,
        spec,
        eos_token_ids=end_tokens,
        seed=seed,
        criteria=criteria,
        padding=padding,
        keeps_scores=keeps,
    )
    request.sample = row
    if processors or config.do_sample or records:
        scoring = ProcessorScoring(processors, padding, records)
        request.sampler = Sampler(params, scoring, end_tokens, *logits_of, seed, row)
    return request
