"""Measures and stores this machine's cost curve: target passes over 1 to N rows, draft levels and their start."""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch

from treespec.cache.kv_cache import pages_for
from treespec.config.configs import AUTO_NODES, SpecConfig
from treespec.drafters.ssm.ssm_drafter import SsmDrafter
from treespec.engine.runner import Runner
from treespec.errors import ConfigError
from treespec.planning.draft_plan import Drafted, DraftPlan
from treespec.planning.planner import Planner
from treespec.planning.round_costs import CostCurve, split_drafting
from treespec.request import Request
from treespec.sampling_params import SamplingParams
from treespec.utils.files import write_json
from treespec.utils.torch_state import one_thread
from treespec.version import __version__
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows
from treespec_kernels.cpu.file_lock import shared_work
from treespec_kernels.tree.level_rule import LevelRule

logger = logging.getLogger("treespec")

CONTEXT = 128  # committed positions of each request during the measurement
LONG_CONTEXT = 1024  # committed positions at which the cost of a position is measured
# Costs jump where matrix products start another tile: after 16, 32 and 48 rows with AMX, after 6 where AVX-512 keeps
# the sums in registers (SmolLM2-135M, two threads: 6, 7 and 8 rows take 1.35, 1.79 and 1.80 times as long as one).
ROWS = (1, 2, 4, 6, 8, 12, 16, 17, 24, 32, 33, 48, 64)
# Row counts for slow models. At 0.5B parameters, 4 rows take as long as one and 8 rows 1.3 times as long; with 4 among
# them, nodes="auto" gains 2.94 instead of 2.86 (modelled seconds).
FEW_ROWS = (1, 2, 4, 6, 8, 16, 17, 32, 33, 64)
SLOWEST_ROWS = (1, 4, 8, 16, 17, 32)  # row counts for models so slow that each pass is timed once
SCRATCH = 64  # slots after the rows, for drafting
DRAFT_LEVELS = 3
REQUESTS = 4  # batch size for measuring the marginal cost of a request in a draft pass
LONG_ROWS = 8  # rows of the pass that measures how the cost of a position grows with rows
ROUND_ROWS = 16  # rows of the pass for comparing numbers of threads
PATIENCE = 3  # maximum measuring time as a multiple of the intended one, see `min_seconds`
START_SECONDS = 0.5  # intended duration of a measurement at engine start
THREADS_MARGIN = 0.9  # recommend another number of threads if its rounds take less than this fraction of the time
_BUSY = 0.05  # a machine is idle if threads wait for a CPU for at most this share of the time
_AGREEMENT = 1.1  # a run was undisturbed if its two lowest times differ by at most this factor
# Tolerated error factor of stored ratios. On a shared machine, short measurements differ by a tenth, and a curve
# measured beside other work was off by a half.
_STORED_MARGIN = 1.25
_NUMBERS = tuple(field.name for field in fields(CostCurve))[2:-1]  # all fields that are not tuples
_WRITE_LOCK_TIMEOUT = 10.0  # seconds to wait for another process's write
STARTS = "starts"  # cache folder of engine starts: their costs (not those of `treespec autotune`) and token ranks
_MAX_STORED = 1000  # curves in a file; the oldest are dropped


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/treespec or ~/.cache/treespec. Raises OSError if there is no home folder."""
    configured = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(configured or Path.home() / ".cache") / "treespec"
    except RuntimeError as error:
        raise OSError("no home folder to keep files in; set XDG_CACHE_HOME or HOME") from error


def cost_key(runner: Runner, ssms: SsmDrafter | None, num_threads: int) -> dict[str, Any]:
    """Return everything that a cost curve depends on: device, threads, torch version, kernels, and models."""
    models, device = [runner.target, *(ssms.models if ssms else [])], runner.target.device
    return {
        "device": str(device),
        "processor": processor() if device.type == "cpu" else torch.cuda.get_device_name(device),
        "dtype": str(runner.target.dtype).removeprefix("torch."),
        "threads": num_threads,
        "torch": torch.__version__,
        "attention": runner.target.attention.name,
        "linear": runner.target.linear,
        "models": [model.cost_key for model in models],
        "families": [model.config.rules.model_type if model.backend == "native" else None for model in models],
        "quantization": [model.quantization for model in models],
        "instructions": os.environ.get("TREESPEC_CPU"),
    }


def start_key(runner: Runner, key: dict[str, Any]) -> dict[str, Any]:
    """Return the key of costs measured at engine start: `key`, and the size limits of the engine's cache.

    It contains treespec's version, since users did not request these measurements and would not repeat them.
    """
    pages = REQUESTS * pages_for(CONTEXT + ROWS[-1] + SCRATCH) + pages_for(LONG_CONTEXT + LONG_ROWS)
    return key | {
        "treespec": __version__,
        "pages": min(runner.cache.num_free, pages),
        "positions": min(runner.target.config.max_positions, LONG_CONTEXT + LONG_ROWS),
        "max_rows": runner.max_rows,
        "rows": list(ROWS),
    }


def processor() -> str:
    """Return the CPU's model name, or "unknown"."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


