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


def test_every_module_and_nothing_else_is_in(wheel_names: set[str]) -> None:
    top = {name.split("/")[0] for name in wheel_names}
    assert {name for name in top if not name.endswith(".dist-info")} == set(PACKAGES)
    modules = set.union(*(on_disk(package, "**/*.py") for package in PACKAGES))
    assert modules == {name for name in wheel_names if name.endswith(".py")}


@pytest.mark.parametrize(
    ("package", "pattern", "one"),
    [
        ("treespec", "serve/page/*", "treespec/serve/page/index.html"),
        ("treespec", "py.typed", "treespec/py.typed"),
        ("treespec_kernels", "py.typed", "treespec_kernels/py.typed"),
        ("treespec_weights", "py.typed", "treespec_weights/py.typed"),
        ("treespec_kernels", "tuned/*.json", None),
        ("treespec_weights", "smollm2/**/*", None),
        ("treespec_weights", "default/**/*", "treespec_weights/default/target/tokenizer.json"),
    ],
)
def test_data_files_are_in(package: str, pattern: str, one: str | None, wheel_names: set[str]) -> None:
    files = on_disk(package, pattern)
    assert files <= wheel_names, sorted(files - wheel_names)
    assert one is None or one in files
