"""Bad input: each error derives from ValueError or is an OSError, and names the bad value and what would be valid."""

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.models import edit_config, greedy, make_llama, open_llm, quick_start, random_prompts, tiny, tiny_llm
from tests.helpers.speech import add_tokenizer
from treespec import LLM, SamplingParams, SpecConfig, errors
from treespec.errors import CheckpointError, ConfigError, DraftError, KernelError, ModelError

# --- parameters

SPEC_CASES: list[tuple[dict[str, Any], str]] = [
    ({"nodes": 1025}, "nodes=1025"),
    ({"nodes": True}, "nodes=True"),
    ({"max_depth": 65}, "max_depth=65; valid: an int from 1 to 64"),
    ({"policy": "dynamik"}, "policy='dynamik'; valid: 'auto', 'static', 'dynamic'"),
    ({"policy": "static"}, 'policy="static" needs branching'),
    ({"policy": "dynamic", "branching": (2, 1)}, "branching=(2, 1)"),
    ({"verification": "coupld"}, "verification='coupld'; valid: 'coupled'"),
    ({"verification": "rejection", "policy": "dynamic"}, "needs all of them"),
    ({"draws": "with-replacement"}, "draws='with-replacement' requires"),
    ({"branching": ()}, "branching=()"),
    ({"branching": "42"}, "branching='42'"),
    ({"branching": (64, 64)}, "makes 4161 nodes"),
    ({"branching": (2, 2), "nodes": 9}, "nodes=9"),
    ({"sources": "ssm"}, "sources='ssm'"),
    ({"max_ssms": 0}, "max_ssms=0; valid: an int of at least 1, or None"),
    ({"max_dept": 5, "polciy": "x"}, "'max_dept' (did you mean 'max_depth'?), 'polciy' (did you mean 'policy'?)"),
]

SAMPLING_CASES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens=0; valid: an int of at least 1"),
    ({"stop": ["a", ""]}, "stop=('a', '')"),
    ({"stop_token_ids": [-1]}, "stop_token_ids=(-1,)"),
    ({"seed": 2**64}, "seed=18446744073709551616"),
    ({"n": 2}, "n=2 with temperature=0"),
    ({"temperature": -0.1}, "temperature=-0.1"),
    ({"temperature": math.nan}, "temperature=nan"),
    ({"top_k": -2}, "top_k=-2"),
    ({"top_p": 0}, "top_p=0"),
    ({"min_p": 1.5}, "min_p=1.5"),
    ({"repetition_penalty": 0}, "repetition_penalty=0"),
    ({"presence_penalty": -3}, "presence_penalty=-3"),
    ({"bad_words": ["x", " "]}, "bad_words=('x', ' ')"),
    ({"min_tokens": 3, "max_tokens": 2}, "min_tokens=3 is more than max_tokens=2"),
    ({"logprobs": -2}, "logprobs=-2"),
    ({"logit_bias": {-3: 1.0}}, "logit_bias={-3: 1.0}"),
    ({"logit_bias": {3: math.nan}}, "logit_bias={3: nan}"),
    ({"allowed_token_ids": []}, "allowed_token_ids=[]; valid: at least one token id, or None for all"),
    ({"logits_processors": [3]}, "logits_processors=(3,); valid: a list of callable"),
    ({"max_token": 5}, "unknown 'max_token' (did you mean 'max_tokens'?)"),
]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [(SpecConfig, *case) for case in SPEC_CASES] + [(SamplingParams, *case) for case in SAMPLING_CASES],
)
def test_parameters(kind: type, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        kind(**options)


def test_sources_that_an_engine_does_not_have() -> None:
    """A name is the engine's to know: the config takes it, the call refuses it."""
    (prompt,) = random_prompts((5,))
    with pytest.raises(ConfigError, match=re.escape("did you mean 'ssm-1'? this engine has 'ssm', 'ssm-1', 'ssm-2'")):
        tiny_llm().generate(prompt, spec=SpecConfig(sources=("smm-1",)))
    with pytest.raises(ConfigError, match="this engine has 'lookup'"):
        tiny_llm(ssms=()).generate(prompt, spec=SpecConfig(sources=("ssm",)))
    with pytest.raises(ConfigError, match="did you mean 'lookup'"):
        open_llm(tiny()[0], spec=SpecConfig(sources=("lokup",)))


def test_neutral_values_pass() -> None:
    neutral: dict[str, Any] = {"n": 1, "temperature": 0, "top_k": -1, "top_p": 1, "min_p": 0, "min_tokens": 0}
    neutral |= {"repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0.0, "bad_words": []}
    neutral |= dict.fromkeys(("logprobs", "logit_bias", "logits_processors", "stop", "stop_token_ids"))
    assert SamplingParams(**neutral, seed=-1) == SamplingParams(**neutral)
    assert SpecConfig(policy="auto", verification="naive", sources=["ssm"]).sources == ("ssm",)


def test_every_error_is_a_value_error() -> None:
    kinds = [getattr(errors, name) for name in errors.__all__ if name[0].isupper()]
    assert len(kinds) > 5 and all(issubclass(kind, ValueError) for kind in kinds)


LLM_CASES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"max_num_seq": 3}, ConfigError, "unknown 'max_num_seq' (did you mean 'max_num_seqs'?)"),
    ({"max_num_seqs": 0}, ConfigError, "max_num_seqs=0; valid: an int of at least 1"),
    ({"max_num_seqs": 10**12, "max_model_len": None}, ConfigError, "max_num_seqs=1000000000000"),
    ({"max_model_len": 1}, ConfigError, "max_model_len=1; valid: an int of at least 2, or None"),
    ({"max_model_len": 1025}, ConfigError, "max_model_len=1025; valid: an int from 2 to the model's 1024"),
    ({"max_num_batched_tokens": "all"}, ConfigError, "max_num_batched_tokens='all'"),
    ({"dtype": torch.float64}, ConfigError, "torch.float64"),
    ({"device": "gpu"}, ConfigError, "device='gpu'"),
    ({"attention": "flash"}, ConfigError, "attention='flash'; valid: 'auto', 'cpu-packed', 'cpu-gathered', 'triton'"),
    ({"attention": "triton"}, KernelError, "triton"),
    ({"compile": "yes"}, ConfigError, "compile='yes'; valid: True, False, 'auto'"),
    ({"exact": 1}, ConfigError, "exact=1; valid: True, False"),
    ({"spec": 16}, ConfigError, "spec=16"),
    ({"drafts": "ssm-1"}, ConfigError, "drafts='ssm-1'; valid: a list"),
    ({"drafts": [3]}, ConfigError, "3 is neither a folder"),
    ({"model": "/no/such/folder"}, OSError, "/no/such/folder"),
    ({"model": "gpt2"}, OSError, "'gpt2'; models of the Hugging Face hub are named owner/name"),
    ({"drafts": ["gpt2"]}, OSError, "treespec weights fetch owner/name"),
    ({"drafts": ["ssm-9"]}, OSError, "no embedded draft 'ssm-9'; valid: 'ssm-1', 'ssm-2', 'ssm-3'"),
    ({"model": "~no-such-user/folder"}, OSError, "~no-such-user/folder"),
    ({"model": 7}, ConfigError, "model=7"),
    ({"tokenizer": "/no/such/folder"}, ConfigError, "/no/such/folder"),
]


