"""Runs the modes, interleaved, and keeps what each run took."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from treespec.bench.profile import profiled
from treespec.config import SpecConfig
from treespec.errors import RequestError
from treespec.llm import LLM
from treespec.request import SamplingParams


@dataclass
class Sample:
    """One run of one mode over all prompts. Lists have one entry per prompt, in their order; seconds throughout.

    Attributes:
        tokens: output token ids.
        decode_seconds: of all batches together, prefill not counted.
        decoded: tokens that were made in `decode_seconds`.
        total_seconds: of all batches together, prefill included.
        ttft: from a batch's start to the first token.
        per_token: decode seconds of the request over its tokens.
        passes: target passes that yielded tokens.
        nodes: rows of those passes, all prompts together; None where it is not known.
        accepted_by_source: accepted drafted tokens by who proposed them.
        accepted: trees by the number of accepted drafted tokens; empty where it is not known.
        rounds: rounds; a round is one target pass for the whole batch.
        parts: seconds of all rounds by part.
    """

    tokens: list[list[int]] = field(default_factory=list)
    decode_seconds: float = 0.0
    decoded: int = 0
    total_seconds: float = 0.0
    ttft: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    nodes: int | None = None
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    rounds: int = 0
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def seconds_per_token(self) -> float:
        """Of the whole run, decoding only."""
        return self.decode_seconds / self.decoded


def run_ours(llm: LLM, spec: SpecConfig | str, prompts: Sequence[list[int]], max_tokens: int, batch: int) -> Sample:
    """Decode all prompts, `batch` at once; the next ones start when all of a batch have ended.

    Seconds are the requests' own, from arrival to end: making text of the tokens is not in them.

    Raises:
        RequestError: a prompt was refused.
    """
    params, sample = SamplingParams(max_tokens=max_tokens, ignore_eos=True), Sample(nodes=0)
    with profiled(llm.engine) as profile:
        for group in groups(prompts, batch):
            before = profile.prefill_seconds
            outputs = llm.generate(group, params, spec=spec)
            prefill = profile.prefill_seconds - before
            total = max(output.metrics.seconds for output in outputs)
            sample.decode_seconds += total - prefill
            sample.total_seconds += total
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
    sample.accepted, sample.rounds, sample.parts = profile.accepted, profile.rounds, profile.parts
    return sample


def groups(prompts: Sequence[list[int]], batch: int) -> Iterator[list[list[int]]]:
    """The prompts, `batch` at a time."""
    for start in range(0, len(prompts), batch):
        yield list(prompts[start : start + batch])


def interleave(
    runs: Mapping[str, Callable[[], Sample]], repeats: int, tick: Callable[[], object] = lambda: None
) -> dict[str, list[Sample]]:
    """Every mode once per repeat, so that what changes on the machine meets all of them.

    Each repeat starts with another mode: what runs first or after a heavy one is not always the same.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in runs}
    names = list(runs)
    for repeat in range(repeats):
        first = repeat * max(1, len(names) // repeats) % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(runs[name]())
            tick()
    return samples


def timed(run: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
