"""The cost curve: what is measured, what is stored of it and read again."""

import dataclasses
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.helpers.libraries import share_libraries
from tests.helpers.models import differing_rows_once, open_llm, tiny, tiny_llm
from treespec import LLM, SamplingParams, SpecConfig
from treespec.planning.draft_plan import Drafted
from treespec.planning.round_costs import CostCurve, RoundSeconds
from treespec.request import Request
from treespec.startup import cost_measurement as costs

KEY = {"device": "cpu", "processor": "p", "dtype": "float32", "threads": 1, "torch": "2", "models": [[1, 8]]}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share_libraries(tmp_path / "treespec")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("treespec.startup.build.differing_rows", differing_rows_once)
    monkeypatch.setattr(costs, "_waiting_seconds", lambda: 0.0)


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
    llm = tiny_llm()
    runner, ssms = llm.engine.runner, llm.engine.sources.ssms
    with (
        mock.patch.object(costs, "least_seconds", lambda runs, *rest, **options: [0.1] * len(runs)),
        mock.patch.object(costs, "_draft") as draft,
    ):
        costs.measure(runner, ssms)
    assert sorted(len(call.args[1]) for call in draft.call_args_list)[-1] == costs.REQUESTS
    assert draft.call_count == (3 if len(ssms.models) == 1 else 4)


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
    monkeypatch: pytest.MonkeyPatch, first: list[float], second: list[float], least: tuple[float, float]
) -> None:
    """Until the two least times of each run agree, or thrice as long as intended; here at the end of a turn.

    What agrees is not repeated.
    """
    now, intended, told = 0.0, sum(second[:2]) + sum(first[:2]), []
    monkeypatch.setattr(costs.time, "perf_counter", lambda: now)

    def run(times: list[float]) -> None:
        nonlocal now
        now += times.pop(0)

    given = [partial(run, first), partial(run, second)]
    assert costs.least_seconds(given, 1, 0.6 * intended, told.append) == list(least)
    assert told[-1] == 1 and len(first) == len(second) == (4 if least == (4, 4) else 0)


TILES = 1, 2, 4, 6, 8, 16, 17, 32


@pytest.mark.parametrize(
    ("first", "rows"),
    [(1e-3, costs.ROWS), (1e-2, (*TILES, 33, 64)), (1e-1, costs.SLOWEST_ROWS)],
    ids=["quick", "slow", "slowest"],
)
def test_passes_are_measured_on_both_sides_of_a_tile(first: float, rows: tuple[int, ...]) -> None:
    llm = tiny_llm(ssms=())
    with mock.patch.object(costs, "least_seconds", lambda runs, *rest, **options: [first] * len(runs)):
        assert costs.measure(llm.engine.runner, None).rows == rows


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


@pytest.mark.parametrize("long", [40, 150])
def test_a_long_context_is_measured_where_there_is_room_for_one(long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "CONTEXT", 16)
    monkeypatch.setattr(costs, "LONG_CONTEXT", long)
    llm = open_llm(tiny()[0], [], max_num_seqs=8)
    with mock.patch.object(costs, "star_pass", wraps=costs.star_pass) as passes:
        curve = costs.measure(llm.engine.runner, None, 0.0)
    contexts = {call.args[1].context_len for call in passes.call_args_list}
    assert contexts == ({16, 150} if long == 150 else {16})
    assert curve.context == 16
    llm.engine.check_integrity()
    assert all(not pool[:, :, 1:].any() for pool in llm.engine.cache.pools), "nothing is left behind"


def test_rows_have_different_tokens() -> None:
    """Rows of one token would read the same experts. Fewer rows have the first tokens of more."""
    runner = tiny_llm().engine.runner
    with mock.patch.object(runner, "run_pass", wraps=runner.run_pass) as passes:
        costs.measure(runner, None, 0.0)
    by_rows = {len(tokens): tokens.tolist() for tokens in (call.args[1] for call in passes.call_args_list)}
    most = by_rows[max(by_rows)]
    assert len(by_rows) > 2 and len(set(most)) > 0.9 * len(most)
    assert all(tokens == most[:rows] for rows, tokens in by_rows.items())


CURVE = CostCurve((1, 8), (1e-9, 2e-9), 0.01)


