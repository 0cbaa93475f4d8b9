"""Formatting of the benchmark document as text: header, tables and legend."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from treespec.bench.measure import MEANING
from treespec.bench.report import LOOPING
from treespec.utils.tables import table

LEGEND = f"""\
speed-up           time per token of treespec's plain decoding over the mode's, in the same repeat: median (min..max of
                   the repeats), without prefill, which is part of ttft
acceptance length  output tokens per target pass, including the target's token (plain decoding: 1.00);
                   "lively" excludes outputs with at most {LOOPING:.0%} distinct 4-grams: loops are easy to predict
efficiency         speed-up / (acceptance length / (pass ratio + draft share)): achieved share of the possible speed-up
95 % interval      bootstrap over prompts with all their repeats; differences are paired by prompt
differ             output tokens that differ from treespec's plain decoding (must be 0 for treespec's modes)"""
RULES_LEGEND = """\
verify             share of a round from logits to the accepted path, sampling noise included
differ "-"         not counted for rejection and traversal, which preserve the distribution, not the tokens"""


def header(document: Mapping[str, Any]) -> str:
    """Format the header: machine, versions, models and prompts."""
    versions, grown = document["versions"], document["grown"]
    commit = f", commit {document['commit']}" if document["commit"] else ""
    threads = f"{document['threads']} thread{'' if document['threads'] == 1 else 's'}"
    kinds = ", ".join(f"{count} {kind}" for kind, count in document["kinds"].items())
    sampling = f"temperature {document['temperature']:g}" if document["temperature"] else "greedy"
    lines = [
        f"machine   {document['processor']}, {document['device']}, {threads}"
        + (", passes compiled (compile=True)" if document["linear"] == "compiled" else ""),
        f"versions  {', '.join(f'{name} {version}' for name, version in versions.items())}{commit}",
        f"models    {document['model']}, drafts {', '.join(document['drafts']) or 'none'}, {document['dtype']}"
        + (f", target quantised to {document['quantization']}" if document.get("quantization") else ""),
        f"prompts   {document['num_prompts']}{f' ({kinds})' if kinds else ''}, "
        f"{document['total_input_tokens']} tokens; {document['max_tokens']} output tokens each, {sampling}, "
        f"{document['repeats']} repeats, seed {document['seed']}",
    ]
    if document["prompts_left_out"]:
        lines.append(f"          {document['prompts_left_out']} prompts skipped: too long for the context")
    if document["temperature"]:
        lines.append("sampling  seeds differ between repeats and are equal for all modes; transformers is skipped")
    if any(run["rules"] for run in document["runs"]):
        trees = {",".join(map(str, m["branching"])): m["nodes"] for m in document["runs"][0]["modes"] if m["branching"]}
        shapes = "; ".join(f"{branching} ({nodes} nodes)" for branching, nodes in trees.items())
        lines.append(f"trees     {shapes}; children by depth, equal for all rules; SSM drafts only")
    if grown:
        lines += [
            f"grown     all figures are for a grown target of {grown['parameters'] / 1e6:.0f} M parameters",
            f"          ({grown['shape']});",
            f"          it computes the function of {grown['of']}: "
            f"{grown['mismatches_with_source']} of its tokens differ",
        ]
    return "\n".join(lines)


def body(document: Mapping[str, Any], profile: bool) -> str:
    """Format the tables of every batch size, and the legend. `profile` adds the time by stage."""
    blocks = []
    for run in document["runs"]:
        modes = run["modes"]
        title = f"batch {run['batch']}, {run['num_prompts']} prompts" + (", grown" if document["grown"] else "")
        blocks += [_speed(title, modes), *_comparisons(title, run), *_rules(title, run)]
        if run["peers_left_out"]:
            blocks.append(f"skipped: {', '.join(run['peers_left_out'])}: {run['why_left_out']}")
        blocks += [_acceptance(title, modes), *_differences(title, run)]
        if profile:
            blocks.append(_profile(title, modes))
    memory_text = ", ".join(f"{name.replace('_', ' ')} {mib:.0f} MiB" for name, mib in document["memory_mib"].items())
    legends = [LEGEND, RULES_LEGEND] if any(run["rules"] for run in document["runs"]) else [LEGEND]
    return "\n\n".join([*blocks, "\n".join(legends), f"memory  {memory_text}"])


def _speed(title: str, modes: Sequence[Mapping[str, Any]]) -> str:
    head = (title, "tokens/s", "speed-up", "", "ms/token p50", "p99", "ttft ms", "nodes", "efficiency", "differ")
    rows = [
        (
            mode["label"],
            f"{mode['output_throughput']:.0f}",
            f"{mode['speedup']:.2f}",
            f"({mode['speedup_min']:.2f}..{mode['speedup_max']:.2f})",
            f"{mode['p50_itl_ms']:.2f}",
            f"{mode['p99_itl_ms']:.2f}",
            f"{mode['mean_ttft_ms']:.1f}",
            _number(mode["nodes_per_pass"], ".1f"),
            _number(mode["efficiency"], ".2f"),
            "-" if mode["mismatches"] is None else str(mode["mismatches"]),
        )
        for mode in modes
    ]
    return table([head, *rows])


def _comparisons(title: str, run: Mapping[str, Any]) -> list[str]:
    """Format the speed of plain decoding, the default and the fastest mode relative to the fastest peers."""
    if not run["comparisons"]:
        return []
    labels = {mode["mode"]: mode["label"] for mode in run["modes"]}
    suffixes = {run["best"].get("assisted"): " (the best K and draft)", run["best"].get("lookup"): " (the best K)"}
    rows = [
        (
            labels[row["mode"]],
            f"{row['times']:.2f}",
            f"({row['times_min']:.2f}..{row['times_max']:.2f})",
            labels[row["peer"]] + suffixes.get(row["peer"], ""),
        )
        for row in run["comparisons"]
    ]
    width = max(len(row[-1]) for row in rows)
    return [table([(title, "times as fast", "", "as".ljust(width)), *((*r[:-1], r[-1].ljust(width)) for r in rows)])]


def _rules(title: str, run: Mapping[str, Any]) -> list[str]:
    """Format the acceptance lengths of verification rules, and their share of a round."""
    if not run["rules"]:
        return []
    rows = [(f"{title}, by rule", "tokens per pass", "95 % interval", "ms per round", "verify")]
    for mode in (mode for mode in run["modes"] if mode["mode"] in run["rules"]):
        low, high = mode["acceptance_length_interval"]
        total = sum(mode["profile_ms"].values())
        length = f"{mode['acceptance_length']:.3f}"
        rows.append((mode["label"], length, f"{low:.3f}..{high:.3f}", f"{total:.2f}", f"{mode['verify_share']:.1%}"))
    return [table(rows)]


def _differences(title: str, run: Mapping[str, Any]) -> list[str]:
    """Format the differences of acceptance lengths, between rules or between a merged tree and its sources."""
    labels = {mode["mode"]: mode["label"] for mode in run["modes"]}
    rows = [(f"{title}, differences", "tokens per pass", "95 % interval")]
    for entry in run["differences"]:
        difference, low, high = entry["difference"]
        label = f"{labels[entry['mode']]}, less {labels[entry['minus']].partition(', ')[0]}"
        rows.append((label, f"{difference:+.3f}", f"{low:+.3f}..{high:+.3f}"))
    return [table(rows)] if rows[1:] else []


def _acceptance(title: str, modes: Sequence[Mapping[str, Any]]) -> str:
    kinds = sorted({kind for mode in modes for kind in mode["acceptance_length_by_kind"]})
    deepest = max(len(mode["acceptance_by_depth"] or ()) for mode in modes)
    depths = [f"depth {d}" if d == 1 else str(d) for d in range(1, deepest + 1)]
    head = (f"{title}, acceptance length", "all", "95 % interval", "lively", *kinds, *depths)
    rows = []
    for mode in modes:
        shares = mode["acceptance_by_depth"] or ()
        low, high = mode["acceptance_length_interval"]
        lengths = [mode["acceptance_length_not_looping"]]
        lengths += [mode["acceptance_length_by_kind"].get(kind) for kind in kinds]
        cells = [f"{share:.0%}" for share in shares] + [""] * (deepest - len(shares))
        length = _number(mode["acceptance_length"], ".2f"), f"{low:.2f}..{high:.2f}"
        rows.append((mode["label"], *length, *(_number(value, ".2f") for value in lengths), *cells))
    return table([head, *rows])


def _profile(title: str, modes: Sequence[Mapping[str, Any]]) -> str:
    head = (f"{title}, ms per round", *MEANING, "all", "pass ratio", "draft share")
    rows = []
    for mode in modes:
        if mode["profile_ms"] is None:
            continue
        stages = mode["profile_ms"]
        total = sum(stages.values())
        cells = [f"{ms:.2f} {ms / total:4.0%}" for ms in map(stages.get, MEANING)]
        ratios = (_number(mode["pass_ratio"], ".2f"), _number(mode["draft_share"], ".2f"))
        rows.append((mode["label"], *cells, f"{total:.2f}", *ratios))
    legend = "; ".join(f"{name}: {text}" for name, text in MEANING.items())
    return "\n".join([table([head, *rows]), *textwrap.wrap(legend, 118)])


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
