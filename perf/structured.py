"""Measures speculation on structured outputs: schemas, objects and regexes, interleaved.

    python perf/structured.py --threads 1 --json out.json                  # the embedded models
    python perf/structured.py --grow 0.5B --threads 2 --json out.json      # the target grown, with the same SSMs

Every repeat runs every mode once in turn: automatic trees, and trees of 8 nodes from one SSM per round, lookup and the
grammar. Seconds are from a request's arrival to its end. Speed-ups are relative to plain decoding in the same repeat:
median (min to max). Tokens per pass are over all repeats. Tokens are compared with plain decoding.
"""

from functools import partial
from typing import Any

import measuring
import torch

from treespec import LLM, SamplingParams, SpecConfig
from treespec.text.prompt_files import read_prompts

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
VARIANTS: dict[str, Any] = {"plain": "off", "auto": None, "8 nodes": SpecConfig(nodes=8, max_ssms=1)}


def measure(llm: LLM, form: str, temperature: float, max_tokens: int, prompts: list[Any], repeats: int) -> Any:
    """Measure one constraint: speed and tokens per pass by variant, and tokens that differ from plain decoding."""
    params: dict[str, Any] = {"max_tokens": max_tokens, "structured_outputs": FORMS[form], "temperature": temperature}
    jobs = [(prompt, SamplingParams(**params, seed=seed)) for seed, prompt in enumerate(prompts)]
    runs = measuring.interleaved(
        {name: partial(measuring.decode, llm, jobs, spec) for name, spec in VARIANTS.items()}, repeats
    )
    row = measuring.over_plain(f"{form}, T={temperature}", runs, lambda run: run.total("seconds"))
    finished = sum(output.outputs[0].finish_reason == "stop" for output in runs["plain"][0].outputs)
    return {"form": form, "temperature": temperature, "finished": finished} | row


def main() -> None:
    parser = measuring.parser(__doc__, prompts=8, max_tokens=96, repeats=5, threads=1)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    # prompts that are the start of structured data
    prompts = [prompt.content for prompt in read_prompts(measuring.HELDOUT) if prompt.kind == "data"][: args.prompts]
    with measuring.opened(args.grow, max_num_seqs=1) as open_llm:
        llm = open_llm()
        rows = [
            measure(llm, form, temperature, args.max_tokens, prompts, args.repeats)
            for form in FORMS
            for temperature in args.temperatures
        ]
    setup = measuring.setup(args, "threads", "prompts", "max_tokens", "repeats")
    measuring.write_json(args.json, {"setup": setup, "rows": rows})


if __name__ == "__main__":
    main()
