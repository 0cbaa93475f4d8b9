"""Performance and correctness targets on a GPU, and their measured values."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from gpu import attention, baselines, kernels, passes, prefill, rounds, smoke
from gpu.failures import last_line

H200_COPY = 4.3e12  # bytes per second of a copy on an H200, for which milliseconds are stated
Documents = Mapping[str, Mapping[str, Any]]  # results by stage: name of a measurement to figures


class Target(NamedTuple):
    """A target and the function that checks it.

    Args:
        text: description.
        must: bound as text.
        value: function that extracts the measured value, or None.
        reached: function that returns whether a value meets the bound.
        shown: format of the value.
    """

    text: str
    must: str
    value: Callable[[Documents], float | None]
    reached: Callable[[float], bool]
    shown: str = "{:.2f}"


def _figure(documents: Documents, stage: str, name: str, key: str) -> Any:
    return documents.get(stage, {}).get(name, {}).get(key)


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _sum(documents: Documents, stage: str, key: str, prefix: str) -> float | None:
    """Sum a figure over all measurements of a kind; None if there is none, or one failed."""
    found = [figures for name, figures in documents.get(stage, {}).items() if name.startswith(prefix)]
    values = [figures.get(key) for figures in found]
    return sum(values) if values and all(value is not None for value in values) else None


def _pass(documents: Documents, nodes: int, key: str = "graph_us", exact: bool = True) -> float | None:
    """Return a figure of a pass at the main context, with tuned kernels if those were measured."""
    name = passes.key(passes.MAIN_CONTEXT, nodes, exact=exact)
    tuned = _figure(documents, "passes_tuned", name, key)
    return _figure(documents, "passes", name, key) if tuned is None else tuned


def _of_plain(nodes: int) -> Callable[[Documents], float | None]:
    return lambda documents: _ratio(_pass(documents, nodes), _pass(documents, 1))


def _plain_ms(documents: Documents) -> float | None:
    """Return the milliseconds of a plain pass; on a GPU of less bandwidth, those that an H200 would take."""
    name = passes.key(passes.MAIN_CONTEXT, 1)
    for stage in ("passes_tuned", "passes"):
        us = _figure(documents, stage, name, "graph_us")
        bandwidth = _figure(documents, stage, passes.COPY, "bytes_per_second")
        if us is not None and bandwidth is not None:
            return 1e-3 * us * min(bandwidth / H200_COPY, 1.0)
    return None


def _compiled_over_ours(*batches: int) -> Callable[[Documents], float | None]:
    """Return a function that extracts the smallest speed-up over the compiled Llama; None if a batch is missing."""

    def smallest(documents: Documents) -> float | None:
        found = dict(documents.get("baselines", {}))
        ratios = [
            _ratio(
                baselines.compiled_us(found, batch),
                _figure(documents, "baselines", baselines.key(batch, 1), "graph_us"),
            )
            for batch in batches
        ]
        known = [ratio for ratio in ratios if ratio is not None]
        return min(known) if len(known) == len(ratios) else None

    return smallest


def _prefill(documents: Documents) -> float | None:
    """Return the largest time of a prompt over that of cuBLAS's products."""
    found = [_figure(documents, "prefill", prefill.key(length), "over_products") for length in prefill.LENGTHS]
    return None if None in found else max(found)


def _batch_over_cublas(documents: Documents) -> float | None:
    names = [passes.key(passes.MAIN_CONTEXT, passes.BATCH[1], passes.BATCH[0], exact) for exact in (True, False)]
    return _ratio(*(_figure(documents, "passes_more", name, "graph_us") for name in names))


def _exact_cost(documents: Documents) -> float | None:
    """Return the relative cost of exactness of a round with 32 nodes; without measured rounds, of a pass (higher)."""
    exact, fast = (_figure(documents, "rounds", rounds.key("tree32", e), "round_us") for e in (True, False))
    ratio = _ratio(exact, fast) or _ratio(_pass(documents, 32), _pass(documents, 32, exact=False))
    return None if ratio is None else ratio - 1.0


def _largest_gap(documents: Documents) -> float | None:
    names = [name for name in documents.get("rounds", {}) if name.endswith("/exact")]
    gaps = [_figure(documents, "rounds", name, "gap_share") for name in names]
    return max(gaps) if gaps and all(gap is not None for gap in gaps) else None


