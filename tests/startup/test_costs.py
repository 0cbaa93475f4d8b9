"""The cost curve: what is measured, what is stored of it and read again."""

import dataclasses
import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from tests.helpers.libraries import share_libraries
from tests.helpers.models import open_llm, tiny, tiny_llm
from treespec import LLM, SamplingParams, SpecConfig
from treespec.engine.runner import Runner
from treespec.planning.draft_plan import Drafted
from treespec.planning.round_costs import CostCurve, RoundSeconds
from treespec.request import Request
from treespec.startup import cost_measurement as costs
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_kernels.cpu.file_lock import shared_work

KEY = {"device": "cpu", "processor": "p", "dtype": "float32", "threads": 1, "torch": "2", "models": [[1, 8]]}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share_libraries(tmp_path / "treespec")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class FakeClock(costs.MachineClock):
    """Stands still, but for what is added to its time; on a busy machine, half of that was spent waiting."""

    time, is_busy = 0.0, False

    def now(self) -> float:
        return self.time

    def waited(self) -> float:
        return self.time / 2 if self.is_busy else 0.0


class TimedRunner(Runner):
    """Passes take `unit` seconds, or twice as long for several rows, each times a slowdown."""

    def __init__(self, llm: LLM, unit: float = 1e-3):
        super().__init__(llm.engine.runner.target, llm.engine.cache)
        self.unit, self.clock, self.slowdown = unit, FakeClock(), (1.0, 1.0)
        self.passes: list[tuple[int, list[int]]] = []  # contexts and tokens

    def takes(self, rows: int) -> float:
        return self.unit * (self.slowdown[0] if rows == 1 else 2 * self.slowdown[1])

    def run_pass(self, rows: list[RequestRows], tokens: np.ndarray) -> Tensor:
        self.clock.time += self.takes(len(tokens))
        self.passes.append((rows[0].context_len, tokens.tolist()))
        return super().run_pass(rows, tokens)

    def measure(self, seconds: float = 1.0, ssms: Any = None) -> CostCurve:
        return costs.measure(self, ssms, seconds, clock=self.clock)

    def start(self, seconds: float = costs.START_SECONDS) -> CostCurve:
        return costs.load_costs(self, None, 1, False, seconds, self.clock)


class TimedSsms:
    """An engine's SSMs, whose drafts take `seconds` on a clock."""

    def __init__(self, llm: LLM, clock: FakeClock, seconds: float = 0.0):
        self.ssms, self.clock, self.seconds = llm.engine.sources.ssms, clock, seconds
        self.drafted: list[int] = []  # requests

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ssms, name)

    def propose(self, requests: Any, *rest: Any) -> None:
        self.clock.time += self.seconds
        self.drafted.append(len(requests))
        self.ssms.propose(requests, *rest)


def test_a_broken_entry_is_skipped_alone(tmp_path: Path) -> None:
    curve = CostCurve((1, 8), (0.1, 0.2), 0.01)
    file = costs.save(curve, KEY, tmp_path)
    [good] = json.loads(file.read_text())
    older = {name: value for name, value in good.items() if name != "draft_start_seconds"}  # in a level's seconds
    wrong: list[dict[str, Any]] = [{"rows": [1]}, {"verify_seconds": ["slow", 2]}, {"key": 7}]
    broken = [older, 3, {}, {"key": {}}, *(good | change for change in wrong)]
    file.write_text(json.dumps([*broken, good]))
    assert costs.load_all(tmp_path) == [good] and costs.load(KEY, tmp_path) == curve
    file.write_text("{")
    assert costs.load_all(tmp_path) == []


def test_the_start_of_drafting_is_what_levels_do_not_explain() -> None:
    curve, request = CostCurve((1, 16), (1.0, 4.0), 0.0), Request([1, 2], SamplingParams(), SpecConfig())
    request.context_len = 1
    for root, three, start in ((5.0, 9.0, 3.0), (2.0, 6.0, 0.1), (2.0, 9.0, 0.1), (4.0, 4.1, 3.6), (4.0, 3.5, 3.15)):
        took = {"root": root, "one": three, "every": three, "batch": three, "read": 1.0}
        known = costs.with_drafting(curve, took, 1, [request])
        assert known.draft_start_seconds == pytest.approx(start) and known.draft_seconds > 0
        assert known.draft(Drafted(3, 3, 3)) == pytest.approx(three)
        assert costs.round_seconds(known) == pytest.approx(4.0 + three)


