"""Stage `smoke`: the first minute on a device, before anything is timed.

Copy bandwidth, a kernel of every op against its reference, the bits of linear layers, of a 1B model's trees and of
repeated passes, and an engine whose captured rounds give the tokens of plain decoding. All but the bandwidth run at
once, each in its own process, because compilation takes most of the time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gpu import rows
from gpu.attention import COPY
from gpu.clock import copy_bandwidth
from gpu.engines import open_engine
from gpu.kernels import configuration, kernel_shape
from gpu.models import Passes
from gpu.setting import Setting
from gpu.stage import Context, Measurement
from gpu.workers import in_workers
from treespec import SamplingParams, SpecConfig
from treespec_kernels.tuning import workloads

SECONDS = 80.0  # time limit of a process
PROMPTS = ("Once upon a time", "def add(a, b):", "1, 2, 3, 4, 5, 6,")
BITS = "bits of rows"
TREES = "trees of 1B"
ENGINE = "embedded engine"


@dataclass(frozen=True)
class Sizes:
    copied: int  # bytes
    nodes: int
    context: int
    linear: tuple[int, int, bool]  # out features, in features, gated
    rows: int
    contexts: tuple[int, ...]
    repeats: int
    max_tokens: int


REAL = Sizes(2 << 30, 16, 700, (16384, 2048, True), 320, (37, 256, 700), 300, 32)
DRY = Sizes(1 << 16, 3, 20, (64, 32, True), 3, (5,), 2, 4)


def measurements(setting: Setting) -> list[Measurement]:
    sizes = DRY if setting.dry else REAL
    own = list(_checks(setting, sizes))
    copy = Measurement(COPY, lambda context: copy_bandwidth(context.clock(10, 2.0), sizes.copied), 20.0)
    return [copy, *(own if setting.dry else in_workers(own, SECONDS, SECONDS + 20.0))]


def _checks(setting: Setting, sizes: Sizes) -> Iterator[Measurement]:
    """Yield the checks, the longest first."""
    yield Measurement(ENGINE, partial(_engine, sizes), SECONDS)
    yield Measurement(TREES, partial(_trees, sizes), SECONDS)
    yield Measurement(BITS, partial(rows.linear, sizes.rows, *sizes.linear), SECONDS)
    for op in workloads.ops():
        yield Measurement(f"op {op}", partial(_op, sizes, op), SECONDS)


def _op(sizes: Sizes, op: str, context: Context) -> dict[str, Any]:
    """Compare an op with its reference at the sizes of a 1B model, with the configurations that the engine would use.

    Raises:
        AssertionError: a result differs.
    """
    setting = context.setting
    made = workloads.Setting(
        kernel_shape(setting, setting.small),
        setting.device,
        nodes=sizes.nodes,
        context=sizes.context,
        requests=1,
        prefill=sizes.rows,
        layers=setting.small.num_layers,
        fixed_order_dot=setting.dry,
    )
    checked = []
    for workload in workloads.workloads_of(made, [op]):
        with torch.inference_mode():
            workload.check(configuration(workload))
        workload.release()
        checked.append(f"{workload.key} {workload.load}")
    return {"checked": checked}


def _trees(sizes: Sizes, context: Context) -> dict[str, Any]:
    """Compare trees of a 1B model with decoding token by token, and repeated passes with each other."""
    setting = context.setting
    opened = Passes(setting, setting.small, max(sizes.contexts), sizes.nodes)
    found = rows.differing_nodes(opened, sizes.contexts, sizes.nodes, setting.seed)
    return found | rows.differing_repeats(opened, max(sizes.contexts), sizes.nodes, sizes.repeats)


def _engine(sizes: Sizes, context: Context) -> dict[str, Any]:
    """Compare trees of the embedded models, in captured rounds, with plain decoding."""
    llm = open_engine(context.setting)
    params = SamplingParams(max_tokens=sizes.max_tokens, ignore_eos=True)
    trees, plain = (llm.generate(list(PROMPTS), params, spec=spec) for spec in (SpecConfig(nodes=8), "off"))
    pairs = [(a.outputs[0].token_ids, b.outputs[0].token_ids) for a, b in zip(trees, plain, strict=True)]
    llm.engine.check_integrity()
    return {
        "tokens": sum(len(tokens) for _, tokens in pairs),
        "differing_tokens": sum(x != y for ours, theirs in pairs for x, y in zip(ours, theirs, strict=True)),
        "rounds": llm.stats()["frozen"]["rounds"],
    }


def describe(document: dict[str, Any]) -> str:
    lines = []
    for name, figures in document["measurements"].items():
        if "error" in figures:
            text = f"ERROR {figures['error'][:150]}"
        elif name == COPY:
            text = f"{figures['bytes_per_second'] / 1e9:.0f} GB/s"
        elif "checked" in figures:
            text = f"{len(figures['checked'])} workloads equal their reference"
        elif name == BITS:
            text = (
                f"{figures['differing_row_counts']} of {figures['row_counts']} numbers of rows and "
                f"{figures['differing_tiles']} of tiles {figures['tiles']} differ"
            )
        elif name == TREES:
            text = (
                f"{figures['differing_rows']} of {figures['rows']} nodes and {figures['differing_repeats']} of "
                f"{figures['repeats']} repeats differ"
            )
        else:
            text = f"{figures['differing_tokens']} of {figures['tokens']} tokens differ, rounds {figures['rounds']}"
        lines.append(f"  {name:24} {text}")
    return "\n".join(lines)
