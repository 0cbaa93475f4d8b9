"""Measures and stores this machine's cost curve: a target pass over 1 to N rows, and drafting: its start, a level."""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treespec.cache import pages_for
from treespec.config import SpecConfig
from treespec.drafters.ssm.ssm_drafter import SsmDrafter
from treespec.errors import ConfigError
from treespec.models.decoder import Decoder
from treespec.planning.draft_plan import DraftPlan
from treespec.planning.planner import Planner
from treespec.planning.round_costs import CostCurve
from treespec.request import Request
from treespec.runner import Runner
from treespec.sampling_params import SamplingParams
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows
from treespec_kernels.cpu.file_lock import shared_work

CONTEXT = 128  # committed positions while measuring
LONG_CONTEXT = 2048  # at which what a committed position costs is measured
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
# Where a pass is slow. At 0.5B parameters 4 rows take as long as one, and 8 take 1.3 times that: with the former, auto
# gains 2.94 instead of 2.86 (modelled seconds).
FEW_ROWS = (1, 4, 8, 16)
SCRATCH = 64  # slots behind the rows, for drafting
DRAFT_LEVELS = 3
_LARGEST_START = 0.75  # of what drafting one level takes
STAR_ROWS = 4  # of each tree where several requests bring one
REQUESTS = 4  # how many at once, to see what each adds
LONG_ROWS = 8  # of the tree that is measured there
_NUMBERS = tuple(field.name for field in fields(CostCurve))[2:]  # all but its two lists
PATIENCE = 3  # times as long as intended, until the two least times of each run agree
_AGREEMENT = 1.1
_PATIENCE_TO_MEASURE = 30.0  # seconds to wait for another process's measurement
_PATIENCE_TO_WRITE = 10.0
ROUND_ROWS = 16  # of the pass by which numbers of threads are compared


def cache_folder() -> Path:
    """Where measurements are kept: $XDG_CACHE_HOME/treespec or ~/.cache/treespec.

    Raises OSError where this user has no home, as in containers that run under a number without a name.
    """
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(named or Path.home() / ".cache") / "treespec"
    except RuntimeError as error:
        raise OSError("no home folder to keep files in; set XDG_CACHE_HOME or HOME") from error


def cost_key(runner: Runner, ssms: SsmDrafter | None, num_threads: int) -> dict[str, Any]:
    """All that a cost curve depends on."""
    models, device = [runner.target, *(ssms.models if ssms else [])], runner.target.device
    key: dict[str, Any] = {
        "device": str(device),
        "processor": processor() if device.type == "cpu" else torch.cuda.get_device_name(device),
        "dtype": str(runner.target.dtype).removeprefix("torch."),
        "threads": num_threads,
        "torch": torch.__version__,
        "attention": runner.target.attention.name,
        "linear": runner.target.linear,
        "models": [_model_key(model) for model in models],
    }
    # Absent for plain models of the first family: their stored curves stay valid.
    families = [model.config.rules.model_type for model in models if model.backend == "native"]
    if {*families} - {"llama"}:
        key["families"] = families
    if any(quantization := [model.quantization for model in models]):
        key["quantization"] = quantization
    return key


def _model_key(model: Decoder) -> list[Any]:
    """What a model's passes cost by."""
    s = model.config.shape
    sizes = (s.num_layers, s.hidden_size, s.intermediate_size, s.num_heads, s.num_kv_heads, s.head_dim, s.vocab_size)
    return [*sizes, *([] if model.backend == "native" else [model.config.folder.name, model.linear, model.min_rows])]


