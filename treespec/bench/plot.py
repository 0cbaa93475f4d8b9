"""Plots the speed-up and the acceptance by depth of every mode."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treespec.bench.modes import PLAIN

OURS, THEIRS, BASELINE, GRID = "#1f6fb4", "#e08a3c", "#555555", "#dddddd"
_ROW_HEIGHT, _MARGINS = 0.27, 1.5  # inches: height of a mode's row; total of the margins above and below


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Write the plot: per batch size, one bar per mode, fastest on top, and its acceptance by depth.

    Args:
        document: the document returned by `bench`.
        path: .png, .svg or .pdf file.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = document["runs"]
    heights = [_ROW_HEIGHT * len(run["modes"]) + _MARGINS for run in runs]
    figure = Figure(figsize=(13, sum(heights) + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    depths = max(len(mode["acceptance_by_depth"] or ()) for run in runs for mode in run["modes"])
    axes = figure.subplots(
        len(runs), 2, squeeze=False, width_ratios=(8, max(depths, 3)), height_ratios=heights, sharey="row"
    )
    for (speeds, shares), run in zip(axes, runs, strict=True):
        modes = sorted(run["modes"], key=lambda mode: mode["speedup"])
        _speed(speeds, modes, run["batch"])
        _acceptance(shares, modes, depths)
    grown = document["grown"]
    subject = f"grown to {grown['parameters'] / 1e6:.0f} M from {grown['of']}" if grown else document["model"]
    threads = f"{document['threads']} thread{'' if document['threads'] == 1 else 's'}"
    figure.suptitle(
        f"{subject}, {document['dtype']}, {document['processor']}, {threads}; {document['num_prompts']} prompts, "
        f"{document['max_tokens']} tokens each, {document['repeats']} repeats",
        fontsize=11,
    )
    figure.savefig(path, dpi=150)


def _speed(axes: Any, modes: list[Mapping[str, Any]], batch: int) -> None:
    """Draw the median speed-up of each mode as a bar, with whiskers from minimum to maximum."""
    speedups = [mode["speedup"] for mode in modes]
    below = [mode["speedup"] - mode["speedup_min"] for mode in modes]
    above = [mode["speedup_max"] - mode["speedup"] for mode in modes]
    axes.barh(range(len(modes)), speedups, color=[_colour(mode) for mode in modes], height=0.7)
    axes.errorbar(speedups, range(len(modes)), xerr=(below, above), fmt="none", ecolor="black", elinewidth=1, capsize=2)
    axes.axvline(1.0, color=BASELINE, linewidth=1, linestyle="--", zorder=0)
    widest = max(mode["speedup_max"] for mode in modes)
    clear = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # covers the line at 1 behind the text
    for row, mode in enumerate(modes):
        axes.text(
            mode["speedup_max"] + 0.015 * widest, row, f"{mode['speedup']:.2f}", va="center", fontsize=8, bbox=clear
        )
    axes.set_xlim(0, 1.1 * widest)
    axes.set_yticks(range(len(modes)), [mode["label"] for mode in modes], fontsize=9)
    axes.set_xlabel("speed-up over treespec's plain decoding (median; whiskers: min to max of repeats)", fontsize=9)
    axes.set_title(f"batch {batch}", loc="left", fontsize=10)
    _style(axes)
    from matplotlib.patches import Patch

    kinds = [Patch(color=OURS, label="treespec"), Patch(color=BASELINE, label="treespec, plain decoding")]
    if any(mode["engine"] != "treespec" for mode in modes):
        kinds.append(Patch(color=THEIRS, label="transformers"))
    axes.legend(handles=kinds, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize=8, frameon=False)


def _acceptance(axes: Any, modes: list[Mapping[str, Any]], depths: int) -> None:
    """Draw a heat map of the acceptance by mode and depth, with the acceptance length at the right."""
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("shares", ("#ffffff", OURS))
    for row, mode in enumerate(modes):
        for depth, share in enumerate(mode["acceptance_by_depth"] or (), start=1):
            axes.barh(row, 1, left=depth - 0.5, height=1, color=shades(share), edgecolor="white", linewidth=0.5)
            shade = "white" if share > 0.75 else "black"
            axes.text(depth, row, f"{share:.0%}", ha="center", va="center", fontsize=8, color=shade)
        length = mode["acceptance_length"]
        axes.text(depths + 1.1, row, f"{length:.2f}", ha="center", va="center", fontsize=8)
    axes.set_xlim(0.5, depths + 1.7)
    axes.set_xticks([*range(1, depths + 1), depths + 1.1], [*map(str, range(1, depths + 1)), "tokens\nper pass"])
    axes.tick_params(axis="y", left=False, labelleft=False)
    axes.set_xlabel("share of target passes whose accepted path reached this depth", fontsize=9)
    axes.set_title("acceptance by depth", loc="left", fontsize=10)
    _style(axes)
    axes.grid(visible=False)


def _colour(mode: Mapping[str, Any]) -> str:
    if mode["mode"] == PLAIN:
        return BASELINE
    return OURS if mode["engine"] == "treespec" else THEIRS


def _style(axes: Any) -> None:
    """Remove the frame, and draw a light grid along x behind the data."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8.5)
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
