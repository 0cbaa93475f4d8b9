"""Decoding on a CPU beside a busy neighbour: speed with one of the cores taken, over the speed when it is not.

    python perf/busy.py --grow 0.5B --threads 2 --json out.json

A repeat decodes all prompts quietly and then beside processes that spin, for each mode in turn; the ratio is of the
same repeat. Tokens per second of the calls, prefill included: median of the repeats (least to largest). Tokens are
compared between the two. Nothing else may run on the machine.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from treespec import LLM, SamplingParams
from treespec.bench.grow import grown
from treespec.bench.prompts import read_prompts
from treespec.bench.run import Options
from treespec.costs import processor
from treespec_weights import default_folder

MODES = {"plain": "off", "auto": None}
SPIN = "while True: pass"


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """`count` processes that compute for as long as the context is open."""
    processes = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        if processes:
            time.sleep(0.5)  # they have started, and the scheduler has placed them
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def decode(llm: LLM, prompts: list[list[int]], max_tokens: int, spec: str | None) -> tuple[float, list[list[int]]]:
    """Tokens per second over all prompts, one after the other, and the tokens."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    began = time.perf_counter()
    tokens = [llm.generate(prompt, params, spec)[0].outputs[0].token_ids for prompt in prompts]
    return sum(map(len, tokens)) / (time.perf_counter() - began), tokens


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "largest": max(values)}


def measure(llm: LLM, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """For each mode: tokens per second quietly and beside neighbours, their ratio, and how many tokens differ."""
    rates: dict[tuple[str, int], list[float]] = {(mode, busy): [] for mode in MODES for busy in (0, args.neighbours)}
    differing = compared = 0
    for repeat in range(args.repeats + 1):  # the first warms up
        found: dict[str, list[list[list[int]]]] = {mode: [] for mode in MODES}
        for busy in (0, args.neighbours):
            with neighbours(busy):
                for mode, spec in MODES.items():
                    rate, tokens = decode(llm, prompts, args.max_tokens, spec)
                    found[mode].append(tokens)
                    if repeat:
                        rates[mode, busy].append(rate)
        for quiet, beside in found.values():
            pairs = [pair for own in zip(quiet, beside, strict=True) for pair in zip(*own, strict=True)]
            compared, differing = compared + len(pairs), differing + sum(a != b for a, b in pairs)
    rows: dict[str, Any] = {"tokens_compared": compared, "tokens_that_differ": differing}
    for mode in MODES:
        quiet, beside = rates[mode, 0], rates[mode, args.neighbours]
        ratios = [own / base for own, base in zip(beside, quiet, strict=True)]
        rows[mode] = {"quiet": spread(quiet), "beside_neighbours": spread(beside), "ratio": spread(ratios)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grow", help="the target's size; without it the embedded one")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--neighbours", type=int, default=1, help="processes that spin")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    options = Options(device="cpu")
    with grown(options, args.grow, None, None) if args.grow else nullcontext((options, None)) as (options, _):
        llm = LLM(
            options.model, options.drafts, device="cpu", dtype="bfloat16", compile=True, max_num_seqs=1,
            max_model_len=1024,
        )  # fmt: skip
        read = read_prompts(default_folder("target").parent / "heldout_prompts.json")
        chosen = read[:: max(len(read) // args.prompts, 1)][: args.prompts]
        rows = measure(llm, [llm.get_tokenizer().encode(prompt.content) for prompt in chosen], args)
    print(f"{rows['tokens_that_differ']} of {rows['tokens_compared']} tokens differ")
    for mode in MODES:
        parts = {name: "{median:.3g} ({least:.3g} to {largest:.3g})".format(**rows[mode][name]) for name in rows[mode]}
        print(f"{mode}: quiet {parts['quiet']} tokens/s, busy {parts['beside_neighbours']}, ratio {parts['ratio']}")
    setup = {
        "grown_to": args.grow, "threads": args.threads, "neighbours": args.neighbours, "torch": torch.__version__,
        "processor": processor(), "prompts": args.prompts, "max_tokens": args.max_tokens, "repeats": args.repeats,
    }  # fmt: skip
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(setup | rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
