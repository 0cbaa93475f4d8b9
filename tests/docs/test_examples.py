"""Every script of examples/ runs and prints what its first lines promise."""

import re
import runpy
import shutil
from pathlib import Path

import pytest

from tests.helpers.heads_made import TargetShape, write_eagle3
from treespec_weights import default_folder, read_config

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PRINTED = {
    "chat": r"> How is one verified\?\n(?s:.*)\[64 tokens in \d+ target passes\]",
    "several_ssms": r"ssm \+ lookup +\d\.\d\d tokens per target pass\n(?s:.*)● accepted path",
    "draft_head": r"eagle3 and lookup: \d\.\d\d tokens per target pass",
    "structured_output": r"'language': '(Python|C\+\+|Rust)'(?s:.*)'grammar': \d+",
    "in_transformers": r"\d\.\d\d tokens per target pass; equal tokens: True",
    "own_drafter": r"'memory': \d+(?s:.*)'memory': \d+",
}


@pytest.fixture
def arguments(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The embedded target with a chat template instead of SmolLM2, and a random head."""
    target = default_folder("target")
    if request.node.callspec.params["name"] == "chat":
        shutil.copytree(target, tmp_path / "chat")
        (tmp_path / "chat" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
        return [str(tmp_path / "chat"), str(default_folder("ssm-1"))]
    if request.node.callspec.params["name"] == "draft_head":
        config, names = read_config(target), TargetShape.__dataclass_fields__
        shape = TargetShape(**{name: config[name] for name in names})
        write_eagle3(tmp_path / "eagle3", shape, layout="specforge", draft_vocab=None, own_embedding=False, seed=0)
        return [str(tmp_path / "eagle3")]
    return []


@pytest.mark.slow
@pytest.mark.parametrize("name", [path.stem for path in sorted(EXAMPLES.glob("*.py"))])
def test_an_example_runs(
    name: str, arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 40
    monkeypatch.setattr("sys.argv", [path.name, *arguments])
    runpy.run_path(str(path), run_name="__main__")
    assert re.search(PRINTED[name], capsys.readouterr().out)
