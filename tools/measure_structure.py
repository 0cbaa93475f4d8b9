"""Print figures of the code's structure: calls down to C++, layers, lines, patches and private accesses of tests."""

import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("treespec", "kernels", "weights", "perf", "tests")
CODE = (".py", ".cpp", ".h")


def code_of(folder: str) -> Iterator[tuple[str, str]]:
    """Yield path and text of the tracked code files in a folder."""
    names = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        if name.endswith(CODE):
            yield name, (ROOT / name).read_text()


def frames_to_cpp() -> list[str]:
    """Return the functions from `LLM.generate` to the C++ call of the embedded target's first round."""
    from treespec import LLM, SamplingParams

    found: list[list[str]] = []
    llm = LLM()
    if (library := llm.engine.runner.target.growth) is None:
        return []
    call = library.treespec_rounds

    def record(arguments: Any) -> None:
        found.append([frame.name for frame in traceback.extract_stack()[:-1]])
        call(arguments)

    with mock.patch.object(library, "treespec_rounds", record):
        llm.generate("def add(a, b):", SamplingParams(max_tokens=4))
    return [*found[0][found[0].index("generate") :], "treespec_rounds"]


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from tests.packaging.test_layout import LAYERS

    texts = {folder: dict(code_of(folder)) for folder in FOLDERS}
    frames = frames_to_cpp()
    print(f"calls from generate to C++: {len(frames) or 'no compiler'} ({', '.join(frames)})")
    print("layers:", ", ".join(f"{package} {len(layers)}" for package, layers in LAYERS.items()))
    for folder, files in texts.items():
        sizes = {name: text.count("\n") for name, text in files.items()}
        longest = max(sizes, key=lambda name: sizes[name])
        print(f"lines of {folder}: {sum(sizes.values())} in {len(sizes)} files; longest: {longest}, {sizes[longest]}")
    tests = "".join(texts["tests"].values())
    patches = len(re.findall(r"mock\.patch|monkeypatch\.setattr", tests))
    private = len(re.findall(r"\b(?!self\b|cls\b)\w+(?:\[\w+\]|\(\))?\._(?!replace\b)[a-z]\w+", tests))
    print(f"in tests: {patches} patches, {private} private accesses")


if __name__ == "__main__":
    main()
