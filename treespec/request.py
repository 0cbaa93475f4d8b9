"""What a user asks for and what comes back."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from treespec.config import SpecConfig, not_yet
from treespec.detokenizer import Detokenizer
from treespec.errors import ConfigError, reject_unknown

if TYPE_CHECKING:
    from treespec.scheduler import PromptGroup

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, init=False)
class SamplingParams:
    """How a request's tokens are chosen and when it ends. Names are vLLM's; the defaults are not.

    Here temperature is 0 (greedy) and max_tokens 128; vLLM's defaults are 1.0 and 16.

    Args:
        max_tokens: the most tokens to generate.
        stop: a string or several; `text` ends before the first that appears, `token_ids` with the token that
            completed it.
        include_stop_str_in_output: keep the stop string in `text`.
        stop_token_ids: tokens that end the request like the model's end token: in `token_ids`, not in `text`.
        ignore_eos: go on past the model's end token.
        skip_special_tokens: leave special tokens out of `text`.
        seed: accepted; greedy decoding does not use it.
        temperature, n, top_k, top_p, min_p, the penalties, bad_words, min_tokens, logprobs, logit_bias,
            logits_processors: their neutral values only; sampling is not implemented yet.

    Raises:
        ConfigError: an unknown keyword, a value out of range, an option without implementation.
    """

    max_tokens: int = 128
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    n: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: Sequence[str] | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    logits_processors: Sequence[Any] | None = None

    def __init__(self, **options: Any) -> None:
        defaults = {field.name: field.default for field in fields(SamplingParams)}
        reject_unknown("SamplingParams", options, defaults)
        for name, value in (defaults | options).items():
            object.__setattr__(self, name, value)
        for name in _PENDING:
            self._check_pending(name, defaults[name], getattr(self, name))
        stop = (self.stop,) if isinstance(self.stop, str) else self._tuple("stop", "a string or a list of strings")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", self._tuple("stop_token_ids", "a list of token ids"))
        self._check()

    def _tuple(self, name: str, valid: str) -> tuple[Any, ...]:
        value = getattr(self, name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{name}={value!r}; valid: {valid}")
        return tuple(value)

    @staticmethod
    def _check_pending(name: str, neutral: Any, value: Any) -> None:
        empty = value is None or (isinstance(value, list | tuple | dict) and not value)
        if empty or (name == "top_k" and isinstance(value, int) and value == -1):
            return
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and value == neutral:
            return
        if number and "penalty" not in name and not value >= 0:
            raise ConfigError(f"{name}={value!r} is out of range; valid now: {neutral!r}")
        raise not_yet(name, value, f"{neutral!r}, that is greedy decoding")

    def _check(self) -> None:
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise ConfigError(f"max_tokens={self.max_tokens!r}; valid: an int of at least 1")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise ConfigError(f"stop={self.stop!r}; valid: non-empty strings")
        if any(isinstance(t, bool) or not isinstance(t, int) or t < 0 for t in self.stop_token_ids):
            raise ConfigError(f"stop_token_ids={self.stop_token_ids!r}; valid: token ids")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ConfigError(f"seed={self.seed!r}; valid: an int or None")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}; valid: True or False")


# Options of the API whose implementation has not landed: their neutral values only.
_PENDING = (
    "n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "bad_words", "min_tokens", "logprobs", "logit_bias", "logits_processors",
)  # fmt: skip


@dataclass(frozen=True)
class RequestMetrics:
    """One request's figures.

    Attributes:
        target_passes: tree passes that the request took part in, prefill not counted.
        prefill_passes: passes over its prompt (all but the last token).
        generated_tokens: tokens emitted.
        acceptance_length: generated_tokens / target_passes, the bonus token included: plain decoding has 1.0.
        accepted_by_source: source to accepted drafted tokens that it proposed; a token of two sources counts for both.
        accepted_only_by_source: the same, where no other source proposed the token.
        nodes_verified: rows of the target passes, roots included.
        ttft: seconds from arrival to the first token.
        seconds: seconds from arrival to the end.
        seed: the request's seed.
    """

    target_passes: int
    prefill_passes: int
    generated_tokens: int
    acceptance_length: float
    accepted_by_source: dict[str, int]
    accepted_only_by_source: dict[str, int]
    nodes_verified: int
    ttft: float | None
    seconds: float
    seed: int | None


@dataclass(frozen=True)
class CompletionOutput:
    """One completion. `token_ids` include the end token, `text` does not; `text` is None without a tokenizer."""

    index: int
    text: str | None
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    logprobs: None = None
    cumulative_logprob: None = None


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. `error` says why where `finish_reason` is "error"."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = None


@dataclass(frozen=True)
class StreamChunk:
    """What one step added to a streamed request. The texts of its chunks concatenate to its final text."""

    request_id: str
    text: str | None
    token_ids: list[int]
    finish_reason: FinishReason | None
    output: RequestOutput | None


_ids = itertools.count()


@dataclass(eq=False)
class Request:
    """A request inside the engine. `tokens` are prompt and output; the last one is the next tree's root.

    `context_len` counts the positions whose target K/V are committed: len(tokens) - 1 once the prompt is prefilled.
    `max_tokens` is the parameters' own, cut to what the context holds. `ended` is set when a token ends the output,
    `finish_reason` when the engine has let go of the request. `group`: the samples of one prompt that this one shares
    its prompt with; `sample` says which of them it is.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    spec: SpecConfig
    prompt: str | None = None
    max_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    detokenizer: Detokenizer | None = None
    group: "PromptGroup | None" = None
    sample: int = 0
    request_id: str = field(default_factory=lambda: f"req-{next(_ids)}")
    tokens: list[int] = field(init=False)
    context_len: int = 0
    pages: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    ended: FinishReason | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    arrival: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    finished_at: float | None = None
    poisoned: bool = False  # a draft computed NaN: its slots must not reach the next holder of the pages
    target_passes: int = 0
    prefill_passes: int = 0
    nodes_verified: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    accepted_only_by_source: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_token_ids)
        self.max_tokens = self.max_tokens or self.params.max_tokens

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end this request."""
        return (*self.params.stop_token_ids, *(() if self.params.ignore_eos else self.eos_token_ids))

    @property
    def tokens_left(self) -> int:
        return self.max_tokens - self.num_generated

    @property
    def needs_prefill(self) -> bool:
        return self.context_len < self.num_prompt - 1

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def accept(self, tokens: Sequence[int]) -> list[int]:
        """The tokens of a verified path that are emitted: all up to a stop, which may lie inside the path."""
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        for count, token in enumerate(tokens, start=1):
            if self._ends_with(token, self.num_generated + count):
                return list(tokens[:count])
        return list(tokens)

    def _ends_with(self, token: int, num_generated: int) -> bool:
        params = self.params
        if token in params.stop_token_ids:
            self.ended, self.stop_reason = "stop", token
        elif token in self.eos_token_ids and not params.ignore_eos:
            self.ended = "stop"
        elif self.detokenizer is not None and self.detokenizer.push(token):
            self.ended, self.stop_reason = "stop", self.detokenizer.stopped_by
        elif num_generated >= self.max_tokens:
            self.ended = "length"
        return self.ended is not None

    def count_accepted(self, sources_of_nodes: Sequence[tuple[str, ...]]) -> None:
        """Attribute accepted drafted tokens to the sources that proposed them."""
        for sources in sources_of_nodes:
            for source in sources:
                self.accepted_by_source[source] = self.accepted_by_source.get(source, 0) + 1
            if len(sources) == 1:
                only = self.accepted_only_by_source
                only[sources[0]] = only.get(sources[0], 0) + 1

    def metrics(self) -> RequestMetrics:
        end = self.finished_at or time.perf_counter()
        return RequestMetrics(
            target_passes=self.target_passes,
            prefill_passes=self.prefill_passes,
            generated_tokens=self.num_generated,
            acceptance_length=self.num_generated / self.target_passes if self.target_passes else 0.0,
            accepted_by_source=dict(self.accepted_by_source),
            accepted_only_by_source=dict(self.accepted_only_by_source),
            nodes_verified=self.nodes_verified,
            ttft=None if self.first_token_at is None else self.first_token_at - self.arrival,
            seconds=end - self.arrival,
            seed=self.params.seed,
        )
