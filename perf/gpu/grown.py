"""Stages `grown1b` and `grown8b`: end-to-end generation with the embedded target grown to a larger shape.

A grown model has the cost of the larger shape and generates the tokens of the small one, so acceptance is realistic.
The stages compare plain decoding, trees of the three SSMs, and transformers with and without assistant model,
interleaved by batch and reported as in `treespec bench`.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from gpu.engines import grown_folder, open_engine
from gpu.setting import Setting
from gpu.stage import Context, Measurement
from treespec import LLM, SpecConfig
from treespec.bench.measure import Run, Sample, interleave, run_ours
from treespec.bench.modes import PLAIN, Selection, our_modes, peer_modes, select
from treespec.bench.peers import Transformers
from treespec.bench.prompts import choose, held_out_prompts
from treespec.bench.report import DEFINITIONS, best, comparisons, summarise
from treespec.text.prompt_files import Prompt, read_prompts
from treespec_weights import default_folder

SECONDS = 110.0  # per batch size
SSMS = ("ssm-1", "ssm-2", "ssm-3")
KEPT = (
    "mode",
    "engine",
    "output_throughput",
    "output_throughput_min",
    "output_throughput_max",
    "mean_ttft_ms",
    "p50_itl_ms",
    "p99_itl_ms",
    "speedup",
    "speedup_min",
    "speedup_max",
    "acceptance_length",
    "nodes_per_pass",
    "mismatches",
    "efficiency",
    "pass_ratio",
    "draft_share",
    "verify_share",
    "profile_ms",
)


@dataclass(frozen=True)
class Sizes:
    """Prompts and repeats by batch size."""

    size: str | None  # None: the embedded target
    prompts: dict[int, int]
    repeats: int
    max_tokens: int
    modes: tuple[str, ...]


_MODES = (
    "chain-k5",
    "tree-ssms-n16",
    "tree-ssms-n32",
    "tree-ssms-n64",
    "tree-everything-n32",
    "auto",
    "hf-plain",
    "hf-assisted-ssm-1-k5",
    "hf-assisted-ssm-1-own",
    "hf-lookup-k5",
)
_DRY_MODES = ("tree-ssms-n16", "hf-plain", "hf-assisted-ssm-1-k5")
DRY = {"1B": Sizes(None, {1: 1, 2: 2}, 1, 4, _DRY_MODES), "8B": Sizes(None, {1: 1}, 1, 4, _DRY_MODES[:1])}


class Opened(NamedTuple):
    """The engine and transformers on one target, with prompts for the largest batch."""

    llm: LLM
    peers: Transformers
    selection: Selection
    prompts: list[Prompt]


def measurements(size: str, setting: Setting) -> Iterator[Measurement]:
    sizes = DRY[size] if setting.dry else Sizes(size, {1: 4, 4: 4, 8: 8}, 3, 48, _MODES)
    yield Measurement("open", partial(_memory, sizes), 240.0)
    for batch in sizes.prompts:
        yield Measurement(f"batch{batch}", partial(_batch, sizes, batch), 260.0 if batch == 1 else 160.0)


def _opened(sizes: Sizes, context: Context) -> Opened:
    return context.keep("opened", lambda: _open(sizes, context.setting))


def _memory(sizes: Sizes, context: Context) -> dict[str, Any]:
    """Grow and load the models, untimed, and return their memory."""
    llm = _opened(sizes, context).llm
    return {"memory": llm.stats()["memory"], "drafts": llm.stats()["drafts"]}


def _batch(sizes: Sizes, batch: int, context: Context) -> dict[str, Any]:
    opened = _opened(sizes, context)
    prompts = opened.prompts[: sizes.prompts[batch]]
    ids = [prompt.content for prompt in prompts if isinstance(prompt.content, list)]
    runs = _runs(opened, batch, sizes.max_tokens)
    interleave(runs, ids[:batch], batch, 1)  # warm-up
    samples = _samples(runs, ids, batch, sizes)
    modes = [mode for mode in (*opened.selection.ours, *opened.selection.peers) if mode.name in runs]
    figures = [summarise(mode, samples[mode.name], samples[PLAIN], prompts) for mode in modes]
    return {
        "prompts": len(prompts),
        "max_tokens": sizes.max_tokens,
        "repeats": len(samples[PLAIN]),
        "comparisons": comparisons(best(figures), samples),
        "frozen": opened.llm.stats()["frozen"],
        "modes": [{key: each[key] for key in KEPT} for each in figures],
        "definitions": {key: text for key, text in DEFINITIONS.items() if key in KEPT},
    }


def _samples(runs: dict[str, Run], ids: Sequence[list[int]], batch: int, sizes: Sizes) -> dict[str, list[Sample]]:
    """Return one sample per mode and repeat; every repeat starts with another mode. Stops at the time limit."""
    samples: dict[str, list[Sample]] = {name: [] for name in runs}
    names, began = list(runs), time.perf_counter()
    for repeat in range(sizes.repeats):
        if repeat and time.perf_counter() - began > SECONDS * repeat / (repeat + 1):
            break  # another repeat would exceed the limit
        order = names[repeat % len(names) :] + names[: repeat % len(names)]
        for name, made in interleave({name: runs[name] for name in order}, ids, batch, 1).items():
            samples[name] += made
    return samples


def _open(sizes: Sizes, setting: Setting) -> Opened:
    target = default_folder("target") if sizes.size is None else grown_folder(setting, sizes.size)
    nodes = sorted({int(name.rpartition("-n")[2]) for name in sizes.modes if "-n" in name})
    selection = select(our_modes(SSMS, (5,), nodes), peer_modes(SSMS, (5,)), sizes.modes)
    folders = {name: default_folder(name) for name in SSMS}
    widest = SpecConfig(nodes=max(nodes))
    llm = open_engine(setting, target, list(folders.values()), widest, max_num_seqs=max(sizes.prompts))
    drafts = {peer.draft: folders[peer.draft] for peer in selection.peers if peer.draft is not None}
    peers = Transformers(target, drafts, setting.device, setting.dtype)
    known = read_prompts(held_out_prompts(chat=False))
    tokenizer, room = llm.get_tokenizer(), llm.config.max_model_len - sizes.max_tokens
    encoded = [prompt._replace(content=tokenizer.encode(prompt.content)) for prompt in known]
    fitting = [prompt for prompt in encoded if len(prompt.content) <= room]
    return Opened(llm, peers, selection, choose(fitting, max(sizes.prompts.values()), setting.seed))


def _runs(opened: Opened, batch: int, max_tokens: int) -> dict[str, Run]:
    def ours(spec: SpecConfig | str) -> Run:
        return lambda prompts, seeds: run_ours(opened.llm, spec, prompts, max_tokens)

    def theirs(peer: Any) -> Run:
        return lambda prompts, seeds: opened.peers.run(peer, prompts, max_tokens)

    runs = {mode.name: ours(mode.spec) for mode in opened.selection.ours}
    return runs | {peer.name: theirs(peer) for peer in opened.selection.peers if batch == 1 or not peer.batch_one_only}


def shares(profile_ms: dict[str, float] | None) -> Sequence[float] | None:
    """Return the shares of a round's time: drafting and merging, target pass, verification, commit, other."""
    if profile_ms is None:
        return None
    total = sum(profile_ms.values())
    parts = (("draft", "merge"), ("forward",), ("verify", "noise"), ("commit",), ("update", "host"))
    return [sum(profile_ms[name] for name in names) / total for names in parts]


def describe(document: dict[str, Any]) -> str:
    lines = []
    for name, figures in document["measurements"].items():
        if "error" in figures:
            lines.append(f"  {name}: ERROR {figures['error'][:150]}")
        if "modes" not in figures:
            continue
        lines.append(
            f"  {name:22} {'tok/s':>7} {'ms/tok':>7} {'p99':>6} {'tau':>5} {'speedup':>16} {'differ':>6}  "
            "draft/pass/verify/commit/rest"
        )
        for mode in figures["modes"]:
            parts = shares(mode["profile_ms"])
            spread = f"{mode['speedup']:.2f} ({mode['speedup_min']:.2f}-{mode['speedup_max']:.2f})"
            lines.append(
                f"    {mode['mode']:20} {mode['output_throughput']:7.1f} {mode['p50_itl_ms']:7.2f} "
                f"{mode['p99_itl_ms']:6.1f} {mode['acceptance_length']:5.2f} {spread:>16} {mode['mismatches']:6}  "
                + ("/".join(f"{part:.0%}" for part in parts) if parts else "-")
            )
    return "\n".join(lines)
