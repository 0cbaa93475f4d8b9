"""Stage `rounds`: duration of engine rounds, and GPU idle time in them.

One request runs on the embedded target grown to 8B with the three embedded SSMs. Round durations are from the host
clock, without a profiler. GPU busy time of the same rounds is from torch's profiler, as the union of kernel and copy
intervals. The gap is the difference.
"""

import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu.clock import Times, device_events
from gpu.engines import grown_folder, open_engine
from gpu.setting import Setting
from gpu.stage import Context, Measurement
from treespec import LLM, SamplingParams, SpecConfig
from treespec.executors.graph_executor import GraphExecutor


@dataclass(frozen=True)
class Sizes:
    size: str | None  # None: the embedded target
    rounds: int
    nodes: tuple[int, ...]


REAL = Sizes("8B", 24, (16, 32, 64))
DRY = Sizes(None, 2, (4,))
WARM_ROUNDS = 3
VOCABULARY = 256  # of the random prompts
NAMED = 24  # number of kernels with the longest total time to report by name


def measurements(setting: Setting) -> Iterator[Measurement]:
    sizes = DRY if setting.dry else REAL
    for exact in (True, False):
        yield Measurement(key("plain", exact), partial(_rounds, sizes, None, exact), 200.0)
        for nodes in sizes.nodes:
            yield Measurement(key(f"tree{nodes}", exact), partial(_rounds, sizes, nodes, exact), 100.0)


def key(mode: str, exact: bool = True) -> str:
    return f"{mode}/{'exact' if exact else 'fast'}"


def _rounds(sizes: Sizes, nodes: int | None, exact: bool, context: Context) -> dict[str, Any]:
    llm = _open(context, sizes, exact)
    spec = "off" if nodes is None else SpecConfig(nodes=nodes, sources=("ssm",))
    free, profiled, tokens, busy = [], [], [], 0.0
    kernels: Counter[str] = Counter()
    for seed in range(1 if context.setting.dry else 4):  # distinct prompts, as tree sizes depend on the text
        seconds, made = _decode(llm, context, spec, sizes.rounds, seed, nullcontext())
        free += seconds
        tokens += made
        profiler = profile(activities=[ProfilerActivity.CPU if context.setting.dry else ProfilerActivity.CUDA])
        profiled += _decode(llm, context, spec, sizes.rounds, seed, profiler)[0]  # same tokens, hence same rounds
        events = device_events(profiler, context.setting.device)
        busy += union_length([(event.time_range.start, event.time_range.end) for event in events])
        for event in events:
            kernels[event.name[:60]] += event.time_range.end - event.time_range.start
    times, mean, busy = Times.of([1e6 * each for each in free]), 1e6 * sum(free) / len(free), busy / len(profiled)
    return {
        "round_us": times.median,
        "round_spread": [times.low, times.high],
        "mean_round_us": mean,
        "busy_us": busy,
        "gap_share": max(1.0 - busy / mean, 0.0),
        "tokens_per_round": sum(tokens) / len(tokens),
        "profiled_round_us": 1e6 * statistics.median(profiled),
        "us_by_kernel": {name: us / len(profiled) for name, us in kernels.most_common(NAMED)},
        "planned_us": _planned(llm),
        "frozen": llm.stats()["frozen"],
    }


def _planned(llm: LLM) -> dict[str, Any] | None:
    """Return the engine's own graph timings for batch 1; None without captured rounds."""
    captured = llm.engine.captured
    if not isinstance(captured, GraphExecutor):
        return None
    curve = captured.rounds.planners[1].costs.curve
    verify = {str(rows): 1e6 * each for rows, each in zip(curve.rows, curve.verify_seconds, strict=True)}
    level, start = 1e6 * curve.draft_seconds, 1e6 * curve.draft_start_seconds
    return {"first_level": start + level, "next_level": level, "verify": verify}


def _open(context: Context, sizes: Sizes, exact: bool) -> LLM:
    name = f"llm/{exact}"
    if name not in context.shared:
        context.release()
        setting = context.setting
        model = None if sizes.size is None else grown_folder(setting, sizes.size)
        drafts = ["ssm-1", "ssm-2", "ssm-3"]
        widest = SpecConfig(nodes=max(sizes.nodes))
        context.shared[name] = open_engine(setting, model, drafts, widest, exact=exact, max_num_seqs=1)
    return context.shared[name]


def _decode(
    llm: LLM, context: Context, spec: Any, rounds: int, seed: int, around: AbstractContextManager[Any]
) -> tuple[list[float], list[int]]:
    """Return seconds and tokens of `rounds` rounds, which run inside `around` after warm-up rounds."""
    prompt = torch.randint(1, VOCABULARY, (16,), generator=torch.Generator().manual_seed(seed)).tolist()
    params = SamplingParams(max_tokens=llm.config.max_model_len - len(prompt) - 1, ignore_eos=True)
    clock, seconds, tokens = context.clock(), [], []
    with closing(llm.stream(prompt, params, spec=spec)) as stream:
        for _ in range(WARM_ROUNDS):
            next(stream)
        with around:
            for _ in range(rounds):
                start = time.perf_counter()
                chunk = next(stream)
                clock.synchronize()
                seconds.append(time.perf_counter() - start)
                tokens.append(len(chunk.token_ids))
    return seconds, tokens


def union_length(spans: list[tuple[float, float]]) -> float:
    """Return the total length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def describe(document: dict[str, Any]) -> str:
    found = document["measurements"]
    lines = [f"  {'round':16} {'ms':>8} {'p10..p90':>17} {'GPU busy':>9} {'gap':>6} {'tokens':>7}"]
    for name, figures in found.items():
        if "error" in figures:
            lines.append(f"  {name:16} ERROR {figures['error'][:130]}")
            continue
        length, busy = figures["round_us"] / 1e3, figures["busy_us"] / 1e3
        spread = "{:.2f}..{:.2f}".format(*(each / 1e3 for each in figures["round_spread"]))
        gap, tokens = figures["gap_share"], figures["tokens_per_round"]
        lines.append(f"  {name:16} {length:8.2f} {spread:>17} {busy:9.2f} {gap:6.1%} {tokens:7.2f}")
        longest = [f"{kernel[:28]} {us:.0f}" for kernel, us in list(figures["us_by_kernel"].items())[:4]]
        lines.append(f"    us a round: {', '.join(longest)}")
    return "\n".join(lines)
