"""The command line: what each option of `generate` does, what is printed where, and how commands end."""

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from tests.helpers.commands import lend, program, run
from tests.helpers.exactness import altered_logits
from tests.helpers.models import VOCAB, tiny_llm
from tests.helpers.speech import speaking_folder
from treespec import LLM, SamplingParams, SpecConfig
from treespec.cli import app
from treespec.cli.generate import pairs_of_seconds, speed_up, summary

PROMPT = "def add(a, b):\n    return"


def test_a_text_its_stream_and_its_document(loaded: LLM) -> None:
    given = ("generate", PROMPT, "--max-tokens", 24)
    document = run(*given, "--json").document
    figures = "target_passes acceptance_length accepted_by_source seconds tokens_per_second seed".split()
    assert list(document) == ["text", "token_ids", "finish_reason", *figures]
    [output] = loaded.generate(PROMPT, SamplingParams(max_tokens=24))
    assert document["token_ids"] == output.outputs[0].token_ids and document["text"] == output.outputs[0].text
    assert document["acceptance_length"] == 24 / document["target_passes"] > 1
    assert document["tokens_per_second"] == pytest.approx(24 / document["seconds"])
    assert document["accepted_by_source"].keys() <= {"ssm-1", "ssm-2", "lookup"}
    ran = run(*given)
    assert ran.stdout == run(*given, "--stream", "--check").stdout == PROMPT + document["text"] + "\n"
    assert f"24 tokens in {document['target_passes']} target passes" in ran.stderr
    assert "finish reason: length" in ran.stderr and run(*given, "--json").stderr == ""


def test_options_of_models_and_trees(models: list[str]) -> None:
    given = ("generate", PROMPT, *models, "--max-tokens", 16)
    plain = run(*given, "--no-spec", "--no-compile", "--json").document
    assert plain["target_passes"] == 16 and plain["acceptance_length"] == 1 and plain["accepted_by_source"] == {}
    tree = run(*given, "--branching", "3,2", "--max-depth", 2, "--device", "cpu", "--dtype", "float32")
    assert tree.stdout == PROMPT + plain["text"] + "\n" and "16 tokens in 16" not in tree.stderr
    assert "ssm-1" in tree.stderr and "ssm-2" in tree.stderr
    drawn = run("tree", PROMPT, *models, "--branching", "3,2", "--round", 1, "--json").document
    assert drawn["depths"] == [0, 1, 1, 1, 2, 2, 2, 2, 2, 2]


def test_the_summary_counts_every_token_once(loaded: LLM) -> None:
    for sources in (("ssm", "lookup"), ("lookup",), ("ssm-1",)):
        [output] = loaded.generate(PROMPT * 3, SamplingParams(max_tokens=64), SpecConfig(nodes=16, sources=sources))
        metrics = output.metrics
        assert metrics.accepted_tokens <= sum(metrics.accepted_by_source.values())
        assert 64 - metrics.target_passes <= metrics.accepted_tokens <= 65 - metrics.target_passes
        told = summary(output, False).splitlines()[1]
        counts = [int(number) for number in re.findall(r"(\d+) (?:guessed|by)", told)]
        assert sum(counts) == 64 and counts[-1] == 64 - metrics.accepted_tokens
        silent = {"lookup"} - metrics.accepted_only_by_source.keys()  # the SSMs proposed all of its tokens, too
        assert {*re.findall("ssm-[12]|lookup", told)} == metrics.accepted_by_source.keys() - silent


def test_check_says_identical_and_states_a_measured_speed_up(loaded: LLM) -> None:
    given = ("generate", PROMPT, "--max-tokens", 8)
    assert run(*given, "--check", "--json", "--seed", 5).document["identical"] is True
    for options in ([], ["--check", "--no-spec"]):
        assert "times as fast" not in run(*given, *options).stderr
    passes = loaded.stats()["target_passes"]
    identical, stated = run(*given, "--check").stderr.splitlines()[-2:]
    assert identical == "identical to plain decoding: 8 tokens"
    assert re.search(r"times as fast as plain decoding: .*\(medians of 3 pairs of warm runs\)$", stated)
    own = run(*given, "--json").document["target_passes"]  # four runs of each kind before; plain ones take 8 passes
    assert loaded.stats()["target_passes"] - passes == 4 * (own + 8) + own


