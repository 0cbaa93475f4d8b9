"""Stages of perf/gpu_suite.py on an engine whose rounds run on the device, in the interpreter: run by
tests/test_gpu_suite.py. On a GPU every engine is one; the dry run's, on a CPU, is not."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.models import make_draft, make_llama, new_folder, open_llm
from treespec import LLM, SpecConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "perf"))

import identity
from gpu import bits, passes, rounds, rows
from gpu.clock import Clock
from gpu.setting import Setting
from gpu.stage import Context

torch.set_num_threads(1)


SPEC = SpecConfig(nodes=2, max_depth=1)  # two launches of a model a round: the interpreter takes seconds for each
SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    target = make_llama(new_folder("target"), 0, **SMALL)
    draft = make_draft(new_folder("ssm-1"), target, 1, 0.05)
    return open_llm(target, [draft], spec=SPEC, attention="triton", linear="triton", max_num_seqs=1, prove=None)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path, dry=True)


def run_measurement(measurements: Any, name: str, context: Context) -> dict[str, Any]:
    [found] = [each for each in measurements(context.setting) if each.name == name]
    return found.run(context)


def test_rounds(llm: LLM, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "DRY", rounds.Sizes(None, 1, (2,)))
    monkeypatch.setattr(rounds, "WARM_ROUNDS", 1)
    monkeypatch.setattr(rounds, "VOCABULARY", 64)
    found = run_measurement(rounds.measurements, "tree2/exact", Context(setting, {}, {"llm/True": llm}))
    assert found["round_us"] > 0 and found["planned_us"]["verify"].keys() == {"1", "2"}


def test_bits(llm: LLM, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "DRY", replace(bits.DRY, prompts=1, max_tokens=2, modes=None, batches=(1,)))
    monkeypatch.setattr(identity, "read_prompts", lambda *given: [[5, 9, 2]])
    monkeypatch.setattr(identity, "modes", lambda *given: {"ssm-1": SPEC})
    found = run_measurement(bits.measurements, "greedy/float32/batch1", Context(setting, {}, {"llm/1": llm}))
    assert found["tokens"] == 2 and found["differing_tokens"] == 0
    assert found["differing_logit_rows"] is None, "captured rounds do not hand them out"


def decoder_of(launch: Any, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Context]:
    """One that calls `launch(pdl)` for a pass, and a context in which the stage has opened it."""
    tuned = SimpleNamespace(launched=lambda pdl: SimpleNamespace(pdl=pdl))
    decoder = SimpleNamespace(kernels=tuned, tuned=tuned)
    opened = SimpleNamespace(decoder=decoder, prepare=lambda *given: lambda: launch(decoder.kernels.pdl))
    monkeypatch.setattr(passes, "takes_pdl", lambda device: True)
    monkeypatch.setattr(Context, "clock", lambda *given: Clock(torch.device("cpu"), warmup=0, repeats=3))
    return decoder, Context(setting, {}, {f"passes/{passes.Kind(tuned=tuned)}": opened for tuned in (False, True)})


def described(**measurements: Any) -> str:
    """What the stage's table says of the measurements that these names begin, all of one tree and context."""
    return passes.describe({"measurements": {f"{name}/context16/nodes4": each for name, each in measurements.items()}})


PASS = {"graph_us": 5.0, "eager_us": 7.0, "share_of_copy": None, "floor_us": None}


@pytest.mark.parametrize("wrong", [False, True])
def test_passes_launched_both_ways(setting: Setting, monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    """What is launched programmatically is compared with what is launched in order, and what was tuned is put back."""
    decoder, context = decoder_of(lambda pdl: torch.tensor([1.0, 2.0 + (wrong and pdl)]), setting, monkeypatch)
    found = run_measurement(passes.more_measurements, "pdl/context16/nodes4", context)
    assert decoder.kernels is decoder.tuned and found["in_order_us"] > 0 and found["pdl_us"] > 0
    assert found["pdl_differing"] == (3 if wrong else 0)
    shown = described(**{"pass": PASS, "pdl": found})
    assert ("3 WRONG" in shown) is wrong and f"{found['pdl_us'] / 1e3:.3f}" in shown
    assert described(**{"pass": PASS, "pdl": found | {"pdl_us": None}}) == described(**{"pass": PASS})


def test_passes_that_do_not_repeat_themselves() -> None:
    """One bit now and then, and a NaN."""
    count = 0

    def run() -> torch.Tensor:
        nonlocal count
        count += 1
        logits = torch.ones(2, 3)
        logits[1, 2] += {5: 2**-23, 7: float("nan")}.get(count, 0.0)
        return logits

    opened: Any = SimpleNamespace(prepare=lambda context, parents: run)
    assert rows.differing_repeats(opened, 9, 2, 8) == {"repeats": 8, "differing_repeats": 2}


def test_launches_that_fail_cost_no_other_figure(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are measured last; and the kernels, which later passes take, are as they were."""

    def launch(pdl: bool) -> torch.Tensor:
        if pdl:
            raise RuntimeError("CUDA error: invalid resource handle")
        return torch.ones(2)

    decoder, context = decoder_of(launch, setting, monkeypatch)
    monkeypatch.setattr(passes, "figures", lambda *given: PASS)
    every = list(passes.more_measurements(setting))
    assert [each.name for each in every[-2:]] == ["pdl/context16/nodes1", "pdl/context16/nodes4"]
    whole = [each for each in passes.measurements(True, setting) if each.name.startswith("pass/")]
    assert [each.run(context) for each in whole] == 2 * [PASS]
    with pytest.raises(RuntimeError, match="invalid resource handle"):
        every[-1].run(context)
    assert decoder.kernels is decoder.tuned
    shown = described(**{"pass": PASS, "pdl": {"error": "RuntimeError: CUDA error: invalid resource handle"}})
    assert "ERROR RuntimeError: CUDA error: invalid resource handle" in shown
