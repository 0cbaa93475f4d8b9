"""Options, prompts, comparisons and documents shared by the measuring scripts."""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from treespec import LLM
from treespec.bench.grow import grown
from treespec.bench.options import Options
from treespec.bench.prompts import held_out_prompts
from treespec.startup.cost_measurement import processor
from treespec.text.prompt_files import read_prompts

HELDOUT = held_out_prompts(chat=False)


def parser(doc: str | None, grow: str | None = None, grows: bool = True, **defaults: int) -> argparse.ArgumentParser:
    """Return a parser with --json, an integer option for each of `defaults` and, if `grows`, --grow."""
    result = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if grows:
        result.add_argument("--grow", default=grow, help="size of a grown target; default: the embedded one")
    for name, default in defaults.items():
        result.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    result.add_argument("--json", type=Path)
    return result


def held_out(llm: LLM, count: int) -> list[list[int]]:
    """Return the tokens of held-out prompts of every kind."""
    prompts = read_prompts(HELDOUT)
    return [llm.get_tokenizer().encode(prompt.content) for prompt in prompts[:: max(len(prompts) // count, 1)][:count]]


@contextmanager
def opened(grow: str | None, drafts: Sequence[Any] | None = None, **options: Any) -> Iterator[Any]:
    """Yield a function that opens the embedded target, optionally grown, compiled in bfloat16 on the CPU.

    Args:
        grow: size of the grown target; None for the embedded one.
        drafts: drafts to use instead of the embedded SSMs.
        options: options of every `LLM`.
    """
    embedded = Options(device="cpu")
    with grown(embedded, grow, None, None) if grow else nullcontext((embedded, None)) as (target, _):
        common: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "compile": True, "max_model_len": 1024}
        common |= {"model": target.model, "drafts": target.drafts if drafts is None else drafts}
        yield lambda **overrides: LLM(**common | options | overrides)


def count_differing(plain: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the number of compared tokens and the number of differing ones; lengths must be equal."""
    pairs = [pair for sequences in zip(plain, other, strict=True) for pair in zip(*sequences, strict=True)]
    return len(pairs), sum(a != b for a, b in pairs)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, minimum and maximum."""
    return {"median": statistics.median(values), "least": min(values), "largest": max(values)}


def speed_ups(plain: Sequence[float], measured: Sequence[float]) -> dict[str, float]:
    """Return the spread of the ratios of paired seconds, the median as `speed_up`."""
    ratios = spread([base / seconds for base, seconds in zip(plain, measured, strict=True)])
    return {"speed_up": ratios.pop("median")} | ratios


def setup(args: argparse.Namespace, *names: str, **more: Any) -> dict[str, Any]:
    """Return the setup for the document: the options `names`, --grow, and the machine."""
    shared = {"torch": torch.__version__, "processor": processor()}
    grown = {"grown_to": args.grow} if "grow" in args else {}
    return grown | {name: getattr(args, name) for name in names} | shared | more


def write_json(path: Path | None, document: Any) -> None:
    """Write a document as JSON if `path` is not None."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")