def test_a_speed_up_is_the_median_of_pairs() -> None:
    """A run beside another process does not count, and pairs of short runs are added until all took 3 s."""
    for speculative, plain, expected in (
        ([1.0, 2.0, 1.0], [2.0] * 3, "2.00 times as fast as plain decoding: 12 instead of 6 tokens/s"),
        ([0.25] * 8, [0.125] * 8, "0.50 times as fast as plain decoding: 48 instead of 96 tokens/s"),
    ):
        pairs = pairs_of_seconds(iter(speculative).__next__, iter(plain).__next__)
        assert pairs == list(zip(speculative, plain, strict=True))
        assert speed_up(12, pairs).startswith(expected)


def test_check_finds_a_planted_difference(loaded: LLM) -> None:
    given, rounds = ("generate", PROMPT, "--max-tokens", 24), list[int]()
    right = run(*given, "--json").document["token_ids"]

    def one_wrong(request: Any, tree: Any, logits: Any) -> None:
        if len(tree) > 1:
            rounds.append(request.num_generated)
        if len(tree) > 1 and len(rounds) == 2:
            logits[0, (right[rounds[1]] + 1) % VOCAB] = logits.max() + 1

    with altered_logits(loaded, one_wrong):
        ran = run(*given, "--check", "--json", code=1)
        at = rounds[1]
        found = {"index": at, "token": (right[at] + 1) % VOCAB, "plain_token": right[at]}
        assert ran.document["identical"] is False and ran.document["first_difference"] == found
        rounds.clear()
        ran = run(*given, "--check", code=1)
    assert "NOT identical" in ran.stderr and "times as fast" not in ran.stderr
    assert f"output position {at} " in ran.stderr and f"token {right[at]} " in ran.stderr


def test_prompts_from_a_file_and_from_a_pipe(loaded: LLM, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("x = 1\n")
    options = ["--max-tokens", "8", "--json"]
    expected = run("generate", "x = 1\n", *options).document["token_ids"]
    for given, stdin in ((["--file", tmp_path / "prompt"], ""), (["--file", "-"], "x = 1\n"), ([], "x = 1\n")):
        assert run("generate", *given, *options, stdin=stdin).document["token_ids"] == expected


def test_token_ids_where_there_is_no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    lend(tiny_llm(ssms=()), monkeypatch)
    document = run("generate", "12, 7 301", "--max-tokens", 6, "--json").document
    assert document["text"] is None and len(document["token_ids"]) == 6
    printed = " ".join(map(str, [12, 7, 301, *document["token_ids"]])) + "\n"
    for options in ([], ["--stream"]):
        assert run("generate", "12, 7 301", "--max-tokens", 6, *options).stdout == printed
    assert "no tokenizer" in run("generate", "twelve", code=2).stderr
    alone = run("tree", "5 6 7", "--json")
    assert alone.document["tokens"] == [7] and alone.document["texts"] == ["[7]"] and "no draft" in alone.stderr


# --- errors


@pytest.mark.parametrize(
    ("arguments", "kind", "named"),
    [
        (["x", "--model", "/nowhere/at-all"], "FileNotFoundError", "/nowhere/at-all"),
        (["x", "--file", "y"], "UsageError", "--file y"),
        (["--file", "/nowhere/prompt"], "FileNotFoundError", "/nowhere/prompt"),
        (["x", "--nodes", "many"], "ConfigError", "nodes='many'"),
        (["x", "--dtype", "int3"], "ConfigError", "dtype='int3'"),
        (["x", "--max-tokens", "some"], "UsageError", "--max-tokens"),
        (["x", "--branching", "a,b"], "UsageError", "--branching a,b"),
        (["x", "--no-spec", "--nodes", "4"], "UsageError", "--no-spec"),
        (["x", "--stream"], "UsageError", "--stream"),
        (["x", "--maxtokens", "4"], "UsageError", "--maxtokens"),
        (["x", "--top-k", "5", "--min-p", "0.1"], "UsageError", "--top-k and --min-p without --temperature"),
        (["x", "-n", "2"], "ConfigError", "n=2 with temperature=0"),
        ([], "UsageError", "empty"),
    ],
)
def test_errors_are_documents(arguments: list[str], kind: str, named: str) -> None:
    ran = run("generate", *arguments, "--json", code=2)
    assert ran.document.keys() == {"error"} and ran.document["error"].keys() == {"type", "message"}
    assert ran.document["error"]["type"] == kind and named in ran.document["error"]["message"]
    assert ran.stderr == ""
    if kind == "UsageError" and "--stream" not in arguments:
        ran = run("generate", *arguments, code=2)
        assert ran.stdout == "" and ran.stderr.startswith("error: ") and named in ran.stderr


def test_errors_of_the_engine(loaded: LLM) -> None:
    error = run("generate", "z" * 2000, "--json", code=2).document["error"]
    assert error["type"] == "RequestError" and "max_model_len" in error["message"]
    assert "UTF-8" in run("generate", stdin=b"\xff\xfe", code=2).stderr


def test_a_bug_keeps_its_traceback_and_ctrl_c_has_none(loaded: LLM) -> None:
    broken = mock.Mock(side_effect=ValueError("no user's error"))
    with altered_logits(loaded, broken):
        result = CliRunner().invoke(app, ["generate", PROMPT])
        assert result.exception is broken.side_effect and result.exit_code == 1
        loaded.engine.check_integrity()
        broken.side_effect = KeyboardInterrupt
        assert run("generate", PROMPT, "--model", "embedded", code=130).stderr == "interrupted\n"
        assert run("generate", PROMPT, "--json", code=130).document["error"]["message"] == "interrupted"
    loaded.engine.check_integrity()


def test_commands() -> None:
    message = run("server", "--anything", "x", "--json", code=2).document["error"]["message"]
    assert "'server'" in message
    assert message.endswith("Valid: generate, chat, serve, bench, tree, train, autotune, weights")
    assert "inspect" in run("weights", "--help").stdout and "inspect" in run("weights").stdout
    assert run("weights", "inspect", speaking_folder(), "--json").document["family"] == "llama"
    assert run("weights", "verify", speaking_folder(), "--json").document["ok"] is True
    assert run("weights", "inspect", "/nowhere", "--json", code=2).document["error"]["type"] == "FileNotFoundError"
    assert run("weights", "inspect", "--json", code=2).document["error"]["type"] == "UsageError"
    assert "generate" in run().stdout and run("--version").stdout.startswith("treespec ")


# --- as programs


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys, treespec; from treespec.cli import app; assert 'LLM' in dir(treespec)\n"
        "from treespec.startup import smollm2; smollm2.model_file()\n"
        "for arguments in ['--help'], ['--version'], ['generate', '--help']:\n"
        "    try: app(arguments)\n"
        "    except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'triton', 'transformers', 'numpy'} & sys.modules.keys()"
    )
    done = program("-c", code, COLUMNS="200")
    assert done.returncode == 0 and "Also decode plainly" in done.stdout, done.stderr


