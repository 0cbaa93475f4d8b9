"""Compares sampled tokens with plain decoding of the same seeds; run by `perf/identity.py --sampling`.

Every cell of the grid (dtype x setting x subset of the SSMs x batch size) decodes all prompts with coupled trees and
counts tokens that differ from plain decoding by the same engine, which runs once per dtype and setting in batches of
`PLAIN_BATCH`. A prompt has the same seed everywhere. The document is written after every cell; interrupted runs resume
after the last one.
"""

import hashlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from treespec import LLM, RequestOutput, SamplingParams, SpecConfig
from treespec.bench.run import commit
from treespec.training.files import atomic_write_text

PLAIN_BATCH = 8
FIRST_SEED = 1000  # seed of prompt 0; each further prompt has the next seed
SETTINGS: dict[str, dict[str, Any]] = {
    "T=0.7": {"temperature": 0.7},
    "T=1": {"temperature": 1.0},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
}
KEYS = ("dtype", "setting", "sources", "batch")
SUMS = ("tokens", "differing_tokens", "outputs_that_differ", "target_passes", "seconds", "cpu_seconds")
ROWS_SHOWN = 8  # differences listed per cell


def subsets(llm: LLM) -> list[tuple[str, ...]]:
    """Return the non-empty subsets of an engine's SSMs, small ones first."""
    names = llm.engine.sources.ssms.names if llm.engine.sources.ssms else ()
    return [s for n in range(1, len(names) + 1) for s in itertools.combinations(names, n)]


def run(
    open_llm: Callable[[str], LLM],
    read_prompts: Callable[[LLM], list[list[int]]],
    setup: dict[str, Any],
    out: Path | None,
) -> dict[str, Any]:
    """Run the remaining cells of the grid, and return the document, which is also written to `out`.

    Args:
        open_llm: function that opens an engine of a dtype for `PLAIN_BATCH` concurrent requests.
        read_prompts: function that returns the prompts.
        setup: setup of the run for the document, with at least dtypes, settings, batches, max_tokens, nodes and
            max_depth.
        out: path of the document, or None.

    Raises:
        ValueError: `out` is the document of another run, a batch is too large, or a request failed.
    """
    if max(setup["batches"]) > PLAIN_BATCH:
        raise ValueError(f"--batches {max(setup['batches'])}: valid with --sampling: 1 to {PLAIN_BATCH}")
    document = _open(out, setup)
    document["commits"] = list(dict.fromkeys([*document.get("commits", ()), commit()]))
    rows = {tuple(row[key] for key in KEYS): row for row in document["rows"]}
    began, computed = time.perf_counter(), 0
    for dtype in setup["dtypes"]:
        llm = open_llm(dtype)
        prompts, drafts = read_prompts(llm), [",".join(subset) for subset in subsets(llm)]
        document |= {"ssms": drafts[-1].split(",") if drafts else [], "prompts": len(prompts)}
        document["distinct_prompts"] = len(set(map(tuple, prompts)))
        total = len(setup["dtypes"]) * len(setup["settings"]) * len(drafts) * len(setup["batches"])
        for setting in setup["settings"]:
            cells = [(dtype, setting, *cell) for cell in itertools.product(drafts, setup["batches"])]
            if all(cell in rows for cell in cells):
                continue
            plain, row = decode(llm, prompts, setting, "off", PLAIN_BATCH, setup["max_tokens"])
            digest = hashlib.sha256(json.dumps(plain).encode()).hexdigest()
            _keep_plain(document, {"dtype": dtype, "setting": setting} | row | {"sha256": digest})
            _log(f"{dtype:9} {setting:10} plain: {row['tokens'] / row['seconds']:.0f} tokens/s")
            for cell in cells:
                if cell in rows:
                    continue
                sources, batch = cell[2].split(","), cell[3]
                spec = SpecConfig(nodes=setup["nodes"], max_depth=setup["max_depth"], sources=sources)
                ours, row = decode(llm, prompts, setting, spec, batch, setup["max_tokens"])
                llm.engine.check_integrity()
                rows[cell] = dict(zip(KEYS, cell, strict=True)) | row | compare(ours, plain)
                document |= {"rows": list(rows.values()), "totals": totals(list(rows.values()))}
                _write(out, document)
                computed += 1
                to_go = (time.perf_counter() - began) / computed * (total - len(rows))
                _log(f"{_line(rows[cell])}  cell {len(rows)} of {total}, about {to_go / 60:.0f} min to go")
    document["complete"] = True
    _write(out, document)
    return document