def _gain_of_tau(documents: Documents) -> float | None:
    """Return speed-up over acceptance length of the fastest tree of the three SSMs, for one request."""
    modes: Iterable[Mapping[str, Any]] = _figure(documents, "grown8b", "batch1", "modes") or ()
    trees = [mode for mode in modes if mode["mode"].startswith("tree-ssms")]
    if not trees:
        return None
    fastest = max(trees, key=lambda mode: mode["speedup"])
    return fastest["speedup"] / fastest["acceptance_length"]


def _attention(context: int, nodes: int, variants: tuple[str, ...]) -> Callable[[Documents], float | None]:
    """Return a function that extracts the microseconds of the fastest of some variants."""
    case = attention.Case(context, nodes)
    return lambda documents: attention.fastest(documents.get("kernels", {}), case, variants)


def _over_ours(context: int, variants: tuple[str, ...]) -> Callable[[Documents], float | None]:
    """Return a function that extracts the speed-up over the fastest of some variants at 32 nodes."""
    others, ours = _attention(context, 32, variants), _attention(context, 32, (attention.OURS,))
    return lambda documents: _ratio(others(documents), ours(documents))


def _ours_over_flash(documents: Documents) -> float | None:
    ours, flash = (_attention(8192, 32, variants)(documents) for variants in ((attention.OURS,), attention.FLASH))
    return _ratio(ours, flash)


def _attention_share(documents: Documents) -> float | None:
    return _figure(documents, "kernels", attention.Case(32768, 32).key(attention.OURS), "share_of_copy")


def _commit(documents: Documents) -> float | None:
    return _figure(documents, "kernels", kernels.COMMIT, "us")


def _smoke(documents: Documents) -> float | None:
    """Return the number of all differences of the first minute; None if a check of bits is missing or failed."""
    keys = {smoke.BITS: ("differing_row_counts", "differing_tiles"), smoke.ENGINE: ("differing_tokens",)}
    keys |= {smoke.TREES: ("differing_rows", "differing_repeats")}
    found = [_figure(documents, "smoke", name, key) for name, own in keys.items() for key in own]
    return None if None in found else sum(found)


