"""Tuning of quantised linear layers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.models import make_draft, make_llama, new_folder
from tests.helpers.quantized_checkpoints import quantize_folder
from tests.interpreted.tuning_cases import NAME, PlannedClock, changed, decoder
from treespec.cache.kv_cache import KVCache
from treespec.cli.kernels import settings_of
from treespec.models.triton_decoder import stacked
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_kernels.linear.quantized import QuantizedWeight, WeightForm
from treespec_kernels.linear.row_linear import RowLinearConfig
from treespec_kernels.ops import cases_of
from treespec_kernels.ops.shapes import KernelShape, Setting
from treespec_kernels.tuning import tuned
from treespec_kernels.tuning.sweep import SweepLog, TuningProblem, problems_of, tune
from treespec_kernels.tuning.tuned import KernelConfigs

torch.set_num_threads(1)
CPU, OP = torch.device("cpu"), "quantized_row_linear"
SETTING = Setting(KernelShape(torch.float32, 16, 4, 2, 64, 96, 100), CPU, nodes=3, context=20, requests=2)
SLOW, FAST = (RowLinearConfig(16, size, 32, 2, 4, 2) for size in (16, 32))
SMALL = {"num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}


def setting(form: WeightForm | None, groups: int = 1) -> Setting:
    return replace(SETTING, shape=replace(SETTING.shape, quantized=form), groups=groups)


@pytest.mark.parametrize(("form", "groups"), [(WeightForm(8), 1), (WeightForm(4, 64, True), 2)])
def test_every_case_is_right_by_its_own_check(form: WeightForm, groups: int) -> None:
    found = [problem[0] for problem in problems_of([setting(form, groups)], [OP])]  # the rows of a tree
    assert {(case.key["out_features"], case.key["in_features"]) for case in found} == {
        (128, 64),
        (64, 64),
        (192, 64),
        (64, 96),
    }
    for case in found:
        inputs = case.key["in_features"]
        group = form.group if form.group and inputs % form.group == 0 else inputs
        assert (case.key["bits"], case.key["group"], case.key["zero"]) == (form.bits, group, int(form.has_zero))
        assert json.loads(json.dumps(case.key)) == case.key and case.op == OP
        case.check(case.default)
        (out,) = case.run(case.default).values()
        x, weight = (case.inputs[0].arguments[name] for name in ("x", "weight"))
        assert case.bytes == x.nbytes + weight.nbytes + out.nbytes
        case.release()


def test_each_form_has_problems_of_its_own() -> None:
    plain, form = setting(None), setting(WeightForm(4, 32))
    others = {"lm_head", "tree_attention", "programmatic_launch"}
    assert cases_of(OP, plain) == [] == cases_of("row_linear", form)
    assert {problem[0].op for problem in problems_of([plain])} == {"row_linear", *others}
    assert {problem[0].op for problem in problems_of([form])} == {OP, *others}
    forms = [WeightForm(8), WeightForm(4, 32), WeightForm(4, 64), WeightForm(4, 32, True)]
    assert len(problems_of(map(setting, forms), [OP])) == 4 * len(forms)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", [WeightForm(8), WeightForm(4, 32), WeightForm(4, 128, True)], ids=str)
def test_candidates_fit_the_groups(dtype: torch.dtype, form: WeightForm) -> None:
    shape = replace(SETTING.shape, dtype=dtype, hidden_size=4096, intermediate_size=14336, quantized=form)
    for case in cases_of(OP, replace(SETTING, shape=shape)):
        configs = case.candidates()
        assert len(configs) == len(set(configs)) > 3
        assert form.group is None or all(form.group % config.block_k == 0 for config in configs)


@pytest.fixture
def problems() -> list[TuningProblem]:
    """One quantised layer at one number of rows, with two configurations to choose from."""
    layer = cases_of(OP, setting(WeightForm(4, 32)))[0]
    return [(changed(layer, configs=lambda case: [SLOW, FAST]),)]


def test_what_was_tuned_holds_for_its_form_alone(problems: list[TuningProblem], tmp_path: Path) -> None:
    [found] = tune(problems, PlannedClock({SLOW: 3.0, FAST: 1.0}), SweepLog(tmp_path / "log", NAME))
    assert found.best is not None and found.best.config == FAST and not found.failed
    entry = found.entry(tuned.versions_of(NAME, OP), 1e9)
    assert entry is not None and entry.config["block_n"] == 32
    tuned.save_entries(tmp_path / "a-device.json", NAME, [entry])
    configs, key = KernelConfigs.load("cuda", name=NAME, folder=tmp_path), problems[0][0].key
    assert configs.get(OP, key, SLOW) == FAST
    others = [key | change for change in ({"group": 64}, {"bits": 8}, {"zero": 1}, {"dtype": "float16"})]
    assert all(configs.get(OP, other, SLOW) is SLOW for other in others)
    plain = {name: value for name, value in key.items() if name not in ("bits", "group", "zero")} | {"silu_gate": 0}
    assert configs.get("row_linear", plain, SLOW) is SLOW and configs.get("row_linear", key, SLOW) is SLOW
    assert len(configs.tuned) == 1 and len(configs.fallbacks) == 6


# --- what an engine asks for


def labels(*given: Any) -> set[str]:
    """Of the problems that `treespec autotune` has for models."""
    return {problem[0].label for problem in problems_of(settings_of(*given))}


@pytest.fixture(scope="module")
def target() -> Path:
    return make_llama(new_folder("quantised-tuning") / "target", 0, **SMALL)


def test_an_engine_asks_for_what_is_tuned(target: Path) -> None:
    """Of a target quantised while it is loaded, and two quantised SSMs that are stacked."""
    drafts = [make_draft(target.with_name(f"ssm-{i}"), target, i, 0.1) for i in (1, 2)]
    drafts = [quantize_folder(draft, 8, None) for draft in drafts]
    configs = KernelConfigs()
    decoder(target, configs, "int4")
    stacked([decoder(draft, configs) for draft in drafts], configs)
    asked = labels(str(target), [str(draft) for draft in drafts], torch.float32, "int4")
    assert asked == set(configs.fallbacks)
    assert not any(label.startswith("row_linear ") for label in asked)


def test_layers_of_one_model_may_differ(target: Path) -> None:
    """The first layer is left as it was; blocks of its configuration do not divide the groups of the second."""
    folder = quantize_some(target, target.with_name("mixed"))
    configs = KernelConfigs()
    opened = decoder(folder, configs)
    first, second = opened.weights.layers
    assert isinstance(first.qkv, torch.Tensor) and isinstance(second.qkv, QuantizedWeight)
    assert labels(str(folder), [], torch.float32) == set(configs.fallbacks)
    pool = KVCache.allocate(opened.config.shape, 2, torch.float32, CPU)
    layout = opened.plan([RequestRows.chain(0, 3, np.array([1]))], pool)
    with torch.inference_mode():
        assert opened.logits(opened.forward(torch.tensor([5, 6, 7]), layout, pool)).isfinite().all()


def quantize_some(source: Path, folder: Path) -> Path:
    """A copy whose second layer alone is quantised, to int4 in groups of 32."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    before = load_file(folder / "model.safetensors")
    quantize_folder(folder, 4, 32)
    after = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in before.items() if ".layers.0." in name}
    changed = {name: tensor for name, tensor in after.items() if ".layers.0." not in name}
    save_file(kept | changed, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"].append(r"re:.*\.layers\.0\..*")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
