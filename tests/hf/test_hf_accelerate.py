"""`treespec.hf.accelerate`: what transformers' `generate` takes, the accelerated one takes, and nothing is lost."""

import copy
import logging
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, StoppingCriteria, pipeline

import treespec.hf
from tests.helpers.architectures import VOCAB, make_model, random_ids
from tests.helpers.commands import use_hub_cache
from tests.helpers.models import add_noise, quick
from tests.helpers.tokenizers_made import letters
from treespec import LLM, SamplingParams, SpecConfig
from treespec.errors import ConfigError, DraftError, ModelError

PAD = 2
TREES = SpecConfig(nodes=16)


def letter_tokenizer(size: int = VOCAB, turned: bool = False) -> Any:
    """An ASCII character for every token, in descending order where it is turned."""
    chars = [chr(31 + token) for token in range(size)]
    return PreTrainedTokenizerFast(tokenizer_object=letters(chars[::-1] if turned else chars))


@pytest.fixture
def accelerated(model: Any) -> Iterator[Any]:
    yield treespec.hf.accelerate(model, spec=TREES)
    treespec.hf.restore(model)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return letter_tokenizer()


def inputs(rows: int = 1) -> dict[str, Tensor]:
    ids = random_ids(rows)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def padded_prompts() -> dict[str, Tensor]:
    """Three rows, two of them padded on the left."""
    ids = random_ids(3, 12, seed=3)
    mask = torch.ones_like(ids)
    for row, pad in ((0, 5), (2, 11)):
        ids[row, :pad], mask[row, :pad] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask}


def by_transformers(model: Any, given: dict[str, Tensor], **options: Any) -> Any:
    return type(model).generate(model, **given, **({"pad_token_id": PAD, "do_sample": False} | options))


def test_generate_is_accelerated_until_it_is_restored(model: Any, draft: Any) -> None:
    """The last options hold, and a call has its own."""
    treespec.hf.accelerate(model, spec="off")
    assert treespec.hf.accelerate(model, drafts=[draft], spec=TREES) is model
    given, options = inputs(), {"max_new_tokens": 40, "pad_token_id": PAD}
    wanted = by_transformers(model, given, max_new_tokens=40)
    assert torch.equal(model.generate(**given, **options, spec="off"), wanted)
    assert treespec.hf.last_metrics(model).acceptance_length == 1
    assert torch.equal(model.generate(**given, **options), wanted)
    assert torch.equal(model.generate(given["input_ids"], **options), wanted)
    metrics = treespec.hf.last_metrics(model)
    assert metrics.acceptance_length > 2
    assert treespec.hf.restore(model) is model
    assert "generate" not in vars(model)
    assert torch.equal(model.generate(**given, **options), wanted)
    assert treespec.hf.last_metrics(model) is metrics
    treespec.hf.restore(model)


class Raises(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        raise KeyError("criterion")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"stopping_criteria": [Raises()]}])
def test_a_streamer_is_fed_and_ended(options: dict[str, Any], accelerated: Any) -> None:
    """With what transformers gives it; after an error, too."""
    for given in (inputs(), padded_prompts()):
        ours, theirs = (mock.Mock(spec=["put", "end"]) for _ in range(2))
        few = {"max_new_tokens": 30, "eos_token_id": [5, 7, 11], "pad_token_id": PAD} | options
        with pytest.raises((ValueError, KeyError)) if options else nullcontext():
            accelerated.generate(**given, streamer=ours, **few)
        assert ours.end.call_count == 1 and ours.mock_calls[-1] == mock.call.end()
        if not options:
            by_transformers(accelerated, given, streamer=theirs, **few)
            parts = [[call.args[0].tolist() for call in each.put.call_args_list] for each in (ours, theirs)]
            assert parts[0] == parts[1]


@pytest.mark.slow
def test_custom_generate_refuses_what_transformers_keeps(model: Any, draft: Any) -> None:
    """`streamer=` would never end, and `assistant_model=` would not be used."""
    options: dict[str, Any] = {"max_new_tokens": 4, "pad_token_id": PAD, "custom_generate": treespec.hf.generate}
    streamer = mock.Mock(spec=["put", "end"])
    with pytest.raises(ConfigError, match=r"streamer=: .* treespec\.hf\.accelerate"):
        model.generate(**inputs(), streamer=streamer, **options)
    assert streamer.end.call_count == 1
    with pytest.raises(ConfigError, match=r"assistant_model=: .* drafts=\[\.\.\.\]"):
        model.generate(**inputs(), assistant_model=draft, **options)


