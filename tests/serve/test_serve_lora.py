"""LoRA adapters of a server, which requests choose by the name of their model."""

import json
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.helpers.commands import run
from tests.helpers.loras import lora_request, make_lora
from tests.helpers.models import greedy, tiny, tokens_of
from tests.helpers.serving import NAME, client_of, serving, wait_until
from tests.helpers.speech import speaking_folder, speaking_llm
from tests.serve.test_serve_audit import audited
from treespec import AsyncLLM
from treespec.errors import CheckpointError, ConfigError
from treespec.serve.options import ServerOptions


def test_the_model_of_a_request_chooses_the_adapter(tmp_path: Path) -> None:
    folders = [make_lora(tmp_path / name, tiny()[0], seed) for seed, name in enumerate("ab")]
    modules = [f"a={folders[0]}", json.dumps({"name": "b", "path": str(folders[1])})]
    llm = speaking_llm(enable_lora=True, enable_prefix_caching=True)
    prompt = llm.get_tokenizer().encode("def add(" * 30)
    options: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    with AsyncLLM(llm) as engine:
        with serving(engine, lora_modules=modules, audit=1) as url, client_of(url) as client:
            told = {model["id"]: model for model in httpx2.get(f"{url}/v1/models").json()["data"]}
            assert list(told) == [NAME, "other", "a", "b"] and client.models.retrieve("a").id == "a"
            assert (told["a"]["root"], told["a"]["parent"]) == (str(folders[0]), NAME) and "parent" not in told[NAME]
            answers = {
                name: client.completions.create(model=name, prompt=prompt, max_tokens=9, **options)
                for name in ("a", NAME, "b", "a")
            }
            said = {name: answer.choices[0].token_ids for name, answer in answers.items()}
            with pytest.raises(openai.NotFoundError, match="model 'c'; this server has 'speaking', 'other', 'a', 'b'"):
                client.completions.create(model="c", prompt=prompt)
            wait_until(lambda: audited(url)[0] == 4 * 9)
            assert audited(url)[1] == 0  # decoded again with their adapters
        for name, lora in {"a": folders[0], "b": folders[1], NAME: None}.items():
            outputs = llm.generate(prompt, greedy(9), "off", lora_request=None if lora is None else lora_request(lora))
            assert tokens_of(outputs) == [said[name]]
        assert len({tuple(tokens) for tokens in said.values()}) == 3
        with pytest.raises(CheckpointError, match=r"adapter_config\.json"), serving(engine, lora_modules=["x=."]):
            pass


@pytest.mark.parametrize("module", ["a", "=b", "a=", '{"name": "a"}', "{a=b"])
def test_modules_that_are_refused(module: str) -> None:
    with pytest.raises(ConfigError, match=r"lora_modules=.*; valid: NAME=FOLDER, or"):
        ServerOptions(lora_modules=[module]).loras()
    with pytest.raises(ConfigError, match="the name 'a' is taken"):
        ServerOptions(lora_modules=["b=c", "a=b"], served_model_name=["a"]).loras()


@pytest.mark.slow
def test_a_command_with_an_adapter(tmp_path: Path) -> None:
    lora = make_lora(tmp_path / "lora", tiny()[0], 3)
    llm, prompt = speaking_llm(enable_lora=True, enable_prefix_caching=True), "def add("
    given = "generate", prompt, "--model", speaking_folder(), "--lora", lora, "--max-tokens", 8
    (expected,) = llm.generate(prompt, greedy(8, ignore_eos=False), lora_request=lora_request(lora))
    assert run(*given, "--json").document["token_ids"] == expected.outputs[0].token_ids
    assert "identical to plain decoding: 8 tokens" in run(*given, "--check").stderr
