"""The wheel holds all that the install needs and nothing else. An editable install would hide missing data."""

import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.packaging.test_layout import PACKAGES, ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files in the wheel, built by way of the sdist, from a copy so that the checkout stays clean."""
    source = tmp_path_factory.mktemp("source") / "treespec"
    clutter = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")
    for folder in ("treespec", "kernels", "weights", "tests", "tools"):
        shutil.copytree(ROOT / folder, source / folder, ignore=clutter)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "out", "."]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (source / "out").glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def on_disk(package: str, pattern: str) -> set[str]:
    """Files of a package as the wheel should name them."""
    folder = PACKAGES[package]
    files = (path for path in folder.glob(pattern) if path.is_file() and "__pycache__" not in path.parts)
    return {f"{package}/{path.relative_to(folder).as_posix()}" for path in files}


def test_top_level(wheel_names: set[str]) -> None:
    top = {name.split("/")[0] for name in wheel_names}
    assert {name for name in top if not name.endswith(".dist-info")} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_is_in(package: str, wheel_names: set[str]) -> None:
    modules = on_disk(package, "**/*.py")
    assert f"{package}/__init__.py" in modules
    assert modules == {name for name in wheel_names if name.startswith(f"{package}/") and name.endswith(".py")}


def test_typed_markers_are_in(wheel_names: set[str]) -> None:
    assert {f"{package}/py.typed" for package in PACKAGES} <= wheel_names


def test_the_page_of_the_server_is_in(wheel_names: set[str]) -> None:
    page = on_disk("treespec", "serve/page/*")
    assert "treespec/serve/page/index.html" in page <= wheel_names


def test_tuned_files_are_in(wheel_names: set[str]) -> None:
    assert on_disk("treespec_kernels", "tuned/*.json") <= wheel_names


def test_embedded_models_are_in(wheel_names: set[str]) -> None:
    files = on_disk("treespec_weights", "default/**/*")
    assert files <= wheel_names, sorted(files - wheel_names)
    assert on_disk("treespec_weights", "smollm2/**/*") <= wheel_names
    models = {name.split("/")[2] for name in files if name.endswith("/model.safetensors")}
    if not files:
        pytest.skip("the embedded models are not trained yet: weights/treespec_weights/default does not exist")
    assert {"target", "ssm-1"} <= models
    assert {f"treespec_weights/default/{model}/config.json" for model in models} <= files
    assert "treespec_weights/default/target/tokenizer.json" in files
