"""The shape of the repository: where packages lie, what they import, what stays small."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "treespec": ROOT / "treespec",
    "treespec_kernels": ROOT / "kernels" / "treespec_kernels",
    "treespec_weights": ROOT / "weights" / "treespec_weights",
}
ALLOWED = {"treespec": {"treespec_kernels", "treespec_weights"}, "treespec_kernels": set(), "treespec_weights": set()}
OURS = {*PACKAGES, "treespec_training", "kernels", "weights", "tests", "perf"}
MAX_LINES = 540
MAX_TRACKED_BYTES = 56 << 20


def python_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def imported_packages(path: Path) -> Iterator[tuple[str, int]]:
    """Top-level packages that a file imports, by statement or by name, with the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        match node:
            case ast.Import(names=names):
                yield from ((name.name.split(".")[0], node.lineno) for name in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.split(".")[0], node.lineno
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield module.split(".")[0], node.lineno


def run_python(code: str, cwd: Path, path: tuple[Path, ...] = ()) -> object:
    """The JSON that `code` prints in a fresh interpreter with `path` before the installed packages."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_one_way(package: str) -> None:
    files = python_files(PACKAGES[package])
    assert PACKAGES[package] / "__init__.py" in files
    forbidden = OURS - ALLOWED[package] - {package}
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files
        for name, line in imported_packages(path)
        if name in forbidden
    ]
    assert not found, "\n".join(found)


def test_the_import_scan_sees_every_form(tmp_path: Path) -> None:
    path = tmp_path / "forms.py"
    path.write_text(
        "import treespec.tree as t\n"
        "def f():\n"
        "    from treespec_weights.load import load\n"
        "    importlib.import_module('treespec_kernels.linear.linear')\n"
        "    __import__('perf')\n"
        "from . import sibling\n"
    )
    assert list(imported_packages(path)) == [
        ("treespec", 1),
        ("treespec_weights", 3),
        ("treespec_kernels", 4),
        ("perf", 5),
    ]


@pytest.mark.parametrize("name", ["kernels/__init__.py", "weights/__init__.py", "conftest.py"])
def test_files_that_must_not_exist(name: str) -> None:
    # transformers would import a regular top-level package `kernels` as Hugging Face's kernel hub.
    assert not (ROOT / name).exists()


@pytest.mark.parametrize("at_root", [False, True])
def test_kernels_is_not_a_regular_package(at_root: bool, tmp_path: Path) -> None:
    code = "import importlib.util as u, json; s = u.find_spec('kernels'); print(json.dumps(s and s.origin))"
    origin = run_python(code, ROOT if at_root else tmp_path)
    assert origin is None or Path(str(origin)).parent != ROOT / "kernels"


def test_import_is_light(tmp_path: Path) -> None:
    code = (
        "import json, sys, treespec; found = {'torch', 'triton', 'transformers'} & sys.modules.keys()\n"
        "import treespec.llm; print(json.dumps(sorted(found | {'llguidance'} & sys.modules.keys())))"
    )
    assert run_python(code, tmp_path, path=(ROOT, ROOT / "kernels", ROOT / "weights")) == []


def test_files_are_short() -> None:
    lengths = {
        path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines())
        for folder in ("treespec", "kernels", "weights")
        for path in python_files(ROOT / folder)
    }
    assert not {path: lines for path, lines in lengths.items() if lines > MAX_LINES}


def test_the_repository_is_small() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so nothing says which files are tracked")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sizes = {name: (ROOT / name).stat().st_size for name in listed.split("\0") if name and (ROOT / name).is_file()}
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
    assert sum(sizes.values()) < MAX_TRACKED_BYTES, f"largest: {largest}"
