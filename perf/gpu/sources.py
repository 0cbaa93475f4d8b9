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
import re
from collections.abc import Iterable, Iterator, Mapping
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
        self._contents: dict[Path, bytes] = {}
        self._trees: dict[Path, ast.Module] = {}
        self._edges: dict[str, set[str]] = {}
        self._exports: dict[str, dict[str, tuple[str, str]]] = {}

    def hash_of(self, modules: Iterable[str]) -> str:
        """Hash all files that modules depend on, independently of git and of results."""
        digest = hashlib.sha256()
        for path in sorted(self.files_of(modules)):
            digest.update(f"{path.relative_to(self.root)}\0".encode())
            digest.update(self._bytes(path))
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
            self._trees[path] = ast.parse(self._bytes(path))
        return self._trees[path]

    def _imports(self, module: str) -> set[str]:
        """Return the modules that a module imports at any place but for type checkers."""
        if module in self._edges:
            return self._edges[module]
        path = self._file(module)
        assert path is not None
        found = set()
        for node in _imports_of(self._tree(path)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            else:
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
                for node in _imports_of(self._tree(path), for_types=True)
                if isinstance(node, ast.ImportFrom) and node.module and self._file(node.module) is not None
                for alias in node.names
            }
        return self._defining(*self._exports[base][name]) if name in self._exports[base] else base

    def _native(self, path: Path) -> set[Path]:
        """Return the C++ sources that a module names, with the headers that they include."""
        found: set[Path] = set()
        waiting = [path.parent / name for name in _NATIVE.findall(self._bytes(path).decode())]
        while waiting:
            each = waiting.pop()
            if each not in found and each.is_file():
                found.add(each)
                waiting += [each.parent / name for name in _INCLUDED.findall(self._bytes(each).decode())]
        return found

    def _bytes(self, path: Path) -> bytes:
        if path not in self._contents:
            self._contents[path] = path.read_bytes()
        return self._contents[path]


_NATIVE = re.compile(r'"([\w.]+\.(?:cpp|h))"')
_INCLUDED = re.compile(r'^#include "([^"]+)"', re.M)


def _imports_of(tree: ast.Module, for_types: bool = False) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the import statements of a module at any place, without those for type checkers unless `for_types`."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            if not (name == "body" and isinstance(node, ast.If) and _is_for_types(node.test) and not for_types):
                inner = getattr(node, name, ())
                waiting += inner if isinstance(inner, list) else ()


def _is_for_types(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


@cache
def sources() -> Sources:
    """Return the import graph of this checkout as it was at the first call."""
    return Sources()


@cache
def source_hash(*modules: str) -> str:
    """Return a hash of all sources that modules of this checkout depend on."""
    return sources().hash_of(modules)
