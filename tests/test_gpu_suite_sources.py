"""Which sources the figures of each stage of `perf/gpu_suite.py` depend on, and how its results folder is continued."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_suite import facts_of, module

ROOT = Path(__file__).resolve().parents[1]

FILES = {
    "gpu/passes.py": "from models import Decoder, open_it\nfrom gpu import clock",
    "gpu/clock.py": "",
    "gpu/rounds.py": "import models.engine",
    "gpu/stage.py": "import models.engine",
    "models/__init__.py": "from typing import TYPE_CHECKING\n"
    "if TYPE_CHECKING:\n    from models.engine import Engine\nfrom models.decoder import Decoder\ndef open_it(): pass",
    "models/decoder.py": "from .kernel import run\nfrom typing import TYPE_CHECKING\n"
    "if TYPE_CHECKING:\n    import models.engine",
    "models/engine.py": "def start():\n    from models import growth",
    "models/growth.py": 'SOURCE = "growth.cpp"',
    "models/growth.cpp": '#include "part.h"\n#include <vector>',
    "models/part.h": "",
    "models/kernel.py": "",
    "models/unused.py": "",
}


@pytest.fixture(autouse=True)
def perf_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "perf"))


@pytest.fixture
def hash_of(tmp_path: Path) -> Callable[[str], str]:
    """Hashes what a module of a small repository depends on, as its files are now."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    packages = {"gpu": "gpu", "models": "models"}
    return lambda name: module("sources").Sources(tmp_path, packages).hash_of([name])


@pytest.mark.parametrize("changed", sorted(FILES))
def test_a_change_voids_only_what_depends_on_it(hash_of: Callable[[str], str], tmp_path: Path, changed: str) -> None:
    before = {name: hash_of(f"gpu.{name}") for name in ("passes", "rounds")}
    (tmp_path / changed).write_text(FILES[changed] + ("\n" if changed.endswith("py") else "\n// x"))
    voided = {name for name, each in before.items() if hash_of(f"gpu.{name}") != each}
    both = {"models/__init__.py": {"passes", "rounds"}}
    of_passes = {f"{name}.py": {"passes"} for name in ("gpu/passes", "gpu/clock", "models/decoder", "models/kernel")}
    others = ("gpu/rounds.py", "models/engine.py", "models/growth.py", "models/growth.cpp", "models/part.h")
    of_rounds = {name: {"rounds"} for name in others}
    assert voided == (both | of_passes | of_rounds).get(changed, set()), "not the bookkeeping, nor what is not imported"


def test_what_the_stages_depend_on() -> None:
    """Every stage launches kernels of attention; only stages with an engine depend on engines."""
    sources, stages = module("sources").sources(), {each.name: each for each in module("stages").STAGES}
    files = {}
    for name, stage in stages.items():
        own = getattr(stage.measurements, "func", stage.measurements).__module__
        found = sources.files_of([own, *stage.also()])
        files[name] = {str(path.relative_to(ROOT)) for path in found}
    kernels = "kernels/treespec_kernels"
    assert all(f"{kernels}/attention/tree_attention_kernels.py" in each for each in files.values())
    engines = {name for name, each in files.items() if "treespec/engine.py" in each}
    assert engines.isdisjoint(
        {"passes", "passes_tuned", "passes_more", "kernels", "captured", "families", "autotune", "prefill", "baselines"}
    )
    assert engines >= {"smoke", "rounds", "grown8b", "grown1b", "bits"}
    assert f"{kernels}/tuning/workloads/row_linear.py" in files["autotune"] & files["kernels"]
    assert f"{kernels}/tree/tree_merge_kernels.py" not in files["passes"]
    assert f"{kernels}/linear/quantized_row_linear_kernels.py" in files["passes"], "a decoder has all layers"
    assert "tests/interpreted/row_linear_cases.py" in files["ops"] - files["bits"]
    assert {f"{kernels}/cpu/growth_cpu.cpp", f"{kernels}/cpu/batch_cpu.h"} <= files["rounds"]
    assert all("perf/gpu/stage.py" not in each and "perf/gpu/targets.py" not in each for each in files.values())
    assert len({stage.source() for stage in stages.values()}) > 9


def test_a_results_folder_is_continued_in_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents, tune = module("documents"), module("tune")
    setting = module("setting").Setting(tmp_path / "kept", dry=True)
    for name in ("a", "b"):
        documents.write(setting.out, name, facts_of(setting) | {"measurements": {"x": {"value": float("inf")}}})
    (setting.out / "tuned-a-gpu.json").write_text("{}")
    out = tmp_path / "out"
    out.mkdir()
    documents.adopt(setting.out, out)
    documents.adopt(tmp_path / "none", out)
    assert documents.load(out, "b")["measurements"] == {"x": {"value": None}}
    documents.forget(out, "b")
    assert documents.load_all(out).keys() == {"a"} and documents.load_all(setting.out).keys() == {"a", "b"}
    documents.adopt(setting.out, out)
    assert documents.load_all(out).keys() == {"a"}, "what is there stays"
    (out / documents.NAME).write_text("[1")
    assert documents.load_all(out) == {} and documents.load(out, "a") is None

    package, user = tmp_path / "package", tmp_path / "user"
    monkeypatch.setattr(tune, "package_folder", lambda: package)
    monkeypatch.setattr(tune, "user_folder", lambda: user)
    monkeypatch.setattr(tune, "writable_folder", lambda: package)
    assert tune.install(out) == ["a-gpu.json"] and (package / "a-gpu.json").read_text() == "{}"
    (package / "a-gpu.json").write_text("newer")
    assert tune.install(out) == [] and (package / "a-gpu.json").read_text() == "newer"


def test_a_long_log_keeps_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = module("failures")
    monkeypatch.setattr(failures, "MAX_BYTES", 1000)
    for number in range(100):
        failures.note(tmp_path, f"heading {number}", "x" * 50)
    assert os.path.getsize(tmp_path / failures.NAME) < 1200
    text: Any = (tmp_path / failures.NAME).read_text()
    assert "heading 99" in text and "heading 1," not in text