TARGETS = (
    Target("first minute: differing rows, repeats and tokens", "0", _smoke, lambda v: v == 0, "{:.0f}"),
    Target(
        "kernel tests on the device: failures", "0", lambda d: _sum(d, "ops", "failed", ""), lambda v: v == 0, "{:.0f}"
    ),
    Target(
        "attention: rows with differing bits",
        "0",
        lambda d: _sum(d, "bits", "differing_rows", "attention/"),
        lambda v: v == 0,
        "{:.0f}",
    ),
    Target(
        "row_linear: row counts with differing bits",
        "0",
        lambda d: _sum(d, "bits", "differing_row_counts", "row_linear/"),
        lambda v: v == 0,
        "{:.0f}",
    ),
    Target(
        "row_linear: tiles with differing bits",
        "0",
        lambda d: _sum(d, "bits", "differing_tiles", "row_linear/"),
        lambda v: v == 0,
        "{:.0f}",
    ),
    Target(
        "whole passes: nodes with differing logits",
        "0",
        lambda d: _sum(d, "bits", "differing_rows", "decoder/"),
        lambda v: v == 0,
        "{:.0f}",
    ),
    Target(
        "whole passes: repeats with differing logits",
        "0",
        lambda d: _sum(d, "bits", "differing_repeats", "decoder/"),
        lambda v: v == 0,
        "{:.0f}",
    ),
    Target(
        "passes of every family: nodes with differing logits",
        "0",
        lambda d: _sum(d, "families", "differing_rows", "family/"),
        lambda v: v == 0,
        "{:.0f}",
    ),
    Target(
        "passes of quantised layers: nodes with differing logits",
        "0",
        lambda d: _sum(d, "quantized", "differing_rows", "int"),
        lambda v: v == 0,
        "{:.0f}",
    ),
    Target(
        "greedy trees: differing tokens",
        "0",
        lambda d: _sum(d, "bits", "differing_tokens", "greedy"),
        lambda v: v == 0,
        "{:.0f}",
    ),
    Target(
        "greedy trees: differing logit rows",
        "0",
        lambda d: _sum(d, "bits", "differing_logit_rows", "greedy, step"),
        lambda v: v == 0,
        "{:.0f}",
    ),
    Target(
        "sampled trees: differing tokens",
        "0",
        lambda d: _sum(d, "bits", "differing_tokens", "sampled"),
        lambda v: v == 0,
        "{:.0f}",
    ),
    Target("exact mode against cuBLAS and packed mask, 32 nodes", "< 10 %", _exact_cost, lambda v: v < 0.10, "{:.1%}"),
    Target(
        "8B plain pass at 2k, share of copy bandwidth (first step)",
        ">= 65 %",
        lambda d: _pass(d, 1, "share_of_copy"),
        lambda v: v >= 0.65,
        "{:.1%}",
    ),
    Target(
        "8B plain pass at 2k, share of copy bandwidth",
        ">= 80 %",
        lambda d: _pass(d, 1, "share_of_copy"),
        lambda v: v >= 0.80,
        "{:.1%}",
    ),
    Target("8B plain pass at 2k, ms at an H200's bandwidth", "<= 4.3", _plain_ms, lambda v: v <= 4.3),
    Target(
        "8B plain pass at 2k: compiled Llama's time over it, batch 1",
        ">= 1.0",
        _compiled_over_ours(1),
        lambda v: v >= 1.0,
    ),
    Target(
        "8B plain pass at 2k: the same, least of batches 4, 16, 64",
        ">= 1.0",
        _compiled_over_ours(4, 16, 64),
        lambda v: v >= 1.0,
    ),
    Target("8B prompts of 2k and 8k: largest time over cuBLAS products", "<= 1.5", _prefill, lambda v: v <= 1.5),
    Target("8B pass at 2k, 8 trees of 32: time over exact=False", "<= 1.30", _batch_over_cublas, lambda v: v <= 1.30),
    Target("8B pass at 2k: 32 nodes against 1", "<= 1.10", _of_plain(32), lambda v: v <= 1.10, "{:.3f}"),
    Target("8B pass at 2k: 64 nodes against 1", "<= 1.20", _of_plain(64), lambda v: v <= 1.20, "{:.3f}"),
    Target(
        "tree attention, 32 nodes x 2k: times masked SDPA",
        ">= 2.0",
        _over_ours(2048, attention.MASKED),
        lambda v: v >= 2.0,
    ),
    Target(
        "tree attention, 32 nodes x 8k: times masked SDPA",
        ">= 2.0",
        _over_ours(8192, attention.MASKED),
        lambda v: v >= 2.0,
    ),
    Target(
        "tree attention, 32 nodes x 8k: times FlexAttention",
        ">= 1.0",
        _over_ours(8192, (attention.FLEX,)),
        lambda v: v >= 1.0,
    ),
    Target("tree attention, 32 nodes x 8k: time over unmasked flash", "<= 1.25", _ours_over_flash, lambda v: v <= 1.25),
    Target(
        "tree attention, 32 nodes x 32k: share of copy bandwidth",
        ">= 70 %",
        _attention_share,
        lambda v: v >= 0.70,
        "{:.1%}",
    ),
    Target("KV commit of a path of 6 for 8B, microseconds", "< 10", _commit, lambda v: v < 10.0, "{:.1f}"),
    Target("host gap, largest share of an 8B round", "< 5 %", _largest_gap, lambda v: v < 0.05, "{:.1%}"),
    Target("grown 8B, three SSMs: speed-up over acceptance length", ">= 0.80", _gain_of_tau, lambda v: v >= 0.80),
)


def table(documents: Documents, dry: bool = False) -> str:
    """Return the table of targets with measured values, without the times of a dry run, which are meaningless."""
    lines = [f"{'target':60} {'bound':>8} {'measured':>9}  verdict"]
    for target in TARGETS:
        try:
            value = target.value(documents)
        except Exception as error:  # malformed figures may raise anything; keep the other targets
            lines.append(f"{target.text:60} {target.must:>8} {'-':>9}  FAILED: {last_line(error)}")
            continue
        if value is None or (dry and target.must != "0"):
            shown, verdict = "-", "not measured"
        else:
            shown, verdict = target.shown.format(value), "met" if target.reached(value) else "MISSED"
        lines.append(f"{target.text:60} {target.must:>8} {shown:>9}  {verdict}")
    return "\n".join(lines)


def wrong(documents: Documents) -> bool:
    """Return whether a correctness target was measured and missed, or is unreadable."""
    return any(_is_wrong(target, documents) for target in TARGETS if target.must == "0")


def _is_wrong(target: Target, documents: Documents) -> bool:
    try:
        value = target.value(documents)
    except Exception:
        return True
    return value is not None and value > 0
