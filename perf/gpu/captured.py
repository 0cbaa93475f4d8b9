"""Stage `captured`: the verify stage of captured rounds of an 8B Llama shape, by nodes and context."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from gpu import passes, roofline
from gpu.clock import Times, copy_bandwidth
from gpu.models import Passes
from gpu.passes import COPY, shares, spread
from gpu.setting import Setting
from gpu.stage import Context, Measurement
from treespec.graphs.batch_round import BatchRound
from treespec.graphs.capture import CONTEXTS
from treespec.graphs.round_inputs import Proposal, RoundInput, RoundLimits
from treespec.graphs.round_tree import RoundTree
from treespec.graphs.stack_passes import ModelStack
from treespec.tree import Draws, TokenTree
from treespec_kernels.launch.graph_capture import GraphMemory

DEPTH = 3  # depth of the trees


def measurements(setting: Setting) -> Iterator[Measurement]:
    sizes = passes.sizes_of(setting)
    yield Measurement(COPY, lambda context: copy_bandwidth(context.clock(20), sizes.copy_bytes), 60.0)
    for context_len in sizes.contexts[:1] if setting.dry else sizes.contexts:
        for nodes in sizes.captured:
            run = partial(_captured, max(sizes.contexts), context_len, nodes)
            yield Measurement(f"captured/context{context_len}/nodes{nodes}", run, 90.0)


def _captured(longest_context: int, context_len: int, nodes: int, context: Context) -> dict[str, Any]:
    """Time the verify stage of a captured round (layout, pass, walk, commit) for full trees.

    Also measures the wall-clock time of a round without drafts.
    """
    setting, shape = context.setting, context.setting.target
    opened = context.keep("captured", lambda: _open(setting, longest_context))
    pages = opened.pages[0]
    longest = next(each for each in (*CONTEXTS, longest_context) if each >= context_len)
    limits = RoundLimits(DEPTH, (1, nodes) if nodes > 1 else (1,), len(pages), longest)
    target = ModelStack(opened.decoder.kernels, opened.decoder.table, opened.decoder.triton_attention, opened.pool)
    memory = None if setting.dry else GraphMemory.of(setting.device)
    levels, proposals = (DEPTH, [Proposal(_tree(nodes), np.ones(nodes))]) if nodes > 1 else (0, [None])
    given = RoundInput(context_len, [5], pages, (), 0.0, 0.0, 0, 0, np.zeros(0), levels, nodes, 0.0, context_len + 1)
    clock = context.clock(30, 4.0)
    with torch.inference_mode():
        batch = BatchRound(1, limits, target, [], memory)
        [result] = batch.run([given], levels, nodes, search=lambda: proposals)
        verify = clock.eager(lambda: batch.replay(0, nodes))
        walls = []
        for _ in range(clock.repeats):
            start = time.perf_counter()
            batch.run([given._replace(max_depth=0, max_nodes=1)], 0, 1)
            walls.append(1e6 * (time.perf_counter() - start))
    if (made := len(RoundTree(result.nodes))) != nodes:
        raise ValueError(f"the tree has {made} nodes instead of {nodes}")
    num_bytes = roofline.pass_bytes(shape, nodes, context_len, setting.dtype.itemsize)
    return {
        "verify_us": verify.median,
        "verify_spread": spread(verify),
        "bytes": num_bytes,
        **shares(context, num_bytes, verify.median),
        "plain_round_us": Times.of(walls).median,
    }


def _open(setting: Setting, longest_context: int) -> Passes:
    with torch.inference_mode():
        return Passes(setting, setting.target, longest_context, max(passes.sizes_of(setting).captured))


def _tree(nodes: int) -> TokenTree:
    """Return a tree with up to four children per node, within the drafts' frontier limit."""
    parents = np.array([-1, *((node - 1) // 4 for node in range(1, nodes))])
    depths = np.zeros(nodes, dtype=np.int64)
    for node in range(1, nodes):
        depths[node] = depths[parents[node]] + 1
    return TokenTree(10 + np.arange(nodes), parents, depths, 0.9 - 0.01 * np.arange(nodes), Draws.none(), ())


def describe(document: dict[str, Any]) -> str:
    lines = [f"  {'verify stage':32} {'ms':>9} {'share':>6} {'plain ms':>9}  (wall clock of a plain round)"]
    for name, figures in document["measurements"].items():
        if "error" in figures:
            lines.append(f"  {name:32} ERROR {figures['error'][:110]}")
        elif "verify_us" in figures:
            verify, plain = figures["verify_us"] / 1e3, figures["plain_round_us"] / 1e3
            lines.append(f"  {name:32} {verify:9.3f} {passes.percent(figures['share_of_copy']):>6} {plain:9.3f}")
    return "\n".join(lines)
