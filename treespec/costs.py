"""The cost curve of this machine: how long a target pass takes over 1 .. N rows, and a level of drafting."""

import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treespec.config import SpecConfig
from treespec.drafters.ssm import DraftPlan, SsmDrafter
from treespec.errors import ConfigError
from treespec.planner import CostCurve
from treespec.request import Request, SamplingParams
from treespec.runner import Runner
from treespec.tree import TokenTree
from treespec_kernels.tree_batch import PAGE_SIZE, RequestRows

CONTEXT = 128  # committed positions while measuring
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
SCRATCH = 64  # slots behind the rows, for drafting
DRAFT_LEVELS = 3


def cache_folder() -> Path:
    """Where measurements are kept: $XDG_CACHE_HOME/treespec or ~/.cache/treespec."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treespec"


def cost_key(runner: Runner, ssms: SsmDrafter | None, num_threads: int) -> dict[str, Any]:
    """All that a cost curve depends on."""
    models = [runner.target, *(ssms.models if ssms else [])]
    return {
        "device": str(runner.target.device),
        "processor": _processor(),
        "dtype": str(runner.target.dtype).removeprefix("torch."),
        "threads": num_threads,
        "torch": torch.__version__,
        "attention": runner.target.attention.name,
        "linear": runner.target.linear,
        "models": [
            [s.num_layers, s.hidden_size, s.intermediate_size, s.num_heads, s.num_kv_heads, s.head_dim, s.vocab_size]
            for s in (model.config.shape for model in models)
        ],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


@torch.inference_mode()
def measure(
    runner: Runner,
    ssms: SsmDrafter | None,
    seconds: float = 1.0,
    advance: Callable[[float], None] = lambda fraction: None,
) -> CostCurve:
    """Time passes over a scratch request. The least of several runs counts: it is the least disturbed.

    Args:
        runner, ssms: an engine's, idle.
        seconds: about how long to take; at least one run of each row count is made, of fewer row counts where a pass
            is slow. A small cache bounds the row counts too.
        advance: told now and then which fraction of the measurement is done.

    Raises:
        ConfigError: no page of the cache is free.
    """
    cache, request = runner.cache, Request([1], SamplingParams(), SpecConfig.off())
    slots = min(cache.num_free * PAGE_SIZE, CONTEXT + ROWS[-1] + SCRATCH)
    if not slots:
        raise ConfigError("a cost curve needs free pages in the cache; measure an idle engine")
    context = min(CONTEXT, slots // 4)
    fitting = tuple(n for n in ROWS if n <= max(slots - context - SCRATCH, 8))
    request.tokens = [1] * (context + 1)
    request.prompt_token_ids = request.tokens
    request.pages = cache.reserve(request.request_id, slots)
    try:
        runner.prefill([request], [context])
        [first] = _least([lambda: runner.forward([request], [TokenTree.root(1)])], 2)
        quick = first * len(fitting) * 6 < seconds
        rows = fitting if quick else tuple(n for n in fitting if n in (1, 8, 16))
        runs: list[Callable[[], None]] = [partial(_star_pass, runner, request, n) for n in rows]
        if ssms is not None:
            runs.append(partial(_draft, ssms, request))
        times = _least(runs, 3 if quick else 1, seconds, advance)
    finally:
        cache.release(request.request_id, scrub=True)
        if ssms is not None:
            ssms.release(request)
    return CostCurve(rows, tuple(times[: len(rows)]), times[-1] / DRAFT_LEVELS if ssms is not None else 0.0)


def _star_pass(runner: Runner, request: Request, rows: int) -> None:
    nodes = np.arange(rows)
    depths = np.minimum(nodes, 1)
    visible = np.eye(rows, dtype=bool)
    visible[:, 0] = True
    star = RequestRows(request.context_len, nodes, depths, visible, depths, request.pages)
    target = runner.target
    hidden = target.forward(
        torch.ones(rows, dtype=torch.int64, device=target.device),
        target.plan([star], runner.cache.pools[0]),
        runner.cache.pools[0],
    )
    target.logits(hidden[:rows]).max(-1)
    if target.device.type == "cuda":
        torch.cuda.synchronize()


def _draft(ssms: SsmDrafter, request: Request) -> None:
    ssms.propose([request], [DraftPlan(DRAFT_LEVELS, 16)], lambda level, values: True)
    ssms.release(request)
    ssms.assume_context(request)


def _least(
    runs: Sequence[Callable[[], object]],
    least_runs: int,
    seconds: float = 0.0,
    advance: Callable[[float], None] = lambda fraction: None,
) -> list[float]:
    """The least time of each run. They take turns, so that a disturbance does not fall on one of them alone."""
    for run in runs:
        run()
    best, start, count, share = [float("inf")] * len(runs), time.perf_counter(), 0, 0.0
    while count < least_runs or share < 1:
        for i, run in enumerate(runs):
            before = time.perf_counter()
            run()
            best[i] = min(best[i], time.perf_counter() - before)
        count += 1
        share = min((time.perf_counter() - start) / seconds, 1.0) if seconds else 1.0
        advance(share)
    return best


def costs_file(folder: Path | None = None) -> Path:
    """Where curves are stored."""
    return (folder or cache_folder()) / "costs.json"


def save(curve: CostCurve, key: dict[str, Any], folder: Path | None = None, names: Sequence[str] = ()) -> Path:
    """Store a curve in the user's cache folder, atomically. Returns the file.

    Args:
        curve, key: a curve with the same key is replaced, others stay.
        folder: instead of the user's cache folder.
        names: of the models, for readers of the file.
    """
    path = costs_file(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = [entry for entry in load_all(folder) if entry["key"] != key]
    entries.append(
        {
            "key": key,
            "names": list(names),
            "rows": list(curve.rows),
            "verify_seconds": list(curve.verify_seconds),
            "draft_seconds": curve.draft_seconds,
        }
    )
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(entries, indent=1))
    os.replace(temporary, path)
    return path


def load_all(folder: Path | None = None) -> list[dict[str, Any]]:
    """Every stored curve; none where the file is missing or unreadable. A broken entry is skipped alone."""
    try:
        entries = json.loads(costs_file(folder).read_text())
    except (OSError, ValueError):
        return []
    return [entry for entry in entries if _is_entry(entry)] if isinstance(entries, list) else []


def _is_entry(entry: Any) -> bool:
    """Whether an entry has the form that this version writes."""
    match entry:
        case {
            "key": {
                "device": str(),
                "processor": str(),
                "dtype": str(),
                "threads": int(),
                "torch": str(),
                "models": list(),
            },
            "rows": [_, *_] as rows,
            "verify_seconds": list(times),
            "draft_seconds": int() | float(),
        }:
            return len(rows) == len(times) and all(isinstance(x, int | float) and x > 0 for x in rows + times)
    return False


def load(key: dict[str, Any], folder: Path | None = None) -> CostCurve | None:
    """The stored curve of exactly this machine and these models, or None."""
    for entry in load_all(folder):
        if entry["key"] == key:
            return CostCurve(tuple(entry["rows"]), tuple(entry["verify_seconds"]), entry["draft_seconds"])
    return None
