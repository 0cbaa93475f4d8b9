"""The command line: what each option does, what is printed where, and how it ends."""

import io
import json
import re
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tokenizers import ByteLevelBPETokenizer
from typer.testing import CliRunner

import treespec.engine.host_executor
from tests.helpers.commands import ROOT, program, run
from tests.helpers.libraries import share_libraries
from tests.helpers.models import CURVE, make_draft, make_llama, open_llm, tree_of
from treespec import LLM, SamplingParams, SpecConfig
from treespec.cli import app
from treespec.cli.generate import pairs_of_seconds, speed_up, summary
from treespec.cli.group import uses_colour
from treespec.drawing.recording import picture, record_rounds, watch
from treespec.engine.host_executor import verify_request
from treespec.engine.round_record import RoundRecord
from treespec.engine.runner import Choices
from treespec.request import Request
from treespec.startup import cost_measurement as costs
from treespec.tree import TokenTree

PROMPT = "def add(a, b):\n    return"
VOCAB = 320


class Models(NamedTuple):
    """Folders of a target, of drafts that resemble it, and of a target without a tokenizer."""

    target: Path
    drafts: list[Path]
    bare: Path

    @property
    def arguments(self) -> list[str]:
        return ["--model", str(self.target), *(part for path in self.drafts for part in ("--draft", str(path)))]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([Path(__file__).read_text()], VOCAB, show_progress=False)
    bare = make_llama(folder / "bare", 0, vocab_size=VOCAB, eos_token_id=None, bos_token_id=None)
    target = make_draft(folder / "target", bare, 0, noise=0.0)
    drafts = [make_draft(folder / name, bare, seed, 0.07) for seed, name in enumerate(("ssm-a", "ssm-b"), start=1)]
    for path in (target, *drafts):
        tokenizer.save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return Models(target, drafts, bare)


@pytest.fixture(scope="module")
def llm(models: Models) -> Iterator[LLM]:
    engine = open_llm(models.target, models.drafts, spec=SpecConfig(nodes=16), max_num_seqs=1)
    yield engine
    engine.engine.check_integrity()