def start(max_num_seqs: int = 1) -> list[int]:
    """The rows of an engine's costs."""
    rows: list[int] = LLM(tiny()[0], [], max_num_seqs=max_num_seqs, max_model_len=64).stats()["cost_curve"]["rows"]
    return rows


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No start finds fault with a stored curve."""
    monkeypatch.setattr(costs, "is_outdated", lambda *_: False)


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("others", [False, True])
def test_engines_that_start_together_measure_one_after_another(others: bool, caplog: pytest.LogCaptureFixture) -> None:
    """What is measured beside another measurement would be too slow. Equal engines are measured once."""
    measuring: list[int] = []

    def measure(*_: Any) -> CostCurve:
        measuring.append(1)
        deadline = time.monotonic() + 60
        while "waiting for another process to measure" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)  # the first of the two waits for the second to come
        assert sum(measuring) == 1
        measuring.append(-1)
        return CURVE

    sizes = [1, 8 if others else 1]
    patience = mock.patch("treespec.startup.cost_measurement.START_SECONDS", 100)
    with mock.patch.object(costs, "measure", measure), patience, ThreadPoolExecutor(2) as threads:
        started = [threads.submit(start, max_num_seqs=size) for size in sizes]
        assert [each.result() for each in started] == [[1, 8]] * 2
    assert measuring == [1, -1] * (2 if others else 1)


@pytest.mark.usefixtures("trusted")
def test_costs_are_measured_once(caplog: pytest.LogCaptureFixture) -> None:
    """A later start needs no lock; one with another cache, in which more may be measured, measures anew."""
    with mock.patch.object(costs, "measure", return_value=CURVE) as measure:
        start()
        with costs.measuring_alone(1), mock.patch.object(costs, "PATIENCE", 0):
            assert start() == [1, 8] and measure.call_count == 1
            assert "waiting" not in caplog.text
            start(max_num_seqs=8)
            assert "not waiting any longer" in caplog.text and measure.call_count == 2
        costs.costs_file().parent.joinpath("starts").rename(costs.cache_folder() / "elsewhere")
        costs.costs_file().parent.joinpath("starts").touch()  # no folder to store them in
        assert start() == start() == [1, 8] and measure.call_count == 4
    assert costs.load_all() == [], "the file of treespec autotune is left alone"


@pytest.mark.parametrize(("unit", "checks"), [(1e-3, 8), (54e-3, 4)], ids=["tiny model", "1.5B parameters"])
def test_costs_measured_beside_other_work_are_corrected(
    unit: float, checks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts on a machine that slows passes over one row and over several down by different factors."""
    clock, counted, slowdown, waits = 0.0, 0, (1.0, 1.0), False

    def star_pass(runner: Any, request: Request, rows: int) -> None:
        nonlocal clock, counted
        clock, counted = clock + unit * (slowdown[0] if rows == 1 else 2 * slowdown[1]), counted + 1

    monkeypatch.setattr(costs.time, "perf_counter", lambda: clock)
    monkeypatch.setattr(costs, "_waiting_seconds", lambda: clock / 2 if waits else 0.0)
    monkeypatch.setattr(costs, "star_pass", star_pass)
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
        counted = 0
        llm = LLM(tiny()[0], [], max_num_seqs=1, max_model_len=64)
        llm.engine.check_integrity()
        curve = llm.stats()["cost_curve"]
        one, eight = (curve["verify_seconds"][curve["rows"].index(rows)] for rows in (1, 8))
        assert (one, eight) == pytest.approx((kept[0] * unit, 2 * kept[1] * unit)), slowdown
        assert counted > checks if again else counted == (checks if waits else 4)  # twice only if the first differ
        assert len(costs.load_all("starts")) == stored