def test_drafts_of_a_slow_model_are_timed_after_a_first_run() -> None:
    """Their first run allocates: it took 3.6 times as long for a batch, and no draft of 0.5B parameters paid."""
    runner = TimedRunner(tiny_llm(), 1.0)
    ssms = TimedSsms(tiny_llm(), runner.clock)
    runner.measure(ssms=ssms)
    assert sorted(ssms.drafted) == [1] * 6 + [costs.REQUESTS] * 2, (
        "each twice: one level, one SSM, all of them, and a batch"
    )


def test_a_further_request_costs_at_most_a_level_of_its_own() -> None:
    curve, request = CostCurve((1, 16), (1.0, 4.0), 0.0), Request([1, 2], SamplingParams(), SpecConfig())
    request.context_len = 1
    took = {"root": 2.0, "one": 6.0, "every": 6.0, "batch": 60.0, "read": 1.0}
    known = costs.with_drafting(curve, took, 1, [request, request])
    assert known.draft_request_seconds == known.draft_seconds


@pytest.mark.parametrize(
    ("first", "second", "least"),
    [
        ([1, 1.05], [2, 2.1], (1, 2)),  # idle
        ([3, 2, 1, 1], [2, 2], (1, 2)),  # disturbed in the first turn
        ([9, 5, 9, 4, 9, 3, 1, 1], [9, 5, 9, 4, 9, 3, 1, 1], (4, 4)),  # busy for longer than it may take
    ],
)
def test_a_busy_machine_is_measured_for_longer(
    first: list[float], second: list[float], least: tuple[float, float]
) -> None:
    """Until the two least times of each run agree, or thrice as long as intended; here at the end of a turn.

    What agrees is not repeated.
    """
    clock, intended, told = FakeClock(), sum(second[:2]) + sum(first[:2]), []

    def run(times: list[float]) -> None:
        clock.time += times.pop(0)

    given = [partial(run, first), partial(run, second)]
    assert costs.min_seconds(given, 1, 0.6 * intended, told.append, clock=clock) == list(least)
    assert told[-1] == 1 and len(first) == len(second) == (4 if least == (4, 4) else 0)


TILES = 1, 2, 4, 6, 8, 16, 17, 32


@pytest.mark.parametrize(
    ("unit", "rows"),
    [(5e-3, costs.ROWS), (1e-2, (*TILES, 33, 64)), (1e-1, costs.SLOWEST_ROWS)],
    ids=["quick", "slow", "slowest"],
)
def test_passes_are_measured_on_both_sides_of_a_tile(unit: float, rows: tuple[int, ...]) -> None:
    assert TimedRunner(tiny_llm(ssms=()), unit).measure().rows == rows


