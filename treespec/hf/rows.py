"""Rows of a `generate` call as requests, with transformers' processors, stopping criteria and streamers."""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treespec.config.configs import SpecConfig
from treespec.errors import ConfigError, RequestError, describe_error
from treespec.request import Request
from treespec.sampling.sampler import Sampler
from treespec.sampling.transforms import call_processor
from treespec.sampling_params import MIN_TEMPERATURE, SamplingParams
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
    """Copy time criteria with a start `seconds` later; return all criteria."""
    delayed = []
    for criterion in criteria:
        if hasattr(criterion, "max_time") and hasattr(criterion, "initial_timestamp"):
            criterion = copy.copy(criterion)
            criterion.initial_timestamp += seconds
        delayed.append(criterion)
    return delayed


class ProcessorScoring:
    """Applies processors to a row after its `padding`, int64 [n]; with `records`, keeps logits and scores."""

    def __init__(self, processors: Any, padding: Tensor, records: bool):
        self._processors, self._padding = processors, padding
        self.records: dict[int, tuple[Tensor, Tensor]] | None = {} if records else None  # (logits, scores) by position

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
    """A request with transformers' stopping criteria, called after each token."""

    criteria: Any = None
    padding: Tensor | None = None
    keeps_scores: bool = False

    @outside_code()
    def accept(self, tokens: Sequence[int]) -> list[int]:
        """Return the verified tokens to emit, up to the first at which a criterion fires; a failure ends this row."""
        assert self.padding is not None
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        prefix = torch.cat((self.padding, torch.tensor(self.tokens, dtype=torch.int64, device=self.padding.device)))
        ids = torch.cat((prefix, torch.tensor(list(tokens), dtype=torch.int64, device=prefix.device)))[None]
        for count in range(1, len(tokens) + 1):
            if self._stops(ids[:, : len(prefix) + count], count):
                self.ended = "stop"
            elif self.num_generated + count >= self.max_tokens:
                self.ended = "length"
            if self.error is not None:
                self.ended = "error"
            if self.ended is not None:
                return list(tokens[:count])
        return list(tokens)

    def _stops(self, ids: Tensor, count: int) -> bool:
        """Return whether a criterion fires after `count` new tokens. Sets `error` if one raises."""
        try:
            scores = tuple(scores[None] for _, scores in self.recorded(count)) if self.keeps_scores else None
            is_done = self.criteria(ids, scores)
            return bool(is_done.all() if isinstance(is_done, Tensor) else is_done)
        except Exception as error:  # user code may raise anything; only this row fails
            self.error = RequestError(f"a stopping criterion failed: {describe_error(error)}")
            self.error.__cause__ = error
            return False

    def recorded(self, num_more: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Return (logits, scores), [vocab] each, for the output tokens and `num_more` upcoming ones."""
        assert self.sampler is not None
        records = self.sampler.transforms.records  # type: ignore[attr-defined]
        return [records[position] for position in range(self.num_prompt, len(self.tokens) + num_more)]


def temperature_of(config: Any) -> float:
    """Return the drafts' temperature. The target's is applied by one of the processors."""
    if not config.do_sample:
        return 0.0
    value = 1.0 if config.temperature is None else float(config.temperature)
    if value < MIN_TEMPERATURE:
        raise ConfigError(f"temperature={value!r} with do_sample=True; valid: {MIN_TEMPERATURE} and more")
    return value


def make_rows(
    prompts: Sequence[list[int]],
    padding: Sequence[Tensor],
    processors: Any,
    criteria: Any,
    config: Any,
    params: SamplingParams,
    spec: SpecConfig,
    vocab_size: int,
    device: torch.device,
) -> list[Row]:
    """Create a call's requests from transformers' prepared arguments; `padding` is the tokens before each prompt."""
    ends = getattr(config, "_eos_token_tensor", None)
    end_tokens = tuple(ends.reshape(-1).tolist()) if isinstance(ends, Tensor) else ()
    keeps = bool(config.return_dict_in_generate and config.output_scores)
    records = keeps or bool(config.return_dict_in_generate and config.output_logits)
    rows = []
    for i, (tokens, pads) in enumerate(zip(prompts, padding, strict=True)):
        row = Row(tokens, params, spec, eos_token_ids=end_tokens, seed=params.seed, sample=i)
        row.criteria, row.padding, row.keeps_scores = criteria, pads, keeps
        if processors or config.do_sample or records:
            scoring = ProcessorScoring(type(processors)(processors_of_row(processors, i)), pads, records)
            row.sampler = Sampler(params, scoring, end_tokens, vocab_size, device, params.seed or 0, i)
        rows.append(row)
    return rows


class EndingStreamer:
    """Wraps the streamer of the argument `name`, or None, and ends it exactly once with the context, so that no reader
    waits forever. Raises ConfigError for an object that is not a streamer."""

    def __init__(self, name: str, streamer: Any):
        if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
            raise ConfigError(f"{name}={streamer!r}; valid: an object with put and end")
        self._streamer, self._ended = streamer, streamer is None

    def put(self, tokens: Any) -> None:
        if self._streamer is not None:
            self._streamer.put(tokens)

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._streamer.end()

    def __enter__(self) -> "EndingStreamer":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class RowStreamer:
    """Feeds a streamer the prompt, then one token per row and step; finished rows get `pad`."""

    def __init__(self, streamer: EndingStreamer, input_ids: Tensor, rows: Sequence[Row], pad: int):
        self._streamer, self._rows, self._pad, self._steps = streamer, rows, pad, 0
        streamer.put(input_ids.cpu())

    def due(self) -> list[list[int]]:
        """Return the steps reached by all unfinished rows and not streamed yet."""
        unfinished = [row.num_generated for row in self._rows if row.ended is None]
        start, self._steps = self._steps, min(unfinished or [max(row.num_generated for row in self._rows)])
        outputs = [row.output_token_ids for row in self._rows]
        return [
            [tokens[step] if step < len(tokens) else self._pad for tokens in outputs]
            for step in range(start, self._steps)
        ]

    def put(self, steps: list[list[int]]) -> None:
        """Stream the tokens of each step, one per row."""
        for tokens in steps:
            self._streamer.put(torch.tensor(tokens, dtype=torch.int64, device="cpu"))
