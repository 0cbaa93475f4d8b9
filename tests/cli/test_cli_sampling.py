"""`treespec generate` at a temperature: seeds, truncation, rules, several outputs, and what --check can say of them."""

import copy
from typing import Any

import pytest

from tests.helpers.commands import lend, run
from tests.helpers.exactness import altered_logits
from tests.helpers.models import tiny_llm
from treespec import LLM, SamplingParams, SpecConfig

PROMPT = "5 6 7"
IDS = [5, 6, 7]
HOT = ["generate", PROMPT, "--temperature", "0.9", "--max-tokens", "12"]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Commands get an engine that is there already; it has no tokenizer."""
    llm = tiny_llm()
    lend(llm, monkeypatch)
    return llm


@pytest.fixture
def asked(loaded: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What commands ask of `LLM`; its speculation is used."""
    given: list[Any] = []

    def opened(model: Any, drafts: Any, spec: Any, max_num_seqs: int = 1, **options: Any) -> LLM:
        given.append({"spec": spec, "max_num_seqs": max_num_seqs})
        llm = copy.copy(loaded)
        llm.spec = SpecConfig.resolve(spec, loaded.spec)
        return llm

    lend(opened, monkeypatch)
    return given


def test_options_are_vllm_s(loaded: LLM) -> None:
    document = run(*HOT, "--seed", 7, "--top-p", 0.9, "--top-k", 40, "--min-p", 0.01, "--json").document
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=7, top_p=0.9, top_k=40, min_p=0.01)
    assert document["token_ids"] == loaded.generate(IDS, params, spec="off")[0].outputs[0].token_ids
    assert document["seed"] == 7 and "outputs" not in document
    assert document["token_ids"] != run(*HOT, "--seed", 7, "--json").document["token_ids"]


def test_a_seed_that_was_drawn_is_reported_and_gives_the_same(loaded: LLM) -> None:
    document = run(*HOT, "--json").document
    again = run(*HOT, "--seed", document["seed"], "--json").document
    assert document["token_ids"] == again["token_ids"] and document["seed"] == again["seed"]
    assert "finish reason: length, seed 11" in run(*HOT, "--seed", 11).stderr
    assert "seed" not in run("generate", PROMPT, "--max-tokens", 4).stderr


@pytest.mark.parametrize("rule", ["coupled", "naive"])
def test_check_decodes_with_the_same_seed(rule: str, asked: list[Any]) -> None:
    ran = run(*HOT, "--check", "--verification", rule, "--json")
    assert ran.document["identical"] is True
    assert asked[0]["spec"].verification == rule
    ran = run(*HOT, "--check", "--verification", rule, "--seed", 3)
    assert ran.stderr.splitlines()[-2] == "identical to plain decoding with seed 3: 12 tokens"


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_check_is_refused_where_tokens_are_others_by_design(rule: str, asked: list[Any]) -> None:
    document = run(*HOT, "--check", "--verification", rule, "--json", code=2).document
    assert document["error"]["type"] == "UsageError"
    message = document["error"]["message"]
    assert f"--verification {rule} preserves the distribution" in message and "use --verification coupled" in message
    assert not asked, "before anything is loaded"
    drawn = run(*HOT, "--verification", rule, "--json").document
    assert len(drawn["token_ids"]) == 12 or drawn["finish_reason"] == "stop", "by chance it meets the end token"
    greedy = run("generate", PROMPT, "--max-tokens", 12, "--verification", rule, "--check", "--json").document
    assert greedy["identical"] is True


def test_several_outputs(asked: list[Any], loaded: LLM) -> None:
    document = run(*HOT, "-n", 3, "--seed", 2, "--check", "--json").document
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=2, n=3)
    [expected] = loaded.generate(IDS, params, spec="off")
    assert [each["token_ids"] for each in document["outputs"]] == [each.token_ids for each in expected.outputs]
    assert document["token_ids"] == document["outputs"][0]["token_ids"] and document["identical"] is True
    assert asked[0]["max_num_seqs"] == 3, "decoded side by side"
    lines = run(*HOT, "--samples", 3, "--seed", 2).stdout.splitlines()
    assert lines[::2] == [f"--- output {i} of 3 ---" for i in (1, 2, 3)]
    for line, each in zip(lines[1::2], expected.outputs, strict=True):
        assert line == " ".join(map(str, [*IDS, *each.token_ids]))


def test_a_difference_names_its_output(loaded: LLM) -> None:
    def wrong(request: Any, tree: Any, logits: Any) -> None:
        if request.sample == 1 and request.spec.nodes != 1:
            logits.copy_(logits.roll(1, 1))

    with altered_logits(loaded, wrong):
        ran = run(*HOT, "-n", 2, "--seed", 2, "--check", "--json", code=1)
        assert ran.document["first_difference"]["output"] == 1 and ran.document["first_difference"]["index"] == 0
        assert "output 2, position 0 (" in run(*HOT, "-n", 2, "--seed", 2, "--check", code=1).stderr


def test_one_stream_has_one_output(loaded: LLM) -> None:
    assert "-n 2 generates several" in run(*HOT, "-n", 2, "--stream", code=2).stderr
    whole, streamed = run(*HOT, "--seed", 4).stdout, run(*HOT, "--seed", 4, "--stream", "--check").stdout
    assert whole == streamed
