"""Stages `passes`, `passes_tuned` and `passes_more`: target passes of an 8B Llama shape against the roofline.

Passes run captured and eager: at the main context with default and with tuned configurations, then batches and other
contexts. Those of the main context also run with programmatic dependent launch (PDL) and are compared bit by bit. The
share of copy bandwidth is the minimum bytes of a pass over its time, divided by the bandwidth of a copy in the same
run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from gpu import roofline
from gpu.clock import Times, copy_bandwidth, device_events, matmul_rate
from gpu.models import Passes
from gpu.setting import Setting
from gpu.stage import Context, Measurement
from treespec_kernels.launch.triton_launch import takes_pdl
from treespec_kernels.tuning.testing import tree_parents
from treespec_kernels.tuning.workloads.base import same_bits

COPY, MATMUL = "copy", "matmul"


@dataclass(frozen=True)
class Sizes:
    """Contexts, of which the first is that of the stated targets; batches as (requests, nodes), at that context."""

    nodes: tuple[int, ...]
    fast: tuple[int, ...]  # numbers of nodes with exact=False
    contexts: tuple[int, ...]
    captured: tuple[int, ...]  # numbers of nodes of captured rounds
    batches: tuple[tuple[int, int], ...]
    fast_batches: tuple[tuple[int, int], ...]
    copy_bytes: int
    matmul: int


MAIN_CONTEXT = 2048
BATCH = (8, 32)  # requests and nodes of the stated target of batches
REAL = Sizes(
    nodes=(1, 32, 8, 16, 64),
    fast=(1, 32),
    contexts=(MAIN_CONTEXT, 8192, 32768, 512),
    captured=(1, 32),
    batches=((4, 1), (4, 32), BATCH, (16, 1), (16, 32), (64, 1), (64, 8)),
    fast_batches=(BATCH,),
    copy_bytes=8 << 30,
    matmul=8192,
)
DRY = Sizes((1, 4), (1,), (16, 20), (4,), ((2, 1),), ((2, 1),), 1 << 16, 32)
PROFILED = 20  # kernels of a profile


def sizes_of(setting: Setting) -> Sizes:
    return DRY if setting.dry else REAL


def measurements(tuned: bool, setting: Setting) -> Iterator[Measurement]:
    """Yield one request's passes at the main context, with tuned or with default configurations."""
    sizes = sizes_of(setting)
    main = sizes.contexts[0]
    yield from _rooflines(sizes, setting)
    for nodes in sizes.nodes:
        yield Measurement(key(main, nodes), partial(_pass, main, nodes, Kind(tuned=tuned)), 90.0)
    for nodes in sizes.fast:
        yield Measurement(
            key(main, nodes, exact=False), partial(_pass, main, nodes, Kind(exact=False, tuned=tuned)), 90.0
        )
    for nodes in sizes.captured:  # last, because a profiler may fail in many ways
        yield Measurement(f"profile/context{main}/nodes{nodes}", partial(_profile, main, nodes, tuned), 60.0)


def more_measurements(setting: Setting) -> Iterator[Measurement]:
    """Yield batches, other contexts, and launches of the main context's passes."""
    sizes = sizes_of(setting)
    main, *others = sizes.contexts
    yield from _rooflines(sizes, setting)
    for batch, nodes in sizes.batches:
        yield Measurement(key(main, nodes, batch), partial(_pass, main, nodes, Kind(batch=batch)), 90.0)
        if (batch, nodes) in sizes.fast_batches:
            kind = Kind(batch=batch, exact=False)
            yield Measurement(key(main, nodes, batch, exact=False), partial(_pass, main, nodes, kind), 90.0)
    for context_len in others:
        for nodes in sizes.nodes:
            yield Measurement(key(context_len, nodes), partial(_pass, context_len, nodes, Kind(longest=True)), 90.0)
    for nodes in sizes.nodes:  # last, so that a driver failure affects no other figure
        yield Measurement(f"pdl/context{main}/nodes{nodes}", partial(_launched, main, nodes), 90.0)


def _rooflines(sizes: Sizes, setting: Setting) -> Iterator[Measurement]:
    yield Measurement(COPY, lambda context: copy_bandwidth(context.clock(20), sizes.copy_bytes), 60.0)
    yield Measurement(MATMUL, lambda context: matmul_rate(context.clock(20), sizes.matmul, setting.dtype), 60.0)


