"""Options of vLLM's calls: truncated prompts, outputs without text, and those that are refused."""

import shutil
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PrefixConstrainedLogitsProcessor, PreTrainedTokenizerFast

from tests.helpers.models import greedy, open_llm, random_prompts, tiny, tiny_llm
from tests.helpers.quantized_checkpoints import quantize_folder
from tests.helpers.speech import END, speaking_folder, speaking_llm
from treespec import LLM, SamplingParams
from treespec.errors import ConfigError, RequestError

PROMPT = "def add("

# --- truncated prompts


TRUNCATE = "truncate_prompt_tokens"


def test_the_last_tokens_of_a_prompt() -> None:
    llm = tiny_llm()
    long, short = random_prompts((40, 9))
    outputs = llm.generate([long, short], greedy(4, prompt_logprobs=0), tokenization_kwargs={TRUNCATE: 12})
    assert [output.prompt_token_ids for output in outputs] == [long[-12:], short]
    assert outputs[0].outputs == llm.generate(long[-12:], greedy(4))[0].outputs
    assert [len(output.prompt_logprobs or ()) for output in outputs] == [12, 9]
    chunks = list(llm.stream(long, greedy(4), tokenization_kwargs={TRUNCATE: np.int64(12)}))
    assert chunks[-1].output is not None and chunks[-1].output.outputs == outputs[0].outputs
    for nothing in (None, {}, {TRUNCATE: None, "add_special_tokens": None}):
        assert llm.generate(long, greedy(4), tokenization_kwargs=nothing)[0].prompt_token_ids == long


def test_as_much_of_a_prompt_as_the_context_holds() -> None:
    llm = tiny_llm()
    most = llm.config.max_model_len
    (prompt,) = random_prompts((most + 50,))
    (output,) = llm.generate(prompt, greedy(4), tokenization_kwargs={TRUNCATE: -1})
    assert output.prompt_token_ids == prompt[-(most - 1) :] and len(output.outputs[0].token_ids) == 1
    (output,) = llm.generate(prompt, greedy(4), tokenization_kwargs={TRUNCATE: -1, "max_output_tokens": 4})
    assert output.prompt_token_ids == prompt[-(most - 4) :] and len(output.outputs[0].token_ids) == 4
    with pytest.raises(RequestError, match=f"a prompt of {most - 3} tokens and max_tokens=4 exceed; ask for at most 3"):
        llm.generate(prompt[3 - most :], greedy(4), tokenization_kwargs={"max_output_tokens": 4})
    with pytest.raises(RequestError, match=f"at most {most - 1} of a prompt of {most} tokens; "):
        llm.generate(prompt, greedy(4), tokenization_kwargs={TRUNCATE: most})
    wrong: list[tuple[Any, str]] = [
        *(({TRUNCATE: bad}, f"={bad!r}; valid: None, 1 to max_model_len={most}, or -1") for bad in (0, most + 1, True)),
        ({"truncation": True}, "tokenization_kwargs: unknown 'truncation' .*valid: add_special_tokens, max_"),
        ({"max_output_tokens": 0}, "max_output_tokens=0; valid: None, or an int"),
        ({"add_special_tokens": 1}, "add_special_tokens=1; valid: None, True or False"),
        ([9], r"tokenization_kwargs=\[9\]; valid: None or a dict"),
    ]
    for options, message in wrong:
        with pytest.raises(ConfigError, match=message):
            llm.generate(prompt, greedy(4), tokenization_kwargs=options)


def with_marks() -> PreTrainedTokenizerFast:
    """The speaking model's tokenizer with a token before a text and two behind it, which truncates as vLLM's do."""
    own = Tokenizer.from_file(str(speaking_folder() / "tokenizer.json"))
    own.add_special_tokens(["<|a|>", "<|b|>"])
    marks = [("<|a|>", 5), ("<|b|>", 7)]
    own.post_processor = TemplateProcessing(single="<|a|> $A <|b|> <|b|>", special_tokens=marks)
    return PreTrainedTokenizerFast(tokenizer_object=own, truncation_side="left", eos_token=END)


