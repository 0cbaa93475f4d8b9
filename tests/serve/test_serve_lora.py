"""LoRA adapters of a server, which requests choose by the name of their model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.helpers.commands import run
from tests.helpers.loras import lora_request, make_lora
from tests.helpers.models import greedy, tiny, tokens_of
from tests.helpers.serving import NAME, PATIENCE, client_of, serving, wait_until
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


def test_adapters_are_loaded_and_unloaded_while_the_server_runs(tmp_path: Path) -> None:
    folder, other = (make_lora(tmp_path / name, tiny()[0], seed) for seed, name in enumerate("ab"))
    wide = make_lora(tmp_path / "wide", tiny()[0], 2, r=9)
    llm = speaking_llm(enable_lora=True, enable_prefix_caching=True, max_lora_rank=8)
    prompt = llm.get_tokenizer().encode("def add(" * 30)
    loras = [lora_request(each) for each in (folder, other)]
    expected = [tokens_of(llm.generate(prompt, greedy(40), "off", lora_request=lora)) for lora in loras]
    options: dict[str, Any] = {"extra_body": {"ignore_eos": True, "return_token_ids": True}, "max_tokens": 40}

    with AsyncLLM(llm) as engine:
        with serving(engine, allow_runtime_lora_updating=True, audit=1) as url, client_of(url) as client:

            def call(what: str, **body: Any) -> tuple[int, str]:
                answer = httpx2.post(f"{url}/v1/{what}_lora_adapter", json={"lora_name": "a", **body}, timeout=PATIENCE)
                return answer.status_code, answer.text

            def stream() -> Iterator[int]:
                chunks = client.completions.create(model="a", prompt=prompt, temperature=0, stream=True, **options)
                return (token for chunk in chunks for choice in chunk.choices for token in choice.token_ids)

            assert call("load", lora_path=str(folder)) == (200, "loaded LoRA adapter 'a'")
            assert [model.id for model in client.models.list()] == [NAME, "other", "a"]
            for body, message in (
                ({"lora_path": str(other)}, "lora_name='a' is taken; load_inplace=true replaces"),
                ({"lora_name": NAME, "lora_path": "b", "load_inplace": True}, "lora_name='speaking' is taken"),
                ({"lora_name": "b", "lora_path": str(tmp_path)}, "'adapter_config.json': no such file"),
                ({"lora_name": "b", "lora_path": "/nowhere"}, "lora_path='/nowhere': no such checkpoint folder"),
                ({"lora_name": "b", "lora_path": str(wide)}, "of rank 9, above max_lora_rank=8; raise it"),
                ({"lora_name": "", "lora_path": "b"}, "lora_name='': String should have at least 1 character"),
            ):
                status, text = call("load", **body)
                assert status == 400 and message in json.loads(text)["error"]["message"]
            running = [stream(), stream()]
            begun = [[next(tokens)] for tokens in running]
            for name in ("adapter_config.json", "adapter_model.safetensors"):
                (folder / name).write_bytes((other / name).read_bytes())
            assert call("load", lora_path=str(folder), load_inplace=True)[0] == 200
            replaced = stream()
            assert [*replaced] == expected[1][0]
            assert call("unload") == (200, "unloaded LoRA adapter 'a'")
            assert [[*first, *rest] for first, rest in zip(begun, running, strict=True)] == [expected[0][0]] * 2
            assert [model.id for model in client.models.list()] == [NAME, "other"]
            status, text = call("unload")
            assert status == 404 and "lora_name='a'; loaded adapters: none" in text
            client.completions.create(model=NAME, prompt=prompt, temperature=0, **options)
            wait_until(lambda: audited(url)[0] >= 40)
            assert audited(url)[1] == 0  # of replaced adapters, requests are not decoded again
        with serving(engine) as url:
            refused = httpx2.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": "a"})
            assert refused.status_code == 403 and "--allow-runtime-lora-updating" in refused.text


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
