"""Plain decoding against trees, on the same engine, prompts and dtype, interleaved in one run.

    python perf/speed.py                              # held-out prompts, the embedded models, batch 1
    python perf/speed.py --batch 8 --dtype float32 --json out.json

Modes: plain decoding; a tree of 16 nodes from each SSM alone and from all; all with nodes="auto". Tokens are counted
from ids, seconds are wall-clock of whole calls, prefill included (the SSMs' too), and the speed-up is against plain
decoding of the same repeat: median, least and largest of the repeats. `tau` is the acceptance length,
tokens per target pass with the bonus token. Also printed: the share of distinct 4-grams of the output, because small
greedy models loop and loops are easy to guess; and `tau` over outputs that do not loop (distinct share above 0.5).
"""

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from treespec import LLM, RequestOutput, SamplingParams, SpecConfig
from treespec_weights import default_folder, default_names

LOOPING = 0.5  # outputs with a smaller share of distinct 4-grams are called looping


def distinct_share(tokens: list[int]) -> float:
    """Distinct 4-grams over all 4-grams."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return len(set(grams)) / len(grams) if grams else 1.0


def tau(outputs: list[RequestOutput]) -> float:
    """Acceptance length over all target passes."""
    passes = sum(output.metrics.target_passes for output in outputs)
    return sum(output.metrics.generated_tokens for output in outputs) / passes if passes else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="torch threads; default: torch's own")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    ssms = [name for name in default_names() if name.startswith("ssm-")]
    entries = json.loads((default_folder("target").parent / "heldout_prompts.json").read_text())
    texts = [entry["text"] for entry in entries][: args.prompts]
    engines = {"all": LLM(dtype=args.dtype, max_num_seqs=args.batch)}
    for name in ssms:
        engines[name] = LLM(default_folder("target"), drafts=[name], dtype=args.dtype, max_num_seqs=args.batch)
    sixteen = SpecConfig(nodes=16)
    modes: dict[str, tuple[LLM, Any]] = {"plain": (engines["all"], "off")}
    modes |= {f"{name}, 16 nodes": (engines[name], sixteen) for name in ssms}
    modes |= {"all SSMs, 16 nodes": (engines["all"], sixteen), "all SSMs, auto": (engines["all"], SpecConfig())}
    params = SamplingParams(max_tokens=args.max_tokens)
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    outputs: dict[str, list[RequestOutput]] = {}
    for llm, spec in modes.values():
        llm.generate(texts[: args.batch], params, spec=spec)  # warm-up
    for _ in range(args.repeats):
        for mode, (llm, spec) in modes.items():
            start = time.perf_counter()
            outputs[mode] = llm.generate(texts, params, spec=spec)
            seconds[mode].append(time.perf_counter() - start)
    plain = [output.outputs[0].token_ids for output in outputs["plain"]]
    lively = [i for i, tokens in enumerate(plain) if distinct_share(tokens) > LOOPING]
    total = sum(len(tokens) for tokens in plain)
    rows = []
    for mode in modes:
        speedups = sorted(p / s for p, s in zip(seconds["plain"], seconds[mode], strict=True))
        rows.append(
            {
                "mode": mode,
                "tokens_per_second": total / statistics.median(seconds[mode]),
                "speedup_median": statistics.median(speedups),
                "speedup_min": speedups[0],
                "speedup_max": speedups[-1],
                "acceptance_length": tau(outputs[mode]),
                "acceptance_length_not_looping": tau([outputs[mode][i] for i in lively]),
                "differing_tokens": sum(
                    a != b
                    for tokens, output in zip(plain, outputs[mode], strict=True)
                    for a, b in itertools.zip_longest(tokens, output.outputs[0].token_ids)
                ),
            }
        )
    print(f"{'mode':22} {'tok/s':>7} {'speed-up (min..max)':>22} {'tau':>6} {'tau, no loops':>13} {'differ':>6}")
    for row in rows:
        spread = f"{row['speedup_median']:.2f} ({row['speedup_min']:.2f}..{row['speedup_max']:.2f})"
        print(f"{row['mode']:22} {row['tokens_per_second']:7.0f} {spread:>22} {row['acceptance_length']:6.2f} "
              f"{row['acceptance_length_not_looping']:13.2f} {row['differing_tokens']:6}")  # fmt: skip
    share = statistics.mean(distinct_share(tokens) for tokens in plain)
    config = engines["all"].config
    setup = {
        "prompts": len(texts), "tokens": total, "batch": args.batch, "dtype": str(config.dtype), "device":
        str(config.device), "threads": config.num_threads, "torch": torch.__version__, "repeats": args.repeats,
        "distinct_4grams": share, "not_looping": len(lively),
    }  # fmt: skip
    print(
        ", ".join(
            f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}" for name, value in setup.items()
        )
    )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"setup": setup, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
