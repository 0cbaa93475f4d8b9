"""The Python API: prompts, text, streams, where a request ends, and what is left behind."""

import itertools

import pytest

from tests.helpers.models import greedy, open_llm, random_prompts, tiny, tiny_llm
from tests.helpers.sharing import assert_clean
from tests.helpers.speech import END, checked, scripted, speaking_folder, speaking_llm
from treespec import SamplingParams, SpecConfig

TREE = SpecConfig(nodes=32, max_depth=8)
ALONE = SpecConfig(nodes=32, max_depth=8, sources=("oracle",))  # SSMs, which are not scripted, would doubt the oracle


def ids(text: str) -> list[int]:
    return list(speaking_llm().get_tokenizer().encode(text))


# --- prompts


def test_prompt_forms() -> None:
    llm, params = speaking_llm(), greedy(6)
    texts = ["def f(x):", "import os"]
    a, b = llm.generate(texts, params)
    assert [o.prompt for o in (a, b)] == texts
    assert a.prompt_token_ids == ids(texts[0])
    assert a.request_id != b.request_id
    (completion,) = a.outputs
    one = completion.token_ids
    assert a.finished and a.error is None
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
    assert completion.logprobs is None and completion.cumulative_logprob is None
    assert completion.text == llm.get_tokenizer().decode(one, skip_special_tokens=True)
    token_ids = ids(texts[0])
    both = {"prompt": texts[0], "prompt_token_ids": token_ids}
    for form in (texts[0], token_ids, tuple(token_ids), {"prompt_token_ids": token_ids}, {"prompt": texts[0]}, both):
        (output,) = llm.generate(form, params)  # type: ignore[arg-type]
        assert output.outputs[0].token_ids == one, form
        assert output.prompt == (texts[0] if isinstance(form, str) or "prompt" in form else None)
        assert output.prompt_token_ids == token_ids
    mixed = llm.generate([{"prompt_token_ids": ids(texts[1])}, texts[0], ids(texts[1])], params)
    assert [o.outputs[0].token_ids for o in mixed] == [b.outputs[0].token_ids, one, b.outputs[0].token_ids]
    assert llm.generate([], params) == []


def test_without_a_tokenizer_all_is_ids() -> None:
    llm = tiny_llm()
    assert llm.get_tokenizer() is None
    (output,) = llm.generate([5, 6, 7], greedy(3))
    assert output.outputs[0].text is None and len(output.outputs[0].token_ids) == 3
    chunks = list(llm.stream([5, 6, 7], greedy(3)))
    assert [chunk.text for chunk in chunks] == [None] * len(chunks)
    assert list(itertools.chain(*(chunk.token_ids for chunk in chunks))) == output.outputs[0].token_ids


def test_a_tokenizer_from_elsewhere() -> None:
    for tokenizer in (speaking_folder(), str(speaking_folder()), speaking_llm().get_tokenizer()):
        llm = open_llm(tiny()[0], tokenizer=tokenizer)
        (output,) = llm.generate("def f(x):", greedy(4))
        decode, tokens = speaking_llm().get_tokenizer().decode, output.outputs[0].token_ids
        assert output.outputs[0].text == decode(tokens, skip_special_tokens=True)


# --- streams


@pytest.mark.parametrize(
    "spec", [TREE, pytest.param(SpecConfig(), marks=pytest.mark.slow), "off"], ids=["tree", "auto", "off"]
)
def test_a_stream_concatenates_to_the_text(spec: SpecConfig | str) -> None:
    """A random model emits random bytes: broken characters of every kind."""
    llm = speaking_llm()
    for prompt in random_prompts((4, 33), seed=1):
        (whole,) = llm.generate(prompt, greedy(48), spec="off")
        chunks = list(llm.stream(prompt, greedy(48), spec))
        final = chunks[-1].output
        assert final is not None and all(chunk.output is None for chunk in chunks[:-1])
        assert final.outputs[0].token_ids == whole.outputs[0].token_ids
        assert [t for chunk in chunks for t in chunk.token_ids] == whole.outputs[0].token_ids
        assert "".join(chunk.text or "" for chunk in chunks) == final.outputs[0].text
        assert final.outputs[0].text == whole.outputs[0].text
        assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert {chunk.request_id for chunk in chunks} == {final.request_id}


# --- where a request ends