class MachineClock:
    """Clock of this machine; also tells how long this process's threads have waited for a CPU."""

    def now(self) -> float:
        return time.perf_counter()

    def waited(self) -> float:
        """Return the total seconds that runnable threads had no CPU; 0.0 where the kernel does not report them."""
        waited = 0
        for file in Path("/proc/self/task").glob("*/schedstat"):
            with suppress(OSError, IndexError, ValueError):  # the thread has ended, or the kernel has no statistics
                waited += int(file.read_text().split()[1])
        return waited / 1e9

    def watch_other_work(self) -> Callable[[], bool]:
        """Return a function that tells whether other processes have taken CPU time from this one since this call."""
        waited, start = self.waited(), self.now()
        return lambda: self.waited() - waited > _BUSY * (self.now() - start)


CLOCK = MachineClock()


@torch.inference_mode()
def measure(
    runner: Runner,  # must belong to an idle engine
    ssms: SsmDrafter | None,
    # Approximate duration; on a busy machine up to `PATIENCE` times as long. Every row count is measured at least once.
    # Slow models have fewer row counts, the slowest none above an automatic tree; a small cache limits them, too
    seconds: float = 1.0,
    advance: Callable[[float], None] = lambda fraction: None,  # progress callback, called with the completed fraction
    clock: MachineClock = CLOCK,
) -> CostCurve:
    """Measure the cost curve with passes over scratch requests. Uses the minimum time of several runs."""
    cache = runner.cache
    slots = min(cache.num_free * PAGE_SIZE, CONTEXT + ROWS[-1] + SCRATCH)
    if not slots:
        raise ConfigError("a cost curve needs free pages in the cache; measure an idle engine")
    context = min(CONTEXT, slots // 4)
    fitting = tuple(n for n in ROWS if n <= max(slots - context - SCRATCH, 8))
    count = 1 if ssms is None else min([REQUESTS, *(pool.num_requests for pool in ssms.state_pools.values())])
    requests = [Request([1] * (context + 1), SamplingParams(), SpecConfig()) for _ in range(count)]
    requests = requests[: cache.num_free // pages_for(slots)]
    long_request = _long_request(runner, len(requests) * pages_for(slots))
    scratch = requests if long_request is None else [*requests, long_request]
    try:
        for request in requests:
            _occupy(runner, request, slots, has_state=request is requests[0])  # the others only draft
        if long_request is not None:
            _occupy(runner, long_request, len(long_request.tokens) - 1 + LONG_ROWS)
        [one_row] = min_seconds([partial(star_pass, runner, requests[0], 1)], 1, clock=clock)
        quick = _is_quick(one_row, len(fitting), seconds)
        slow = not quick and one_row * len(FEW_ROWS) * 5 > seconds
        limit = ROWS[-1] if one_row * ROWS[-1] < 2 * seconds else AUTO_NODES  # n rows take at most n * one_row
        measured = fitting if quick else SLOWEST_ROWS if slow else FEW_ROWS
        rows = tuple(n for n in fitting if n in measured and (quick or n <= limit))
        # Keys: n, a pass over n rows; "n far", the same for the request with the long context.
        runs: dict[Any, Callable[[], None]] = {n: partial(star_pass, runner, requests[0], n) for n in rows}
        if long_request is not None:
            runs |= {f"{n} far": partial(star_pass, runner, long_request, n) for n in (1, LONG_ROWS)}
        before: list[Callable[[], None] | None] = []
        if ssms is not None:
            # "root": one level of one SSM. "one", "every": DRAFT_LEVELS levels of one SSM or of all. "batch": these
            # levels for all requests. "read": all SSMs read a prompt.
            runs["root"] = partial(_draft, ssms, requests[:1], 1, levels=1)
            runs["one"] = partial(_draft, ssms, requests[:1], 1)
            if len(ssms.models) > 1:
                runs["every"] = partial(_draft, ssms, requests[:1], None)
            runs["batch"], runs["read"] = partial(_draft, ssms, requests, None), partial(_read, ssms, requests[:1])
        # Drafting follows a target pass, which evicts most of the drafts from the CPU's caches.
        drafts, target_pass = runs.keys() & {"root", "one", "every", "batch"}, runs[rows[0]]
        before = [target_pass if name in drafts else None for name in runs]
        # First runs compile kernels and allocate memory. On a CPU, they hardly slow the target once a pass has read all
        # weights, but a draft of 0.5B parameters takes 1.4 times as long for one request, and 3.6 times for four.
        cold = () if quick or runner.target.device.type != "cpu" else runs.keys() - drafts if slow else rows
        for name, run in runs.items():
            if name not in cold:
                run()
        is_busy, calls = clock.watch_other_work(), list(runs.values())
        if not slow:
            least = min_seconds(calls, 2 if quick else 1, seconds, advance, before=before, clock=clock)
        else:
            least = min_seconds(calls, 1, 0.0, advance, 1, before, clock)
            if is_busy():  # measure again, for longer
                longer_run = min_seconds(calls, 1, seconds, advance, before=before, clock=clock)
                least = [min(times) for times in zip(least, longer_run, strict=True)]
    finally:
        _release(runner, ssms, scratch)
    times = dict(zip(runs, least, strict=True))
    if ssms is not None and len(ssms.models) == 1:
        times["every"] = times["one"]
    curve = CostCurve(rows, tuple(times[n] for n in rows), 0.0, context=context)
    if long_request is not None:
        curve = with_positions(curve, times, long_request.context_len)
    curve = curve if ssms is None else with_drafting(curve, times, len(ssms.models), requests)
    return replace(curve, idle_seconds=_compared(curve, ssms is not None))


@torch.inference_mode()
def is_outdated(runner: Runner, ssms: SsmDrafter | None, curve: CostCurve, clock: MachineClock = CLOCK) -> bool:
    """Return whether the costs of 8 rows and of drafting, relative to one row, clearly differ from those of a curve.

    They must also differ from `CostCurve.idle_seconds`: passes of rounds, which correct the curve, follow other work. A
    curve is also outdated if passes have become so fast that more row counts can be measured. A uniform change of the
    machine's speed affects no decision. On a busy machine the curve stays, and rounds correct it. Each run is timed
    twice, or four times if the times are short and differ.
    """
    slots = curve.context + (LONG_ROWS if ssms is None else SCRATCH)
    if slots > runner.cache.num_free * PAGE_SIZE:
        return False
    request = Request([1] * (curve.context + 1), SamplingParams(), SpecConfig())
    runs: list[Callable[[], None]] = [partial(star_pass, runner, request, n) for n in (1, LONG_ROWS)]
    expected, before = _compared(curve, ssms is not None), [None, None, runs[0]]
    references = [expected, curve.idle_seconds or expected]
    if ssms is not None:
        runs.append(partial(_draft, ssms, [request], 1))
    try:
        _occupy(runner, request, slots)
        is_busy = clock.watch_other_work()
        measured = min_seconds(runs, 1, before=before, clock=clock)
        if _differ(measured, references) and 4 * sum(expected) < START_SECONDS / 2:
            measured = [*map(min, measured, min_seconds(runs, 1, before=before, clock=clock))]
    finally:
        _release(runner, ssms, [request])
    missing = {rows for rows in ROWS if rows <= curve.rows[-1]} - {*curve.rows}
    is_coarse = bool(missing) and _is_quick(_STORED_MARGIN * measured[0], len(ROWS))
    return (_differ(measured, references) or is_coarse) and not is_busy()


def _compared(curve: CostCurve, drafts: bool) -> tuple[float, ...]:
    """Return the costs that `is_outdated` measures, by a curve."""
    passes = float(curve.verify(1)), float(curve.verify(LONG_ROWS))
    return (*passes, curve.draft(Drafted(DRAFT_LEVELS, DRAFT_LEVELS, DRAFT_LEVELS))) if drafts else passes


def _is_quick(one_row: float, num_rows: int, seconds: float = START_SECONDS) -> bool:
    """Return whether `num_rows` row counts can be measured in time if a pass over one row takes `one_row` seconds."""
    return one_row * num_rows * 12 < seconds


def _occupy(runner: Runner, request: Request, slots: int, has_state: bool = True) -> None:
    """Reserve slots for a request and zero the K/V of its context; attending to zeros takes as long as to other K/V."""
    request.pages = runner.cache.reserve(request.request_id, slots)
    request.context_len = len(request.tokens) - 1
    runner.cache.scrub(request.pages)  # on a CPU, pages never written to would all map to one page of zeros
    if has_state:
        request.state = runner.cache.reserve_state(request.request_id, request.context_len)


def _release(runner: Runner, ssms: SsmDrafter | None, requests: Sequence[Request]) -> None:
    for request in requests:
        if len(request.pages):
            runner.cache.release(request.request_id, scrub=True)
        if ssms is not None:
            ssms.release(request)


def _differ(seconds: Sequence[float], references: Sequence[Sequence[float]]) -> bool:
    """Return whether the ratios of some times clearly differ from those of all known ones."""
    slowdowns = np.array(seconds) / references
    return bool((slowdowns.max(1) > _STORED_MARGIN * slowdowns.min(1)).all())


def _long_request(runner: Runner, pages_taken: int) -> Request | None:
    """Return a request with a context of up to `LONG_CONTEXT`; None if model or cache hold too few positions."""
    room = min((runner.cache.num_free - pages_taken) * PAGE_SIZE, runner.target.config.max_positions)
    context = min(LONG_CONTEXT, room - LONG_ROWS)
    return Request([1] * (context + 1), SamplingParams(), SpecConfig()) if context >= 4 * CONTEXT else None


def with_positions(curve: CostCurve, times: dict[Any, float], context: int) -> CostCurve:
    """Add the marginal costs of a committed position to a curve, from passes at `context` positions."""
    extra_positions = context - curve.context
    one_row = max(times["1 far"] - float(curve.verify(1)), 0.0) / extra_positions
    rows = max(times[f"{LONG_ROWS} far"] - float(curve.verify(LONG_ROWS)), 0.0) / extra_positions
    return replace(curve, position_seconds=one_row, row_position_seconds=max(rows - one_row, 0.0) / (LONG_ROWS - 1))


def with_drafting(curve: CostCurve, times: dict[Any, float], ssms: int, requests: Sequence[Request]) -> CostCurve:
    """Add the costs of drafting to a curve: its start, a level, a request, an SSM and reading a token."""
    extra_requests = max(len(requests) - 1, 1)
    start, level = split_drafting(times["root"], times["one"], DRAFT_LEVELS)
    further_request = max(times["batch"] - times["every"], 0.0) / (DRAFT_LEVELS * ssms * extra_requests)
    return replace(
        curve,
        draft_seconds=level,
        draft_start_seconds=start,
        draft_request_seconds=min(further_request, level),
        ssm_seconds=max(times["every"] - times["one"], 0.0) / (DRAFT_LEVELS * max(ssms - 1, 1)),
        read_seconds=times["read"] / (ssms * requests[0].context_len),
    )


def star_pass(runner: Runner, request: Request, rows: int) -> None:
    """Run a target pass over a star of `rows` nodes (a root and its children), up to the argmax.

    Tokens are random, since equal tokens would route to the same experts. A larger star starts with the tokens of a
    smaller one.
    """
    parents, state = np.minimum(np.arange(rows), 1) - 1, request.state_rows()
    star = RequestRows.tree(request.context_len, parents, request.pages, state=state)
    if rows == 1:
        star = RequestRows.chain(request.context_len, 1, request.pages, state=state)
    target = runner.target
    tokens = np.random.default_rng(0).integers(target.vocab_size, size=rows)
    target.best(target.logits(runner.run_pass([star], tokens)))
    _synchronize(target.device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _draft(ssms: SsmDrafter, requests: Sequence[Request], max_ssms: int | None, levels: int = DRAFT_LEVELS) -> None:
    """Draft trees of `levels` levels with up to `max_ssms` SSMs, then reset their state to the committed context."""
    plans = [DraftPlan(levels, levels, 16, max_ssms=max_ssms)] * len(requests)
    ssms.propose(requests, plans, LevelRule(1.0, 1.0, [1.0] * len(requests), 0.0, 0.0, 0.0, 0.0))
    for request in requests:
        ssms.assume_context(request)


def _read(ssms: SsmDrafter, requests: Sequence[Request]) -> None:
    """Let all SSMs read all committed tokens of the requests."""
    for request in requests:
        ssms.release(request)
    ssms.prefill(requests)
    _synchronize(ssms.models[0].device)


def min_seconds(
    runs: Sequence[Callable[[], object]],
    min_runs: int,  # minimum number of turns
    # Intended duration. Callables whose two lowest times differ by more than a factor of `_AGREEMENT` run for up to
    # `PATIENCE` times as long. 0: only `min_runs` turns
    seconds: float = 0.0,
    # Progress callback, called with the completed fraction after each turn
    advance: Callable[[float], None] = lambda fraction: None,
    repeats: int = 2,  # runs per turn; the first one restores caches and clock rate after the other callables
    before: Sequence[Callable[[], object] | None] = (),  # an untimed call before each callable, or None
    clock: MachineClock = CLOCK,
) -> list[float]:
    """Return the minimum seconds of each callable; runs are interleaved, so that interference affects all."""
    best, start, count, share = [(float("inf"), float("inf"))] * len(runs), clock.now(), 0, 0.0
    turn = list(range(len(runs)))
    while count < min_runs or share < PATIENCE:
        if count >= min_runs and share >= 1:
            turn = [i for i, (least, second) in enumerate(best) if second > _AGREEMENT * least]
        if not turn:
            break
        for i in turn if count % 2 else reversed(turn):
            for _ in range(repeats):
                if before and (prepare := before[i]) is not None:
                    prepare()
                began = clock.now()
                runs[i]()
                least, second, _ = sorted((*best[i], clock.now() - began))
                best[i] = least, second
        count += 1
        share = (clock.now() - start) / seconds if seconds else PATIENCE
        advance(min(share, 1.0))
    return [least for least, _ in best]


def costs_file(folder: Path | str = "") -> Path:
    """Return the file of stored cost curves: those of `treespec autotune`, or those in a folder of the cache."""
    return cache_folder() / folder / "costs.json"


@contextmanager
def measuring_alone(seconds: float) -> Iterator[None]:
    """Hold a lock against this user's other measurements, waiting as long as one of `seconds` may take.

    Has no effect where file locks do not work.
    """
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        yield
        return
    with shared_work(folder / "measuring.lock", "measure pass costs", PATIENCE * seconds):
        yield


def save(curve: CostCurve, key: dict[str, Any], folder: Path | str = "", names: Sequence[str] = ()) -> Path:
    """Store a curve atomically and return the file."""
    path = costs_file(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    entry = {"key": key, "names": list(names), **asdict(curve)}
    with shared_work(path.with_suffix(".lock"), "store its cost curve", _WRITE_LOCK_TIMEOUT):
        entries = [stored for stored in load_all(folder) if stored["key"] != key]
        write_json(path, [*entries, entry][-_MAX_STORED:])
    return path


def load_all(folder: Path | str = "") -> list[dict[str, Any]]:
    """Return all valid stored entries; empty if the file is missing or unreadable."""
    try:
        entries = json.loads(costs_file(folder).read_text())
    except (OSError, ValueError):
        return []
    return [entry for entry in entries if _is_entry(entry)] if isinstance(entries, list) else []


def _is_entry(entry: Any) -> bool:
    """Return whether an entry has the format that this version writes."""
    try:
        curve = curve_of(entry)
        ascending, positive = (np.diff(curve.rows, prepend=0) > 0).all(), (np.array(curve.verify_seconds) > 0).all()
        return bool(
            ascending and positive and len(curve.rows) == len(curve.verify_seconds) and "threads" in entry["key"]
        )
    except (KeyError, TypeError):
        return False


def curve_of(entry: dict[str, Any]) -> CostCurve:
    rows, times = tuple(entry["rows"]), tuple(entry["verify_seconds"])
    numbers = {name: entry[name] for name in _NUMBERS}
    return CostCurve(rows, times, **numbers, idle_seconds=tuple(entry.get("idle_seconds", ())))


def load(key: dict[str, Any], folder: Path | str = "") -> CostCurve | None:
    """Return the stored curve with exactly this key, or None."""
    return next((curve_of(entry) for entry in load_all(folder) if entry["key"] == key), None)


def round_seconds(curve: CostCurve) -> float:
    """Return the modelled seconds of a round of `ROUND_ROWS` rows and `DRAFT_LEVELS` levels of one SSM."""
    return float(curve.verify(ROUND_ROWS)) + curve.draft(Drafted(DRAFT_LEVELS, DRAFT_LEVELS, DRAFT_LEVELS))


def by_threads(key: dict[str, Any]) -> dict[int, float]:
    """Return `round_seconds` by number of threads, ascending, of the stored curves that otherwise match `key`."""
    seconds_by_threads = {
        entry["key"]["threads"]: round_seconds(curve_of(entry))
        for entry in load_all()
        if entry["key"] | {"threads": 0} == key | {"threads": 0}
    }
    return dict(sorted(seconds_by_threads.items()))


def load_planner(
    runner: Runner, ssms: SsmDrafter | None, threads: int, interpreted: bool, clock: MachineClock = CLOCK
) -> Planner:
    """Return a planner with the costs of these models; it stores the corrections that rounds make to them.

    Costs measured by `treespec autotune` are not overwritten.
    """
    planner = Planner(load_costs(runner, ssms, threads, interpreted, clock=clock))
    key = cost_key(runner, ssms, threads)
    if not interpreted and load(key) is None:
        save_curve = partial(_try_to_save, key=start_key(runner, key))
        # Rounds wait neither for the disk nor for other processes.
        planner.costs.store = lambda curve: Thread(target=save_curve, args=(curve,), name="treespec costs").start()
    return planner


def _try_to_save(curve: CostCurve, key: dict[str, Any]) -> None:
    try:
        save(curve, key, STARTS)
    except OSError as error:
        logger.info("pass costs cannot be stored, and the next start measures them again: %s", error)


def load_costs(
    runner: Runner,
    ssms: SsmDrafter | None,
    threads: int,
    interpreted: bool,
    seconds: float = START_SECONDS,
    clock: MachineClock = CLOCK,
) -> CostCurve:
    """Return the costs of these models, as stored by `treespec autotune` or an earlier start, else measured and stored.

    Costs of an earlier start include its rounds' corrections. Outdated ones are measured again, since the machine may
    have been busy then.
    """
    if interpreted:
        return CostCurve((1,), (1.0,), 0.1)  # times in Triton's interpreter are slow and meaningless
    key = cost_key(runner, ssms, threads)
    if (curve := load(key)) is not None:
        if runner.target.device.type == "cpu":
            warn_of_threads(by_threads(key), threads)
        return curve
    key_of_start = start_key(runner, key)
    with one_thread() if runner.target.linear == "compiled" else nullcontext():
        stored = load(key_of_start, STARTS)
        if stored is not None and not is_outdated(runner, ssms, stored, clock):
            return stored
        with measuring_alone(seconds):
            # Another process may have stored them while this one waited.
            curve = load(key) or load(key_of_start, STARTS)
            if curve is not None and curve != stored:
                return curve
            is_busy = clock.watch_other_work()
            curve = measure(runner, ssms, seconds, clock=clock)
            if is_busy():
                logger.info("pass costs were measured beside other work, and are not stored until rounds correct them")
                return curve
            _try_to_save(curve, key_of_start)
    return curve


def warn_of_threads(seconds: dict[int, float], threads: int) -> None:
    """Recommend another number of threads if its rounds were clearly faster; bits may depend on it, so only log it."""
    if threads not in seconds:
        return
    best_threads = min(seconds, key=lambda number: seconds[number])
    if seconds[best_threads] < THREADS_MARGIN * seconds[threads]:
        logger.warning(
            "with %d threads a round took %.3g ms here, with %d %.3g ms (treespec autotune); "
            "set OMP_NUM_THREADS=%d, or call torch.set_num_threads(%d) before LLM",
            *(threads, 1000 * seconds[threads], best_threads, 1000 * seconds[best_threads], best_threads, best_threads),
        )