class Kind(NamedTuple):
    """What distinguishes the decoders that are measured, of which one is open at a time."""

    batch: int = 1
    exact: bool = True
    tuned: bool = True
    longest: bool = False  # whether its cache has room for the longest context instead of the main one


def key(context_len: int, nodes: int, batch: int = 1, exact: bool = True) -> str:
    """Return the name of a pass in the document."""
    return f"{'pass' if exact else 'fast'}/context{context_len}/nodes{nodes}" + (f"/batch{batch}" * (batch > 1))


def _pass(context_len: int, nodes: int, kind: Kind, context: Context) -> dict[str, Any]:
    return figures(context, _open(context, kind), context_len, nodes)


def _launched(context_len: int, nodes: int, context: Context) -> dict[str, Any]:
    """Time the captured pass with ordinary and, if supported, programmatic dependent launches.

    Also counts replays with programmatic dependent launch whose logits differ.
    """
    opened = _open(context, Kind())
    setting, decoder = context.setting, opened.decoder
    tree = tree_parents("random", nodes, torch.Generator().manual_seed(setting.seed))
    launch, tuned, clock = opened.prepare(context_len, tree), decoder.kernels, context.clock(50, 4.0)
    pdl, logits = takes_pdl(setting.device), []  # logits of every capture and warm-up
    try:
        with torch.inference_mode():
            decoder.kernels = tuned.launched(False)
            expected = launch().clone()
            in_order = clock.graphed(launch)
            decoder.kernels = tuned.launched(pdl)
            replay = clock.capture(lambda: logits.append(launch()))
            differing = 0
            for _ in range(clock.repeats):
                for each in logits:
                    each.fill_(torch.nan)
                replay()
                differing += not same_bits(logits[-1], expected)
            launched = clock.eager(replay)
    finally:
        decoder.kernels = tuned
    return {"in_order_us": in_order.median, "pdl_us": launched.median if pdl else None, "pdl_differing": differing}


def figures(context: Context, opened: Passes, context_len: int, nodes: int) -> dict[str, Any]:
    """Time a pass over a random tree per request, and compute its roofline.

    Raises:
        ValueError: the pass computed NaN or infinity.
    """
    setting, batch = context.setting, opened.requests
    generator = torch.Generator().manual_seed(setting.seed)
    launch = opened.prepare(context_len, tree_parents("random", nodes, generator))
    with torch.inference_mode():
        finite = bool(launch().isfinite().all())
        eager = context.clock(30, 4.0).eager(launch)
        graphed = context.clock(50, 4.0).graphed(launch)
    if not finite:
        raise ValueError("the pass computed NaN or infinity")
    itemsize = setting.dtype.itemsize
    num_bytes = roofline.pass_bytes(opened.shape, nodes, context_len, itemsize, batch, opened.form)
    return {
        "graph_us": graphed.median,
        "graph_spread": spread(graphed),
        "eager_us": eager.median,
        "eager_spread": spread(eager),
        "bytes": num_bytes,
        **shares(context, num_bytes, graphed.median),
        "floor_us": _floor(context, num_bytes, roofline.pass_flop(opened.shape, nodes, context_len, batch)),
        "how": opened.how,
    }


def _profile(context_len: int, nodes: int, tuned: bool, context: Context) -> dict[str, Any]:
    """Return the kernels of one captured replay with the most device time, as (name, calls, microseconds)."""
    setting = context.setting
    opened = _open(context, Kind(tuned=tuned))
    launch = opened.prepare(context_len, tree_parents("random", nodes, torch.Generator().manual_seed(setting.seed)))
    activity = ProfilerActivity.CPU if setting.dry else ProfilerActivity.CUDA
    with torch.inference_mode():
        replay = context.clock(1).capture(launch)
        replay()
        context.clock(1).synchronize()
        with profile(activities=[activity]) as profiler:
            replay()
            context.clock(1).synchronize()
    spans: dict[str, list[float]] = {}
    for event in device_events(profiler, setting.device):
        spans.setdefault(event.name[:80], []).append(event.time_range.end - event.time_range.start)
    rows = sorted(((name, len(each), round(sum(each), 2)) for name, each in spans.items()), key=lambda row: -row[2])
    return {"launches": sum(map(len, spans.values())), "us": sum(row[2] for row in rows), "kernels": rows[:PROFILED]}