@pytest.fixture(scope="module")
def cache_home(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that knows a curve for `models`, so that no command measures one."""
    folder = tmp_path_factory.mktemp("cache")
    key = costs.cost_key(llm.engine.runner, llm.engine.sources.ssms, llm.config.num_threads)
    costs.save(CURVE, key, share_libraries(folder / "treespec"))
    return folder


@pytest.fixture(autouse=True)
def own_cache(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))


@pytest.fixture
def loaded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Commands get the module's engine instead of loading one of their own."""
    lend(llm, monkeypatch)
    return llm


def lend(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("generate", "tree"):
        monkeypatch.setattr(f"treespec.cli.{command}.load_llm", lambda *_, **__: llm)
    measure_briefly(monkeypatch)


def measure_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let --check measure as few pairs of runs as it may."""
    monkeypatch.setattr("treespec.cli.generate.MEASURED_SECONDS", 0)


# --- generate


def test_generate_prints_prompt_and_text(models: Models) -> None:
    ran = run("generate", PROMPT, *models.arguments, "--max-tokens", 20, "--nodes", 8)
    document = run("generate", PROMPT, *models.arguments, "--max-tokens", 20, "--nodes", 8, "--json").document
    assert ran.stdout == PROMPT + document["text"] + "\n"
    assert "20 tokens in" in ran.stderr and "finish reason: length" in ran.stderr
    assert f"20 tokens in {document['target_passes']} target passes" in ran.stderr
    assert "ssm-a" in ran.stderr and "ssm-b" in ran.stderr


def test_generate_json(loaded: LLM) -> None:
    ran = run("generate", PROMPT, "--max-tokens", 24, "--json")
    document = ran.document
    figures = "target_passes acceptance_length accepted_by_source seconds tokens_per_second seed".split()
    assert list(document) == ["text", "token_ids", "finish_reason", *figures]
    [output] = loaded.generate(PROMPT, SamplingParams(max_tokens=24))
    assert document["token_ids"] == output.outputs[0].token_ids and document["text"] == output.outputs[0].text
    assert document["finish_reason"] == "length"
    assert document["acceptance_length"] == 24 / document["target_passes"] > 1
    assert document["tokens_per_second"] == pytest.approx(24 / document["seconds"])
    assert document["accepted_by_source"].keys() <= {"ssm-a", "ssm-b", "lookup"} and ran.stderr == ""


def test_no_spec_is_plain_decoding(models: Models) -> None:
    plain = run("generate", PROMPT, *models.arguments, "--max-tokens", 16, "--no-spec", "--json").document
    assert plain["target_passes"] == 16 and plain["acceptance_length"] == 1 and plain["accepted_by_source"] == {}
    fixed = ["--branching", "3,2", "--max-depth", "2", "--device", "cpu", "--dtype", "float32"]
    tree = run("generate", PROMPT, *models.arguments, "--max-tokens", 16, *fixed, "--json").document
    assert tree["token_ids"] == plain["token_ids"] and tree["target_passes"] < 16


def test_check_says_identical(loaded: LLM) -> None:
    ran = run("generate", PROMPT, "--max-tokens", 24, "--check")
    assert ran.stderr.splitlines()[-2] == "identical to plain decoding: 24 tokens"
    assert run("generate", PROMPT, "--max-tokens", 24, "--check", "--json", "--seed", 5).document["identical"] is True


def test_the_summary_counts_every_token_once(loaded: LLM) -> None:
    for sources in (("ssm", "lookup"), ("lookup",), ("ssm-a",)):
        [output] = loaded.generate(PROMPT * 3, SamplingParams(max_tokens=64), SpecConfig(nodes=16, sources=sources))
        metrics = output.metrics
        assert metrics.accepted_tokens <= sum(metrics.accepted_by_source.values())
        assert 64 - metrics.target_passes <= metrics.accepted_tokens <= 65 - metrics.target_passes
        told = summary(output, False).splitlines()[1]
        assert told.startswith(f"64 tokens in {metrics.target_passes} target passes ({64 / metrics.target_passes:.2f} ")
        counts = [int(number) for number in re.findall(r"(\d+) (?:guessed|by)", told)]
        assert sum(counts) == 64 and counts[-1] == 64 - metrics.accepted_tokens
        silent = {"lookup"} - metrics.accepted_only_by_source.keys()  # the SSMs proposed all of its tokens, too
        assert {*re.findall("ssm-[ab]|lookup", told)} == metrics.accepted_by_source.keys() - silent


def test_a_speed_up_is_stated_if_it_was_measured(loaded: LLM) -> None:
    for options, is_stated in (["--check"], True), ([], False), (["--check", "--no-spec"], False):
        passes = loaded.stats()["target_passes"]
        ran = run("generate", PROMPT, "--max-tokens", 8, *options)
        stated = re.search(
            r"times as fast as plain decoding: \d+ instead of \d+ tokens/s \(medians of 3 pairs of warm runs\)\n$",
            ran.stderr,
        )
        assert (stated is not None) is is_stated == ("times as fast" in ran.stderr)
        if is_stated:  # four runs of each kind; plain decoding takes 8 passes
            first = int(re.search(r"(\d+) target pass", ran.stderr)[1])  # type: ignore[index]
            assert loaded.stats()["target_passes"] - passes == 4 * (first + 8)


@pytest.mark.parametrize(
    ("speculative", "plain", "expected"),
    [
        # Two of three pairs agree: the third, in which another process ran, does not count.
        ([1.0, 2.0, 1.0], [2.0, 2.0, 2.0], "2.00 times as fast as plain decoding: 12 instead of 6 tokens/s"),
        # Short runs: pairs are added until all took 3 s.
        ([0.25] * 8, [0.125] * 8, "0.50 times as fast as plain decoding: 48 instead of 96 tokens/s"),
    ],
)
def test_a_speed_up_is_the_median_of_pairs(speculative: list[float], plain: list[float], expected: str) -> None:
    queues, order = {"speculative": [*speculative], "plain": [*plain]}, []

    def measured(kind: str) -> float:
        order.append(kind)
        return queues[kind].pop(0)

    pairs = pairs_of_seconds(lambda: measured("speculative"), lambda: measured("plain"))
    assert pairs == list(zip(speculative, plain, strict=True))
    assert order[:4] == ["speculative", "plain", "plain", "speculative"]
    assert speed_up(12, pairs) == f"{expected} (medians of {len(plain)} pairs of warm runs)"


def test_check_finds_a_planted_difference(loaded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    right = run("generate", PROMPT, "--max-tokens", 24, "--json").document["token_ids"]
    rounds = []

    def one_wrong(request: Request, tree: TokenTree, choices: Choices) -> tuple[np.ndarray, int]:
        path, bonus = verify_request(request, tree, choices)
        if len(tree) > 1:
            rounds.append(path)
        return path, (bonus + 1) % VOCAB if len(tree) > 1 and len(rounds) == 2 else bonus

    monkeypatch.setattr(treespec.engine.host_executor, "verify_request", one_wrong)
    ran = run("generate", PROMPT, "--max-tokens", 24, "--check", "--json", code=1)
    position = sum(map(len, rounds[:2])) - 1
    assert ran.document["identical"] is False
    assert ran.document["first_difference"] == {
        "index": position,
        "token": (right[position] + 1) % VOCAB,
        "plain_token": right[position],
    }
    rounds.clear()
    ran = run("generate", PROMPT, "--max-tokens", 24, "--check", code=1)
    assert "NOT identical" in ran.stderr and "times as fast" not in ran.stderr
    assert f"output position {position} " in ran.stderr
    assert f"token {right[position]} " in ran.stderr


def test_stream_prints_the_same(loaded: LLM) -> None:
    whole = run("generate", PROMPT, "--max-tokens", 20)
    streamed = run("generate", PROMPT, "--max-tokens", 20, "--stream", "--check")
    assert streamed.stdout == whole.stdout


def test_prompts_from_a_file_and_from_a_pipe(loaded: LLM, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("x = 1\n")
    options = ["--max-tokens", "8", "--json"]
    expected = run("generate", "x = 1\n", *options).document["token_ids"]
    for given, stdin in ((["--file", tmp_path / "prompt"], ""), (["--file", "-"], "x = 1\n"), ([], "x = 1\n")):
        assert run("generate", *given, *options, stdin=stdin).document["token_ids"] == expected


def test_token_ids_where_there_is_no_tokenizer(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    lend(open_llm(models.bare), monkeypatch)
    document = run("generate", "12, 7 301", "--max-tokens", 6, "--json").document
    assert document["text"] is None and len(document["token_ids"]) == 6
    printed = " ".join(map(str, [12, 7, 301, *document["token_ids"]])) + "\n"
    assert run("generate", "12, 7 301", "--max-tokens", 6).stdout == printed
    assert run("generate", "12, 7 301", "--max-tokens", 6, "--stream").stdout == printed
    assert "no tokenizer" in run("generate", "twelve", code=2).stderr
    alone = run("tree", "5 6 7", "--json")
    assert alone.document["tokens"] == [7] and alone.document["texts"] == ["[7]"]
    assert "no draft" in alone.stderr


# --- errors


@pytest.mark.parametrize(
    ("arguments", "kind", "named"),
    [
        (["x", "--model", "/nowhere/at-all"], "FileNotFoundError", "/nowhere/at-all"),
        (["x", "--model", "gpt2"], "FileNotFoundError", "owner/name"),
        (["x", "--draft", "ssm-9"], "FileNotFoundError", "valid: 'ssm-1', 'ssm-2', 'ssm-3'"),
        (["x", "--file", "y"], "UsageError", "--file y"),
        (["--file", "/nowhere/prompt"], "FileNotFoundError", "/nowhere/prompt"),
        (["x", "--nodes", "many"], "ConfigError", "nodes='many'"),
        (["x", "--max-tokens", "0"], "ConfigError", "max_tokens=0"),
        (["x", "--max-tokens", "some"], "UsageError", "--max-tokens"),
        (["x", "--branching", "a,b"], "UsageError", "--branching a,b"),
        (["x", "--branching", "900,900"], "ConfigError", "branching"),
        (["x", "--no-spec", "--nodes", "4"], "UsageError", "--no-spec"),
        (["x", "--stream"], "UsageError", "--stream"),
        (["x", "--maxtokens", "4"], "UsageError", "--maxtokens"),
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


def test_errors_of_the_engine(loaded: LLM, models: Models) -> None:
    ran = run("generate", "z" * 2000, "--json", code=2)
    assert ran.document["error"]["type"] == "RequestError" and "max_model_len" in ran.document["error"]["message"]
    not_utf8 = run("generate", stdin=b"\xff\xfe", code=2)
    assert "UTF-8" in not_utf8.stderr
    ran = run("tree", PROMPT, "--round", "999", code=2)
    assert "--round 999" in ran.stderr and "valid: 1 to" in ran.stderr
    assert "--round 0" in run("tree", PROMPT, "--round", 0, code=2).stderr


def test_options_of_a_bad_device_or_dtype(models: Models) -> None:
    assert "dtype='int3'" in run("generate", "x", *models.arguments, "--dtype", "int3", code=2).stderr
    assert "device='abacus'" in run("tree", "x", *models.arguments, "--device", "abacus", code=2).stderr


def test_a_bug_keeps_its_traceback(loaded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> tuple[np.ndarray, int]:
        raise ValueError("no user's error")

    monkeypatch.setattr(treespec.engine.host_executor, "verify_request", broken)
    result = CliRunner().invoke(app, ["generate", PROMPT])
    assert isinstance(result.exception, ValueError) and result.exit_code == 1
    loaded.engine.check_integrity()


def test_ctrl_c(loaded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> tuple[np.ndarray, int]:
        raise KeyboardInterrupt

    monkeypatch.setattr(treespec.engine.host_executor, "verify_request", interrupted)
    ran = run("generate", PROMPT, "--model", "embedded", code=130)
    assert ran.stderr == "interrupted\n"
    assert run("generate", PROMPT, "--json", code=130).document["error"]["message"] == "interrupted"
    loaded.engine.check_integrity()


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
def test_ctrl_c_while_it_starts(module: str, handled: str, models: Models) -> None:
    """Whatever is being imported: no traceback, and it ends."""
    command = ["generate", "x", "--model", str(models.target), "--no-compile"]
    ran = program("-c", INTERRUPTED_START, module, handled, *command)
    assert (ran.returncode, ran.stderr, ran.stdout) == (130, "interrupted\n", "")


@pytest.mark.slow
def test_ctrl_c_while_libraries_are_compiled(models: Models, tmp_path: Path) -> None:
    """As from a terminal: the compilers get it, too."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\nmkdir {tmp_path}/first && kill -INT 0\nexec sleep 60\n")
    compiler.chmod(0o755)
    command = ["generate", "x", "--model", str(models.target), "--compile"]
    ran = program("-m", "treespec", *command, CXX=str(compiler), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert (ran.returncode, ran.stderr) == (130, "interrupted\n")


def test_only_what_works_is_offered() -> None:
    for arguments in (["server"], ["server", "--anything", "x"]):
        message = run(*arguments, "--json", code=2).document["error"]["message"]
        assert "'server'" in message and message.endswith(
            "Valid: generate, serve, bench, tree, train, autotune, weights"
        )
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras.keys() == {"test", "serve", "ray", "structured", "sentencepiece", "gguf"}


def test_unknown_commands_and_the_weights(models: Models) -> None:
    assert "generat" in run("generat", "x", "--json", code=2).document["error"]["message"]
    assert "inspect" in run("weights", "--help").stdout and "inspect" in run("weights").stdout
    assert run("weights", "inspect", models.target, "--json").document["family"] == "llama"
    assert run("weights", "verify", models.target, "--json").document["ok"] is True
    assert run("weights", "inspect", "/nowhere", "--json", code=2).document["error"]["type"] == "FileNotFoundError"
    assert run("weights", "inspect", "--json", code=2).document["error"]["type"] == "UsageError"
    assert "generate" in run().stdout and run("--version").stdout.startswith("treespec ")


# --- tree


def test_the_drawn_tree_is_the_real_one(loaded: LLM) -> None:
    output = loaded.generate(PROMPT, SamplingParams(max_tokens=64))[0]
    sequence = output.prompt_token_ids + output.outputs[0].token_ids
    at = len(output.prompt_token_ids)
    for number in range(1, 6):
        document = run("tree", PROMPT, "--round", number, "--json").document
        tokens, path = document["tokens"], document["path"]
        assert len(tokens) == 16 and document["round"] == number
        assert document["context"] == sequence[: at - 1] and tokens[0] == sequence[at - 1]
        assert document["emitted"] == [tokens[i] for i in path[1:]] + [document["bonus"]]
        assert document["emitted"] == sequence[at : at + len(document["emitted"])]
        assert [document["parents"][i] for i in path] == [-1, *path[:-1]]
        assert [document["depths"][i] for i in path] == list(range(len(path)))
        assert document["sources"][0] == [] and document["probs"][0] is None
        assert all(document["sources"][1:]) and all(0 < p <= 1 for p in document["probs"][1:])
        assert {len(document[key]) for key in ("tokens", "texts", "parents", "depths", "sources", "probs")} == {16}
        at += len(document["emitted"])


def test_tree_as_text_and_svg(loaded: LLM, tmp_path: Path) -> None:
    ran = run("tree", PROMPT, "--svg", tmp_path / "tree.svg")
    document = run("tree", PROMPT, "--json").document
    first, *lines = ran.stdout.splitlines()
    assert first.startswith(f"round {document['round']}, the best of the first 8: they accepted ")
    accepted = [int(count) for count in first.split("accepted ")[1].split()[:8]]
    assert accepted[document["round"] - 1] == max(accepted) == len(document["path"]) - 1 > 0
    assert sum("●" in line or "○" in line for line in lines) == 16 + 1  # the legend
    assert f"accepted {max(accepted)} of 15 drafted nodes + 1 bonus token" in ran.stdout and "\x1b" not in ran.stdout
    root = ElementTree.parse(tmp_path / "tree.svg").getroot()
    groups = [group.get("class") for group in root.iter("{http://www.w3.org/2000/svg}g")]
    assert groups.count("on") == max(accepted) and groups.count("off") == 15 - max(accepted)
    assert str(tmp_path / "tree.svg") in ran.stderr
    assert "missing" in run("tree", PROMPT, "--svg", tmp_path / "missing" / "tree.svg", code=2).stderr


def test_tree_options(models: Models) -> None:
    fixed = run("tree", PROMPT, *models.arguments, "--branching", "3,2", "--round", 1, "--json").document
    assert fixed["depths"] == [0, 1, 1, 1, 2, 2, 2, 2, 2, 2]


def test_watching_a_stop_inside_the_path(llm: LLM) -> None:
    before: list[int] = []
    for each in record_rounds(llm, PROMPT, 20):
        new = [token for token in each.emitted[:-2] if token not in before]
        if new:
            break
        before += each.emitted
    with watch(llm.engine) as rounds:
        [output] = llm.generate(PROMPT, SamplingParams(max_tokens=200, stop_token_ids=[new[0]]))
    assert [token for one in rounds for token in one.emitted] == output.outputs[0].token_ids
    assert rounds[-1].emitted[-1] == new[0] and rounds[-1].bonus is None and rounds[-1].number == each.number
    assert [one.number for one in rounds] == list(range(1, len(rounds) + 1))
    assert not llm.engine.observers


def test_texts_of_nodes_follow_their_own_path(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    context, [root, *path] = tokenizer.encode("def add("), tokenizer.encode("self, other")
    tree = tree_of(root, {tuple(path[:depth]): 0.5 for depth in range(1, len(path))} | {(path[0], root): 0.2})
    accepted = [0, *(node for node in range(1, len(tree)) if tree.tokens[node] == path[tree.depths[node] - 1])]
    shown = picture(RoundRecord("r", 1, context, tree, np.array(accepted), path[-1]), tokenizer)
    accepted_text = "".join(shown.tokens[node] for node in shown.path)
    assert shown.context + accepted_text + str(shown.bonus) == "def add(self, other"


# --- as programs


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from treespec.cli import app\n"
        "for arguments in ['--help'], ['generate', '--help'], ['--version']:\n"
        "    try: app(arguments)\n"
        "    except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers', 'numpy'} & sys.modules.keys()"
    )
    done = program("-c", code)
    assert done.returncode == 0, done.stderr
    assert "Also decode plainly" in program("-m", "treespec", "generate", "--help", COLUMNS="200").stdout


def test_the_program(models: Models) -> None:
    done = program("-m", "treespec", "generate", PROMPT, *models.arguments, "--max-tokens", "8", "--check", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["identical"] is True
    assert done.stderr.splitlines()[-1] == "identical to plain decoding: 8 tokens"


def test_colour_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert uses_colour(Terminal()) and not uses_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not uses_colour(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not uses_colour(Terminal())
