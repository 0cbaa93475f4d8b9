"""Compares the acceptance of verification rules on the same trees.

    python perf/rules.py                                     # held-out prompts, the embedded models, temperature 0.8
    python perf/rules.py --prompts 90 --seeds 4 --compile --json out.json

Runs draw trees of one static topology and continue with the output of "rejection". Each tree is verified `REPEATS` more
times by every rule with new random numbers, which pairs the rules by round. All rules preserve the target's
distribution, so the trees are representative for each rule. Coupled sampling draws no random numbers in verification
and is excluded. Reports tokens per target pass, bonus included (`tau`), with bootstrap 95 % intervals over prompts,
also for paired differences. `treespec bench --verification all` compares all rules in runs of their own.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import measuring
import numpy as np
import torch
from measuring import RESAMPLES, interval, tau
from torch import Tensor
from tqdm import tqdm

from treespec import LLM, SamplingParams, SpecConfig
from treespec.bench.prompts import choose
from treespec.config.configs import DRAWS
from treespec.sampling.sampler import Sampler
from treespec.text.prompt_files import read_prompts
from treespec.tree import TokenTree
from treespec.verification.verify import RandomOracle, verify_drawn

REPEATS = 4
FIRST_SEED = 1000
RULES = ("naive", "rejection", "traversal")
PAIRS = (("rejection", "naive"), ("traversal", "rejection"))


@contextmanager
def verified_by_all(rng: np.random.Generator) -> Iterator[dict[int, dict[str, list[int]]]]:
    """Verify every tree in the block by all rules; yield the numbers of tokens emitted by each rule, by seed."""
    lengths: dict[int, dict[str, list[int]]] = {}
    original = Sampler.verify_drawn

    def verify(
        self: Sampler, rule: str, tree: TokenTree, logits: Tensor, tokens: Sequence[int]
    ) -> tuple[np.ndarray, int]:
        rows: dict[int, np.ndarray] = {}

        def target(node: int) -> np.ndarray:
            if node not in rows:
                ancestors = tree.tokens[tree.path_to(node)[1:]].tolist()
                rows[node] = self.target_probs(logits[node], tokens, ancestors)
            return rows[node]

        seed_lengths = lengths.setdefault(self.noise.seed, {name: [] for name in RULES})
        deterministic, oracle = tree.as_deterministic(), RandomOracle(rng)
        for _ in range(REPEATS):
            for name in RULES:  # "rejection" with one-hot draft distributions is the naive rule
                how = ("rejection", deterministic) if name == "naive" else (name, tree)
                seed_lengths[name].append(len(verify_drawn(*how, target, oracle)[0]))
        return original(self, rule, tree, logits, tokens)

    with mock.patch.object(Sampler, "verify_drawn", verify):
        yield lengths


Counted = tuple[np.ndarray, np.ndarray]
"""Tokens and target passes of each prompt, int64 [num_prompts] each."""


def by_prompt(tokens: Sequence[int], passes: Sequence[int], seeds: int) -> Counted:
    """Sum over the seeds of each prompt, whose runs are adjacent."""
    return np.reshape(tokens, (-1, seeds)).sum(1), np.reshape(passes, (-1, seeds)).sum(1)


def figures(counted: dict[str, Counted]) -> dict[str, Any]:
    """Return acceptance lengths and their differences, with bootstrap intervals over prompts."""
    count = len(next(iter(counted.values()))[0])
    picks = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))
    # over all prompts, then over each resample
    lengths = {rule: np.append(tau(*counts), tau(*counts, picks)) for rule, counts in counted.items()}

    def row(values: np.ndarray) -> dict[str, Any]:
        return {"value": float(values[0]), "interval": interval(values[1:])}

    return {
        "tau": {rule: row(values) for rule, values in lengths.items()},
        "difference": {f"{ours} - {theirs}": row(lengths[ours] - lengths[theirs]) for ours, theirs in PAIRS},
    }


def show(title: str, results: dict[str, Any]) -> None:
    print(title)
    for kind, rows in results.items():
        for name, row in rows.items():
            low, high = row["interval"]
            sign = "+" if kind == "difference" else ""
            print(f"  {kind:10} {name:22} {row['value']:{sign}.3f}  [{low:{sign}.3f}, {high:{sign}.3f}]", flush=True)


def main() -> None:
    parser = measuring.parser(__doc__, grows=False, prompts=90, seeds=2, max_tokens=128, batch=8)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--branching", type=int, nargs="+", default=[3, 2, 1])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    prompts = choose(read_prompts(measuring.HELDOUT), args.prompts, seed=0)
    llm = LLM(dtype=args.dtype, compile=args.compile, max_num_seqs=args.batch)
    texts = [prompt.content for prompt in prompts for _ in range(args.seeds)]
    params = [
        SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, ignore_eos=True, seed=FIRST_SEED + i)
        for i in range(len(texts))
    ]

    same_trees = {}
    for draws in tqdm(DRAWS, leave=False, desc="runs", disable=not sys.stderr.isatty()):
        spec = SpecConfig(branching=args.branching, verification="rejection", draws=draws, sources=("ssm",))
        with verified_by_all(np.random.default_rng(0)) as lengths:
            outputs = llm.generate(texts, params, spec=spec)
        counted = {}
        for rule in RULES:
            runs = [lengths[output.metrics.seed][rule] for output in outputs]
            counted[rule] = by_prompt([sum(counts) for counts in runs], [len(counts) for counts in runs], args.seeds)
        same_trees[draws] = figures(counted)
    names = ("seeds", "max_tokens", "branching", "temperature", "batch", "compile")
    setup = (
        {"prompts": len(prompts)}
        | {name: getattr(args, name) for name in names}
        | {
            "dtype": str(llm.config.dtype).removeprefix("torch."),
            "threads": llm.config.num_threads,
            "torch": torch.__version__,
            "repeats_on_the_same_trees": REPEATS,
            "sources": list(llm.engine.sources.ssms.names),
        }
    )
    for draws, results in same_trees.items():
        show(f"on the same trees, {draws}", results)
    print(", ".join(f"{name} {value}" for name, value in setup.items()))
    measuring.write_json(args.json, {"setup": setup, "same_trees": same_trees})


if __name__ == "__main__":
    main()
