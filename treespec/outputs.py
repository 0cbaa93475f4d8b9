"""Outputs of a call: completions, their metrics, and the chunks of a stream."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from treespec.request import FinishReason, Request
from treespec.sampling.transforms import Logprob


@dataclass(frozen=True)
class RequestMetrics:
    """One request's figures, over all of its samples.

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
        seed: of the noise, drawn where the request named none; None where nothing is sampled and none was named.
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

    @classmethod
    def of(cls, samples: Sequence[Request]) -> "RequestMetrics":
        """Sums over a prompt's samples; `ttft` is the earliest, `seconds` the longest."""
        passes, generated = sum(s.target_passes for s in samples), sum(s.num_generated for s in samples)
        accepted: Counter[str] = Counter()
        alone: Counter[str] = Counter()
        for sample in samples:
            accepted.update(sample.accepted_by_source)
            alone.update(sample.accepted_only_by_source)
        firsts = [s.first_token_at - s.arrival for s in samples if s.first_token_at is not None]
        return cls(
            target_passes=passes,
            prefill_passes=sum(s.prefill_passes for s in samples),
            generated_tokens=generated,
            acceptance_length=generated / passes if passes else 0.0,
            accepted_by_source=dict(accepted),
            accepted_only_by_source=dict(alone),
            nodes_verified=sum(s.nodes_verified for s in samples),
            ttft=min(firsts, default=None),
            seconds=max((s.finished_at or time.perf_counter()) - s.arrival for s in samples),
            seed=samples[0].seed,
        )


@dataclass(frozen=True)
class CompletionOutput:
    """One completion. `token_ids` include the end token, `text` does not unless `include_stop_str_in_output` asked for
    it; `text` is None without a tokenizer, and empty with detokenize=False.

    `logprobs` holds, for each token, it and the likeliest ones of its position, by token id; `cumulative_logprob` is
    the sum over the tokens. Both are None unless `SamplingParams.logprobs` asked for them.
    """

    index: int
    text: str | None
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. `error` says why where `finish_reason` is "error".

    `prompt_token_ids` are those that were used, the last ones where the call truncates. `prompt_logprobs` holds for
    each of them it and the likeliest ones of its position, by token id, and None for the first. It is None unless
    `SamplingParams.prompt_logprobs` asked for them, and where the request ended before its prompt was computed.
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
    """What one step added to a streamed request. The texts of the chunks of one `index`, that is of one of its `n`
    outputs, concatenate to its final text. The last chunk of all has the whole `output`."""

    request_id: str
    text: str | None
    token_ids: list[int]
    finish_reason: FinishReason | None
    output: RequestOutput | None
    index: int = 0