@pytest.mark.parametrize("spec", [ALONE, "off"], ids=["tree", "off"])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    "stop, expected",
    [
        ("three", "one two "),
        (["absent", "e f"], "one two thre"),
        (["two", "two three"], "one "),  # the one that is complete first
        (" four 😀", "one two three"),
        ("o", ""),
    ],
)
def test_stop_strings_inside_an_accepted_path(
    stop: str | list[str], expected: str, include: bool, spec: SpecConfig | str
) -> None:
    llm, prompt = speaking_llm(), ids("count:")
    said = ids("one two three four 😀 five six")
    params = greedy(60, stop=stop, include_stop_str_in_output=include)
    with scripted(llm, [prompt + said]), checked(llm):
        (output,) = llm.generate(prompt, params, spec)
        chunks = list(llm.stream(prompt, params, spec))
    completion = output.outputs[0]
    stops = [stop] if isinstance(stop, str) else stop
    assert completion.finish_reason == "stop" and completion.stop_reason in stops
    assert completion.text == expected + (str(completion.stop_reason) if include else "")
    # token_ids end with the token that completed the stop string.
    decode = llm.get_tokenizer().decode
    count = next(n for n in range(1, len(said)) if any(s in decode(said[:n]) for s in stops))
    assert completion.token_ids == said[:count]
    assert "".join(chunk.text or "" for chunk in chunks) == completion.text
    assert [t for chunk in chunks for t in chunk.token_ids] == completion.token_ids
    assert chunks[-1].output is not None and chunks[-1].output.outputs[0] == completion
    assert_clean(llm)
    if spec != "off":
        assert output.metrics.target_passes <= -(-count // 9)


@pytest.mark.parametrize("spec", [TREE, "off"], ids=["tree", "off"])
def test_the_end_token_inside_an_accepted_path(spec: SpecConfig | str) -> None:
    llm, prompt = speaking_llm(), ids("say: ")
    said = [*ids("one two"), 0, *ids("three")]
    with scripted(llm, [prompt + said]), checked(llm):
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=60), spec)
        (ignoring,) = llm.generate(prompt, greedy(len(said)), spec)
        (shown,) = llm.generate(prompt, greedy(len(said), skip_special_tokens=False), spec)
        chunks = list(llm.stream(prompt, SamplingParams(max_tokens=60, skip_special_tokens=False), spec))
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("one two", "stop", None)
    assert completion.token_ids == said[: said.index(0) + 1]
    assert "".join(chunk.text or "" for chunk in chunks) == "one two"
    assert ignoring.outputs[0].token_ids == said and ignoring.outputs[0].finish_reason == "length"
    assert ignoring.outputs[0].text == "one twothree"
    assert shown.outputs[0].text == f"one two{END}three"


@pytest.mark.parametrize("at", [0, 1, 4, 8, 9, 10, 17])
def test_stop_tokens_inside_an_accepted_path(at: int) -> None:
    """Nothing is emitted past it, wherever in the path it stands: first, last, bonus, next round's."""
    llm = tiny_llm()
    prompt, said = [7, 8, 9], [100 + i for i in range(24)]
    params = greedy(24, stop_token_ids=[100 + at, 100 + at + 3, 5])
    with scripted(llm, [prompt + said]) as oracle, checked(llm):
        (output,) = llm.generate(prompt, params, ALONE)
    completion = output.outputs[0]
    assert completion.token_ids == said[: at + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", 100 + at)
    assert output.metrics.target_passes == at // 9 + 1
    # A bonus token is no drafted one: of 9 tokens a round, 8 count for the oracle.
    assert output.metrics.accepted_by_source["oracle"] == at + 1 - (at + 1) // 9
    assert oracle.released == [output.request_id]
    assert_clean(llm)


@pytest.mark.parametrize("prompt_tokens", [1, 62, 63])
def test_the_end_of_the_context(prompt_tokens: int) -> None:
    llm = tiny_llm(ssms=(0,), max_model_len=64, max_num_seqs=4)
    prompt = random_prompts((prompt_tokens,))[0]
    outputs = [llm.generate(prompt, greedy(most), spec)[0] for most, spec in ((1000, "off"), (None, TREE))]
    (longer,) = tiny_llm().generate(prompt, greedy(64 - prompt_tokens), "off")
    for output in outputs:
        assert output.outputs[0].token_ids == longer.outputs[0].token_ids
        assert len(output.outputs[0].token_ids) == 64 - prompt_tokens
        assert output.outputs[0].finish_reason == "length"
    assert_clean(llm)