def test_a_curve_steps_where_a_tile_begins() -> None:
    """Between the measured row counts, and beyond them on average, whether they end with a tile or begin one."""
    for end in (32, 33, 64):
        measured = [rows for rows in costs.FEW_ROWS if rows <= end]
        curve = CostCurve(tuple(measured), tuple(float(-(-rows // 16)) for rows in measured), 0.0)
        assert curve.verify(np.array([1, 15, 16, 17, 31, 32])).tolist() == [1, 1, 1, 2, 2, 2]
        steps = np.array([end, end + 16, end + 64])
        assert curve.verify(steps).tolist() == np.ceil(steps / 16).tolist()


def test_what_a_position_costs_is_the_difference_of_two_contexts() -> None:
    curve = CostCurve((1, 8), (1e-3, 1.7e-3), 0.0, context=48)
    took = {"1 far": 3e-3, "8 far": 6.5e-3}
    known = costs.with_positions(curve, took, 1048)
    assert known.position_seconds == pytest.approx(2e-6)
    assert known.row_position_seconds == pytest.approx((4.8e-6 - 2e-6) / 7)
    disturbed = costs.with_positions(curve, {"1 far": 1e-4, "8 far": 1e-4}, 1048)
    assert disturbed.position_seconds == disturbed.row_position_seconds == 0


@pytest.mark.parametrize("seqs", [1, 8])
def test_a_long_context_is_measured_where_there_is_room_for_one(seqs: int) -> None:
    llm = open_llm(tiny()[0], [], max_num_seqs=seqs)
    runner = TimedRunner(llm)
    curve = runner.measure(0.0)
    short, *long = sorted({context for context, _ in runner.passes})
    assert curve.context == short and long == ([1016] if seqs == 8 else [])
    llm.engine.check_integrity()
    assert all(not pool[:, :, 1:].any() for pool in llm.engine.cache.pools), "nothing is left behind"


def test_rows_have_different_tokens() -> None:
    """Rows of one token would read the same experts. Fewer rows have the first tokens of more."""
    runner = TimedRunner(tiny_llm())
    runner.measure(0.0)
    by_rows = {len(tokens): tokens for _, tokens in runner.passes}
    most = by_rows[max(by_rows)]
    assert len(by_rows) > 2 and len(set(most)) > 0.9 * len(most)
    assert all(tokens == most[:rows] for rows, tokens in by_rows.items())


@pytest.mark.parametrize("others", [False, True])
def test_engines_that_start_together_measure_one_after_another(others: bool, caplog: pytest.LogCaptureFixture) -> None:
    """What is measured beside another measurement would be too slow. Equal engines are measured once."""
    measuring: list[TimedRunner] = []

    class Waiting(TimedRunner):
        def run_pass(self, rows: list[RequestRows], tokens: np.ndarray) -> Tensor:
            deadline = time.monotonic() + 60
            while "waiting for another process to measure" not in caplog.text and time.monotonic() < deadline:
                time.sleep(0.01)  # the first of the two waits for the second to come
            measuring.append(self)
            return super().run_pass(rows, tokens)

    target = tiny()[0]
    runners = [Waiting(open_llm(target, max_num_seqs=size), 1.0) for size in (1, 8 if others else 1)]
    with ThreadPoolExecutor(2) as threads:
        curves = list(threads.map(lambda runner: runner.start(100.0), runners))
    assert curves[0].verify_seconds[:2] == curves[1].verify_seconds[:2] == pytest.approx((1.0, 2.0))
    assert len(list(itertools.groupby(measuring, id))) == (2 if others else 1), "one after another, or one for both"


def test_costs_are_measured_once(caplog: pytest.LogCaptureFixture) -> None:
    """A later start needs no lock; one with another cache, in which more may be measured, measures anew."""
    one, other = (TimedRunner(open_llm(tiny()[0], max_num_seqs=size)) for size in (1, 8))

    def passes(runner: TimedRunner, seconds: float = 0.5) -> int:
        """How many a start has timed; it compares a stored curve with four."""
        runner.passes.clear()
        runner.start(seconds)
        return len(runner.passes)

    assert passes(one) > 4
    with costs.measuring_alone(1):
        assert passes(one) == 4 and "waiting" not in caplog.text
        assert passes(other, 0.0) > 4 and "not waiting any longer" in caplog.text
    costs.costs_file().parent.joinpath("starts").rename(costs.cache_folder() / "elsewhere")
    costs.costs_file().parent.joinpath("starts").touch()  # no folder to store them in
    assert passes(one) > 4 and passes(one) > 4
    assert costs.load_all() == [], "the file of treespec autotune is left alone"


@pytest.mark.parametrize(("unit", "checks"), [(1e-3, 8), (54e-3, 4)], ids=["tiny model", "1.5B parameters"])
def test_costs_measured_beside_other_work_are_corrected(unit: float, checks: int) -> None:
    """Starts on a machine that slows passes over one row and over several down by different factors."""
    runner = TimedRunner(open_llm(tiny()[0], max_num_seqs=1, max_model_len=64), unit)
    for slowdown, waits, kept, again, stored in (
        ((1.5, 1.5), True, (1.5, 1.5), True, 0),  # other work takes the CPUs: not stored
        ((1.5, 1.5), False, (1.5, 1.5), True, 1),  # memory is busy, which does not show
        ((1.0, 1.0), False, (1.5, 1.5), False, 1),  # the machine has become faster, which changes no decision
        ((1.0, 1.4), True, (1.5, 1.5), False, 1),  # busy
        ((1.0, 1.2), False, (1.5, 1.5), False, 1),  # noise
        ((1.0, 1.4), False, (1.0, 1.4), True, 1),  # rows cost more
        ((1.5, 1.0), False, (1.5, 1.0), True, 1),  # and less
        ((1.5, 1.0), False, (1.5, 1.0), False, 1),
    ):
        runner.passes.clear()
        runner.slowdown, runner.clock.is_busy = slowdown, waits
        curve, counted = runner.start(), len(runner.passes)
        one, eight = (curve.verify_seconds[curve.rows.index(rows)] for rows in (1, 8))
        assert (one, eight) == pytest.approx((kept[0] * unit, 2 * kept[1] * unit)), slowdown
        assert counted > checks if again else counted == (checks if waits else 4)  # twice only if the first differ
        assert len(costs.load_all("starts")) == stored


@pytest.mark.parametrize(("factor", "outdated"), [(0.7, True), (1.1, False), (1.4, True)])
def test_a_start_checks_what_drafting_costs(factor: float, outdated: bool) -> None:
    llm = tiny_llm()
    curve = CostCurve((1, 2, 4, 6, 8), (1e-3, 1.1e-3, 1.4e-3, 1.7e-3, 2e-3), 5e-4, 2e-4, context=16)
    costs.is_outdated(llm.engine.runner, llm.engine.sources.ssms, curve)
    llm.engine.check_integrity()  # whatever this machine's times say

    class TwiceAsLong(TimedRunner):
        def takes(self, rows: int) -> float:
            return 2 * float(curve.verify(rows))

    runner = TwiceAsLong(llm)
    ssms: Any = TimedSsms(llm, runner.clock, 2 * factor * curve.draft(Drafted(3, 3, 3)))
    assert costs.is_outdated(runner, ssms, curve, runner.clock) == outdated
    few = dataclasses.replace(curve, rows=(1, 8), verify_seconds=(1e-3, 2e-3))
    assert costs.is_outdated(runner, ssms, few, runner.clock), "measured when passes were slower"


def test_what_rounds_teach_is_kept_for_the_next_start() -> None:
    """A pass over 8 rows takes four times as long as one in rounds, and on an idle engine twice, as it did before."""
    runner = TimedRunner(open_llm(tiny()[0], max_num_seqs=1, max_model_len=64))
    starts = (200, 2, 2, True), (300, 2, 2, False), (0, 4, 4, False), (0, 2, 4, False), (0, 7, 7, True)
    for rounds, idle, ratio, measures in starts:
        runner.passes.clear()
        runner.slowdown = 1.0, idle / 2
        known = costs.load_planner(runner, None, 1, False, clock=runner.clock).costs
        assert known.curve.verify(8) / known.curve.verify(1) == pytest.approx(ratio, rel=0.05)
        assert (len(runner.passes) > 4) == measures, "later starts compare four passes"
        for turn in range(rounds):
            rows = (1, 8)[turn % 2]
            known.learn(RoundSeconds(0.0, 0.0, (0.01, 0.04)[turn % 2], 0.0), rows, Drafted(), rows > 1)
        wait_for_stores()
    assert len(costs.load_all("starts")) == 1


def wait_for_stores() -> None:
    for thread in threading.enumerate():
        if thread.name == "treespec costs":
            thread.join()


def test_rounds_do_not_wait_for_a_store() -> None:
    """Of another process, or of a slow disk: a corrected curve is stored when the lock is free."""
    runner = TimedRunner(open_llm(tiny()[0], max_num_seqs=1, max_model_len=64))
    known = costs.load_planner(runner, None, 1, False, clock=runner.clock).costs
    [measured] = costs.load_all("starts")
    with shared_work(costs.costs_file("starts").with_suffix(".lock"), "hold the lock", 1.0):
        for turn in range(300):
            known.learn(RoundSeconds(0.0, 0.0, (0.01, 0.04)[turn % 2], 0.0), (1, 8)[turn % 2], Drafted(), False)
        assert costs.load_all("starts") == [measured]
    wait_for_stores()
    assert costs.load_all("starts") != [measured]


@pytest.mark.parametrize(("busy", "passes"), [(False, 10), (True, 42)])
def test_the_passes_of_a_slow_model_are_timed_once_on_a_quiet_machine(busy: bool, passes: int) -> None:
    runner = TimedRunner(open_llm(tiny()[0], [], max_num_seqs=8), 0.01)
    runner.slowdown, runner.clock.is_busy = (2.0, 1.0), busy
    assert runner.measure(costs.START_SECONDS).rows == costs.SLOWEST_ROWS
    assert len(runner.passes) == passes


def test_curves_that_are_stored_at_once_are_all_kept(tmp_path: Path) -> None:
    def store(threads: int) -> None:
        costs.save(CostCurve((1, 8), (0.1, 0.2), 0.01), KEY | {"threads": threads}, tmp_path)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(store, range(24)))
    assert sorted(entry["key"]["threads"] for entry in costs.load_all(tmp_path)) == list(range(24))
