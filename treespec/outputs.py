"""Request outputs: completions, metrics and stream chunks."""

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from treespec.request import FinishReason, Request
from treespec.sampling.logprobs import Logprob


@dataclass(frozen=True)
class RequestMetrics:
    """Metrics of one request, summed over its samples.

    Attributes:
        target_passes: tree passes, without prefill.
        prefill_passes: passes over the prompt (all but its last token).
        cached_tokens: prompt tokens with K/V from earlier requests.
        generated_tokens: tokens emitted.
        acceptance_length: generated_tokens / target_passes, bonus tokens included; 1.0 for plain decoding.
        accepted_tokens: drafted tokens that were accepted; the target alone chose the other generated tokens.
        accepted_by_source: accepted drafted tokens by source; a token proposed by two sources counts for both.
        accepted_only_by_source: the same for tokens proposed by this source only.
        accepted_lengths: entry i is the number of target passes that accepted i drafted tokens.
        nodes_verified: rows of target passes, including roots.
        queued: seconds from arrival to the start of prefill.
        ttft: seconds from arrival to the first token.
        seconds: seconds from arrival to the end.
        seed: RNG seed, generated if a sampled request has none; None for a greedy request without one.
    """

    target_passes: int
    prefill_passes: int
    cached_tokens: int
    generated_tokens: int
    acceptance_length: float
    accepted_tokens: int
    accepted_by_source: dict[str, int]
    accepted_only_by_source: dict[str, int]
    accepted_lengths: list[int]
    nodes_verified: int
    queued: float | None
    ttft: float | None
    seconds: float
    seed: int | None

    @classmethod
    def of(cls, samples: Sequence[Request]) -> "RequestMetrics":
        """Aggregate a prompt's samples: sums, the earliest `queued` and `ttft` and the longest `seconds`."""
        passes, generated = sum(s.target_passes for s in samples), sum(s.num_generated for s in samples)
        accepted: Counter[str] = Counter()
        accepted_only: Counter[str] = Counter()
        for sample in samples:
            accepted.update(sample.accepted_by_source)
            accepted_only.update(sample.accepted_only_by_source)
        lengths = itertools.zip_longest(*(s.accepted_lengths for s in samples), fillvalue=0)
        starts = [s.admitted_at - s.arrival for s in samples if s.admitted_at is not None]
        firsts = [s.first_token_at - s.arrival for s in samples if s.first_token_at is not None]
        return cls(
            target_passes=passes,
            prefill_passes=sum(s.prefill_passes for s in samples),
            cached_tokens=sum(s.num_cached for s in samples),
            generated_tokens=generated,
            acceptance_length=generated / passes if passes else 0.0,
            accepted_tokens=sum(s.accepted_tokens for s in samples),
            accepted_by_source=dict(accepted),
            accepted_only_by_source=dict(accepted_only),
            accepted_lengths=[sum(counts) for counts in lengths],
            nodes_verified=sum(s.nodes_verified for s in samples),
            queued=min(starts, default=None),
            ttft=min(firsts, default=None),
            seconds=max((s.finished_at or time.perf_counter()) - s.arrival for s in samples),
            seed=samples[0].seed,
        )


@dataclass(frozen=True)
class CompletionOutput:
    """One completion. `token_ids` includes the end token, `text` only with `include_stop_str_in_output`; `text` is None
    without a tokenizer and empty with detokenize=False.

    `logprobs` maps, per position, the chosen and the most likely token ids to their log-probabilities;
    `cumulative_logprob` is the sum over the chosen tokens. Both are None without `SamplingParams.logprobs`. `metrics`
    are those of this completion alone, once it has finished.
    """

    index: int
    text: str | None
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    metrics: RequestMetrics | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. `error` holds the reason if `finish_reason` is "error".

    `prompt_token_ids` are the tokens used, after truncation. `prompt_logprobs` has an entry as in `logprobs` per prompt
    token, None for the first. It is None without `SamplingParams.prompt_logprobs`, or if the request ended before its
    prefill.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass(frozen=True)
class StreamChunk:
    """Tokens that one step added to a streamed request. The last chunk carries the whole `output`."""

    request_id: str
    text: str | None
    token_ids: list[int]
    finish_reason: FinishReason | None
    output: RequestOutput | None
    index: int = 0  # index of the output among `n`
