"""Hashes of the sources that each stage depends on, from the import graph of the repository.

A stage depends on its own module and on every module of this repository that it imports, directly or not, wherever the
import statement stands. `from treespec import LLM` leads to the module that defines LLM; of the packages around a
module only their own text counts. Modules loaded by name (`DYNAMIC`) and C++ sources named in a module count as well.
So a change of an attention or linear kernel voids every stage; one of engines, drafts, planning or the tree kernels
voids the stages with an engine, but no passes and no kernels; one of a stage voids that stage. Tuned configurations,
which change without the sources, have a hash of their own (`setting.tuned_hash`).
"""

import ast
import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "gpu": "perf/gpu",
    "identity": "perf/identity",
    "tests": "tests",
    "treespec": "treespec",
    "treespec_kernels": "kernels/treespec_kernels",
    "treespec_weights": "weights/treespec_weights",
}
DYNAMIC = ("treespec_kernels.tuning.workloads",)
"""Packages that import all of their modules by name."""
BOOKKEEPING = ("gpu.documents", "gpu.failures", "gpu.host", "gpu.sources", "gpu.stage", "gpu.workers")
"""Modules that run measurements and store figures, but do not affect them."""


class Sources:
    """Import graph of a repository.

    Args:
        root: the repository.
        packages: folder of every package, or file without suffix of every module.
    """

    def __init__(self, root: Path = ROOT, packages: Mapping[str, str] = PACKAGES):
        self.root, self._packages = root, packages
        self._files: dict[str, Path | None] = {}
        self._trees: dict[Path, ast.Module] = {}
        self._edges: dict[str, set[str]] = {}
        self._exports: dict[str, dict[str, tuple[str, str]]] = {}

    def hash_of(self, modules: Iterable[str]) -> str:
        """Hash all files that modules depend on, independently of git and of results."""
        digest = hashlib.sha256()
        for path in sorted(self.files_of(modules)):
            digest.update(f"{path.relative_to(self.root)}\0".encode())
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]

    def files_of(self, modules: Iterable[str]) -> set[Path]:
        """Return the files of modules and of all modules and C++ sources that they depend on."""
        seen: set[str] = set()
        waiting = list(modules)
        while waiting:
            module = waiting.pop()
            if module not in seen and module not in BOOKKEEPING and self._file(module) is not None:
                seen.add(module)
                waiting += self._imports(module)
        packages = {module.rsplit(".", count)[0] for module in seen for count in range(1, module.count(".") + 1)}
        found = {path for module in seen | packages if (path := self._file(module)) is not None}
        return found | {each for path in found for each in self._native(path)}

    def _file(self, module: str) -> Path | None:
        if module not in self._files:
            top, *rest = module.split(".")
            path = self.root.joinpath(self._packages[top], *rest) if top in self._packages else None
            options = () if path is None else (path / "__init__.py", path.with_suffix(".py"))
            self._files[module] = next((each for each in options if each.is_file()), None)
        return self._files[module]

    def _tree(self, path: Path) -> ast.Module:
        if path not in self._trees:
            self._trees[path] = ast.parse(path.read_text(encoding="utf-8"))
        return self._trees[path]

    def _imports(self, module: str) -> set[str]:
        """Return the modules that a module imports at any place but for type checkers."""
        if module in self._edges:
            return self._edges[module]
        path = self._file(module)
        assert path is not None
        tree = self._tree(path)
        unseen = _of_type_checkers(tree)
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import) and id(node) not in unseen:
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and id(node) not in unseen:
                parts = module.split(".")
                above = parts[: len(parts) - node.level + (path.name == "__init__.py")] if node.level else []
                base = ".".join([*above, *filter(None, [node.module])])
                found |= {self._defining(base, alias.name) for alias in node.names}
        if module in DYNAMIC:
            found |= {f"{module}.{each.stem}" for each in path.parent.glob("*.py") if each != path}
        self._edges[module] = found
        return found

    def _defining(self, base: str, name: str) -> str:
        """Return the module that a name imported from `base` comes from."""
        if self._file(f"{base}.{name}") is not None:
            return f"{base}.{name}"
        path = self._file(base)
        if path is None or path.name != "__init__.py":
            return base
        if base not in self._exports:
            self._exports[base] = {
                alias.asname or alias.name: (node.module, alias.name)
                for node in ast.walk(self._tree(path))
                if isinstance(node, ast.ImportFrom) and node.module and self._file(node.module) is not None
                for alias in node.names
            }
        return self._defining(*self._exports[base][name]) if name in self._exports[base] else base

    def _native(self, path: Path) -> set[Path]:
        """Return the C++ sources that a module names, with the headers that they include."""
        tree = self._tree(path)
        named = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and _is_native(node.value)}
        found: set[Path] = set()
        waiting = [path.parent / name for name in named]
        while waiting:
            each = waiting.pop()
            if each not in found and each.is_file():
                found.add(each)
                lines = each.read_text(encoding="utf-8").splitlines()
                includes = [line.split('"')[1] for line in lines if line.startswith('#include "')]
                waiting += [each.parent / name for name in includes]
        return found


def _is_native(value: object) -> bool:
    return isinstance(value, str) and value.endswith((".cpp", ".h")) and "\n" not in value and len(value) < 80


def _of_type_checkers(tree: ast.Module) -> set[int]:
    """Return the ids of all nodes under `if TYPE_CHECKING`."""
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    return {id(inner) for block in blocks for statement in block.body for inner in ast.walk(statement)}


@cache
def sources() -> Sources:
    """Return the import graph of this checkout as it was at the first call."""
    return Sources()


@cache
def source_hash(*modules: str) -> str:
    """Return a hash of all sources that modules of this checkout depend on."""
    return sources().hash_of(modules)