@pytest.mark.slow
def test_an_assistant_is_a_draft(accelerated: Any, draft: Any) -> None:
    """Of every row, as the metrics of the call say."""
    few: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None}
    wanted = by_transformers(accelerated, inputs(3), **few)
    options = {"pad_token_id": PAD, "spec": SpecConfig(nodes=16, sources=("ssm",)), "assistant_model": draft}
    assert torch.equal(accelerated.generate(**inputs(3), **few, **options), wanted)
    metrics = treespec.hf.last_metrics(accelerated)
    assert metrics.acceptance_length > 2
    assert sum(metrics.accepted_by_source.values()) > 10
    assert set(metrics.accepted_by_source) == set(metrics.accepted_only_by_source)
    assert metrics.generated_tokens == sum(row.generated_tokens for row in metrics.rows) == 3 * 24
    assert metrics.target_passes == sum(row.target_passes for row in metrics.rows)
    for row in metrics.rows:
        assert row.acceptance_length == row.generated_tokens / row.target_passes
        assert row.generated_tokens == row.target_passes + sum(row.accepted_only_by_source.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["padded", "translated"])
def test_an_assistant_and_its_tokenizer(
    kind: str, accelerated: Any, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Given with the call, as neither model was loaded from a folder."""
    assistant = make_model("stablelm", vocab_size=VOCAB + 40 * (kind == "padded"))
    own = letter_tokenizer(VOCAB, turned=kind == "translated")
    options = {"max_new_tokens": 12, "pad_token_id": PAD, "assistant_model": assistant}
    with caplog.at_level(logging.INFO, "treespec"):
        found = accelerated.generate(**inputs(), tokenizer=tokenizer, assistant_tokenizer=own, **options)
    assert f"(in-memory StableLmForCausalLM): {kind}" in caplog.text
    assert torch.equal(found, by_transformers(accelerated, inputs(), max_new_tokens=12))


@pytest.mark.slow
@pytest.mark.parametrize(("place", "kind"), [("folder", "padded"), ("hub cache", "translated")])
def test_tokenizers_that_models_in_memory_were_loaded_with(
    place: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hub_cache(tmp_path, monkeypatch)
    models = []
    for name, size in (("target", VOCAB), ("draft", VOCAB + 40)):
        folder = tmp_path / f"models--owner--{name}" / "snapshots" / ("0" * 40)
        make_model("stablelm", vocab_size=size).save_pretrained(folder)
        letter_tokenizer(VOCAB, turned=(kind, name) == ("translated", "draft")).save_pretrained(folder)
        (folder.parents[1] / "refs").mkdir()
        (folder.parents[1] / "refs" / "main").write_text(folder.name)
        source = f"owner/{name}" if place == "hub cache" else folder
        models.append(AutoModelForCausalLM.from_pretrained(source, cache_dir=tmp_path, local_files_only=True).eval())
    llm = LLM(models[0], models[1:], TREES)
    [connection] = llm.stats()["draft_vocabularies"].values()
    assert connection.startswith(kind)
    given = inputs()["input_ids"]
    [output] = llm.generate(given[0], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    wanted = by_transformers(models[0], inputs(), max_new_tokens=12, eos_token_id=None)
    assert output.outputs[0].token_ids == wanted[0, 9:].tolist()


@pytest.mark.slow
def test_models_without_a_tokenizer_take_the_one_that_the_error_asks_for(model: Any, tokenizer: Any) -> None:
    larger = make_model("stablelm", vocab_size=VOCAB + 40)
    with pytest.raises(DraftError, match=r"drafts=\[\(draft, its tokenizer\)\], tokenizer="):
        LLM(model, [larger])
    llm = LLM(model, [(larger, tokenizer)], tokenizer=tokenizer)
    assert llm.stats()["draft_vocabularies"] == {"StableLmForCausalLM": "padded"}
    with pytest.raises(ConfigError, match=r"neither a folder"):
        LLM(model, [("larger", tokenizer)])


@pytest.mark.parametrize("place", quick(("call", "config"), ("call",)))
def test_stop_strings(place: str, accelerated: Any, tokenizer: Any) -> None:
    given = inputs()
    whole = by_transformers(accelerated, given, max_new_tokens=40)[0, 9:].tolist()
    stop = tokenizer.decode([whole[6]])
    options: dict[str, Any] = {"max_new_tokens": 40, "tokenizer": tokenizer}
    config = GenerationConfig(max_new_tokens=40, pad_token_id=PAD, stop_strings=[stop])
    options |= {"stop_strings": [stop]} if place == "call" else {"generation_config": config}
    wanted = by_transformers(accelerated, given, **options)
    assert wanted.shape[1] < 9 + 40
    assert torch.equal(accelerated.generate(**given, pad_token_id=PAD, **options), wanted)
    assert config.stop_strings == [stop]
    with pytest.raises(ConfigError, match=r"needs the model's tokenizer"):
        accelerated.generate(**given, stop_strings=[stop], max_new_tokens=4)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "token healing": ({"token_healing": True}, ConfigError, "token_healing"),
    "several GPUs": ({"synced_gpus": True}, ConfigError, "synced_gpus"),
    "continuous batching": ({"cache_implementation": "paged"}, ConfigError, "paged"),
    "an unknown argument": ({"strange": 3}, ValueError, "strange"),
    "a streamer that is none": ({"streamer": print}, ConfigError, "streamer=.*put and end"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, accelerated: Any) -> None:
    options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        accelerated.generate(**inputs(), **({"max_new_tokens": 4, "pad_token_id": PAD} | options))


def test_what_cannot_be_accelerated(model: Any) -> None:
    with pytest.raises(ModelError, match="training mode"):
        treespec.hf.accelerate(make_model("stablelm").train())
    with pytest.raises(ModelError, match="not a transformers model"):
        treespec.hf.accelerate(torch.nn.Linear(2, 2))
    other = make_model("stablelm")
    other.generate = print
    with pytest.raises(ConfigError, match=r"model\.generate was replaced"):
        treespec.hf.accelerate(other)
    assert treespec.hf.restore(other).generate is print
    defaults = treespec.hf.accelerate(make_model("stablelm"))
    defaults.generation_config.stop_strings = ["a"]
    with pytest.raises(ConfigError, match=r"generation_config\.stop_strings"):
        defaults.generate(**inputs(), max_new_tokens=4)


@pytest.mark.slow
def test_prepared_inputs_are_refused(draft: Any) -> None:
    """As peft sets a soft prompt while it generates, or as a class of the user's; what it prepares would be ignored."""
    model, given, few = treespec.hf.accelerate(make_model("stablelm")), inputs(), {"max_new_tokens": 4}
    own = model.prepare_inputs_for_generation

    def with_soft_prompt(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    class Prepares(type(model)):  # type: ignore[misc]
        prepare_inputs_for_generation = with_soft_prompt

    model.prepare_inputs_for_generation = with_soft_prompt
    for use in (
        lambda: model.generate(**given, **few, pad_token_id=PAD),
        lambda: treespec.hf.accelerate(Prepares(model.config).eval()),
        lambda: LLM(Prepares(model.config).eval(), []),
    ):
        with pytest.raises(ModelError, match=rf"code of {__name__}, as for soft prompts .* treespec\.hf\.restore"):
            use()
    model.prepare_inputs_for_generation = own  # as peft leaves it
    draft.prepare_inputs_for_generation = with_soft_prompt  # of a draft: it changes no token
    found = model.generate(**given, **few, assistant_model=draft, pad_token_id=PAD)
    del draft.prepare_inputs_for_generation
    assert torch.equal(found, by_transformers(model, given, **few))
    phi3 = make_model("phi3")
    assert "prepare_inputs_for_generation" in vars(type(phi3)), "transformers' own is taken"
    found = treespec.hf.accelerate(phi3).generate(**given, **few, pad_token_id=PAD, do_sample=False)
    assert torch.equal(found, by_transformers(phi3, given, **few))


@pytest.mark.slow
def test_hints_and_other_loops_are_announced(accelerated: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Hints change nothing, and loops are left to transformers."""
    given = inputs()
    wanted = by_transformers(accelerated, given, max_new_tokens=8)
    with caplog.at_level(logging.INFO, "treespec"):
        found = accelerated.generate(**given, max_new_tokens=8, pad_token_id=PAD, num_assistant_tokens=3)
        other = accelerated.generate(**given, custom_generate=lambda model, input_ids, **_: input_ids + 1)
    assert torch.equal(found, wanted) and torch.equal(other, given["input_ids"] + 1)
    assert "num_assistant_tokens=3" in caplog.text and "handled by transformers" in caplog.text


@pytest.mark.slow
def test_copies_have_a_generate_of_their_own(accelerated: Any) -> None:
    """A copy decodes with the copy's weights; so does one that was pickled."""
    for twin in (copy.deepcopy(accelerated), pickle.loads(pickle.dumps(accelerated))):
        wanted = by_transformers(add_noise(twin, 0.5), inputs(), max_new_tokens=16)
        assert not torch.equal(wanted, by_transformers(accelerated, inputs(), max_new_tokens=16))
        assert torch.equal(twin.generate(**inputs(), max_new_tokens=16, pad_token_id=PAD), wanted)
        assert treespec.hf.last_metrics(twin).generated_tokens == wanted.shape[1] - 9


@pytest.mark.slow
def test_a_pipeline(accelerated: Any, tokenizer: Any, draft: Any) -> None:
    text = tokenizer.decode(inputs()["input_ids"][0])
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "return_full_text": False}
    found = pipeline("text-generation", model=accelerated, tokenizer=tokenizer, assistant_model=draft)(text, **options)
    metrics = treespec.hf.last_metrics(accelerated)
    assert metrics.acceptance_length > 2
    treespec.hf.restore(accelerated)
    assert found == pipeline("text-generation", model=accelerated, tokenizer=tokenizer)(text, **options)
