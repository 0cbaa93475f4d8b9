"""The whole sweep on the CPU."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.models import make_draft, new_folder, tiny
from tests.helpers.quantized_checkpoints import quantize_folder
from treespec.cache.kv_cache import KVCache
from treespec.cli.kernels import settings_of
from treespec.models import triton_decoder
from treespec.models.attention import make_attention
from treespec.models.model_config import ModelConfig
from treespec.models.triton_decoder import TritonDecoder, stacked
from treespec_kernels import sweep as tuning
from treespec_kernels.attention.tree_attention import TreeAttentionConfig
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_kernels.linear.quantized import QuantizedWeight, WeightForm
from treespec_kernels.ops import cases_of, linear
from treespec_kernels.ops.op import Case
from treespec_kernels.ops.shapes import KernelShape, Setting
from treespec_kernels.sweep import Measurement, SweepLog, Tuned, TuningError, TuningProblem, measure, problems_of, tune
from treespec_kernels.tuning import tuned
from treespec_weights import load_weights

NAME = "A device"
SHAPE = KernelShape(torch.float32, 16, 4, 2, 32, 48, 100)
SETTING = Setting(SHAPE, torch.device("cpu"), nodes=3, context=20, requests=2, layers=2)
SLOW, FAST, EQUAL = (TreeAttentionConfig(16, size, 4, 2) for size in (16, 32, 64))


class PlannedClock:
    """Runs everything, and says what the test planned: seconds by configuration."""

    def __init__(self, seconds: dict[Any, float]):
        self.planned, self.timed, self.device = seconds, [], SETTING.device

    def seconds(self, calls: Sequence[Callable[[], Any]]) -> float:
        for call in calls:
            call()
        config = calls[0].args[0]
        self.timed.append(config)
        return self.planned[config]

    def copies(self, num_bytes: int) -> int:
        return 2

    def copy_bandwidth(self) -> float:
        return 1e9


def changed(case: Case, **changes: Any) -> Case:
    """A case of an op that differs in some attributes."""
    return replace(case, entry=replace(case.entry, **changes))


@pytest.fixture
def problems() -> list[TuningProblem]:
    """Tree attention of one small tree, by its reference, with three configurations to choose from."""
    tree = cases_of("tree_attention", SETTING)[0]

    def run(*given: Any, plan: Any, **named: Any) -> torch.Tensor:
        return tree.entry.ref(*given, **named)

    return [(changed(tree, configs=lambda case: [SLOW, FAST, EQUAL], run=run),)]


@pytest.fixture
def log(tmp_path: Path) -> SweepLog:
    return SweepLog(tmp_path / "log", NAME)


def clock() -> PlannedClock:
    return PlannedClock({SLOW: 3.0, FAST: 1.0, EQUAL: 1.0})


def swept(problems: list[TuningProblem], log: SweepLog, **options: Any) -> tuple[Tuned, list[Any]]:
    """What a sweep finds of one problem, and the configurations that it times."""
    timed = clock()
    [found] = tune(problems, timed, log, **options)
    return found, timed.timed


@pytest.mark.parametrize(("default", "best"), [(3.0, FAST), (1.009, SLOW)])
def test_the_fastest_is_kept(
    problems: list[TuningProblem], default: float, best: Any, log: SweepLog, tmp_path: Path
) -> None:
    """But a default that is about as fast stays."""
    timed = PlannedClock({SLOW: default, FAST: 1.0, EQUAL: 1.0})
    [found] = tune(problems, timed, log)
    assert timed.timed == [SLOW, FAST, EQUAL] and found.unmeasured == 0 and found.failed == []
    assert found.best is not None and found.best.config == best
    entry = found.entry(tuned.versions_of(NAME, found.problem[0].op), 1e9)
    assert entry is not None and entry.config["block_n"] == best.block_n
    assert entry.default_microseconds == default * 1e6
    tuned.save_entries(tmp_path / "a-device.json", NAME, [entry])
    configs = tuned.KernelConfigs.load("cuda", name=NAME, folder=tmp_path)
    assert configs.get(found.problem[0].op, found.problem[0].key, EQUAL) == best


def planted(problems: list[TuningProblem], change: Callable[[torch.Tensor], None]) -> list[TuningProblem]:
    """The problem, with other results of `FAST`."""
    [tree] = problems[0]
    right = tree.entry.run

    def run(*given: Any, plan: Any, **named: Any) -> torch.Tensor:
        out = right(*given, plan=plan, **named)
        if plan.config == FAST:
            change(out)
        return out

    return [(changed(tree, run=run),)]


def one_wrong(out: torch.Tensor) -> None:
    out[-1, 0, 0] += 0.1


def last_bit_by_company(out: torch.Tensor) -> None:
    if len(out) > 1:
        out[0].view(torch.int32)[0, 0] += 1


@pytest.mark.parametrize(
    ("change", "said"), [(one_wrong, "max error"), (last_bit_by_company, "rows depend on other rows")]
)
def test_a_wrong_kernel_is_refused_before_it_is_timed(
    problems: list[TuningProblem], log: SweepLog, change: Any, said: str
) -> None:
    found, timed = swept(planted(problems, change), log)
    assert timed == [SLOW, EQUAL] and found.best is not None and found.best.config == EQUAL
    [failed] = found.failed
    assert failed.config == FAST and said in str(failed.error)


def test_a_kernel_that_cannot_run_has_failed(problems: list[TuningProblem]) -> None:
    def broken(out: torch.Tensor) -> None:
        raise RuntimeError("out of shared memory")

    found = measure(planted(problems, broken)[0], FAST, clock())
    assert found.error == "RuntimeError: out of shared memory" and found.seconds == {}
    assert Tuned(problems[0], (found,), 2).best is None
    assert Tuned(problems[0], (found,), 2).entry({}, 1e9) is None


def test_what_was_measured_is_not_measured_again(
    problems: list[TuningProblem], log: SweepLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for a change of the kernels."""
    path, times = tmp_path / "log", iter([0.0] * 3 + [100.0] * 20)  # the budget ends in the first configuration
    with monkeypatch.context() as patch:
        patch.setattr("treespec_kernels.sweep.time.monotonic", lambda: next(times))
        first, _ = swept(problems, log, budget_seconds=50.0)
    assert [m.config for m in first.measurements] == [SLOW] and first.unmeasured == 2
    with path.open("a") as file:
        file.write('{"what": {"op": ')  # as a process that was killed leaves it
    second, timed = swept(problems, SweepLog(path, NAME))
    assert timed == [FAST, EQUAL] and second.unmeasured == 0
    third, timed = swept(problems, SweepLog(path, NAME))
    assert timed == [] and third.best == second.best
    log = SweepLog(path, NAME)
    assert log.find(problems[0], SLOW) is not None and SweepLog(path, "Another").find(problems[0], SLOW) is None
    monkeypatch.setattr(tuned, "source_hash", lambda op: "another")
    assert swept(problems, SweepLog(path, NAME))[1] == [SLOW, FAST, EQUAL]
    log.forget()
    assert not path.exists() and log.find(problems[0], SLOW) is None
    spent, _ = swept(problems, log, budget_seconds=-1.0)
    assert spent.unmeasured == 3 and spent.best is None