def compare(ours: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Count differing and missing tokens, with the first differences of some outputs."""
    differing, first = 0, []
    for prompt, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        positions = [i for i, (a, b) in enumerate(itertools.zip_longest(mine, theirs)) if a != b]
        differing += len(positions)
        first += [{"prompt": prompt, "position": positions[0]}] if positions else []
    return {"differing_tokens": differing, "outputs_that_differ": len(first), "first_differences": first[:ROWS_SHOWN]}


def totals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum the figures over cells."""
    result = {"cells": len(rows)} | {name: sum(row[name] for row in rows) for name in SUMS}
    return result | {"acceptance_length": result["tokens"] / result["target_passes"] if rows else None}


def describe(document: dict[str, Any]) -> str:
    """Format the rows and their sum."""
    total = document["totals"]
    return "\n".join(
        [
            f"{'dtype':9} {'setting':10} {'sources':24} {'batch':>5} {'tokens':>8} {'differ':>6} {'tau':>5} {'s':>7}",
            *map(_line, document["rows"]),
            f"{total['differing_tokens']} of {total['tokens']} tokens differ, {total['cells']} cells, "
            f"{total['seconds'] / 3600:.2f} hours, {total['cpu_seconds'] / 3600:.2f} of a core",
        ]
    )


def decode(
    llm: LLM, prompts: Sequence[list[int]], setting: str, spec: SpecConfig | str, batch: int, max_tokens: int
) -> tuple[list[list[int]], dict[str, Any]]:
    """Decode all prompts and measure.

    Batches run one after another, except that the engine's own batch size runs with continuous batching.
    """
    options = SETTINGS[setting] | {"max_tokens": max_tokens, "ignore_eos": True}
    params = [SamplingParams(seed=FIRST_SEED + i, **options) for i in range(len(prompts))]
    step = len(prompts) if batch == PLAIN_BATCH else batch
    outputs: list[RequestOutput] = []
    began, worked = time.perf_counter(), time.process_time()
    for start in range(0, len(prompts), step):
        outputs += llm.generate(prompts[start : start + step], params[start : start + step], spec=spec)
    took = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - worked}
    for output in outputs:
        if output.error is not None:
            raise ValueError(output.error)
    tokens = [output.outputs[0].token_ids for output in outputs]
    count, passes = sum(map(len, tokens)), sum(output.metrics.target_passes for output in outputs)
    figures = {"tokens": count, "target_passes": passes, "acceptance_length": count / passes}
    return tokens, figures | took


def _keep_plain(document: dict[str, Any], row: dict[str, Any]) -> None:
    """Record plain decoding, whose tokens a resumed run must reproduce."""
    for recorded in document["plain"]:
        if (recorded["dtype"], recorded["setting"]) == (row["dtype"], row["setting"]):
            if recorded["sha256"] != row["sha256"]:
                raise ValueError(f"plain decoding, {row['dtype']}, {row['setting']}: tokens differ from before")
            return
    document["plain"].append(row)


def _open(out: Path | None, setup: dict[str, Any]) -> dict[str, Any]:
    if out is None or not out.exists():
        return {"setup": setup, "complete": False, "plain": [], "rows": [], "totals": totals([])}
    document = json.loads(out.read_text())
    if document.get("setup") != json.loads(json.dumps(setup)):
        raise ValueError(f"{out} holds another run: {document.get('setup')}; name another file, or remove it")
    _log(f"{out}: resuming after {len(document['rows'])} cells")
    return document


def _write(out: Path | None, document: dict[str, Any]) -> None:
    if out is not None:
        atomic_write_text(out, json.dumps(document, indent=1) + "\n")


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['dtype']:9} {row['setting']:10} {row['sources']:24} {row['batch']:5} {row['tokens']:8} "
        f"{row['differing_tokens']:6} {row['acceptance_length']:5.2f} {row['seconds']:7.1f}"
    )


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
