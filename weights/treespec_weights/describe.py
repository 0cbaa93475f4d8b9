"""Format reports on checkpoints as aligned text."""

from collections.abc import Sized
from pathlib import Path
from typing import Any

from treespec_weights.verify import Verification

TableRow = tuple[str, ...]


def describe(report: dict[str, Any]) -> str:
    """Format the report of `inspect_checkpoint`, with `drafts`, as text for a terminal."""
    shape, vocabulary = report["shape"], report["vocabulary"]
    stored = " + ".join(f"{dtype} {_size(row['bytes'])}" for dtype, row in report["dtypes"].items())
    family = _printable(report["family"] or "unknown")
    if report["architectures"]:
        family += f" ({', '.join(map(_printable, report['architectures']))})"
    facts = [
        ("family", family),
        ("parameters", f"{report['parameters']:,}"),
        ("stored", f"{stored} in {_count(report['files'], 'file')}"),
    ]
    if report["quantization"]:
        facts.append(("quantised", report["quantization"]))
    for in_blocks, name, form in ((True, "in blocks", ""), (False, "as values", " in memory")):
        rows = [row for row in report["matrices"] or () if row["in_blocks"] == in_blocks]
        kinds = " + ".join(f"{row['count']} {row['type']} {_size(row['bytes'])}{form}" for row in rows)
        if report["matrices"] is not None:
            facts.append((name, kinds or "no matrices"))
    if report["pass_bytes"]:
        head = f"the layers and the {'tied' if shape['tied'] else 'untied'} head"
        facts.append(("pass reads", f"{_size(report['pass_bytes'])}: {head}"))
    if shape:
        heads_of = sorted({tuple(layer_sizes[:2]) for layer_sizes in shape["sizes"]}) or [
            (shape["num_kv_heads"], shape["head_dim"])
        ]
        kv_text = " or ".join(f"{kv_heads} KV heads, head dim {head_dim}" for kv_heads, head_dim in heads_of)
        heads = f"{shape['num_heads']} heads, {kv_text}"
        biases = [name for name in ("attention_bias", "o_bias", "mlp_bias") if shape[name]]
        facts += [
            ("layers", f"{shape['num_layers']} x hidden {shape['hidden_size']:,}, MLP {shape['intermediate_size']:,}"),
            ("attention", heads),
            ("biases", ", ".join(biases) or "none"),
            ("layers of", _made_of(shape, report["made_of"])),
            ("vocabulary", f"{shape['vocab_size']:,}, {'tied' if shape['tied'] else 'untied'} head"),
        ]
    if vocabulary:
        count = "" if vocabulary["tokens"] is None else f"{vocabulary['tokens']:,} tokens, "
        padding = f", {report['unused_ids']:,} ids unused" if report["unused_ids"] else ""
        facts.append(("tokenizer", f"{count}sha256 {vocabulary['sha256'][:16]}{padding}"))
    if report["context"]:
        facts.append(("context", f"{report['context']:,} positions"))
    if report["ignored"]:
        facts.append(("ignored", f"{len(report['ignored'])} tensors that are not read"))
    if report["problems"]:
        facts.append(("PROBLEMS", f"{report['problems']} names, shapes or dtypes; `verify` lists them"))
    if not report["supported"]:
        facts.append(("unsupported", report["unsupported_because"]))
    blocks = [str(report["folder"]), _table([("  " + key, value) for key, value in facts])]
    blocks.append(_table(_memory_rows(report), right_aligned=(1, 2, 3)))
    tensors: list[TableRow] = [("  tensor", "count", "dtype", "shape", "each")]
    for row in report["tensors"]:
        dims = " x ".join(f"{dim:,}" for dim in row["shape"]) or "scalar"
        tensors.append(("  " + _printable(row["name"]), str(row["count"]), row["dtype"], dims, _size(row["bytes"])))
    blocks.append(_table(tensors, right_aligned=(1, 3, 4)))
    if report.get("drafts"):
        blocks.append(_table(_draft_rows(report["drafts"]), right_aligned=(1, 2)))
    return "\n\n".join(blocks)


def _made_of(shape: dict[str, Any], traits: dict[str, Any]) -> str:
    norm = {"rms": "RMSNorm", "rms_plus_one": "RMSNorm (1 + w)", "layer": "LayerNorm"}[traits["norm"]]
    if shape["qk_norm"]:
        norm += ", also of heads"
    if shape["wide_qk_norm"]:
        norm += ", also of queries and keys"
    if shape["post_norms"]:
        norm += ", also after attention and MLP" if shape["pre_norms"] else ", after attention and MLP, not before"
    features = [norm, _printable(str(traits["activation"])) + ("" if shape["gated"] else ", no gate")]
    if experts := shape["experts"]:
        shared = " and a shared one" if experts["shared_size"] else ""
        features.append(f"{experts['top_k']} of {experts['count']} experts of {experts['size']:,}{shared}")
    if recurrent := shape["recurrent"]:
        kind = {"delta": "Gated DeltaNets", "mamba2": "Mamba 2", "conv": "gated convolutions"}[recurrent["kind"]]
        count, state = len(recurrent["layers"]), recurrent["heads"] * recurrent["key_dim"] * recurrent["value_dim"]
        of_request = f", with states of {_size(4 * count * state)} per request" if state else ""
        relation = "have attention beside" if recurrent["beside"] else "are"
        features.append(f"{count} of {shape['num_layers']} layers {relation} {kind}{of_request}")
    if type(traits["window"]) is int:
        features.append(f"windows of {traits['window']:,} positions")
    if traits["parallel"] is True:
        features.append("parallel attention and MLP")
    if shape["learned_positions"]:
        features.append(f"{shape['learned_positions']:,} learned positions")
    return "; ".join(features)


