"""Request state inside the engine, and prompt groups of samples that share a prompt."""

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from treespec.config.configs import RANDOM_DRAWS, SpecConfig
from treespec.errors import RequestError, TreespecError
from treespec.lora import Lora
from treespec.mixture_weights import MixtureWeights
from treespec.sampling.logprobs import Logprob
from treespec.sampling.restriction import Restriction
from treespec.sampling.sampler import Sampler
from treespec.sampling_params import SamplingParams
from treespec.text.detokenizer import Detokenizer
from treespec_kernels.recurrent.request_state import RecurrentState, StateRows

if TYPE_CHECKING:
    from treespec.planning.learning import DraftedMeans

FinishReason = Literal["stop", "length", "abort", "error"]

_ids = itertools.count()


def new_request_id() -> str:
    return f"req-{next(_ids)}"


_group_ids = itertools.count()


@dataclass(eq=False)
class PromptGroup:
    """Samples of one prompt: requests with the same prompt and spec that share the prompt's K/V.

    The first admitted sample is the leader and prefills the prompt. The others wait for its first token, which shows
    that the prompt's K/V is finite; they then share the prompt's full pages and copy its last, partial one. When the
    leader ends, a running sample becomes the leader; if none is running, the group keeps the prompt's pages for the
    next sample. A leader that ends before its first token leaves no pages.
    """

    group_id: str = field(default_factory=lambda: f"group-{next(_group_ids)}")  # holder of the group's pages
    leader: "Request | None" = field(default=None, repr=False)
    kept: np.ndarray | None = None  # prompt pages held by the group; None while a sample leads or before prefill
    waiting: int = 0  # number of samples not yet admitted
    mixture: MixtureWeights | None = None  # mixture weights after the prompt; None if the SSMs have not prefilled it
    without_ssms: bool = False  # the SSMs never prefill the prompt: no sample was expected to gain from it

    @property
    def is_prefilling(self) -> bool:
        """Whether other samples must wait for the leader."""
        return self.leader is not None and not self.leader.has_verified_prompt


