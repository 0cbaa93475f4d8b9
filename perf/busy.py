"""Measures CPU decoding next to busy processes: speed with busy cores relative to an idle machine.

    python perf/busy.py --grow 0.5B --threads 2 --json out.json

Each repeat decodes all prompts on the idle machine and then next to spinning processes, for each mode in turn; ratios
are per repeat. Reports tokens per second of decoding (without prefill) and seconds to the first token: median (min to
max) of the repeats. Compares the tokens of both runs. Nothing else may run on the machine.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

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


def decode(llm: LLM, jobs: list[measuring.Job], mode: str, busy: int) -> measuring.Decoded:
    with neighbours(busy):
        return measuring.decode(llm, jobs, MODES[mode])


def measure(llm: LLM, jobs: list[measuring.Job], busy: int, repeats: int) -> dict[str, Any]:
    """Return figures with and without `busy` neighbours and their ratio by mode, and the number of differing tokens."""
    ways = {(mode, count): partial(decode, llm, jobs, mode, count) for count in (0, busy) for mode in MODES}
    runs = measuring.interleaved(ways, repeats)
    counts = sum(measuring.count_differing(runs[mode, 0], runs[mode, busy]) for mode in MODES)
    rows: dict[str, Any] = dict(zip(("tokens_compared", "tokens_that_differ"), map(int, counts), strict=True))
    for mode in MODES:
        quiet, beside = (runs[mode, count][1:] for count in (0, busy))
        ratios = [b.tokens_per_second / q.tokens_per_second for q, b in zip(quiet, beside, strict=True)]
        rows[mode] = {
            "quiet": measuring.spread([run.tokens_per_second for run in quiet]),
            "beside_neighbours": measuring.spread([run.tokens_per_second for run in beside]),
            "ratio": measuring.spread(ratios),
            "first_token_seconds": measuring.spread([run.total("ttft") / len(jobs) for run in quiet]),
            "first_token_seconds_beside": measuring.spread([run.total("ttft") / len(jobs) for run in beside]),
        }
    return rows


def main() -> None:
    parser = measuring.parser(__doc__, prompts=4, max_tokens=48, repeats=5, threads=2)
    parser.add_argument("--neighbours", type=int, default=1, help="number of spinning processes")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with measuring.opened(args.grow, max_num_seqs=1) as open_llm:
        llm = open_llm()
        params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
        jobs = [(prompt, params) for prompt in measuring.held_out(llm, args.prompts)]
        rows = measure(llm, jobs, args.neighbours, args.repeats)
    print(f"{rows['tokens_that_differ']} of {rows['tokens_compared']} tokens differ")
    for mode in MODES:
        shown = {name: "{median:.3g} ({least:.3g} to {largest:.3g})".format(**rows[mode][name]) for name in rows[mode]}
        print(f"{mode}: quiet {shown['quiet']} tokens/s, busy {shown['beside_neighbours']}, ratio {shown['ratio']}")
    setup = measuring.setup(args, "threads", "neighbours", "prompts", "max_tokens", "repeats")
    measuring.write_json(args.json, setup | rows)


if __name__ == "__main__":
    main()
