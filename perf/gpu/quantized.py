"""Stage `quantized`: passes of an 8B shape with int8 and int4 layers, compared with unquantised ones.

Per kind: tree nodes whose logits differ from token-by-token decoding, and pass times of one node and of a tree relative
to the bytes moved; then pass times again after tuning the linear layers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gpu import passes, tune
from gpu.clock import copy_bandwidth
from gpu.models import Passes
from gpu.passes import COPY
from gpu.rows import differing_nodes
from gpu.setting import Setting
from gpu.stage import Context, Measurement
from treespec.config import QUANTIZATIONS

PLAIN = "plain"  # unquantised
TUNED = "tuned "


@dataclass(frozen=True)
class Sizes:
    context: int  # context length at which passes are timed
    contexts: tuple[int, ...]  # context lengths at which bits are compared
    nodes: tuple[int, int]
    copy_bytes: int
    tuning_seconds: int  # per quantisation


REAL = Sizes(passes.MAIN_CONTEXT, (37, 1023), (1, 32), 8 << 30, 40)
DRY = Sizes(16, (7,), (1, 4), 1 << 16, 1)


def measurements(setting: Setting) -> Iterator[Measurement]:
    sizes = DRY if setting.dry else REAL
    yield Measurement(COPY, lambda context: copy_bandwidth(context.clock(20), sizes.copy_bytes), 60.0)
    for kind in (PLAIN, *QUANTIZATIONS):
        yield Measurement(kind, partial(_shipped, sizes, kind), 120.0)
    for kind in QUANTIZATIONS:
        yield Measurement(f"{TUNED}{kind}", partial(_tuned, sizes, kind), sizes.tuning_seconds + 120.0)


def _shipped(sizes: Sizes, kind: str, context: Context) -> dict[str, Any]:
    opened = _open(context, sizes, kind, kind)
    compared = differing_nodes(opened, sizes.contexts, sizes.nodes[-1], context.setting.seed)
    return _passes(sizes, opened, context) | compared


def _tuned(sizes: Sizes, kind: str, context: Context) -> dict[str, Any]:
    tuning = _autotune(sizes, kind, context)
    return _passes(sizes, _open(context, sizes, f"{TUNED}{kind}", kind), context) | {"tuning": tuning}


def _passes(sizes: Sizes, opened: Passes, context: Context) -> dict[str, Any]:
    """Time passes: for each number of nodes the time (`us_32`), shares and ratio, and all figures as `passes`."""
    found = {nodes: passes.figures(context, opened, sizes.context, nodes) for nodes in sizes.nodes}
    shown: dict[str, Any] = {}
    for nodes, figures in found.items():
        plain = context.figure(PLAIN, f"us_{nodes}")
        shown |= {
            f"us_{nodes}": figures["graph_us"],
            f"share_of_copy_{nodes}": figures["share_of_copy"],
            f"of_plain_{nodes}": figures["graph_us"] / plain if plain else None,
        }
    return shown | {"passes": {str(nodes): figures for nodes, figures in found.items()}}


def _open(context: Context, sizes: Sizes, name: str, kind: str) -> Passes:
    """Open a decoder with the current tuning, after releasing the previous one."""
    if name not in context.shared:
        context.release()
        setting, quantization = context.setting, None if kind == PLAIN else kind
        longest, rows = max(sizes.context, *sizes.contexts), max(sizes.nodes)
        with torch.inference_mode():
            context.shared[name] = Passes(setting, setting.target, longest, rows, quantization=quantization)
    return context.shared[name]


def _autotune(sizes: Sizes, kind: str, context: Context) -> dict[str, Any]:
    """Run `treespec autotune` for the linear layers only; stage `autotune` covers the other ops."""
    context.release()  # the other process needs the memory
    options = [
        *tune.shape_options(context.setting.target),
        *("--dtype", str(context.setting.dtype).removeprefix("torch.")),
        *("--quantization", kind, "--ops", "quantized_row_linear"),
        *("--budget-seconds", str(sizes.tuning_seconds)),
    ]
    if context.setting.dry:
        options += ["--nodes", "2", "--context", "20"]
    return tune.autotune(options, context)


def describe(document: dict[str, Any]) -> str:
    """Return one line per kind, with default and tuned passes."""
    found, lines = document["measurements"], []
    for kind in (PLAIN, *QUANTIZATIONS):
        parts = []
        for name in (kind, f"{TUNED}{kind}"):
            figures = found.get(name)
            if figures is None:
                continue
            before = TUNED if name != kind else ""
            if "error" in figures:
                parts.append(f"{before}ERROR {figures['error'][:60]}")
                continue
            parts.append(before + ", ".join(_cell(figures, nodes) for nodes in figures["passes"]))
            if figures.get("differing_rows"):
                parts[-1] += f", {figures['differing_rows']} of {figures['rows']} rows differ, {figures['first']}"
        if parts:
            lines.append(f"  {kind:6} {'; '.join(parts)}")
    return "\n".join(lines)


def _cell(figures: dict[str, Any], nodes: str) -> str:
    """Format milliseconds, share of copy bandwidth and ratio to an unquantised pass."""
    share, of_plain = figures[f"share_of_copy_{nodes}"], figures[f"of_plain_{nodes}"]
    notes = [*([] if share is None else [f"{share:.0%}"]), *([] if of_plain is None else [f"{of_plain:.2f} of plain"])]
    return f"{nodes} nodes {figures[f'us_{nodes}'] / 1e3:.3f} ms" + (f" ({', '.join(notes)})" if notes else "")