def _memory_rows(report: dict[str, Any]) -> list[TableRow]:
    context = report["context"]
    rows: list[TableRow] = [("  memory", "weights", "KV per token", f"KV at {context:,}" if context else "")]
    for dtype, memory in report["memory"].items():
        kv = memory["kv_bytes_per_token"]
        full = _size(kv * context) if kv and context else ""
        rows.append((f"  {dtype}", _size(memory["weights_bytes"]), _size(kv) if kv else "?", full))
    return rows


def _draft_rows(drafts: list[dict[str, Any]]) -> list[TableRow]:
    words = {True: "same", False: "differs", None: "unknown"}
    rows: list[TableRow] = [("  draft", "parameters", "of target", "vocab size", "tokenizer", "hidden size", "")]
    for draft in drafts:
        rows.append(
            (
                f"  {draft['folder']}",
                f"{draft['parameters']:,}" if draft["parameters"] is not None else "?",
                f"{draft['cost_ratio']:.1%}" if draft["cost_ratio"] is not None else "?",
                words[draft["same_vocab_size"]],
                words[draft["same_vocabulary"]],
                words[draft["same_hidden_size"]],
                _verdict(draft),
            )
        )
    return rows


def _verdict(draft: dict[str, Any]) -> str:
    if not draft["usable"]:
        return f"not usable: {draft['reason']}"
    if draft["same_vocabulary"] is None:
        return "usable, if the tokenizers are the same"
    return "usable" if draft["connection"] == "same vocabulary" else f"usable: {draft['connection']}"


def describe_verification(folder: Path, result: Verification) -> str:
    lines = [str(folder)]
    width = max(len(check.name) for check in result.checks)
    for check in result.checks:
        mark = "FAIL" if check.problems else "ok" if check.done else "-"
        outcome = _count(check.problems, "problem") if check.problems else check.detail
        lines.append(f"  {mark:<4}  {check.name:<{width}}  {outcome}")
        lines += [f"        {'':<{width}}  {problem}" for problem in check.problems]
    lines.append("no problems" if result.ok else _count(result.problems, "problem"))
    return "\n".join(lines)


def describe_conversion(report: dict[str, Any]) -> str:
    facts = [
        ("family", report["family"]),
        ("stored", f"{' + '.join(report['dtypes'])} {_size(report['bytes'])} in {_count(report['files'], 'file')}"),
    ]
    if report["resumed"]:
        facts.append(("resumed", f"{_count(report['resumed'], 'file')} of them finished before"))
    if left_out := report["left_out"]:
        facts.append(("left out", f"{_count(left_out, 'tensor')} not read, such as {_printable(left_out[0])}"))
    return f"{report['destination']}\n\n" + _table([("  " + key, value) for key, value in facts])


def describe_timing(report: dict[str, Any]) -> str:
    rows: list[TableRow] = [("  ", "seconds", "GB/s")]
    for key, name in (("load_weights", "load_weights"), ("plain", "plain read")):
        rows.append((f"  {name}", f"{report[key]['median']:.3f}", f"{report[key]['gb_per_second']:.2f}"))
    summary = f"{_size(report['bytes'])} to {report['device']}"
    summary += f" as {report['dtype']}" if report["dtype"] else ", as stored"
    summary += ", from the disk" if report["cold"] else ", from the page cache"
    head = f"{report['folder']}\n\n  {summary}; median of {report['repeats']}\n\n"
    return head + _table(rows, right_aligned=(1, 2)) + f"\n\n  {report['share']:.1%} of the plain read's speed"


def _count(items: Sized, noun: str) -> str:
    return f"{len(items):,} {noun}{'s' * (len(items) != 1)}"


def _printable(name: str) -> str:
    return name if name.isprintable() else repr(name)  # a checkpoint's names must not send terminal control sequences


def _size(size: int) -> str:
    power = min(max(size.bit_length() - 1, 0) // 10, 4)
    return f"{size / 1024**power:.1f} {'KMGT'[power - 1]}iB" if power else f"{size} B"


def _table(rows: list[TableRow], right_aligned: tuple[int, ...] = ()) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right_aligned else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
