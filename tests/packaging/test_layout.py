"""The shape of the repository: where packages lie, what they import, what stays small."""

import ast
import subprocess
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
# Folders and modules of each package, from the bottom up; a layer imports only what is below it.
LAYERS = {
    "treespec": (
        ("errors", "inputs", "mixture_weights", "tree", "version"),
        ("utils",),
        ("config", "planning"),
        ("cache", "lora", "sampling_params", "verification"),
        ("text",),
        ("sampling",),
        ("request",),
        ("models", "outputs"),
        ("adapter", "drafters"),
        ("engine",),
        ("frontend", "graphs"),
        ("startup",),
        ("llm",),
        ("async_llm", "bench", "drawing", "hf", "llm_engine", "training"),
        ("serve",),
        ("cli", "__main__"),
    ),
    "treespec_kernels": (
        ("comparison", "launch"),
        ("linear", "tree"),
        ("recurrent",),
        ("attention", "sampling"),
        ("cpu", "tuning"),
        ("ops",),
        ("aot",),
        ("sweep",),
    ),
    "treespec_weights": (
        ("dtypes", "errors", "progress", "quantize", "sentencepiece"),
        ("experts", "factors", "files", "quant_schemes", "sizes", "state_projection"),
        ("rules",),
        ("blocks", "layouts"),
        ("quant_config",),
        ("families",),
        ("gguf", "text_part"),
        ("checkpoint",),
        ("writer",),
        ("documents",),
        ("codec", "hub", "load", "tokenizer"),
        ("draft_tensors", "draft_vocabulary", "lora", "timing", "transform", "verify", "vocabularies"),
        ("assistants", "block_drafts", "describe", "inspection", "mtp", "staging", "state_heads"),
        ("convert", "grow", "heads"),
        ("cli",),
    ),
}
OURS = {*PACKAGES, "treespec_training", "kernels", "weights", "tests", "perf"}
MAX_LINES = 540
MAX_TRACKED_BYTES = 56 << 20


def python_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def imported_modules(path: Path) -> Iterator[tuple[str, int, bool]]:
    """Modules that a file imports, by statement or by name, with the line, and whether at once."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                modules = [name.name for name in names]
            case ast.ImportFrom(module=str(module), level=0):
                modules = [module]
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                modules = [module]
            case _:
                continue
        yield from ((module, node.lineno, node in tree.body) for module in modules)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_one_way_and_what_is_optional_late(package: str) -> None:
    files = python_files(PACKAGES[package])
    assert PACKAGES[package] / "__init__.py" in files
    forbidden = OURS - ALLOWED[package] - {package}
    for path in files:
        for module, line, at_once in imported_modules(path):
            name = module.split(".")[0]
            assert name not in forbidden and not (at_once and name == "llguidance"), f"{path}:{line}"


@pytest.mark.parametrize("package", PACKAGES)
def test_layers_import_downwards(package: str) -> None:
    layer_of = {part: number for number, layer in enumerate(LAYERS[package]) for part in layer}
    for path in python_files(PACKAGES[package]):
        own, *_ = path.relative_to(PACKAGES[package]).with_suffix("").parts
        if own == "__init__":  # of the package: it imports what it exports
            continue
        for module, line, at_once in imported_modules(path):
            root, _, rest = module.partition(".")
            part = rest.split(".")[0]
            if at_once and root == package and part and part != own:
                assert layer_of[part] < layer_of[own], f"{path}:{line} imports {module}, which is no layer below"


@pytest.mark.parametrize("name", ["kernels/__init__.py", "weights/__init__.py", "conftest.py"])
def test_files_that_must_not_exist(name: str) -> None:
    # transformers would import a regular top-level package `kernels` as Hugging Face's kernel hub.
    assert not (ROOT / name).exists()


def test_files_are_short() -> None:
    files = [path for folder in ("treespec", "kernels", "weights") for path in python_files(ROOT / folder)]
    assert not [path for path in files if len(path.read_text(encoding="utf-8").splitlines()) > MAX_LINES]


def test_the_repository_is_small() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so nothing says which files are tracked")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sizes = {name: (ROOT / name).stat().st_size for name in listed.split("\0") if name and (ROOT / name).is_file()}
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
    assert sum(sizes.values()) < MAX_TRACKED_BYTES, f"largest: {largest}"