@pytest.mark.parametrize(("factor", "outdated"), [(0.7, True), (1.1, False), (1.4, True)])
def test_a_start_checks_what_drafting_costs(factor: float, outdated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, clock = tiny_llm(), 0.0
    runner, ssms = llm.engine.runner, llm.engine.sources.ssms
    curve = CostCurve((1, 2, 4, 6, 8), (1e-3, 1.1e-3, 1.4e-3, 1.7e-3, 2e-3), 5e-4, 2e-4, context=16)
    assert costs.is_outdated(runner, ssms, curve) in (False, True)
    llm.engine.check_integrity()

    def take(seconds: float) -> None:
        nonlocal clock
        clock += seconds

    monkeypatch.setattr(costs.time, "perf_counter", lambda: clock)
    monkeypatch.setattr(costs, "star_pass", lambda runner, request, rows: take(2 * float(curve.verify(rows))))
    monkeypatch.setattr(costs, "_draft", lambda *_: take(2 * factor * curve.draft(Drafted(3, 3, 3))))
    assert costs.is_outdated(runner, ssms, curve) == outdated
    few = dataclasses.replace(curve, rows=(1, 8), verify_seconds=(1e-3, 2e-3))
    assert costs.is_outdated(runner, ssms, few), "measured when passes were slower"


@pytest.mark.usefixtures("trusted")
def test_what_rounds_teach_is_kept_for_the_next_start() -> None:
    """A pass over 8 rows takes four times as long as one, instead of twice."""

    def serve(rounds: int) -> float:
        llm = LLM(tiny()[0], [], max_num_seqs=1, max_model_len=64)
        costs_of_engine = llm.engine.host.planner.costs
        ratio = float(costs_of_engine.curve.verify(8) / costs_of_engine.curve.verify(1))
        for turn in range(rounds):
            rows = (1, 8)[turn % 2]
            costs_of_engine.learn(RoundSeconds(0.0, 0.0, (0.01, 0.04)[turn % 2], 0.0), rows, Drafted(), rows > 1)
        return ratio

    with mock.patch.object(costs, "measure", return_value=CURVE) as measure:
        ratios = [serve(rounds) for rounds in (200, 300, 0)]
        assert ratios == pytest.approx([2, 2, 4], rel=0.05) and measure.call_count == 1
    assert len(costs.load_all("starts")) == 1


@pytest.mark.parametrize(("busy", "passes"), [(False, 10), (True, 42)])
def test_the_passes_of_a_slow_model_are_timed_once_on_a_quiet_machine(
    busy: bool, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, counted = 0.0, 0

    def star_pass(*_: Any) -> None:
        nonlocal clock, counted
        clock, counted = clock + 0.02, counted + 1

    monkeypatch.setattr(costs.time, "perf_counter", lambda: clock)
    monkeypatch.setattr(costs, "_waiting_seconds", lambda: clock / 2 if busy else 0.0)
    monkeypatch.setattr(costs, "star_pass", star_pass)
    runner = open_llm(tiny()[0], [], max_num_seqs=8).engine.runner
    assert costs.measure(runner, None, costs.START_SECONDS).rows == costs.SLOWEST_ROWS
    assert counted == passes


@pytest.mark.usefixtures("trusted")
def test_a_start_waits_no_longer_than_it_may_measure() -> None:
    """For a measurement whose end it does not see; then it measures beside that, or takes what that has stored."""
    patiences, found = [], list[dict[str, Any]]()

    @contextmanager
    def never_free(path: Path, waiting_for: str, patience: float) -> Iterator[bool]:
        if path.name == "measuring.lock":
            patiences.append(patience)
            for entry in found:
                costs.save(CostCurve((1, 4), (0.1, 0.2), 0.01), entry["key"], costs.cache_folder() / "starts")
        yield False

    with (
        mock.patch.object(costs, "shared_work", never_free),
        mock.patch.object(costs, "measure", return_value=CURVE) as measure,
    ):
        assert start() == [1, 8]
        found += costs.load_all(costs.cache_folder() / "starts")
        costs.costs_file(costs.cache_folder() / "starts").unlink()
        assert start() == [1, 4]
        with costs.measuring_alone(5):  # as an autotune of 5 seconds
            pass
    assert patiences == [1.5, 1.5, 15] and measure.call_count == len(found) == 1


def test_curves_that_are_stored_at_once_are_all_kept(tmp_path: Path) -> None:
    def store(threads: int) -> None:
        costs.save(CostCurve((1, 8), (0.1, 0.2), 0.01), KEY | {"threads": threads}, tmp_path)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(store, range(24)))
    assert sorted(entry["key"]["threads"] for entry in costs.load_all(tmp_path)) == list(range(24))