def processor() -> str:
    """The machine's name for its CPU."""
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
        seconds: about how long to take, on a busy machine up to `PATIENCE` times as long; at least one run of each row
            count is made, of fewer row counts where a pass is slow. A small cache bounds the row counts too.
        advance: told now and then which fraction of the measurement is done.

    Raises:
        ConfigError: no page of the cache is free.
    """
    cache = runner.cache
    slots = min(cache.num_free * PAGE_SIZE, CONTEXT + ROWS[-1] + SCRATCH)
    if not slots:
        raise ConfigError("a cost curve needs free pages in the cache; measure an idle engine")
    context = min(CONTEXT, slots // 4)
    fitting = tuple(n for n in ROWS if n <= max(slots - context - SCRATCH, 8))
    requests = [Request([1] * (context + 1), SamplingParams(), SpecConfig()) for _ in range(REQUESTS)]
    requests = requests[: cache.num_free // pages_for(slots)]
    long = _long_request(runner, len(requests) * pages_for(slots))
    scratch = requests if long is None else [*requests, long]
    try:
        for request in requests:
            request.pages = cache.reserve(request.request_id, slots)
            while (left := context - request.context_len) > 0:
                runner.prefill([request], [min(left, runner.max_rows or left)])
        if long is not None:  # its keys stay zeros: they are read at the same cost, and computing them would take long
            long.context_len = len(long.tokens) - 1
            long.pages = cache.reserve(long.request_id, long.context_len + LONG_ROWS)
        [first] = least_seconds([partial(star_pass, runner, requests[:1], 1)], 2)
        quick = first * len(fitting) * 12 < seconds
        rows = fitting if quick else tuple(n for n in fitting if n in FEW_ROWS)
        runs: dict[Any, Callable[[], None]] = {n: partial(star_pass, runner, requests[:1], n) for n in rows}
        runs |= {f"{n} each": partial(star_pass, runner, requests, n) for n in (1, STAR_ROWS)}
        if long is not None:
            runs |= {f"{n} far": partial(star_pass, runner, [long], n) for n in (1, LONG_ROWS)}
        if ssms is not None:
            runs["root"] = partial(_draft, ssms, requests[:1], 1, levels=1)
            runs["one"], runs["every"] = (partial(_draft, ssms, requests[:1], count) for count in (1, None))
            runs["batch"], runs["read"] = partial(_draft, ssms, requests, None), partial(_read, ssms, requests[:1])
        times = least_seconds(list(runs.values()), 2 if quick else 1, seconds, advance)
    finally:
        for request in scratch:
            if len(request.pages):
                cache.release(request.request_id, scrub=True)
            if ssms is not None:
                ssms.release(request)
    took = dict(zip(runs, times, strict=True))
    curve = CostCurve(rows, tuple(took[n] for n in rows), 0.0, context=context)
    curve = _with_requests(curve, took, len(requests))
    if long is not None:
        curve = with_positions(curve, took, long.context_len)
    return curve if ssms is None else with_drafting(curve, took, len(ssms.models), requests)


def _long_request(runner: Runner, pages_taken: int) -> Request | None:
    """One whose context is far longer than the others', if the model and the cache hold it."""
    room = min((runner.cache.num_free - pages_taken) * PAGE_SIZE, runner.target.config.max_positions)
    context = min(LONG_CONTEXT, room - LONG_ROWS)
    return Request([1] * (context + 1), SamplingParams(), SpecConfig()) if context >= 4 * CONTEXT else None


def _with_requests(curve: CostCurve, took: dict[Any, float], requests: int) -> CostCurve:
    further = max(requests - 1, 1)
    request_seconds = max(took["1 each"] - float(curve.verify(requests)), 0.0) / further
    apart = float(curve.verify(STAR_ROWS * requests)) + further * request_seconds
    tree_seconds = max(took[f"{STAR_ROWS} each"] - apart, 0.0) / further
    return replace(curve, request_seconds=request_seconds, tree_seconds=tree_seconds)


def with_positions(curve: CostCurve, took: dict[Any, float], context: int) -> CostCurve:
    """The curve with what a position of the context costs, from passes at `context`."""
    further = context - curve.context
    one = max(took["1 far"] - float(curve.verify(1)), 0.0) / further
    rows = max(took[f"{LONG_ROWS} far"] - float(curve.verify(LONG_ROWS)), 0.0) / further
    return replace(curve, position_seconds=one, row_position_seconds=max(rows - one, 0.0) / (LONG_ROWS - 1))


def with_drafting(curve: CostCurve, took: dict[Any, float], ssms: int, requests: Sequence[Request]) -> CostCurve:
    """The curve with what drafting costs: its start, a level, a request, an SSM and reading a token."""
    further = max(len(requests) - 1, 1)
    further_level = (took["one"] - took["root"]) / (DRAFT_LEVELS - 1)
    # A disturbed time must not make levels free: none would be one too many, and rounds would not correct it.
    start = min(max(took["root"] - further_level, 0.0), _LARGEST_START * took["root"])
    return replace(
        curve,
        draft_seconds=(took["one"] - start) / DRAFT_LEVELS,
        draft_start_seconds=start,
        draft_request_seconds=max(took["batch"] - took["every"], 0.0) / (DRAFT_LEVELS * ssms * further),
        ssm_seconds=max(took["every"] - took["one"], 0.0) / (DRAFT_LEVELS * max(ssms - 1, 1)),
        read_seconds=took["read"] / (ssms * requests[0].context_len),
    )