def test_a_broken_device_ends_the_sweep_and_is_remembered(
    problems: list[TuningProblem], log: SweepLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = planted(problems, one_wrong)
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "works", lambda device: False)
        with pytest.raises(TuningError, match=r"broke the device .*; run again to continue without it"):
            tune(problems, clock(), log)
    found, timed = swept(problems, SweepLog(tmp_path / "log", NAME))
    assert timed == [EQUAL] and [m.config for m in found.failed] == [FAST]


def test_too_little_memory_is_no_configurations_fault(problems: list[TuningProblem], log: SweepLog) -> None:
    def full(out: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("no memory")

    problems = [(changed(problems[0][0], configs=lambda case: [FAST]),)]
    with pytest.raises(torch.OutOfMemoryError):
        tune(planted(problems, full), clock(), log)
    assert log.find(problems[0], FAST) is None


def test_loads_are_weighted() -> None:
    wider = replace(SETTING, shape=replace(SHAPE, head_dim=32))
    problem, other = problems_of([SETTING, SETTING, wider], ["tree_attention"])
    assert [case.weight for case in problem] == [case.weight for case in other] == [0.5, 0.25, 0.25]
    seconds = Measurement(FAST, {case.load: 4.0 / (1 + place) for place, case in enumerate(problem)})
    assert Tuned(problem, (), 0).mean(seconds) == pytest.approx(2.0 + 0.5 + 1 / 3)


def decoder(folder: Path, configs: tuned.KernelConfigs, *quantization: str | None) -> TritonDecoder:
    """Of two formats, the first layer has the first."""
    config = ModelConfig.from_hf(folder)
    loaded = [
        load_weights(config.folder, config.shape, config.rules, torch.float32, SETTING.device, form)
        for form in quantization or (None,)
    ]
    weights = {name: tensor for name, tensor in loaded[0].items() if ".0." in name}
    weights |= {name: tensor for name, tensor in loaded[-1].items() if ".0." not in name}
    attention = make_attention("triton", config.shape, torch.float32, SETTING.device, configs)
    return TritonDecoder(config, weights, attention, configs, True, 64)


def pass_of_three(opened: TritonDecoder) -> torch.Tensor:
    pool = KVCache.allocate(opened.config.shape, 2, torch.float32, SETTING.device)
    layout = opened.plan([RequestRows.chain(0, 3, np.array([1]))], pool)
    with torch.inference_mode():
        return opened.logits(opened.forward(torch.tensor([5, 6, 7]), layout, pool))


@pytest.mark.parametrize("quantised", [False, True])
def test_an_engine_asks_for_what_is_tuned(quantised: bool) -> None:
    """The keys of the cases are those under which an engine looks: of a target, and of two SSMs stacked."""
    target, configs, root = tiny()[0], tuned.KernelConfigs(), new_folder("tuned")
    drafts = [make_draft(root / f"ssm-{i}", target, i, 0.1) for i in (1, 2)]
    if quantised:
        drafts = [quantize_folder(draft, 8, None) for draft in drafts]
    form = "int4" if quantised else None
    decoder(target, configs, form)
    stacked([decoder(draft, configs) for draft in drafts], configs)
    settings = settings_of(str(target), [str(draft) for draft in drafts], torch.float32, form)
    assert [setting.groups for setting in settings][:2] == [1, 2]
    assert {problem[0].label for problem in problems_of(settings)} == set(configs.fallbacks)
    assert quantised != any(label.startswith("row_linear ") for label in configs.fallbacks)


def test_layers_of_one_model_may_differ() -> None:
    """Blocks of the first layer's configuration do not divide the groups of the others."""
    opened = decoder(tiny()[0], tuned.KernelConfigs(), None, "int4")
    first, second, *_ = opened.weights.layers
    assert isinstance(first.qkv, torch.Tensor) and isinstance(second.qkv, QuantizedWeight)
    assert pass_of_three(opened).isfinite().all()


def test_each_form_has_problems_of_its_own() -> None:
    form = replace(SETTING, shape=replace(SHAPE, hidden_size=64, intermediate_size=96, quantized=WeightForm(4, 32)))
    others, op = {"lm_head", "tree_attention", "programmatic_launch"}, "quantized_row_linear"
    assert cases_of(op, SETTING) == [] == cases_of("row_linear", form)
    assert {problem[0].op for problem in problems_of([SETTING])} == {"row_linear", *others}
    assert {problem[0].op for problem in problems_of([form])} == {op, *others}
    forms = [WeightForm(8), WeightForm(4, 32), WeightForm(4, 64), WeightForm(4, 32, True)]
    settings = [replace(form, shape=replace(form.shape, quantized=each)) for each in forms]
    assert len(problems_of(settings, [op])) == 4 * len(forms)


class TiledConfigs(tuned.KernelConfigs):
    """Gives every product tiles of 32 and 64 rows, which follow one of 16."""

    def get(self, op: str, key: tuned.Key, default: Any) -> Any:
        tiled = op in ("row_linear", "lm_head")
        return replace(default, larger=((32, 8, 2), (64, 16, 2))) if tiled else default


@pytest.mark.parametrize("wrong", [None, 32])
def test_a_decoder_uses_tiles_that_it_found_equal(
    wrong: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target, configs, used = tiny()[0], TiledConfigs(), list[tuple[int, ...]]()

    def launch(run: Callable[..., torch.Tensor], *given: Any, config: Any, **named: Any) -> torch.Tensor:
        used.append(tuple(tile.block_m for tile in config.tiles))
        out = run(*given, config=config, **named)
        return out + 1e-6 if config.block_m == wrong else out

    for name in ("row_linear_triton", "row_linear_partials_triton"):
        monkeypatch.setattr(triton_decoder, name, partial(launch, getattr(triton_decoder, name)))
    opened = decoder(target, configs)
    assert {(16,), (32,), (64,)} == set(used), "one tile at a time"
    used.clear()
    pass_of_three(opened)
    assert set(used) == {(16, 32, 64) if wrong is None else (16, 64)}
    named = [message.split(" of shape")[0] for message in caplog.messages if "differ in bits" in message]
    assert named == ([] if wrong is None else ["qkv", "o", "gate_up", "down"])


def test_a_tile_with_other_bits_is_refused() -> None:
    def planted(*given: Any, config: Any, **named: Any) -> torch.Tensor:
        out = linear.ROW_LINEAR.run(*given, config=config, **named)
        return out + 1e-6 if config.block_m == 32 else out

    [case, *_] = cases_of("row_linear", SETTING)
    config = replace(case.default, block_m=16, num_stages=2, larger=((32, 8, 2), (64, 16, 2)))
    case.check(config)
    with pytest.raises(AssertionError, match="rows depend on other rows"):
        changed(case, run=planted).check(config)
