"""Interleaved runs of the modes, and profiling of their rounds.

All modes decode a batch before the next batch starts, so that transient load on the machine affects all of them.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from treespec.config.configs import SpecConfig
from treespec.engine.engine import Engine
from treespec.errors import RequestError
from treespec.llm import LLM
from treespec.sampling_params import SamplingParams

MEANING = {
    "draft": "all sources propose",
    "merge": "plan, merge and prune the trees",
    "forward": "the target pass; in captured rounds also verification and commit",
    "verify": "from logits to the accepted path, sampling noise included",
    "commit": "emit tokens, compact the caches",
    "update": "release finished requests",
    "host": "everything else",
}


@dataclass
class Sample:
    """Measurements of one mode. Lists have one entry per prompt, in order; times are in seconds."""

    tokens: list[list[int]] = field(default_factory=list)  # output token ids
    decode_seconds: float = 0.0  # sum over batches, without prefill
    decoded: int = 0  # tokens generated in `decode_seconds`
    total_seconds: float = 0.0  # sum over batches, with prefill
    prefill_seconds: float = 0.0  # including the SSMs'; 0 if unknown
    ttft: list[float] = field(default_factory=list)  # seconds from the start of the batch to the first token
    per_token: list[float] = field(default_factory=list)  # decode seconds per token of each request
    passes: list[int] = field(default_factory=list)  # target passes that emitted tokens
    nodes: int | None = None  # rows of these target passes; None if unknown
    accepted_by_source: Counter[str] = field(default_factory=Counter)  # accepted drafted tokens by source
    accepted: Counter[int] = field(default_factory=Counter)  # trees by accepted tokens; empty if unknown
    rounds: int = 0  # target passes of the whole batch
    # seconds of all rounds by stage of `MEANING`; the sum is the time of all steps without prefill
    stages: dict[str, float] = field(default_factory=dict)

    @property
    def seconds_per_token(self) -> float:
        """Decode seconds per token over the whole run."""
        return self.decode_seconds / self.decoded

    def add(self, other: "Sample") -> None:
        """Add measurements of the same mode on further prompts."""
        for member in fields(Sample):
            total, added = getattr(self, member.name), getattr(other, member.name)
            if member.name == "stages":
                self.stages = {stage: total.get(stage, 0.0) + seconds for stage, seconds in added.items()}
            elif member.name == "nodes":
                self.nodes = None if added is None else (total or 0) + added
            else:
                setattr(self, member.name, total + added)


@contextmanager
def profiled(engine: Engine) -> Iterator[Sample]:
    """Measure an engine's rounds. The sample is complete when the block ends."""
    sample, clock, stats = Sample(nodes=0), engine.clock, engine.stats

    before, accepted, rounds = dict(clock.seconds), stats.accepted_lengths.copy(), stats.rounds
    try:
        yield sample
    finally:
        stage_seconds = {stage: seconds - before[stage] for stage, seconds in clock.seconds.items()}
        stage_seconds["draft"] += stage_seconds.pop("cross_tokenizer") + stage_seconds.pop("search")
        sample.prefill_seconds = stage_seconds["prefill"]
        sample.stages = {stage: stage_seconds[stage] for stage in MEANING}
        sample.accepted, sample.rounds = stats.accepted_lengths - accepted, stats.rounds - rounds


def run_ours(
    llm: LLM,
    spec: SpecConfig | str,
    prompts: Sequence[list[int]],
    max_tokens: int,
    temperature: float = 0.0,
    seeds: Sequence[int] = (),
) -> Sample:
    """Decode prompts (with seeds if sampled) as one batch, past end tokens and without detokenization."""
    options: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": temperature}
    params = [SamplingParams(**options, seed=seed) for seed in (seeds if temperature > 0 else [None] * len(prompts))]
    with profiled(llm.engine) as sample:
        outputs = llm.generate(list(prompts), params, spec=spec)
    prefill, sample.total_seconds = sample.prefill_seconds, max(output.metrics.seconds for output in outputs)
    sample.decode_seconds = sample.total_seconds - prefill
    for output in outputs:
        if output.error is not None:
            raise RequestError(output.error)
        metrics, tokens = output.metrics, output.outputs[0].token_ids
        assert metrics.ttft is not None and sample.nodes is not None
        sample.tokens.append(tokens)
        sample.decoded += len(tokens)
        sample.ttft.append(metrics.ttft)
        sample.per_token.append((metrics.seconds - prefill) / len(tokens))
        sample.passes.append(metrics.target_passes)
        sample.nodes += metrics.nodes_verified
        sample.accepted_by_source.update(metrics.accepted_by_source)
    return sample


Run = Callable[[Sequence[list[int]], Sequence[int]], Sample]
"""Function that runs one mode on one batch of prompts and their seeds."""


def sampling_seed(seed: int, repeat: int, prompt: int) -> int:
    """Return the seed of a prompt in one repeat; all modes use the same seed."""
    return (seed % 2**31 << 32) + (repeat << 16) + prompt


def interleave(
    runs: Mapping[str, Run],
    prompts: Sequence[list[int]],
    batch: int,
    repeats: int,
    seed: int = 0,
    advance: Callable[[], object] = lambda: None,
) -> dict[str, list[Sample]]:
    """Run all modes over all prompts in rotating order with equal seeds; return a sample per mode and repeat."""
    samples: dict[str, list[Sample]] = {name: [] for name in runs}
    names, turn = list(runs), 0
    for repeat in range(repeats):
        for name in names:
            samples[name].append(Sample())
        for start in range(0, len(prompts), batch):
            batch_prompts = prompts[start : start + batch]
            seeds = [sampling_seed(seed, repeat, prompt) for prompt in range(start, start + len(batch_prompts))]
            for name in names[turn:] + names[:turn]:
                samples[name][-1].add(runs[name](batch_prompts, seeds))
                advance()
            turn = (turn + 1) % len(names)
    return samples
