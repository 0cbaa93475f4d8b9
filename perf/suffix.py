"""Measures suffix decoding over stored outputs, on repetitive workloads and on one without repetition.

    python perf/suffix.py --threads 1 --json out.json                  # the embedded models
    python perf/suffix.py --grow 0.5B --threads 2 --json out.json      # the target grown, with the same SSMs
    python perf/suffix.py --grow 0.5B --threads 2 --no-drafts --json out.json  # lookup and stored outputs only

Every repeat runs every mode once in turn: plain decoding and automatic trees on an engine without stored outputs, and
automatic trees on an engine that stores outputs, starting empty. Seconds are per call. Speed-ups are relative to plain
decoding in the same repeat: median (min to max). Tokens per pass are over all repeats. Tokens are compared with plain
decoding.
"""

from collections import Counter
from functools import partial
from typing import Any

import measuring
import torch

from treespec import LLM, SamplingParams

CUTS = (0, 8, 20, 40)  # numbers of tokens removed from the start of a prompt
SEEDS = range(4)
REMEMBERED = 2**16
VARIANTS = ("plain", "auto", "auto, remembering")


def workloads(prompts: list[list[int]], max_tokens: int) -> dict[str, list[measuring.Job]]:
    """Return the sequential calls of each workload."""
    greedy = SamplingParams(max_tokens=max_tokens)

    def sampled(seed: int, n: int = 1) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, temperature=0.7, seed=seed, n=n)

    return {
        "edited prompts, greedy": [(prompt[cut:], greedy) for prompt in prompts for cut in CUTS],
        "other seeds, temperature 0.7": [(prompt, sampled(seed)) for prompt in prompts for seed in SEEDS],
        "4 samples at once, temperature 0.7": [(prompt, sampled(0, n=len(SEEDS))) for prompt in prompts],
        "unlike prompts, greedy": [(prompt, greedy) for prompt in prompts],
    }


def decode(llm: LLM, jobs: list[measuring.Job], spec: str | None) -> measuring.Decoded:
    llm.reset_suffix_cache()
    return measuring.decode(llm, jobs, spec)


def measure(title: str, engines: dict[str, LLM], jobs: list[measuring.Job], repeats: int) -> dict[str, Any]:
    """Measure one workload: speed and tokens per pass by variant, and tokens that differ from plain decoding."""
    specs = {name: "off" if name == "plain" else None for name in VARIANTS}
    variants = {name: partial(decode, engines[name], jobs, spec) for name, spec in specs.items()}
    runs = measuring.interleaved(variants, repeats)
    row = measuring.over_plain(title, runs, lambda run: run.seconds)
    for name, (_, *measured) in runs.items():
        outputs = [output for run in measured for output in run.outputs]
        by_source = sum((Counter(output.metrics.accepted_by_source) for output in outputs), Counter[str]())
        row["ways"][name]["accepted_by_source"] = dict(by_source)
    return row


def main() -> None:
    parser = measuring.parser(__doc__, prompts=12, max_tokens=64, repeats=5, threads=1)
    parser.add_argument("--no-drafts", action="store_true", help="without SSMs")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with measuring.opened(args.grow, [] if args.no_drafts else None, max_num_seqs=len(SEEDS)) as open_llm:
        forgetful, remembering = open_llm(), open_llm(suffix_tokens=REMEMBERED)
        engines = dict(zip(VARIANTS, (forgetful, forgetful, remembering), strict=True))
        jobs_of = workloads(measuring.held_out(forgetful, args.prompts), args.max_tokens)
        rows = {name: measure(name, engines, jobs, args.repeats) for name, jobs in jobs_of.items()}
    setup = measuring.setup(
        args, "threads", "prompts", "max_tokens", "repeats", drafts=not args.no_drafts, remembered=REMEMBERED
    )
    measuring.write_json(args.json, setup | {"workloads": rows})


if __name__ == "__main__":
    main()