def _open(context: Context, kind: Kind) -> Passes:
    """Open a decoder, after releasing the previous one."""
    name = f"passes/{kind}"
    if name not in context.shared:
        context.release()
        setting, sizes = context.setting, sizes_of(context.setting)
        rows = max(sizes.nodes) if kind.batch == 1 else max(nodes for batch, nodes in sizes.batches)
        longest = max(sizes.contexts) if kind.longest else sizes.contexts[0]
        with torch.inference_mode():
            context.shared[name] = Passes(
                setting, setting.target, longest, rows, kind.batch, kind.exact, tuned=kind.tuned
            )
    opened: Passes = context.shared[name]
    return opened


def spread(times: Times) -> list[float]:
    return [round(times.low, 2), round(times.high, 2)]


def shares(context: Context, num_bytes: int, microseconds: float) -> dict[str, Any]:
    bandwidth = context.figure(COPY, "bytes_per_second")
    achieved = num_bytes / (1e-6 * microseconds)
    return {"bytes_per_second": achieved, "share_of_copy": achieved / bandwidth if bandwidth else None}


def _floor(context: Context, num_bytes: int, flop: int) -> float | None:
    bandwidth = context.figure(COPY, "bytes_per_second")
    return (
        roofline.floor_us(num_bytes, flop, bandwidth, context.figure(MATMUL, "flop_per_second")) if bandwidth else None
    )


def describe(document: dict[str, Any]) -> str:
    found = document["measurements"]
    lines = [
        f"  copy {(found.get(COPY, {}).get('bytes_per_second') or 0) / 1e12:.2f} TB/s, matrix product "
        f"{(found.get(MATMUL, {}).get('flop_per_second') or 0) / 1e12:.0f} TFLOP/s"
    ]
    names = [name for name in found if name.startswith(("pass/", "fast/"))]
    how = {found[name]["how"] for name in names if "how" in found[name]}
    lines += [f"  {each[:118]}" for each in sorted(how)]
    lines.append(
        f"  {'pass':34} {'graph ms':>9} {'share':>6} {'of floor':>8} {'eager ms':>9}  "
        "(share of the copy's bandwidth; floor / graph)"
    )
    for name in names:
        figures = found[name]
        if "error" in figures:
            lines.append(f"  {name:34} ERROR {figures['error'][:110]}")
            continue
        share = percent(figures["share_of_copy"])
        graph, eager, floor = figures["graph_us"] / 1e3, figures["eager_us"] / 1e3, figures["floor_us"]
        of_floor = percent(None if floor is None else floor / 1e3 / graph)
        lines.append(f"  {name:34} {graph:9.3f} {share:>6} {of_floor:>8} {eager:9.3f}")
    return "\n".join([*lines, *_launches(found), *_profiles(found)])


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return one line of the passes that were measured with default and with tuned kernels."""
    both = [(name, before[name].get("graph_us"), after.get(name, {}).get("graph_us")) for name in before]
    shown = [
        f"{name} {then / 1e3:.3f} to {now / 1e3:.3f} ms ({then / now:.2f} times)"
        for name, then, now in both
        if then is not None and now is not None
    ]
    return f"passes before and after tuning: {', '.join(shown)}" if shown else ""


def _launches(found: dict[str, Any]) -> Iterator[str]:
    """Yield a line per pass with ordinary and programmatic dependent launches."""
    for name, figures in found.items():
        if not name.startswith("pdl/"):
            continue
        if "error" in figures:
            yield f"  {name:34} ERROR {figures['error'][:110]}"
        elif figures["pdl_us"] is not None:
            wrong = figures["pdl_differing"]
            times = f"{figures['in_order_us'] / 1e3:.3f} ms in order, {figures['pdl_us'] / 1e3:.3f} ms overlapping"
            yield f"  {name:34} {times}" + f"  {wrong} WRONG" * bool(wrong)


def _profiles(found: dict[str, Any]) -> Iterator[str]:
    """Yield a line per profile with its longest kernels."""
    for name, figures in found.items():
        if name.startswith("profile/") and "error" in figures:
            yield f"  {name:34} ERROR {figures['error'][:110]}"
        elif name.startswith("profile/"):
            longest = ", ".join(f"{kernel[:28]} {calls}x {us:.0f} us" for kernel, calls, us in figures["kernels"][:5])
            yield f"  {name:34} {figures['launches']} launches, {figures['us']:.0f} us: {longest}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