def star_pass(runner: Runner, requests: Sequence[Request], rows: int) -> None:
    """A pass over a star of `rows` nodes for each request, as far as the choice of its tokens."""
    nodes = np.arange(rows)
    depths = np.minimum(nodes, 1)
    visible = np.eye(rows, dtype=bool)
    visible[:, 0] = True
    stars = [
        RequestRows(r.context_len, nodes, depths, visible, depths, r.pages)
        if rows > 1
        else RequestRows.chain(r.context_len, 1, r.pages)
        for r in requests
    ]
    target, pool = runner.target, runner.cache.pools[0]
    tokens = torch.ones(rows * len(requests), dtype=torch.int64, device=target.device)
    hidden = target.forward(tokens, target.plan(stars, pool), pool)
    target.best(target.logits(hidden[: len(tokens)]))
    _wait(target.device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _draft(ssms: SsmDrafter, requests: Sequence[Request], max_ssms: int | None, levels: int = DRAFT_LEVELS) -> None:
    plans = [DraftPlan(levels, levels, 16, max_ssms=max_ssms)] * len(requests)
    ssms.propose(requests, plans, Planner(CostCurve((1,), (1.0,), 0.0)))  # these trees are not adaptive: never asked
    for request in requests:
        ssms.release(request)
        ssms.assume_context(request)


def _read(ssms: SsmDrafter, requests: Sequence[Request]) -> None:
    """Let all SSMs read all that is committed."""
    for request in requests:
        ssms.release(request)
    ssms.prefill(requests)
    _wait(ssms.models[0].device)


def least_seconds(
    runs: Sequence[Callable[[], object]],
    least_runs: int,
    seconds: float = 0.0,
    advance: Callable[[float], None] = lambda fraction: None,
) -> list[float]:
    """The least time of each run. They take turns, so that a disturbance does not fall on one of them alone."""
    for run in runs:
        run()
    best, start, count, share = [(float("inf"), float("inf"))] * len(runs), time.perf_counter(), 0, 0.0
    while count < least_runs or share < 1 or (share < PATIENCE and any(b > _AGREEMENT * a for a, b in best)):
        for i in range(len(runs)) if count % 2 else reversed(range(len(runs))):
            for _ in range(2):  # the first of the two finds the caches, and the clock rate, as another run left them
                before = time.perf_counter()
                runs[i]()
                least, second, _ = sorted((*best[i], time.perf_counter() - before))
                best[i] = least, second
        count += 1
        share = (time.perf_counter() - start) / seconds if seconds else PATIENCE
        advance(min(share, 1.0))
    return [least for least, _ in best]


def costs_file(folder: Path | None = None) -> Path:
    """Where curves are stored."""
    return (folder or cache_folder()) / "costs.json"


@contextmanager
def measuring_alone() -> Iterator[None]:
    """Within it no other process, and no other thread, of this user measures on this machine: each would find passes
    slow that are not. Where no lock can be had, or another one measures for long, it goes on all the same."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        yield
        return
    with shared_work(folder / "measuring.lock", "measure what passes cost", _PATIENCE_TO_MEASURE):
        yield


def save(curve: CostCurve, key: dict[str, Any], folder: Path | None = None, names: Sequence[str] = ()) -> Path:
    """Store a curve in the user's cache folder, atomically. Returns the file.

    Args:
        curve, key: a curve with the same key is replaced, others stay.
        folder: instead of the user's cache folder.
        names: of the models, for readers of the file.
    """
    path = costs_file(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    entry = {"key": key, "names": list(names), **asdict(curve)}
    with shared_work(path.with_suffix(".lock"), "write what it measured", _PATIENCE_TO_WRITE):
        entries = [each for each in load_all(folder) if each["key"] != key]
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps([*entries, entry], indent=1))
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
        } if all(isinstance(entry.get(name), int | float) for name in _NUMBERS):
            ascending = all(isinstance(x, int | float) and x > 0 for x in rows + times) and rows == sorted(set(rows))
            return ascending and len(rows) == len(times)
    return False


def curve_of(entry: dict[str, Any]) -> CostCurve:
    """The curve of a stored entry."""
    rows, times = tuple(entry["rows"]), tuple(entry["verify_seconds"])
    return CostCurve(rows, times, **{name: entry[name] for name in _NUMBERS})


def load(key: dict[str, Any], folder: Path | None = None) -> CostCurve | None:
    """The stored curve of exactly this machine and these models, or None."""
    for entry in load_all(folder):
        if entry["key"] == key:
            return curve_of(entry)
    return None


def round_seconds(curve: CostCurve) -> float:
    """What numbers of threads are compared by: a pass over `ROUND_ROWS` rows and `DRAFT_LEVELS` levels of one SSM."""
    return float(curve.verify(ROUND_ROWS)) + curve.draft(DRAFT_LEVELS, DRAFT_LEVELS, DRAFT_LEVELS)


def by_threads(key: dict[str, Any], folder: Path | None = None) -> dict[int, float]:
    """Seconds of a round by number of threads, ascending: of the stored curves that differ from `key` in that alone."""
    found = {
        entry["key"]["threads"]: round_seconds(curve_of(entry))
        for entry in load_all(folder)
        if entry["key"] | {"threads": 0} == key | {"threads": 0}
    }
    return dict(sorted(found.items()))
