"""The table of docs/vllm.md: which of vLLM's offline examples run, and what the others are told to do instead."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import ROOT
from tests.helpers.loras import make_lora
from tests.helpers.models import open_llm, quick, quick_start, tiny
from tests.helpers.serving import TEMPLATE
from tests.helpers.speech import speaking_folder
from tests.helpers.vllm_scripts import ANSWERED, IMPORTS, SERVED, Script, ported
from treespec import LLM, LLMEngine, RequestOutput, SamplingParams
from treespec.errors import ConfigError, RequestError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a tokenizer and a chat template."""
    copy = tmp_path_factory.mktemp("scripts") / "model"
    shutil.copytree(speaking_folder(), copy)
    path = copy / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return copy


@pytest.fixture(scope="module")
def reference(folder: Path) -> LLM:
    return open_llm(folder, enable_lora=True)


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Iterator[Callable[[Script], dict[str, Any]]]:
    """Runs a script with its import lines changed; what it leaves behind. Engines are proven once."""

    def play(script: Script) -> dict[str, Any]:
        argv = [str(folder) if word == "MODEL" else word for word in script.argv.split()]
        names: dict[str, Any] = {"MODEL": str(folder), "DRAFT": str(tiny()[1][0]), "ARGV": argv}
        names["LORA"] = str(make_lora(tmp_path, folder, 1))
        names["prompts"] = ["def add(", "import os", "class A:", "    return"]
        exec(compile(ported(script.text), "script", "exec"), names)
        return names

    with quick_start():
        yield play


@pytest.mark.parametrize(
    "name",
    quick(SERVED, ("generate & run_one_batch", "chat", "structured_outputs", "async_llm_streaming", "spec_decode")),
)
def test_examples_that_run(name: str, run: Callable[[Script], dict[str, Any]], reference: LLM) -> None:
    if name == "structured_outputs":
        pytest.importorskip("llguidance")
    left = run(SERVED[name])
    outputs: Sequence[RequestOutput] = left["outputs"]
    params = left["params"] if isinstance(left["params"], list) else [left["params"]] * len(outputs)
    assert len(outputs) == len(left["prompts"]) == len(params)
    loras = left.get("loras", [None] * len(outputs))
    for output, given, lora in zip(outputs, params, loras, strict=True):
        same = given.clone()
        same.seed = output.metrics.seed
        (expected,) = reference.generate(output.prompt_token_ids, same, spec="off", lora_request=lora)
        assert output.finished and output.error is None
        assert output.outputs == expected.outputs and output.prompt_logprobs == expected.prompt_logprobs


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERED)
def test_examples_that_are_answered(name: str, run: Callable[[Script], dict[str, Any]]) -> None:
    script, answer = ANSWERED[name]
    with pytest.raises((ValueError, ImportError), match=answer):
        run(script)


def test_the_documented_table() -> None:
    text = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    assert not [name for names in SERVED for name in names.split(" & ") if f"| {name} | runs" not in text]
    assert not [name for name in ANSWERED if f"| {name} | " not in text or f"| {name} | runs" in text]
    assert not [old for old, new in IMPORTS if f"| `{old}` | `{new}` |" not in text]


@pytest.mark.slow
def test_steps_give_the_tokens_so_far(reference: LLM) -> None:
    engine = LLMEngine(reference)
    params = SamplingParams(max_tokens=12, stop=["never"], ignore_eos=True)
    engine.add_request("a", "def add(", params)
    with pytest.raises(ConfigError, match="request_id='a' is in use"):
        engine.add_request("a", "x", params)
    with pytest.raises(RequestError, match="an empty prompt"):
        engine.add_request("b", "", params)
    params.max_tokens = 1  # the request has its own
    seen: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        seen += engine.step()
    assert {output.request_id for output in seen} == {"a"} and len(seen) > 2
    assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
    tokens, texts = ([getattr(o.outputs[0], name) for o in seen] for name in ("token_ids", "text"))
    assert all(tokens[-1][: len(part)] == part for part in tokens) and len(tokens[-1]) == 12
    assert all(texts[-1].startswith(part) for part in texts)
    params.max_tokens = 12
    assert seen[-1].outputs == reference.generate("def add(", params)[0].outputs


@pytest.mark.slow
def test_a_stepped_request_is_aborted(reference: LLM) -> None:
    engine = LLMEngine(reference)
    engine.add_request("a", "def add(", SamplingParams(max_tokens=100, ignore_eos=True))
    engine.step()
    engine.abort_request(["a", "unknown"])
    (output,) = engine.step()
    assert output.finished and output.outputs[0].finish_reason == "abort" and not engine.has_unfinished_requests()
    assert engine.step() == [] and reference.engine.scheduler.is_idle


@pytest.mark.slow
def test_missing_methods_are_missing_attributes(reference: LLM) -> None:
    assert not hasattr(reference, "embed") and getattr(reference, "sleep", None) is None
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'genrate'"):
        reference.genrate  # type: ignore[attr-defined]  # noqa: B018
