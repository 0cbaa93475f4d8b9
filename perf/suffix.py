"""Measures suffix decoding over stored outputs, on repetitive workloads and on one without repetition.

    python perf/suffix.py --threads 1 --json out.json                  # the embedded models
    python perf/suffix.py --grow 0.5B --threads 2 --json out.json      # the target grown, with the same SSMs
    python perf/suffix.py --grow 0.5B --threads 2 --no-drafts --json out.json  # lookup and stored outputs only

Every repeat runs every mode once in turn: plain decoding and automatic trees on an engine without stored outputs, and
automatic trees on an engine that stores outputs, starting empty. Seconds are those of the calls. Speed-ups are relative
to plain decoding in the same repeat: median (min to max). Tokens per pass are over all repeats. Tokens are compared
with plain decoding.
"""

import statistics
import time
from collections import Counter
from typing import Any

import measuring
import torch

from treespec import LLM, SamplingParams

CUTS = (0, 8, 20, 40)  # numbers of tokens to remove from the start of a prompt
SEEDS = range(4)
REMEMBERED = 2**16
WAYS = ("plain", "auto", "auto, remembering")

Job = tuple[list[int], SamplingParams]


def workloads(prompts: list[list[int]], max_tokens: int) -> dict[str, list[Job]]:
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


def run(llm: LLM, jobs: list[Job], spec: str | None) -> tuple[float, list[list[int]], int, Counter[str]]:
    """Run jobs on an empty suffix cache; return seconds, tokens, target passes, and accepted tokens by source."""
    tokens, passes, accepted = [], 0, Counter[str]()
    llm.reset_suffix_cache()
    began = time.perf_counter()
    outputs = [llm.generate([prompt], params, spec)[0] for prompt, params in jobs]
    seconds = time.perf_counter() - began
    for output in outputs:
        tokens += [completion.token_ids for completion in output.outputs]
        passes += output.metrics.target_passes
        accepted.update(output.metrics.accepted_by_source)
    return seconds, tokens, passes, accepted


def measure(engines: dict[str, LLM], jobs: list[Job], repeats: int) -> dict[str, Any]:
    """Measure one workload: speed and tokens per pass by mode, and tokens that differ from plain decoding."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    passes: Counter[str] = Counter()
    accepted: dict[str, Counter[str]] = {way: Counter() for way in WAYS}
    plain: list[list[int]] = []
    differing = compared = 0
    for repeat in range(repeats + 1):  # the first warms up
        for way in WAYS:
            took, tokens, own_passes, by_source = run(engines[way], jobs, "off" if way == "plain" else None)
            if way == "plain":
                plain = tokens
            else:
                counts = measuring.count_differing(plain, tokens)
                compared, differing = compared + counts[0], differing + counts[1]
            if repeat:
                seconds[way].append(took)
                passes[way] += own_passes
                accepted[way] += by_source
    generated = sum(map(len, plain))
    ways = {}
    for way in WAYS:
        ways[way] = measuring.speed_ups(seconds["plain"], seconds[way]) | {
            "acceptance_length": repeats * generated / passes[way],
            "accepted_by_source": dict(accepted[way]),
        }
    return {
        "tokens": generated,
        "plain_tokens_per_second": generated / statistics.median(seconds["plain"]),
        "tokens_compared": compared,
        "tokens_that_differ": differing,
        "ways": ways,
    }


def main() -> None:
    parser = measuring.parser(__doc__, prompts=12, max_tokens=64, repeats=5, threads=1)
    parser.add_argument("--no-drafts", action="store_true", help="without SSMs")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with measuring.opened(args.grow, [] if args.no_drafts else None, max_num_seqs=len(SEEDS)) as open_llm:
        forgetful, remembering = open_llm(), open_llm(suffix_tokens=REMEMBERED)
        engines = dict(zip(WAYS, (forgetful, forgetful, remembering), strict=True))
        rows = {}
        for name, jobs in workloads(measuring.held_out(forgetful, args.prompts), args.max_tokens).items():
            rows[name] = row = measure(engines, jobs, args.repeats)
            print(f"{name}: plain {row['plain_tokens_per_second']:.1f} tokens/s; ", end="")
            print(f"{row['tokens_that_differ']} of {row['tokens_compared']} tokens differ", flush=True)
            for way, gain in row["ways"].items():
                print(f"  {way:18} {gain['speed_up']:.2f} ({gain['least']:.2f} to {gain['largest']:.2f}), ", end="")
                print(f"{gain['acceptance_length']:.2f} a pass")
    setup = measuring.setup(
        args, "threads", "prompts", "max_tokens", "repeats", drafts=not args.no_drafts, remembered=REMEMBERED
    )
    measuring.write_json(args.json, setup | {"workloads": rows})


if __name__ == "__main__":
    main()