def test_a_truncated_text_keeps_its_special_tokens() -> None:
    """As transformers' tokenizers truncate, which vLLM lets do it; where only token ids are known they are cut."""
    tokenizer, text = with_marks(), "def add(first, second):\n    return first + second"
    llm = open_llm(tiny()[0], tokenizer=tokenizer)
    whole = tokenizer.encode(text)
    assert whole[0] == 5 and whole[-2:] == [7, 7] and len(whole) > 12

    def used(prompt: Any, **options: Any) -> list[int]:
        return llm.generate(prompt, greedy(1), tokenization_kwargs=options)[0].prompt_token_ids

    for count in (4, 10, len(whole) - 1, len(whole), len(whole) + 1):
        expected = tokenizer.encode(text, truncation=True, max_length=count)
        assert used(text, **{TRUNCATE: count}) == used({"prompt": text}, **{TRUNCATE: count}) == expected
        assert used(whole, **{TRUNCATE: count}) == whole[-count:]
        bare = tokenizer.encode(text, add_special_tokens=False)
        assert used(text, add_special_tokens=False, **{TRUNCATE: count}) == bare[-count:]
    assert used(text, **{TRUNCATE: 2}) == whole[-2:], "less than the special tokens"
    tokenizer.chat_template = "{{ messages[0].content }}"
    said, options = [{"role": "user", "content": text}], {TRUNCATE: 5}
    (plain,) = llm.chat(said, greedy(1), tokenization_kwargs=options)
    (marked,) = llm.chat(said, greedy(1), tokenization_kwargs=options | {"add_special_tokens": True})
    assert plain.prompt_token_ids == bare[-5:] and plain.prompt == marked.prompt == text
    assert marked.prompt_token_ids == [5, *bare[-2:], 7, 7]


# --- without text


def test_no_text_is_made() -> None:
    llm = speaking_llm()
    (plain,), (silent,) = (llm.generate(PROMPT, greedy(6, detokenize=make)) for make in (True, False))
    assert plain.outputs == [replace(silent.outputs[0], text=plain.outputs[0].text)]
    assert silent.outputs[0].text == "" and silent.prompt == PROMPT
    chunks = list(llm.stream(PROMPT, greedy(6, detokenize=False, bad_words=["zebra"], logprobs=1)))
    assert {chunk.text for chunk in chunks} == {""} and chunks[-1].output is not None
    assert chunks[-1].output.outputs[0].text == ""
    assert tiny_llm().generate([1, 2], greedy(2, detokenize=False))[0].outputs[0].text == ""
    with pytest.raises(ConfigError, match=r"stop=\('a',\) is searched in the text and needs detokenize=True"):
        SamplingParams(stop="a", detokenize=False)
    with pytest.raises(ConfigError, match="detokenize=None; valid: True, False"):
        SamplingParams(detokenize=None)


# --- vLLM's enum of outputs, and options that only vLLM has


def test_output_kinds() -> None:
    """As members of an enum like vLLM's RequestOutputKind, or by their names."""
    for kind in Enum("RequestOutputKind", ["CUMULATIVE", "DELTA", "FINAL_ONLY"]):
        for given in (kind, kind.name):
            assert SamplingParams(output_kind=given).output_kind.name == kind.name  # type: ignore[arg-type]
    for wrong in (1, "delta", [], True):
        with pytest.raises(ConfigError, match=r"output_kind=.*; valid: 'CUMULATIVE', 'DELTA', 'FINAL_ONLY'"):
            SamplingParams(output_kind=wrong)  # type: ignore[arg-type]


PARAMS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], str]] = {
    "guided_decoding": ((None,), ({"regex": "a+"},), "use SamplingParams(structured_outputs="),
    "extra_args": ((None, {}), ({"a": 1},), "give a logits processor its arguments"),
    "spaces_between_special_tokens": ((True,), (False,), "leave it out where special tokens are skipped"),
    "truncate_prompt_tokens": ((None,), (5, -1), "it is an option of the call"),
    "best_of": ((None, 1), (3,), "ask for n outputs"),
    "flat_logprobs": ((False,), (True,), "logprobs come as a list of dicts"),
    "logprob_token_ids": ((None, []), ([1],), "use logprobs=-1"),
}

CALLS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], str]] = {
    "prompt_token_ids": ((None,), ([[1, 2]],), "give the ids as prompts"),
    "mm_processor_kwargs": ((None, {}), ({"a": 1},), "prompts are text or token ids"),
}

# name: no-op values, hints, refused values, what to do instead
ENGINE: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...], str]] = {
    "tensor_parallel_size": ((1, None), (), (2,), "a model runs on one device"),
    "gpu_memory_utilization": ((0.9, None), (0.5, 1), (), "max_num_seqs and max_model_len bound the memory"),
    "trust_remote_code": ((False, True), (), (), ""),
    "cpu_offload_gb": ((0, 0.0), (), (4,), "use quantization='int8' or 'int4'"),
    "compilation_config": ((None, {}), (3, {"level": 3}), (), "compile and cuda_graphs say how passes run"),
    "kv_cache_dtype": (("auto",), (), ("fp8",), "the cache has the dtype that the exactness of passes needs"),
}