@pytest.mark.parametrize(("options", "error", "message"), LLM_CASES)
def test_llm(options: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with quick_start(), pytest.raises(error, match=re.escape(message)):
        LLM(**({"model": tiny()[0], "device": "cpu", "max_model_len": 64} | options))


def test_the_smallest_engine_is_valid() -> None:
    """What the message of `max_model_len` calls valid is, with a cost curve measured on the spot as well."""
    llm = LLM(tiny()[0], drafts=tiny()[1][:1], device="cpu", max_model_len=2, max_num_seqs=1)
    assert len(llm.generate([5], greedy(8))[0].outputs[0].token_ids) == 1


# --- checkpoints


def broken_copy(folder: Path, change: Callable[[Path], object]) -> Path:
    shutil.copytree(tiny()[0], folder)
    change(folder)
    return folder


def config(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: edit_config(folder, **changes)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


CHECKPOINTS: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "truncated": (truncate, CheckpointError, "model.safetensors"),
    "no config": (lambda f: (f / "config.json").unlink(), CheckpointError, "config.json"),
    "other family": (config(model_type="mamba"), CheckpointError, "'mamba'"),
    "other activation": (config(hidden_act="swirl"), ModelError, "'swirl'"),
    "other rope": (config(rope_parameters={"rope_type": "swirl", "rope_theta": 1e4}), ModelError, "swirl"),
    "no rope factor": (config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}), ModelError, "factor"),
    "absurd context": (config(max_position_embeddings=-1), ValueError, "-1"),
    "other dtype": (config(dtype="int8"), ModelError, "'int8'"),
    "end token of text": (config(eos_token_id="end"), ValueError, "end"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints(name: str, tmp_path: Path) -> None:
    change, error, message = CHECKPOINTS[name]
    folder = broken_copy(tmp_path / "model", change)
    (folder / "generation_config.json").unlink(missing_ok=True)
    roles: list[tuple[Path, list[Path]]] = [(folder, []), (tiny()[0], [folder])]
    for target, drafts in roles[:1] if name == "end token of text" else roles:  # that of a draft is nobody's business
        with pytest.raises(error, match=re.escape(message)) as caught:
            open_llm(target, drafts, max_model_len=None)
        assert "model" in str(caught.value), "the folder is not named"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"model": {"vocab": {"a": 1}}}'),
        ("tokenizer_config.json", "[1"),
        ("tokenizer_config.json", '{"tokenizer_class": 7}'),
        ("tokenizer_config.json", '{"tokenizer_class": "TokenizersBackend", "eos_token": 7}'),
    ],
)
def test_tokenizer_files_that_cannot_be_read(file: str, text: str, tmp_path: Path) -> None:
    folder = add_tokenizer(broken_copy(tmp_path / "model", lambda f: (f / file).write_text("{}")))
    (folder / file).write_text(text)
    for attempt in (lambda: open_llm(folder), lambda: open_llm(tiny()[0], tokenizer=folder)):
        with pytest.raises(ConfigError, match=r"the tokenizer files of .*model cannot be read \(.*pass LLM\(tokenizer"):
            attempt()


def test_a_draft_of_another_vocabulary(tmp_path: Path) -> None:
    other = make_llama(tmp_path / "other", 3, vocab_size=500)
    with pytest.raises(DraftError, match=r"other .*vocabulary of 500 tokens, the target .* one of 512"):
        open_llm(tiny()[0], [other])