def test_the_program(models: list[str]) -> None:
    given = ["generate", PROMPT, *models[:2], "--max-tokens", "8", "--check", "--json"]
    done = program("-m", "treespec", *given)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["identical"] is True
    assert done.stderr.splitlines()[-1] == "identical to plain decoding: 8 tokens"


# As pip's console script: it imports the entry point. Ctrl-C comes when `sys.argv[1]` is first imported, and whoever
# imports it clears the exception where `sys.argv[2]` says so, as extension modules do.
INTERRUPTED_START = """
import importlib, os, signal, sys, tomllib

awaited, clears = sys.argv[1], sys.argv[2] == "cleared"

class CtrlC:
    def find_spec(self, name, *rest):
        if name != awaited:
            return
        sys.meta_path.remove(self)
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            if not clears:
                raise

sys.meta_path.insert(0, CtrlC())
module, function = tomllib.load(open("pyproject.toml", "rb"))["project"]["scripts"]["treespec"].split(":")
main = getattr(importlib.import_module(module), function)
sys.argv[:3] = ["treespec"]
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("module", "handled"),
    [
        ("treespec.cli", "raised"),
        ("torch", "cleared"),
        pytest.param("typer", "cleared", marks=pytest.mark.slow),
        pytest.param("transformers", "raised", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_while_it_starts(module: str, handled: str, models: list[str]) -> None:
    """Whatever is being imported: no traceback, and it ends."""
    command = ["generate", "x", *models[:2], "--no-compile"]
    ran = program("-c", INTERRUPTED_START, module, handled, *command)
    shown = [line for line in ran.stderr.splitlines() if not line.startswith("waiting for another process")]
    assert (ran.returncode, shown, ran.stdout) == (130, ["interrupted"], "")


@pytest.mark.slow
def test_ctrl_c_while_libraries_are_compiled(models: list[str], tmp_path: Path) -> None:
    """As from a terminal: the compilers get it, too."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\nmkdir {tmp_path}/first && kill -INT 0\nexec sleep 60\n")
    compiler.chmod(0o755)
    command = ["generate", "x", *models[:2], "--compile"]
    ran = program("-m", "treespec", *command, CXX=str(compiler), XDG_CACHE_HOME=str(tmp_path / "empty"))
    assert (ran.returncode, ran.stderr) == (130, "interrupted\n")
