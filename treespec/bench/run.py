"""Runs a benchmark and builds its JSON document."""

import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from treespec.bench.grow import GrownTarget
from treespec.bench.measure import Run, Sample, interleave, run_ours
from treespec.bench.modes import PLAIN, Mode, Peer, Selection, our_modes, peer_modes, select
from treespec.bench.options import Options
from treespec.bench.peers import Transformers
from treespec.bench.progress import BenchProgress, Plan
from treespec.bench.prompts import choose, held_out_prompts
from treespec.bench.report import DEFINITIONS, best, comparisons, mismatches, summarise
from treespec.bench.rule_comparison import default_branching, intervals, rule_modes
from treespec.config.configs import AUTO_NODES, SpecConfig
from treespec.errors import ConfigError
from treespec.llm import LLM
from treespec.sampling_params import SamplingParams
from treespec.startup.cost_measurement import processor
from treespec.startup.options import resolve_folders, resolve_model
from treespec.text.prompt_files import Prompt, encode_prompt, has_chat_template, read_prompts
from treespec.version import __version__

WHY_BATCH_ONE = "transformers' assisted decoding supports batch 1 only"


def bench(
    options: Options,
    grown: GrownTarget | None = None,
    progress: BenchProgress | None = None,
) -> dict[str, Any]:
    """Run the benchmark and return the `--json` document.

    Args:
        options: the options.
        grown: description of a grown target, whose source model also decodes the prompts for comparison.
        progress: progress callbacks.

    Raises:
        ConfigError: an invalid mode, prompt file or value. Otherwise as in `LLM`.
    """
    progress = progress or BenchProgress()
    target = resolve_model(options.model)
    folders = dict(resolve_folders(options.model, options.drafts))
    selection = _selection(options, list(folders))
    specs = {mode.name: mode.spec for mode in selection.ours}  # validates before anything is loaded
    progress.stage("loading the models")
    llm = LLM(
        target,
        [*folders.values()],
        _widest(specs.values()),
        device=options.device,
        dtype=options.dtype,
        max_num_seqs=max(options.batches),
        compile=options.compile,
        quantization=options.quantization,
    )
    prompts, ids, left_out = _prompts(options, llm)
    memory = {"peak_with_ours": _peak_mib()}
    needed = {peer.draft for peer in selection.peers}
    drafts = {name: folder for name, folder in folders.items() if name in needed}
    if selection.peers:
        progress.stage("loading the models into transformers")
    peers = Transformers(target, drafts, llm.config.device, llm.config.dtype) if selection.peers else None
    per_batch = {batch: _runs(batch, options, selection, specs, llm, peers) for batch in options.batches}
    plan = Plan(
        {
            (batch, mode): options.warmup + options.repeats * (len(ids) // batch)
            for batch, by_mode in per_batch.items()
            for mode in by_mode
        }
    )
    progress.began(plan)
    runs = []
    for batch, by_mode in per_batch.items():
        counted = {mode: _counted(run, batch, mode, plan, progress) for mode, run in by_mode.items()}
        for _ in range(options.warmup):
            interleave(counted, ids[:batch], batch, 1, options.seed)
        whole = len(ids) // batch * batch  # full batches only
        samples = interleave(counted, ids[:whole], batch, options.repeats, options.seed)
        runs.append(_summary(batch, samples, selection, prompts[:whole], options))
        plain = samples[PLAIN][0].tokens
    memory["peak_with_all"] = _peak_mib()
    if llm.config.device.type == "cuda":
        memory["peak_on_the_gpu"] = torch.cuda.max_memory_allocated(llm.config.device) / 2**20
    memory |= {name: size / 2**20 for name, size in llm.stats()["memory"].items()}
    frozen = llm.stats()["frozen"]
    ancestry = None
    if grown is not None:
        progress.stage("decoding the prompts with the source of the grown model")
        small = LLM(grown.source, [], "off", device=options.device, dtype=llm.config.dtype, max_num_seqs=1)
        run: dict[str, Run] = {PLAIN: _ours(small, "off", options)}
        [sample] = interleave(run, ids[: len(plain)], 1, 1, seed=options.seed)[PLAIN]
        ancestry = grown.figures | {"mismatches_with_source": mismatches(plain, sample.tokens)}
    return {
        "model": grown.of if grown else "embedded target" if options.model is None else str(options.model),
        "drafts": list(folders),
        "grown": ancestry,
        "device": frozen["device"],
        "processor": _processor(llm),
        "dtype": frozen["dtype"],
        "threads": frozen["threads"],
        "versions": {
            "treespec": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "commit": commit(),
        "seed": options.seed,
        "temperature": options.temperature,
        "num_prompts": len(prompts),
        "prompts_left_out": left_out,
        "kinds": dict(Counter(prompt.kind for prompt in prompts if prompt.kind is not None)),
        "total_input_tokens": sum(map(len, ids)),
        "max_tokens": options.max_tokens,
        "repeats": options.repeats,
        "memory_mib": memory,
        "attention": frozen["attention"],
        "linear": frozen["linear"],
        "quantization": frozen["quantization"],
        "exact": frozen["exact"],
        "runs": runs,
        "definitions": DEFINITIONS,
    }


def _runs(
    batch: int,
    options: Options,
    selection: Selection,
    specs: dict[str, SpecConfig | str],
    llm: LLM,
    peers: Transformers | None,
) -> dict[str, Run]:
    """Return the runs of one batch size, by mode."""

    def theirs(peer: Peer) -> Run:
        assert peers is not None
        return lambda prompts, seeds: peers.run(peer, prompts, options.max_tokens)

    runs = {mode.name: _ours(llm, specs[mode.name], options) for mode in selection.ours}
    return runs | {peer.name: theirs(peer) for peer in selection.peers if batch == 1 or not peer.batch_one_only}


def _counted(run: Run, batch: int, mode: str, plan: Plan, progress: BenchProgress) -> Run:
    """Return `run` wrapped to record its time in the plan."""

    def counted(prompts: Sequence[list[int]], seeds: Sequence[int]) -> Sample:
        start = time.perf_counter()
        sample = run(prompts, seeds)
        plan.add(batch, mode, time.perf_counter() - start)
        progress.ran(plan)
        return sample

    return counted


def _ours(llm: LLM, spec: SpecConfig | str, options: Options) -> Run:
    return lambda prompts, seeds: run_ours(llm, spec, prompts, options.max_tokens, options.temperature, seeds)


def _selection(options: Options, ssms: list[str]) -> Selection:
    """Return the requested modes.

    Raises:
        ConfigError: an unknown mode, rules without an SSM, or an invalid temperature or topology.
    """
    SamplingParams(temperature=options.temperature)
    sampled = options.temperature > 0
    if options.verification:
        if not ssms:
            raise ConfigError("--verification compares rules on SSM drafts, and there is no SSM; give --draft")
        branchings = [options.branching] if options.branching else list(map(default_branching, options.nodes))
        return select(rule_modes(options.verification, branchings, sampled), [], options.only)
    peers = [] if sampled or not options.peers else peer_modes(ssms, options.k_values)
    ours = our_modes(ssms, options.k_values, options.nodes, options.combinations)
    return select(ours, peers, options.only)


def _summary(
    batch: int, samples: dict[str, list[Sample]], selection: Selection, prompts: list[Prompt], options: Options
) -> dict[str, Any]:
    plain, sampled = samples[PLAIN], options.temperature > 0
    modes: list[Mode | Peer] = [*selection.ours, *selection.peers]
    figures = [summarise(mode, samples[mode.name], plain, prompts, sampled) for mode in modes if mode.name in samples]
    left_out = [peer.name for peer in selection.peers if peer.name not in samples]
    return {
        "batch": batch,
        "num_prompts": len(prompts),
        "best": best(figures),
        "comparisons": comparisons(best(figures), samples),
        "peers_left_out": left_out,
        "why_left_out": WHY_BATCH_ONE if left_out else None,
        "rules": intervals(selection.ours[1:], samples) if options.verification else None,
        "modes": figures,
    }


def _prompts(options: Options, llm: LLM) -> tuple[list[Prompt], list[list[int]], int]:
    """Return the chosen prompts, their token ids, and the number of prompts that exceed the context."""
    tokenizer, room = llm.get_tokenizer(), llm.config.max_model_len - options.max_tokens
    chat = has_chat_template(tokenizer)
    path = options.prompts or held_out_prompts(chat)
    prompts = read_prompts(path, chat)
    if tokenizer is None and not all(isinstance(token, int) for prompt in prompts for token in prompt.content):
        raise ConfigError(f"{path} holds text, but the model has no tokenizer; give prompt_token_ids")
    encoded = [prompt._replace(content=encode_prompt(tokenizer, prompt.content)) for prompt in prompts]
    fitting = [prompt for prompt in encoded if 0 < len(prompt.content) <= room]
    if not fitting:
        raise ConfigError(
            f"no prompt of {path} has room: {llm.config.max_model_len} positions without --max-tokens "
            f"{options.max_tokens} leave {room}"
        )
    selected = choose(fitting, options.samples, options.seed)
    if len(selected) < max(options.batches):
        raise ConfigError(f"--batch {max(options.batches)}, but there are {len(selected)} prompts; give more --samples")
    return selected, [encode_prompt(tokenizer, prompt.content) for prompt in selected], len(encoded) - len(fitting)


def _widest(specs: Any) -> SpecConfig:
    """Return a configuration with the largest tree of `specs`, for which the engine reserves slots."""
    largest = max([AUTO_NODES, *(spec.max_nodes for spec in specs if isinstance(spec, SpecConfig))])
    return SpecConfig(nodes=largest)


def _processor(llm: LLM) -> str:
    device = llm.config.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def _peak_mib() -> float:
    """Return the peak resident memory of this process in MiB."""
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def commit() -> str | None:
    """Return the git commit of the running checkout, with "-dirty" if modified; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
