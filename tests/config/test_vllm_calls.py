"""Calls as vLLM's users write them, parameters of any kind of number, and tokenizers of their own."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.helpers.models import EOS, edit_config, greedy, open_llm, tiny, tiny_llm
from tests.helpers.speech import END, scripted, speaking_folder, speaking_llm
from treespec import LLM, SamplingParams, SpecConfig
from treespec.errors import ConfigError
from treespec.outputs import CompletionOutput

PROMPT = "def add("


def test_a_progress_bar_and_unknown_keywords(capsys: pytest.CaptureFixture[str]) -> None:
    llm = tiny_llm()
    capsys.readouterr()
    llm.generate([[1, 2], [3]], greedy(3))
    llm.generate([[1, 2], [3]], greedy(3), use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate([[1, 2], [3]], greedy(3), use_tqdm=True)
    assert "outputs: 100%" in capsys.readouterr().err
    bar = mock.MagicMock()
    llm.generate([[1, 2], [3]], greedy(3), use_tqdm=bar)
    assert bar.call_args.kwargs["total"] == 2
    with pytest.raises(ConfigError, match="use_tqdm='no'"):
        llm.generate([1, 2], greedy(3), use_tqdm="no")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"chat: unknown 'tool' \(did you mean 'tools'\?\)"):
        llm.chat([{"role": "user", "content": PROMPT}], tool=[])


def test_logprobs_of_the_whole_vocabulary() -> None:
    llm = tiny_llm()
    (all_of_them,) = llm.generate([1, 2], greedy(2, logprobs=-1))
    (some,) = llm.generate([1, 2], greedy(2, logprobs=3))
    for every, few in zip(all_of_them.outputs[0].logprobs or [], some.outputs[0].logprobs or [], strict=True):
        assert sorted(every) == list(range(llm.engine.runner.target.vocab_size))
        assert all(every[token] == found for token, found in few.items())


NUMBERS: list[dict[str, tuple[Any, Any]]] = [
    {"seed": (np.int64(3), 3), "temperature": (np.float32(0.5), 0.5), "top_k": (np.int32(5), 5)},
    {"max_tokens": (np.uint8(7), 7), "logprobs": (np.int64(-1), -1), "top_p": (np.float64(0.25), 0.25)},
    {"stop_token_ids": (np.array([3, 4]), (3, 4)), "min_p": (np.float16(0.5), 0.5)},
    {"logit_bias": ({np.int64(3): np.float32(-1.0)}, {3: -1.0}), "stop_token_ids": ([np.int64(3)], (3,))},
]


def test_numbers_of_numpy() -> None:
    for given in NUMBERS:
        params = SamplingParams(**{name: value for name, (value, _) in given.items()})
        assert params == SamplingParams(**{name: value for name, (_, value) in given.items()})
        assert all("numpy" not in repr(getattr(params, name)) + str(type(getattr(params, name))) for name in given)
    with pytest.raises(ConfigError, match="True"):
        SamplingParams(top_k=np.bool_(True))
    spec = SpecConfig(nodes=np.int64(8), max_depth=np.int32(3), max_ssms=np.int8(2))  # type: ignore[arg-type]
    assert spec == SpecConfig(nodes=8, max_depth=3, max_ssms=2) and type(spec.nodes) is int
    assert SpecConfig(branching=np.array([2, 1])) == SpecConfig(branching=(2, 1))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="nodes=True"):
        SpecConfig(nodes=np.bool_(True))  # type: ignore[arg-type]
    assert tiny_llm().generate([1, 2], greedy(4), spec)[0].metrics.generated_tokens == 4


# --- what the model's files say


def folder_with(tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None) -> Path:
    folder = edit_config(Path(shutil.copytree(speaking_folder(), tmp_path / "model")), **config)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


ENDS = [
    ({"eos_token_id": None}, None, (EOS,)),
    ({"eos_token_id": 7}, None, (7, EOS)),
    ({"eos_token_id": 7}, {"eos_token_id": None}, (7, EOS)),
    ({"eos_token_id": 7}, {"eos_token_id": [8, EOS]}, (8, EOS)),
]


@pytest.mark.parametrize(("config", "generation", "ends"), ENDS)
def test_end_tokens_of_model_and_tokenizer(config: Any, generation: Any, ends: Any, tmp_path: Path) -> None:
    llm = open_llm(folder_with(tmp_path, config, generation))
    assert llm.get_tokenizer().eos_token_id == EOS
    for end in ends:
        script = [5, 6, 9, 9, end, 9, 9, 9, 9]
        with scripted(llm, [script]):
            (output,) = llm.generate(script[:2], SamplingParams(max_tokens=6))
            (ignoring,) = llm.generate(script[:2], SamplingParams(max_tokens=6, ignore_eos=True))
        assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([9, 9, end], "stop")
        assert ignoring.outputs[0].finish_reason == "length"


def ended(llm: LLM, script: Sequence[int], **options: Any) -> list[CompletionOutput]:
    """The output of a script behind its first token, of `generate`, with a stop string that is not there, and of
    `stream`."""
    with scripted(llm, [script]):
        outputs = [
            llm.generate(list(script[:1]), SamplingParams(max_tokens=9, stop=stop, **options))[0].outputs[0]
            for stop in ((), ("never",))
        ]
        chunks = list(llm.stream(list(script[:1]), SamplingParams(max_tokens=9, **options)))
    assert chunks[-1].output is not None
    assert "".join(str(chunk.text) for chunk in chunks) == chunks[-1].output.outputs[0].text
    return [*outputs, chunks[-1].output.outputs[0]]


def test_the_text_of_what_ended_it() -> None:
    llm = speaking_llm()
    encode = llm.get_tokenizer().encode
    word, stop = encode("x")[0], encode("y")[0]
    plain, eos = [word, word, word, stop, word], [word, word, word, EOS, word]

    def texts(script: list[int], include: bool, **options: Any) -> set[str | None]:
        found = ended(llm, script, include_stop_str_in_output=include, **options)
        assert {each.finish_reason for each in found} == {"stop"}
        return {each.text for each in found}

    assert texts(plain, False, stop_token_ids=[stop]) == {"xx"}
    assert texts(plain, True, stop_token_ids=[stop]) == {"xxy"}
    assert texts(eos, True) == {"xx"} == texts(eos, False, skip_special_tokens=False), "a special token is skipped"
    assert texts(eos, True, skip_special_tokens=False) == {"xx" + END}


# --- tokenizers of the user's own


def letters(**others: Any) -> Any:
    """A tokenizer of no more than the two methods, without options; ids come as an array."""
    own = {"encode": lambda text: np.array([*map(ord, text)]), "decode": lambda ids: "".join(map(chr, ids))}
    return SimpleNamespace(**own | others)


def test_a_tokenizer_with_two_methods() -> None:
    own = letters()
    llm = open_llm(tiny()[0], tokenizer=own)
    assert llm.get_tokenizer() is own
    with scripted(llm, [list(map(ord, "abcdef"))]):
        outputs = llm.generate(["ab", [97, 98]], greedy(4, logprobs=0))
        assert "".join(str(chunk.text) for chunk in llm.stream("ab", greedy(4))) == "cdef"
    assert [output.outputs[0].text for output in outputs] == ["cdef", "cdef"]
    word = str(llm.generate("ab", greedy(4))[0].outputs[0].text)[2]
    assert word not in str(llm.generate("ab", greedy(4, bad_words=[word]))[0].outputs[0].text)


def test_a_tokenizer_of_the_tokenizers_library() -> None:
    own = Tokenizer.from_file(str(speaking_folder() / "tokenizer.json"))
    llm, reference = open_llm(tiny()[0], tokenizer=own), speaking_llm(ssms=0)
    params = greedy(12, bad_words=["self"], stop=["never"], logprobs=1)
    (output,), (expected,) = llm.generate(PROMPT, params), reference.generate(PROMPT, params)
    assert output.prompt_token_ids == expected.prompt_token_ids and output.outputs == expected.outputs
    eos = [5, 5, EOS]
    for skip, text in ((True, ""), (False, END)):
        found = ended(llm, eos, include_stop_str_in_output=True, skip_special_tokens=skip, stop_token_ids=[EOS])
        assert {str(each.text)[1:] for each in found} == {text}


def broken(ids: list[int]) -> str:
    raise KeyError(ids[0])


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("tokenizer", 5, r"tokenizer=5; valid: a folder, or an object with encode\(text\)"),
        ("tokenizer", letters(decode=lambda ids: None), r"decodes \[97\] to NoneType; .*valid: an object with"),
        ("tokenizer", letters(decode=broken), r"cannot decode \[97\]: KeyError: 97; valid: an object with"),
        (
            "tokenizer",
            letters(encode=lambda text: text.split()),
            r"returned \['a'\] for 'a'; valid: a list of token ids",
        ),
        (
            "tokenizer",
            letters(encode=lambda text, pair: []),
            r"rejects 'a': TypeError: .*'pair'.*valid: an object with",
        ),
        ("generation_config", 5, "generation_config=5; valid: 'auto', 'treespec', 'vllm', or a folder"),
        ("generation_config", "/no/such/folder", "/no/such/folder"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(option: str, value: Any, message: str) -> None:
    with pytest.raises((ConfigError, OSError), match=message):
        LLM("/absent/model", drafts=[], **{option: value})