@pytest.mark.parametrize("name", ENGINE)
def test_options_of_engines_that_only_vllm_has(name: str, caplog: pytest.LogCaptureFixture) -> None:
    nothing, hints, refused, instead = ENGINE[name]
    for value in (*nothing, *hints):  # what is wrong beside it is found behind it
        caplog.clear()
        with pytest.raises(OSError, match="/no/such/folder"):
            LLM("/no/such/folder", **{name: value})
        said = [record.getMessage() for record in caplog.records]
        expected = f"LLM: ignored, as no token depends on them: {name}={value!r} ({instead}"
        assert [text.startswith(expected) for text in said] == [True] * (value in hints)
    for value in refused:
        with pytest.raises(ConfigError) as caught:
            LLM(**{name: value})
        assert str(caught.value).startswith(f"LLM: {name}={value!r} is not supported; {instead}")


def test_a_seed_of_the_engine() -> None:
    """Sampled requests without a seed get theirs from it, in the order of the calls."""
    params = SamplingParams(temperature=1.0, max_tokens=3)

    def seeds(**options: Any) -> list[int | None]:
        llm = open_llm(tiny()[0], **options)
        outputs = llm.generate([[1, 2], [3]], [params, SamplingParams(temperature=1.0, seed=5, max_tokens=3)])
        return [output.metrics.seed for output in (*outputs, *llm.generate([4], params))]

    first = seeds(seed=0)
    assert first == seeds(seed=0) and first[1] == 5 and first[0] != first[2]
    assert first != seeds(seed=1) and seeds() != seeds()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"speculative_config": {"method": "draft_model"}}, "is not supported; use drafts="),
    ({"speculative_config": {"method": "mtp", "model": "x"}}, "for the model's own MTP layer"),
    ({"speculative_config": {"model": "x"}, "drafts": ["y"]}, r"the draft 'x' beside drafts=\[\.\.\.\]; give one"),
    ({"speculative_config": "ngram"}, "speculative_config='ngram'; valid: a dict"),
    ({"seed": "x"}, "seed='x'; valid: an int from 0"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_engines_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**options)


def test_suffix_decoding_and_a_dtype_by_vllms_names() -> None:
    llm = open_llm(tiny()[0], speculative_config={"method": "suffix"}, dtype="half")
    llm.generate([1, 2, 3], greedy(4))
    assert llm.stats()["suffix_tokens"] > 0 and llm.stats()["frozen"]["dtype"] == "float16"


def test_quantisation_by_the_name_of_a_method(tmp_path: Path) -> None:
    folder = quantize_folder(Path(shutil.copytree(tiny()[0], tmp_path / "model")), 8, None)
    named, plain = (open_llm(folder, quantization=given) for given in ("compressed-tensors", None))
    assert named.stats()["frozen"]["quantization"] == plain.stats()["frozen"]["quantization"]
    assert named.generate([1, 2, 3], greedy(4))[0].outputs == plain.generate([1, 2, 3], greedy(4))[0].outputs
    for model, method in ((tiny()[0], "not quantised"), (folder, "compressed-tensors")):
        with pytest.raises(ConfigError, match=f"quantization='awq': leave it out; .*this one is {method}"):
            open_llm(model, quantization="awq")


@pytest.mark.parametrize("name", PARAMS)
def test_parameters_that_only_vllm_has(name: str) -> None:
    accepted, refused, instead = PARAMS[name]
    for value in accepted:
        assert SamplingParams(**{name: value}) == SamplingParams(), value
    for value in refused:
        with pytest.raises(ConfigError) as caught:
            SamplingParams(**{name: value})
        assert str(caught.value).startswith(f"SamplingParams: {name}={value!r} is not supported; {instead}")


@pytest.mark.parametrize("name", CALLS)
def test_options_of_calls_that_only_vllm_has(name: str) -> None:
    llm = speaking_llm()
    accepted, refused, instead = CALLS[name]
    prompts = [PROMPT, PROMPT]
    for value in accepted:
        assert len(llm.generate(prompts, greedy(1), **{name: value})) == 2
    for value in refused:
        for call in ("generate", "chat", "stream"):
            with pytest.raises(ConfigError) as caught:
                made = getattr(llm, call)(prompts, greedy(1), **{name: value})
                next(made)  # of a stream
            assert str(caught.value).startswith(f"{call}: {name}={value!r} is not supported; {instead}")


def test_a_constraint_of_transformers() -> None:
    llm = tiny_llm()
    allowed = PrefixConstrainedLogitsProcessor(lambda _, ids: [3, 4] if len(ids) % 2 else [5], 1)
    (output,) = llm.generate([1, 2], greedy(6, logits_processors=[allowed]))
    assert [token == 5 for token in output.outputs[0].token_ids] == [True, False] * 3
    assert set(output.outputs[0].token_ids) <= {3, 4, 5}
