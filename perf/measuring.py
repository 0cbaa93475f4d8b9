"""Options, prompts, comparisons and documents shared by the measuring scripts."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from treespec import LLM, RequestOutput, SamplingParams
from treespec.bench.grow import grown
from treespec.bench.options import Options
from treespec.bench.prompts import held_out_prompts
from treespec.startup.cost_measurement import processor
from treespec.text.prompt_files import read_prompts
from treespec.utils.files import atomic_write_text

HELDOUT = held_out_prompts(chat=False)
RESAMPLES = 4000  # number of bootstrap resamples

Job = tuple[Any, SamplingParams]
Name = TypeVar("Name", bound=Hashable)
Run = TypeVar("Run")


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


def alternating() -> list[Any]:
    """Return all held-out texts, alternating their kinds."""
    kinds: dict[str | None, list[Any]] = {}
    for prompt in read_prompts(HELDOUT):
        kinds.setdefault(prompt.kind, []).append(prompt.content)
    return [text for row in zip_longest(*kinds.values()) for text in row if text is not None]


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
        defaults: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "compile": True, "max_model_len": 1024}
        defaults |= {"model": target.model, "drafts": target.drafts if drafts is None else drafts}
        yield lambda **overrides: LLM(**defaults | options | overrides)


class Decoded(NamedTuple):
    """Outputs of prompts decoded one after another, and the seconds of the calls."""

    outputs: list[RequestOutput]
    seconds: float

    @property
    def tokens(self) -> list[list[int]]:
        return [completion.token_ids for output in self.outputs for completion in output.outputs]

    @property
    def passes(self) -> int:
        return self.total("target_passes")

    @property
    def tokens_per_second(self) -> float:
        """Speed of decoding, without prefill."""
        return (sum(map(len, self.tokens)) - len(self.outputs)) / (self.total("seconds") - self.total("ttft"))

    def total(self, metric: str) -> Any:
        return sum(getattr(output.metrics, metric) for output in self.outputs)


def decode(llm: LLM, jobs: Sequence[Job], spec: Any) -> Decoded:
    began = time.perf_counter()
    outputs = [llm.generate([prompt], params, spec)[0] for prompt, params in jobs]
    return Decoded(outputs, time.perf_counter() - began)


def interleaved(variants: Mapping[Name, Callable[[], Run]], repeats: int) -> dict[Name, list[Run]]:
    """Run all variants in turn, once for warm-up and then `repeats` times; return the results by name."""
    runs: dict[Name, list[Run]] = {name: [] for name in variants}
    for _ in range(repeats + 1):
        for name, run in variants.items():
            runs[name].append(run())
    return runs


def count_differing(plain: Sequence[Decoded], variant: Sequence[Decoded]) -> np.ndarray:
    """Return the numbers of compared and differing tokens, int64 [2]; lengths must be equal."""
    outputs = [
        pair for runs in zip(plain, variant, strict=True) for pair in zip(*(run.tokens for run in runs), strict=True)
    ]
    pairs = [pair for sequences in outputs for pair in zip(*sequences, strict=True)]
    return np.array([len(pairs), sum(a != b for a, b in pairs)])


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "largest": max(values)}


def over_plain(title: str, runs: dict[str, list[Decoded]], seconds: Callable[[Decoded], float]) -> dict[str, Any]:
    """Print and return each variant's figures relative to "plain": speed-ups by repeat, and tokens per pass."""
    counts = sum(count_differing(runs["plain"], outputs) for name, outputs in runs.items() if name != "plain")
    compared, num_differing = map(int, counts)
    plain = [seconds(run) for run in runs["plain"][1:]]
    generated = sum(map(len, runs["plain"][0].tokens))
    rate = generated / statistics.median(plain)
    print(f"{title}: plain {rate:.1f} tokens/s; {num_differing} of {compared} tokens differ", flush=True)
    figures = {}
    for name, (_, *measured) in runs.items():
        ratios = spread([base / seconds(run) for base, run in zip(plain, measured, strict=True)])
        gain = figures[name] = {"speed_up": ratios.pop("median")} | ratios
        gain["acceptance_length"] = len(measured) * generated / sum(run.passes for run in measured)
        text = "{speed_up:.2f} ({least:.2f} to {largest:.2f}), {acceptance_length:.2f} a pass".format(**gain)
        print(f"  {name:18} {text}")
    counted = {"tokens_compared": compared, "tokens_that_differ": num_differing}
    return {"tokens": generated, "plain_tokens_per_second": rate} | counted | {"ways": figures}


def tau(tokens: np.ndarray, passes: np.ndarray, picks: np.ndarray | slice = slice(None)) -> np.ndarray:
    """Return the tokens per target pass over the picked prompts; picks: [..., num_prompts]."""
    return tokens[picks].sum(-1) / passes[picks].sum(-1)


def interval(values: np.ndarray) -> list[float]:
    """Return the 95 % interval of bootstrap values."""
    return np.percentile(values, [2.5, 97.5]).tolist()


def setup(args: argparse.Namespace, *names: str, **more: Any) -> dict[str, Any]:
    """Return the setup for the document: the options `names`, --grow, and the machine."""
    shared = {"torch": torch.__version__, "processor": processor()}
    grown = {"grown_to": args.grow} if "grow" in args else {}
    return grown | {name: getattr(args, name) for name in names} | shared | more


def write_json(path: Path | None, document: Any) -> None:
    """Write a document as JSON, atomically, if `path` is not None."""
    if path:
        atomic_write_text(path, json.dumps(document, indent=1) + "\n")
