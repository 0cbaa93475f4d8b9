"""Stage `passes`: target passes of an 8B Llama shape against the roofline, by nodes and context, captured and eager.

At the first context, passes also run with programmatic dependent launch (PDL) and are compared bit by bit. The share of
copy bandwidth is the minimum bytes of a pass over its time, divided by the bandwidth of a copy in the same run.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from gpu import roofline
from gpu.clock import Times, copy_bandwidth, matmul_rate
from gpu.models import Passes
from gpu.setting import Setting
from gpu.stage import Context, Measurement
from treespec.graphs.batch_round import BatchRound
from treespec.graphs.capture import CONTEXTS
from treespec.graphs.round_inputs import RoundInput, RoundLimits
from treespec.graphs.stack_passes import ModelStack
from treespec.tree import Draws, TokenTree
from treespec_kernels.launch.graph_capture import GraphMemory
from treespec_kernels.launch.triton_launch import takes_pdl
from treespec_kernels.tuning.testing import tree_parents
from treespec_kernels.tuning.workloads.base import same_bits

COPY, MATMUL = "copy", "matmul"
DEPTH = 3  # depth of the trees in captured rounds


@dataclass(frozen=True)
class Sizes:
    nodes: tuple[int, ...]
    contexts: tuple[int, ...]
    captured: tuple[int, ...]  # tree sizes of captured rounds
    batches: tuple[int, ...]  # batch sizes, measured only for the first context and the first and last number of nodes
    copy_bytes: int
    matmul: int


REAL = Sizes((1, 8, 16, 32, 64), (2048, 512, 8192, 32768), (1, 32), (4, 8), 8 << 30, 8192)
DRY = Sizes((1, 4), (16,), (1, 4), (2,), 1 << 16, 32)
MAIN_CONTEXT = 2048  # context length of the stated targets


def measurements(setting: Setting) -> Iterator[Measurement]:
    sizes = DRY if setting.dry else REAL
    yield Measurement(COPY, lambda context: copy_bandwidth(context.clock(20), sizes.copy_bytes), 60.0)
    yield Measurement(MATMUL, lambda context: matmul_rate(context.clock(20), sizes.matmul, setting.dtype), 60.0)
    for context_len in sizes.contexts:
        for nodes in sizes.nodes:
            yield Measurement(key(context_len, nodes), partial(_pass, sizes, context_len, nodes, True, 1), 90.0)
    for context_len in sizes.contexts:
        for nodes in sizes.captured:
            yield Measurement(
                f"captured/context{context_len}/nodes{nodes}", partial(_captured, sizes, context_len, nodes), 90.0
            )
    for nodes in sizes.nodes:  # the same passes with exact=False, for the cost of exactness
        yield Measurement(
            key(sizes.contexts[0], nodes, exact=False), partial(_pass, sizes, sizes.contexts[0], nodes, False, 1), 90.0
        )
    for batch in sizes.batches:
        for nodes in sizes.nodes[:: len(sizes.nodes) - 1]:
            yield Measurement(
                key(sizes.contexts[0], nodes, batch), partial(_pass, sizes, sizes.contexts[0], nodes, True, batch), 90.0
            )
    for nodes in sizes.nodes:  # last, so that a driver failure affects no other figure
        yield Measurement(
            f"pdl/context{sizes.contexts[0]}/nodes{nodes}", partial(_launched, sizes, sizes.contexts[0], nodes), 90.0
        )


def key(context_len: int, nodes: int, batch: int = 1, exact: bool = True) -> str:
    """Return the name of a pass in the document."""
    return f"{'pass' if exact else 'fast'}/context{context_len}/nodes{nodes}" + (f"/batch{batch}" * (batch > 1))


def _pass(sizes: Sizes, context_len: int, nodes: int, exact: bool, batch: int, context: Context) -> dict[str, Any]:
    return figures(context, _open(context, sizes, exact, batch), context_len, nodes)


def _launched(sizes: Sizes, context_len: int, nodes: int, context: Context) -> dict[str, Any]:
    """Time the captured pass with ordinary and, if supported, programmatic dependent launches.

    Also counts replays with programmatic dependent launch whose logits differ.
    """
    opened = _open(context, sizes, True, 1)
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
        "graph_spread": _spread(graphed),
        "eager_us": eager.median,
        "eager_spread": _spread(eager),
        "bytes": num_bytes,
        **_shares(context, num_bytes, graphed.median),
        "floor_us": _floor(context, num_bytes, roofline.pass_flop(opened.shape, nodes, context_len, batch)),
        "how": opened.how,
    }


def _captured(sizes: Sizes, context_len: int, nodes: int, context: Context) -> dict[str, Any]:
    """Time the verify stage of a captured round (layout, pass, walk, commit) for full trees.

    Also measures the wall-clock time of a round without drafts.
    """
    setting, shape = context.setting, context.setting.target
    opened = _open(context, sizes, True, 1)
    pages = opened.pages[0]
    longest = next(each for each in (*CONTEXTS, max(sizes.contexts)) if each >= context_len)
    limits = RoundLimits(DEPTH, (1, nodes) if nodes > 1 else (1,), len(pages), longest)
    target = ModelStack(opened.decoder.kernels, opened.decoder.table, opened.decoder.triton_attention, opened.pool)
    memory = None if setting.dry else GraphMemory.of(setting.device)
    tree = _tree(nodes) if nodes > 1 else None
    given = RoundInput(
        context_len, [5], pages, (), 0.0, 0.0, 0, 0, np.zeros(0), tree, np.ones(nodes), DEPTH, nodes, 0.0
    )
    clock = context.clock(30, 4.0)
    with torch.inference_mode():
        batch = BatchRound(1, limits, target, [], memory)
        [result] = batch.run([given], DEPTH if nodes > 1 else 0, nodes)
        verify = clock.eager(lambda: batch.replay(0, nodes))
        walls = []
        for _ in range(clock.repeats):
            start = time.perf_counter()
            batch.run([given._replace(proposed=None, max_depth=0, max_nodes=1)], 0, 1)
            walls.append(1e6 * (time.perf_counter() - start))
    if len(result.depths) != nodes:
        raise ValueError(f"the tree has {len(result.depths)} nodes instead of {nodes}")
    num_bytes = roofline.pass_bytes(shape, nodes, context_len, setting.dtype.itemsize)
    return {
        "verify_us": verify.median,
        "verify_spread": _spread(verify),
        "bytes": num_bytes,
        **_shares(context, num_bytes, verify.median),
        "plain_round_us": Times.of(walls).median,
    }


def _tree(nodes: int) -> TokenTree:
    """Return a tree with up to four children per node, within the drafts' frontier limit."""
    parents = np.array([-1, *((node - 1) // 4 for node in range(1, nodes))])
    depths = np.zeros(nodes, dtype=np.int64)
    for node in range(1, nodes):
        depths[node] = depths[parents[node]] + 1
    return TokenTree(10 + np.arange(nodes), parents, depths, 0.9 - 0.01 * np.arange(nodes), Draws.none(), ())


def _open(context: Context, sizes: Sizes, exact: bool, batch: int) -> Passes:
    """Open a decoder, after releasing the previous one."""
    name = f"passes/{exact}/{batch}"
    if name not in context.shared:
        context.release()
        longest = max(sizes.contexts) if batch == 1 else sizes.contexts[0]
        with torch.inference_mode():
            made = Passes(context.setting, context.setting.target, longest, max(sizes.nodes), batch, exact)
        context.shared[name] = made
    return context.shared[name]


def _spread(times: Times) -> list[float]:
    return [round(times.low, 2), round(times.high, 2)]


def _shares(context: Context, num_bytes: int, microseconds: float) -> dict[str, Any]:
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
    names = [name for name in found if name.startswith(("pass/", "fast/", "captured/"))]
    how = {found[name]["how"] for name in names if "how" in found[name]}
    lines += [f"  {each[:118]}" for each in sorted(how)]
    lines.append(
        f"  {'pass':34} {'graph ms':>9} {'share':>6} {'of floor':>8} {'eager ms':>9} {'in order':>9} "
        f"{'overlap':>9}  (share of the copy's bandwidth; floor / graph; programmatic launches)"
    )
    for name in names:
        figures = found[name]
        if "error" in figures:
            lines.append(f"  {name:34} ERROR {figures['error'][:110]}")
            continue
        share = _percent(figures["share_of_copy"])
        if "verify_us" in figures:
            lines.append(
                f"  {name:34} {figures['verify_us'] / 1e3:9.3f} {share:>6} {'':8} "
                f"{figures['plain_round_us'] / 1e3:9.3f}  (wall clock of a plain round)"
            )
            continue
        graph, eager, floor = figures["graph_us"] / 1e3, figures["eager_us"] / 1e3, figures["floor_us"]
        of_floor = _percent(None if floor is None else floor / 1e3 / graph)
        lines.append(f"  {name:34} {graph:9.3f} {share:>6} {of_floor:>8} {eager:9.3f}{_both(found, name)}")
    return "\n".join(lines)


def _both(found: dict[str, Any], name: str) -> str:
    """Return the columns of a pass with ordinary and programmatic dependent launches."""
    figures = found.get(f"pdl/{name.removeprefix('pass/')}", {})
    if "error" in figures:
        return f" ERROR {figures['error'][:60]}"
    if figures.get("pdl_us") is None:
        return ""
    wrong = figures["pdl_differing"]
    return f" {figures['in_order_us'] / 1e3:9.3f} {figures['pdl_us'] / 1e3:9.3f}" + f"  {wrong} WRONG" * bool(wrong)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
