"""Measures CPU decoding next to busy processes: speed with one or more busy cores relative to an idle machine.

    python perf/busy.py --grow 0.5B --threads 2 --json out.json

Each repeat decodes all prompts on the idle machine and then next to spinning processes, for each mode in turn; ratios
are per repeat. Reports tokens per second of decoding (without prefill) and seconds to the first token: median (min to
max) of the repeats. Compares the tokens of both runs. Nothing else may run on the machine.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import measuring
import torch

from treespec import LLM, SamplingParams

MODES = {"plain": "off", "auto": None}
SPIN = "while True: pass"


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Run `count` spinning processes while the context is open."""
    processes = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        if processes:
            time.sleep(0.5)  # wait until the processes spin
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class Decoded(NamedTuple):
    """Measurements and tokens of all prompts, decoded sequentially."""

    tokens_per_second: float  # of decoding
    first_token_seconds: float  # on average
    tokens: list[list[int]]


def decode(llm: LLM, prompts: list[list[int]], max_tokens: int, spec: str | None) -> Decoded:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    outputs = [llm.generate(prompt, params, spec)[0] for prompt in prompts]
    tokens = [output.outputs[0].token_ids for output in outputs]
    first = sum(output.metrics.ttft for output in outputs)
    seconds = sum(output.metrics.seconds for output in outputs) - first
    return Decoded((sum(map(len, tokens)) - len(prompts)) / seconds, first / len(prompts), tokens)


def measure(llm: LLM, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """Return figures with and without neighbours and their ratio for each mode, and the number of differing tokens."""
    runs: dict[tuple[str, int], list[Decoded]] = {(mode, busy): [] for mode in MODES for busy in (0, args.neighbours)}
    for _ in range(args.repeats + 1):  # the first warms up
        for busy in (0, args.neighbours):
            with neighbours(busy):
                for mode, spec in MODES.items():
                    runs[mode, busy].append(decode(llm, prompts, args.max_tokens, spec))
    rows: dict[str, Any] = {"tokens_compared": 0, "tokens_that_differ": 0}
    for mode in MODES:
        quiet, beside = runs[mode, 0], runs[mode, args.neighbours]
        for quiet_run, busy_run in zip(quiet, beside, strict=True):
            compared, differing = measuring.count_differing(quiet_run.tokens, busy_run.tokens)
            rows["tokens_compared"] += compared
            rows["tokens_that_differ"] += differing
        pairs_of_runs = list(zip(quiet, beside, strict=True))[1:]
        rows[mode] = {
            "quiet": measuring.spread([run.tokens_per_second for run, _ in pairs_of_runs]),
            "beside_neighbours": measuring.spread([run.tokens_per_second for _, run in pairs_of_runs]),
            "ratio": measuring.spread(
                [busy_run.tokens_per_second / quiet_run.tokens_per_second for quiet_run, busy_run in pairs_of_runs]
            ),
            "first_token_seconds": measuring.spread([run.first_token_seconds for run, _ in pairs_of_runs]),
            "first_token_seconds_beside": measuring.spread([run.first_token_seconds for _, run in pairs_of_runs]),
        }
    return rows


def main() -> None:
    parser = measuring.parser(__doc__, prompts=4, max_tokens=48, repeats=5, threads=2)
    parser.add_argument("--neighbours", type=int, default=1, help="number of spinning processes")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with measuring.opened(args.grow, max_num_seqs=1) as open_llm:
        llm = open_llm()
        rows = measure(llm, measuring.held_out(llm, args.prompts), args)
    print(f"{rows['tokens_that_differ']} of {rows['tokens_compared']} tokens differ")
    for mode in MODES:
        shown = {name: "{median:.3g} ({least:.3g} to {largest:.3g})".format(**rows[mode][name]) for name in rows[mode]}
        print(f"{mode}: quiet {shown['quiet']} tokens/s, busy {shown['beside_neighbours']}, ratio {shown['ratio']}")
    setup = measuring.setup(args, "threads", "neighbours", "prompts", "max_tokens", "repeats")
    measuring.write_json(args.json, setup | rows)


if __name__ == "__main__":
    main()
