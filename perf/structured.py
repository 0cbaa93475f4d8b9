"""Measures speculation on structured outputs: schemas, objects and regexes, interleaved.

    python perf/structured.py --threads 1 --json out.json                  # the embedded models
    python perf/structured.py --grow 0.5B --threads 2 --json out.json      # the target grown, with the same SSMs

Every repeat runs every mode once in turn: automatic trees, and trees of 8 nodes from one SSM per round, lookup and the
grammar. "unaware" drafts ignore the constraint, which only the target applies at every node. Seconds are from a
request's arrival to its end; speed-ups are relative to plain decoding in the same repeat: median (min to max). Tokens
per pass are over all repeats. Tokens are compared with plain decoding.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from treespec import LLM, SamplingParams, SpecConfig
from treespec.bench.grow import grown
from treespec.bench.prompts import read_prompts
from treespec.bench.run import Options
from treespec.planning.cost_measurement import processor
from treespec.tree import TokenTree
from treespec_weights import default_folder

TEXT = {"type": "string", "maxLength": 40}
NEEDED = {
    "type": "object",
    "properties": {"name": TEXT, "optional": {"type": "boolean"}},
    "required": ["name", "optional"],
}
PACKAGE = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "version": {"type": "string", "pattern": r"^[0-9]+\.[0-9]+\.[0-9]+$"},
        "description": TEXT,
        "license": {"enum": ["MIT", "Apache-2.0", "BSD-3-Clause"]},
        "dependencies": {"type": "array", "items": NEEDED, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "version", "description", "license", "dependencies"],
}
FORMS: dict[str, dict[str, Any]] = {
    "schema": {"json": PACKAGE, "disable_any_whitespace": True, "disable_additional_properties": True},
    "any object": {"json_object": True},
    "regex": {"regex": r"def [a-z_]{3,20}\(self(, [a-z_]{1,10})*\)( -> (int|str|None))?:\n    '[A-Za-z ,.]{20,200}'\n"},
}
TREE = SpecConfig(nodes=8, max_ssms=1)
WAYS: dict[str, Any] = {
    "plain": "off",
    "auto": None,
    "auto, unaware": None,
    "8 nodes": TREE,
    "8 nodes, unaware": TREE,
}


@contextmanager
def unaware() -> Iterator[None]:
    """Make drafts ignore the constraint."""
    with ExitStack() as stack:
        restriction = "treespec.sampling.restriction.Restriction"
        stack.enter_context(mock.patch(f"{restriction}.narrow", lambda self, logits, tokens, paths: None))
        stack.enter_context(mock.patch(f"{restriction}.prune", lambda self, tree, tokens: tree))
        root = lambda request, depth: TokenTree.root(request.tokens[-1])  # noqa: E731
        stack.enter_context(mock.patch("treespec.executors.host_executor.forced_tree", root))
        yield


def held_out(count: int) -> list[Any]:
    """Held-out beginnings of structured data."""
    prompts = read_prompts(default_folder("target").parent / "heldout_prompts.json")
    return [prompt.content for prompt in prompts if prompt.kind == "data"][:count]


def measure(llm: LLM, form: str, temperature: float, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one constraint: speed and tokens per pass by mode, and tokens that differ from plain decoding."""
    each = [
        SamplingParams(max_tokens=args.max_tokens, structured_outputs=FORMS[form], temperature=temperature, seed=seed)
        for seed in range(args.prompts)
    ]
    prompts = held_out(args.prompts)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    tokens: dict[str, list[list[int]]] = {}
    passes, finished, differing, compared = dict.fromkeys(WAYS, 0), 0, 0, 0
    for repeat in range(args.repeats + 1):  # the first warms up
        for way, spec in WAYS.items():
            with unaware() if "unaware" in way else nullcontext():
                outputs = [llm.generate(p, params, spec)[0] for p, params in zip(prompts, each, strict=True)]
            tokens[way] = [output.outputs[0].token_ids for output in outputs]
            finished = sum(output.outputs[0].finish_reason == "stop" for output in outputs)
            if repeat:
                passes[way] += sum(output.metrics.target_passes for output in outputs)
                seconds[way].append(sum(output.metrics.seconds for output in outputs))
            pairs = [pair for own in zip(tokens["plain"], tokens[way], strict=True) for pair in zip(*own, strict=True)]
            compared += len(pairs) if way != "plain" else 0
            differing += sum(a != b for a, b in pairs)
    generated = sum(map(len, tokens["plain"]))
    rate = generated / statistics.median(seconds["plain"])
    print(f"{form}, T={temperature}: plain {rate:.1f} tokens/s; {differing} of {compared} tokens differ", flush=True)
    ways = {}
    for way in WAYS:
        ratios = [plain / own for plain, own in zip(seconds["plain"], seconds[way], strict=True)]
        tau = args.repeats * generated / passes[way]
        ways[way] = {
            "speed_up": statistics.median(ratios),
            "least": min(ratios),
            "largest": max(ratios),
            "acceptance_length": tau,
        }
        print(f"  {way:17} {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), {tau:.2f} a pass")
    return {
        "form": form,
        "temperature": temperature,
        "tokens": generated,
        "finished": finished,
        "plain_tokens_per_second": rate,
        "tokens_compared": compared,
        "tokens_that_differ": differing,
        "ways": ways,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grow", help="size of a grown target; default: the embedded one")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    options = Options(device="cpu")
    with grown(options, args.grow, None, None) if args.grow else nullcontext((options, None)) as (options, _):
        llm = LLM(
            options.model,
            options.drafts,
            device="cpu",
            dtype="bfloat16",
            compile=True,
            max_num_seqs=1,
            max_model_len=1024,
        )
        rows = [measure(llm, form, temperature, args) for form in FORMS for temperature in args.temperatures]
    setup = {
        "grown_to": args.grow,
        "threads": args.threads,
        "torch": torch.__version__,
        "processor": processor(),
        "prompts": args.prompts,
        "max_tokens": args.max_tokens,
        "repeats": args.repeats,
    }
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"setup": setup, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
