"""Execution of a benchmark, and its JSON document."""

import platform
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm  # type: ignore[import-untyped]

from treespec.bench.grow import GrownTarget
from treespec.bench.measure import Run, Sample, interleave, run_ours
from treespec.bench.modes import (
    PLAIN,
    Mode,
    Peer,
    default_branching,
    our_modes,
    parse_rules,
    peer_modes,
    rule_modes,
    select,
)
from treespec.bench.options import Options
from treespec.bench.peers import Transformers
from treespec.bench.prompts import choose, held_out_prompts
from treespec.bench.report import best, comparisons, differences, mismatches, summarise
from treespec.bench.text import LEGEND, RULES_LEGEND
from treespec.config.configs import AUTO_NODES, SpecConfig
from treespec.errors import ConfigError
from treespec.llm import LLM
from treespec.sampling_params import SamplingParams
from treespec.startup.cost_measurement import processor
from treespec.startup.options import resolve_folders, resolve_model
from treespec.text.prompt_files import Prompt, encode_prompt, has_chat_template, read_prompts
from treespec.version import __version__

_FROZEN = ("device", "dtype", "threads", "attention", "linear", "quantization", "exact")
WHY_BATCH_ONE = "transformers' assisted decoding supports batch 1 only"


def bench(
    options: Options,
    grown: GrownTarget | None = None,
    loading: AbstractContextManager[None] = nullcontext(),  # noqa: B008  (open while the models are loaded)
) -> dict[str, Any]:
    """Run the benchmark and return the `--json` document. The source of a grown target also decodes the prompts."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    target = resolve_model(options.model)
    folders = dict(resolve_folders(options.model, options.drafts))
    ours, peers = _modes(options, list(folders))
    specs = {mode.name: mode.spec for mode in ours}  # validates before loading anything
    largest = max([AUTO_NODES, *(spec.max_nodes for spec in specs.values() if isinstance(spec, SpecConfig))])
    with loading:
        llm = LLM(
            target,
            [*folders.values()],
            SpecConfig(nodes=largest),  # makes the engine reserve slots for it
            device=options.device,
            dtype=options.dtype,
            max_num_seqs=max(options.batch),
            compile=options.compile,
            quantization=options.quantization,
            draft_vocabulary=options.draft_vocabulary,
        )
    prompts, ids, left_out = _prompts(options, llm)
    memory = {"peak_with_ours": _peak_mib()}
    by_name: dict[str, Run] = {mode.name: _ours(llm, specs[mode.name], options) for mode in ours}
    if peers:
        draft_names = {peer.draft for peer in peers}
        drafts = {name: folder for name, folder in folders.items() if name in draft_names}
        baselines = Transformers(target, drafts, llm.config.device, llm.config.dtype)
        by_name |= {peer.name: partial(baselines.run, peer, options.max_tokens) for peer in peers}
    batch_one_names = {peer.name for peer in peers if peer.batch_one_only}
    by_batch = {
        batch: {name: run for name, run in by_name.items() if batch == 1 or name not in batch_one_names}
        for batch in options.batch
    }
    total = sum(
        len(names) * (options.warmup + options.repeats * (len(ids) // batch)) for batch, names in by_batch.items()
    )
    runs = []
    with tqdm(desc="measuring", total=total, unit="run", mininterval=0.1 if sys.stderr.isatty() else 30) as bar:
        for batch, by_mode in by_batch.items():
            for _ in range(options.warmup):
                interleave(by_mode, ids[:batch], batch, 1, options.seed, bar.update)
            num_batched = len(ids) // batch * batch  # full batches only
            samples = interleave(by_mode, ids[:num_batched], batch, options.repeats, options.seed, bar.update)
            runs.append(_summary(batch, samples, ours, peers, prompts[:num_batched], options))
            plain = samples[PLAIN][0].tokens
    memory["peak_with_all"] = _peak_mib()
    device, on_gpu = llm.config.device, llm.config.device.type == "cuda"
    if on_gpu:
        memory["peak_on_the_gpu"] = torch.cuda.max_memory_allocated(device) / 2**20
    memory |= {name: size / 2**20 for name, size in llm.stats()["memory"].items()}
    frozen, ancestry = llm.stats()["frozen"], None
    if grown is not None:
        small = LLM(grown.source, [], "off", device=options.device, dtype=llm.config.dtype, max_num_seqs=1)
        [sample] = interleave({PLAIN: _ours(small, "off", options)}, ids[: len(plain)], 1, 1, options.seed)[PLAIN]
        ancestry = grown.figures | {"mismatches_with_source": mismatches(plain, sample.tokens)}
    return {
        "model": grown.of if grown else "embedded target" if options.model is None else str(options.model),
        "drafts": list(folders),
        "grown": ancestry,
        **{name: frozen[name] for name in _FROZEN},
        "processor": torch.cuda.get_device_name(device) if on_gpu else processor(),
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
        "runs": runs,
        "definitions": [*LEGEND.splitlines(), *RULES_LEGEND.splitlines()],
    }


def _ours(llm: LLM, spec: SpecConfig | str, options: Options) -> Run:
    return lambda prompts, seeds: run_ours(llm, spec, prompts, options.max_tokens, options.temperature, seeds)


def _modes(options: Options, ssms: list[str]) -> tuple[list[Mode], list[Peer]]:
    """Return the requested modes. Raises ConfigError for an unknown mode, or rules without an SSM."""
    SamplingParams(temperature=options.temperature)
    sampled = options.temperature > 0
    if options.verification:
        if not ssms:
            raise ConfigError("--verification compares rules on SSM drafts, but there is no SSM; pass --draft")
        branchings = [tuple(options.branching)] if options.branching else list(map(default_branching, options.nodes))
        return select(rule_modes(parse_rules(options.verification), branchings, sampled), [], options.only)
    peers = [] if sampled or not options.peers else peer_modes(ssms, options.k_values)
    return select(our_modes(ssms, options.k_values, options.nodes, options.combine), peers, options.only)


def _summary(
    batch: int,
    samples: dict[str, list[Sample]],
    ours: list[Mode],
    peers: list[Peer],
    prompts: list[Prompt],
    options: Options,
) -> dict[str, Any]:
    plain, sampled = samples[PLAIN], options.temperature > 0
    modes: list[Mode | Peer] = [*ours, *peers]
    figures = [summarise(mode, samples[mode.name], plain, prompts, sampled) for mode in modes if mode.name in samples]
    left_out = [peer.name for peer in peers if peer.name not in samples]
    return {
        "batch": batch,
        "num_prompts": len(prompts),
        "best": best(figures),
        "comparisons": comparisons(best(figures), samples),
        "peers_left_out": left_out,
        "why_left_out": WHY_BATCH_ONE if left_out else None,
        "rules": [mode.name for mode in ours[1:]] if options.verification else None,
        "differences": differences(ours, samples),
        "modes": figures,
    }


def _prompts(options: Options, llm: LLM) -> tuple[list[Prompt], list[list[int]], int]:
    """Return the chosen prompts, their token ids, and the number of prompts that exceed the context."""
    tokenizer, room = llm.get_tokenizer(), llm.config.max_model_len - options.max_tokens
    chat = has_chat_template(tokenizer)
    path = Path(options.prompts or held_out_prompts(chat))
    prompts = read_prompts(path, chat)
    if tokenizer is None and not all(isinstance(token, int) for prompt in prompts for token in prompt.content):
        raise ConfigError(f"{path} contains text, but the model has no tokenizer; use prompt_token_ids")
    encoded = [prompt._replace(content=encode_prompt(tokenizer, prompt.content)) for prompt in prompts]
    fitting = [prompt for prompt in encoded if 0 < len(prompt.content) <= room]
    if not fitting:
        raise ConfigError(f"no prompt of {path} fits: --max-tokens {options.max_tokens} leaves {room} positions")
    selected = choose(fitting, options.samples, options.seed)
    if len(selected) < max(options.batch):
        raise ConfigError(f"--batch {max(options.batch)}, but there are only {len(selected)} prompts; raise --samples")
    return selected, [encode_prompt(tokenizer, prompt.content) for prompt in selected], len(encoded) - len(fitting)


def _peak_mib() -> float:
    import resource  # not available on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def commit() -> str | None:
    """Return the git commit of the running checkout, with "-dirty" if modified; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
