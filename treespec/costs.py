"""The cost curve of this machine: how long a target pass takes over 1 .. N rows, and a level of drafting."""

import json
import os
import time
from collections.abc import Callable
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
from treespec_kernels.tree_batch import RequestRows

CONTEXT = 128  # committed positions while measuring
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


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


def measure(runner: Runner, ssms: SsmDrafter | None, seconds: float = 1.0) -> CostCurve:
    """Time passes over a scratch request. The least of several runs counts: it is the least disturbed.

    Args:
        runner, ssms: an engine's, idle.
        seconds: about how long to take; at least one run of each row count is made, of fewer row counts where a pass
            is slow.
    """
    cache, request = runner.cache, Request([1] * (CONTEXT + 1), SamplingParams(), SpecConfig.off())
    needed = CONTEXT + ROWS[-1] + 64
    if not cache.can_reserve(needed):
        raise ConfigError(f"a cost curve needs {needed} slots of cache; raise max_model_len or max_num_seqs")
    request.pages = cache.reserve(request.request_id, needed)
    try:
        runner.prefill([request], [CONTEXT])
        first = _least(lambda: runner.forward([request], [TokenTree.root(1)]), 2, 0.0)
        rows = ROWS if first * len(ROWS) * 6 < seconds else (1, 8, 16)
        share = 0.7 * seconds / len(rows)
        times = [_least(lambda n=n: _star_pass(runner, request, n), 3 if rows is ROWS else 1, share) for n in rows]
        draft = 0.0
        if ssms is not None:
            draft = _least(lambda: _draft(ssms, request), 3, 0.3 * seconds) / 3
            ssms.release(request)
    finally:
        cache.release(request.request_id, scrub=True)
    return CostCurve(rows, tuple(times), draft)


def _star_pass(runner: Runner, request: Request, rows: int) -> None:
    nodes = np.arange(rows)
    depths = np.minimum(nodes, 1)
    visible = np.eye(rows, dtype=bool)
    visible[:, 0] = True
    star = RequestRows(request.context_len, nodes, depths, visible, depths, request.pages)
    target = runner.target
    hidden = target.forward(
        torch.ones(rows, dtype=torch.int64, device=target.device), target.plan([star]), runner.cache.pools[0]
    )
    target.logits(hidden[:rows]).max(-1)
    if target.device.type == "cuda":
        torch.cuda.synchronize()


def _draft(ssms: SsmDrafter, request: Request) -> None:
    ssms.propose([request], [DraftPlan(3, 16)], lambda level, values: True)
    ssms.release(request)
    ssms.assume_context(request)


def _least(run: Callable[[], object], least_runs: int, seconds: float) -> float:
    run()
    best, start, count = float("inf"), time.perf_counter(), 0
    while count < least_runs or time.perf_counter() - start < seconds:
        before = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - before)
        count += 1
    return best


def save(curve: CostCurve, key: dict[str, Any], folder: Path | None = None) -> Path:
    """Store a curve in the user's cache folder, atomically. Returns the file."""
    folder = folder or cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "costs.json"
    entries = [entry for entry in load_all(folder) if entry["key"] != key]
    entries.append(
        {
            "key": key,
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
    """Every stored curve; none where the file is missing or unreadable."""
    try:
        entries = json.loads(((folder or cache_folder()) / "costs.json").read_text())
    except (OSError, json.JSONDecodeError):
        return []
    return entries if isinstance(entries, list) else []


def load(key: dict[str, Any], folder: Path | None = None) -> CostCurve | None:
    """The stored curve of exactly this machine and these models, or None."""
    for entry in load_all(folder):
        if entry.get("key") == key:
            return CostCurve(tuple(entry["rows"]), tuple(entry["verify_seconds"]), entry["draft_seconds"])
    return None