@dataclass(eq=False)
class Request:
    """A request (one sample) inside the engine. `tokens` is prompt plus output; the last token is the next tree's root.

    `context_len` counts positions with committed target K/V: len(tokens) - 1 after prefill. `output_id` is the
    user-visible id, common to all samples of a prompt; `sample` is the index among them and `group` their shared state.
    `max_tokens` is the parameter clipped to the context. `ended` is set when a token ends the output, `finish_reason`
    when the engine has released the request. Prefill fills `prompt_logprobs` if requested, in the sample that computes
    the prompt. A preempted request has no pages; its prefill computes the output so far, too.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    spec: SpecConfig
    prompt: str | None = None
    max_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    detokenizer: Detokenizer | None = None
    undecoded: list[int] = field(default_factory=list)  # accepted tokens that the detokenizer has not read
    sampler: Sampler | None = None  # None: argmax of the logits
    seed: int | None = None
    group: PromptGroup | None = None
    sample: int = 0
    request_id: str = field(default_factory=new_request_id)
    output_id: str = ""
    priority: int = 0  # lower values are admitted first
    lora: Lora | None = None  # adapter of the target; drafts have none
    order: int = 0  # order of arrival at the scheduler
    passed: int = 0  # number of later requests that were admitted before it
    num_preemptions: int = 0
    tokens: list[int] = field(init=False)
    context_len: int = 0
    prefill_len: int = field(init=False)  # positions to prefill: all tokens but the last
    pages: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    state: RecurrentState | None = field(default=None, repr=False)  # of the target's recurrent layers, if it has any
    reserved_len: int = 0  # number of tokens up to which the pages suffice for a round
    page_keys: list[bytes] = field(default_factory=list)  # keys of the prompt's full pages, see `prefix_cache`
    num_cached: int = 0  # prompt tokens with K/V from other requests
    draft_lengths: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))  # see `Prefix`
    ended: FinishReason | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: TreespecError | None = None
    arrival: float = field(default_factory=time.perf_counter)
    admitted_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    poisoned: bool = False  # a draft computed NaN: zero its slots before the pages are reused
    runs_ahead: bool = False  # whether a round that may not be the request's next one writes behind its context
    target_passes: int = 0
    prefill_passes: int = 0
    num_prefilled: int = 0  # positions computed in these passes
    nodes_verified: int = 0
    num_rounds: int = 0
    accepted_tokens: int = 0
    accepted_lengths: list[int] = field(default_factory=list)  # [i]: number of rounds that accepted i drafted tokens
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    accepted_only_by_source: Counter[str] = field(default_factory=Counter)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    drafted: "DraftedMeans | None" = None  # learned by the planner; None before its first round
    # If a list, log-probabilities are appended to it as `LogprobRows.packed` instead of to `logprobs`
    packed_logprobs: list[np.ndarray] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_token_ids)
        self.prefill_len = len(self.tokens) - 1
        self.max_tokens = self.max_tokens or self.params.max_tokens or 0
        self.output_id = self.output_id or self.request_id
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs.append(None)  # the first token has none

    @property
    def adapter(self) -> Any:
        """The adapter in the form of `RequestRows.adapter`."""
        return None if self.lora is None else self.lora.updates

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def max_len(self) -> int:
        """Maximum number of positions that the request may reach."""
        return self.num_prompt + self.max_tokens

    def state_rows(self, commits: int = 0) -> StateRows | None:
        """Return the state for a pass of the target, as in `RequestRows`."""
        return None if self.state is None else StateRows(self.state, commits)

    @property
    def num_replayed(self) -> int:
        """Number of committed tokens since the recurrent state was stored, which the target's next pass replays."""
        return 0 if self.state is None else self.context_len - self.state.length

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end this request."""
        return (*(self.params.stop_token_ids or ()), *(() if self.params.ignore_eos else self.eos_token_ids))

    @property
    def is_sampled(self) -> bool:
        """Whether the temperature is greater than 0."""
        return self.sampler is not None and self.sampler.temperature > 0

    @property
    def draws_at_random(self) -> bool:
        """Whether drafts use random draws for this request, as its verification rule requires."""
        return self.is_sampled and self.spec.verification in RANDOM_DRAWS

    @property
    def restriction(self) -> Restriction | None:
        """Restriction to allowed tokens; None allows all."""
        return None if self.sampler is None else self.sampler.restriction

    @property
    def tokens_left(self) -> int:
        return self.max_tokens - self.num_generated

    def room(self, max_model_len: int) -> int:
        """Maximum tree depth: every level may be emitted, plus one token."""
        return min(self.tokens_left - 1, max_model_len - len(self.tokens) - 1)

    @property
    def needs_prefill(self) -> bool:
        return self.context_len < self.prefill_len

    @property
    def has_verified_prompt(self) -> bool:
        """Whether the pages hold the whole prompt and a first token was computed from it, so that its K/V is finite."""
        verified = self.num_generated or (self.context_len and not self.prefill_passes)
        return bool(verified) and not self.needs_prefill

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def raise_error(self) -> None:
        """Raise the error of a failed request."""
        if self.error is not None:
            raise self.error

    def accept(self, tokens: Sequence[int]) -> list[int]:
        """Return the verified tokens to emit, up to a stop or to a token that cannot be decoded (`error`)."""
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        for count, token in enumerate(tokens, start=1):
            try:
                ends = self._ends_with(token, self.num_generated + count)
                if ends:
                    self.decode()
            except RequestError as error:
                self.ended, self.error, ends = "error", error, True
                unread = token in self.end_tokens and not self.params.include_stop_str_in_output
                count -= len(self.undecoded) + unread
            if ends:
                return list(tokens[:count])
        return list(tokens)

    def decode(self) -> None:
        """Detokenize the accepted tokens. Raises RequestError; the tokens after the failed one remain `undecoded`."""
        while self.undecoded:
            assert self.detokenizer is not None
            self.detokenizer.push(self.undecoded.pop(0))

    def _ends_with(self, token: int, num_generated: int) -> bool:
        params, may_stop = self.params, num_generated > self.params.min_tokens
        if token in self.end_tokens:
            self.ended, self.stop_reason = "stop", token if token in (params.stop_token_ids or ()) else None
            if params.include_stop_str_in_output and (stopped_by := self._stopped_by(token, may_stop)):
                self.stop_reason = stopped_by
        elif stopped_by := self._stopped_by(token, may_stop):
            self.ended, self.stop_reason = "stop", stopped_by
        elif num_generated >= self.max_tokens:
            self.ended = "length"
        return self.ended is not None

    def _stopped_by(self, token: int, may_stop: bool) -> str | None:
        """Return the stop string that a token completes, or None; without stop strings, leave the token to `decode`."""
        if self.detokenizer is None:
            return None
        if not self.params.stop:
            self.undecoded.append(token)
            return None
        return self.detokenizer.stopped_by if self.detokenizer.push(token, may_stop) else None

    def count_accepted(self, sources_of_nodes: Sequence[tuple[str, ...]]) -> None:
        """Count accepted drafted tokens, and attribute them to the sources that proposed them."""
        accepted = len(sources_of_nodes)
        self.accepted_tokens += accepted
        self.accepted_lengths += [0] * (accepted + 1 - len(self.accepted_lengths))
        self.accepted_lengths[accepted] += 1
        for sources in sources_of_nodes:
            for source in sources:
                self.accepted_by_source[source] += 1
            if len(sources) == 1:
                self.accepted_only_by_source[sources[0]] += 1
