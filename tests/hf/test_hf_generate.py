"""`model.generate(custom_generate=treespec.hf.generate)` against transformers: tokens, distribution, rules, errors."""

import functools
import gc
import itertools
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, StoppingCriteria, WatermarkingConfig

import treespec.hf
from tests.helpers.architectures import VOCAB, make_model, random_ids
from tests.helpers.models import add_noise, randomize
from tests.helpers.walk import tiny_config
from tests.hf.test_hf_accelerate import PAD, TREES, Raises, padded_prompts
from treespec import SpecConfig
from treespec.errors import ConfigError, DraftError, ModelError, RequestError
from treespec.hf.engines import engines_of

pytestmark = pytest.mark.slow


def one_prompt(length: int = 9, seed: int = 0) -> dict[str, Tensor]:
    return {"input_ids": random_ids(1, length, seed)}


def by_trees(model: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    return model.generate(**inputs, **({"pad_token_id": PAD, "custom_generate": treespec.hf.generate} | options))


class Alternate(LogitsProcessor):
    """Even tokens after odd ones and the other way round; it sees one row with its own prefix."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert len(input_ids) == len(scores)
        parity = (torch.arange(scores.shape[1])[None] + input_ids[:, -1:]) % 2
        return scores.masked_fill(parity == 0, -torch.inf)


class EndsAfter(StoppingCriteria):
    """Fires once some token stood in the output `times` times."""

    def __init__(self, divisor: int, times: int):
        self.divisor, self.times = divisor, times

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return (input_ids[:, 9:] % self.divisor == 0).sum(1) >= self.times


GREEDY: dict[str, dict[str, Any]] = {
    "plain": {"max_new_tokens": 32},
    "max_length": {"max_length": 40},
    "end tokens": {"max_new_tokens": 40, "eos_token_id": [5, 7, 11, 13, 17, 19, 23, 29, 31]},
    "min_new_tokens": {"max_new_tokens": 40, "min_new_tokens": 21, "eos_token_id": list(range(5, 60))},
    "repetition_penalty": {"max_new_tokens": 24, "repetition_penalty": 1.4},
    "bad_words_ids": {"max_new_tokens": 24, "bad_words_ids": [[i] for i in range(3, 60)] + [[70, 71]]},
    "forced_eos_token_id": {"max_new_tokens": 24, "forced_eos_token_id": 4},
    "exponential_decay": {"max_new_tokens": 24, "eos_token_id": 6, "exponential_decay_length_penalty": (5, 1.3)},
    "prefix_allowed": {"max_new_tokens": 24, "prefix_allowed_tokens_fn": lambda row, ids: [row + 7, 3 + len(ids) % 50]},
    "list of processors": {"max_new_tokens": 24, "logits_processor": [Alternate()], "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_tokens_are_transformers_own(name: str, model: Any, draft: Any) -> None:
    for inputs in (one_prompt(), padded_prompts()):
        wanted = model.generate(**inputs, do_sample=False, pad_token_id=PAD, **GREEDY[name])
        for drafts in (["lookup"], [draft])[name != "plain" :]:
            found = by_trees(model, inputs, do_sample=False, drafts=drafts, spec=TREES, **GREEDY[name])
            assert found.dtype == wanted.dtype and torch.equal(found, wanted), drafts
        assert name != "plain" or treespec.hf.last_metrics(model).acceptance_length > 2


def test_a_model_for_images_decodes_text() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("gemma3")).eval()
    with torch.no_grad():
        randomize(model, gain=1.5, head_gain=1.5)
    wanted = model.generate(**one_prompt(), do_sample=False, max_new_tokens=8)
    assert torch.equal(by_trees(model, one_prompt(), max_new_tokens=8), wanted)
    images = {"image": model.get_input_embeddings()(one_prompt()["input_ids"])}
    with pytest.raises(ConfigError, match="mm_encoder_outputs: not supported"):
        by_trees(model, one_prompt(), max_new_tokens=8, mm_encoder_outputs=images)


@pytest.mark.parametrize("times", [1, 2, 7])
def test_criteria_cut_where_they_fire(times: int, model: Any, draft: Any) -> None:
    options = {"max_new_tokens": 50, "stopping_criteria": [EndsAfter(3, times)]}
    for inputs, more in ((one_prompt(), {}), (padded_prompts(), {"eos_token_id": 4})):
        wanted = model.generate(**inputs, pad_token_id=PAD, **options, **more)
        assert wanted.shape[1] < 59 or more
        assert torch.equal(wanted, by_trees(model, inputs, drafts=[draft], spec=TREES, **options, **more))


def test_outputs_with_scores(model: Any, draft: Any) -> None:
    """Logits and scores of every step, those of transformers within rounding; user criteria see them too."""
    options = {"max_new_tokens": 24, "repetition_penalty": 1.3, "return_dict_in_generate": True}
    options |= {"output_scores": True, "output_logits": True}
    inputs = one_prompt()
    wanted = model.generate(**inputs, pad_token_id=PAD, **options)
    found = by_trees(model, inputs, drafts=[draft], spec=TREES, **options)
    assert type(found) is type(wanted)
    assert torch.equal(found.sequences, wanted.sequences)
    for which in ("scores", "logits"):
        ours, theirs = torch.stack(getattr(found, which)), torch.stack(getattr(wanted, which))
        assert ours.shape == theirs.shape
        assert float((ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt()) < 1e-4
    assert by_trees(model, inputs, max_new_tokens=3, return_dict_in_generate=True).scores is None


def test_sampled_tokens_come_from_the_seed_alone(model: Any, draft: Any) -> None:
    options = {"do_sample": True, "temperature": 1.2, "top_p": 0.95, "repetition_penalty": 1.1}
    options |= {"max_new_tokens": 12, "num_return_sequences": 3}
    inputs, found = padded_prompts(), []
    for seed, drafts in ((1, [draft]), (1, None), (1, [draft, model]), (2, [draft])):
        torch.manual_seed(seed)
        spec = "off" if drafts is None else TREES
        found.append(by_trees(model, inputs, drafts=drafts, spec=spec, **options))
    assert len(found[0]) == 3 * 3
    assert all(torch.equal(found[0], other) for other in found[1:3])
    assert found[3].shape != found[0].shape or not torch.equal(found[3], found[0])
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(found[0], 2)), "each has its own noise"
    narrow = make_model("stablelm", torch.bfloat16)
    plain = by_trees(narrow, one_prompt(), max_new_tokens=20, spec="off")
    assert torch.equal(plain, by_trees(narrow, one_prompt(), max_new_tokens=20, drafts=[narrow], spec=TREES))


SMALL, SAMPLES, RULES = 8, 400, ("coupled", "rejection", "coupled")
SAMPLED_OPTIONS: dict[str, dict[str, Any]] = {
    "top_k of the config": {"temperature": 2.0, "top_k": 5},
    "default top_k, penalty": {"temperature": 3.0, "repetition_penalty": 1.7},
    "top_p and min_p": {"temperature": 2.0, "top_k": 0, "top_p": 0.8, "min_p": 0.05},
}


@functools.cache
def small_models() -> tuple[Any, Any]:
    """A target, and a draft far from it; the same for all cases, so that they share an engine."""
    ends = dict.fromkeys(("eos_token_id", "pad_token_id", "bos_token_id"))
    small, far = (make_model("stablelm", seed=seed, vocab_size=SMALL, **ends) for seed in (0, 5))
    return small, far


def probs_of(model: Any, prompt: list[int], options: dict[str, Any]) -> np.ndarray:
    """float64 [8, 8], of the first two tokens: the softmax of transformers' own scores."""
    options = options | {"max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}

    def after(prompts: list[list[int]]) -> Tensor:
        found = model.generate(torch.tensor(prompts), do_sample=True, pad_token_id=0, **options)
        return torch.softmax(found.scores[0], -1).double()

    return (after([prompt]).T * after([[*prompt, token] for token in range(SMALL)])).numpy()


@pytest.mark.parametrize("name, verification", [*zip(SAMPLED_OPTIONS, RULES, strict=True)])
def test_the_distribution_is_transformers(name: str, verification: str) -> None:
    (small, far), prompt = small_models(), [1, 2, 3, 4, 1, 2]
    probs = probs_of(small, prompt, SAMPLED_OPTIONS[name])
    torch.manual_seed(7)
    spec = SpecConfig(branching=(2, 1), verification=verification, sources=("ssm",))
    options = {"do_sample": True, "max_new_tokens": 2, "num_return_sequences": SAMPLES, "pad_token_id": 0}
    options |= {"drafts": [far], "spec": spec}
    out = by_trees(small, {"input_ids": torch.tensor([prompt])}, **options, **SAMPLED_OPTIONS[name])
    counts = np.zeros((SMALL, SMALL))
    np.add.at(counts, tuple(out[:, len(prompt) :].T.tolist()), 1)
    assert not counts[probs == 0].any(), "a token that processors exclude"

    def statistic(probs: np.ndarray) -> float:
        """G, of the outcomes that were seen and can be."""
        seen = (counts > 0) & (probs > 0)
        return 2 * float((counts[seen] * np.log(counts[seen] / (SAMPLES * probs[seen]))).sum())

    freedom = int((probs > 0).sum()) - 1
    assert statistic(probs) < freedom + 6 * (2 * freedom) ** 0.5 + 10, f"{freedom} degrees of freedom"
    assert statistic(np.roll(probs, 1, axis=1)) > 2 * statistic(probs)


def test_the_model_stays_as_it_was() -> None:
    model, inputs, few = make_model("gpt2"), one_prompt(), {"max_new_tokens": 12, "pad_token_id": PAD}

    def parts() -> list[Any]:
        modules = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
        places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
        return [modules, places, model.config._attn_implementation]

    before, values = parts(), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wanted = model.generate(**inputs, **few)
    assert torch.equal(wanted, by_trees(model, inputs, **few))
    assert parts() == before
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(wanted, model.generate(**inputs, **few))


def test_an_engine_follows_its_model() -> None:
    """Kept from call to call, sees new values, and goes with the model; test_hf_engines.py has new parameters."""
    model, inputs, more = make_model("stablelm", seed=4), one_prompt(), {"max_new_tokens": 20, "pad_token_id": PAD}
    by_trees(model, inputs, max_new_tokens=8)
    [first] = engines_of(model)
    by_trees(model, inputs, do_sample=True, **more)
    assert engines_of(model) == [first]
    add_noise(model, 0.5)
    assert torch.equal(model.generate(**inputs, **more), by_trees(model, inputs, **more))
    assert engines_of(model) == [first]
    gone = weakref.ref(model), weakref.ref(first)
    del model, first
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_an_engine_follows_its_drafts() -> None:
    """One that changed its type or its vocabulary is not run as what it was."""
    model, draft, inputs = make_model("stablelm"), make_model("stablelm", seed=1), one_prompt()
    wanted = model.generate(**inputs, max_new_tokens=12, pad_token_id=PAD)
    assert torch.equal(by_trees(model, inputs, drafts=[draft], max_new_tokens=12), wanted)
    with pytest.raises(ModelError, match=r"but torch\.float32"):
        by_trees(model, inputs, drafts=[draft.bfloat16()], max_new_tokens=12)
    draft.float().resize_token_embeddings(VOCAB + 7)
    with pytest.raises(DraftError, match="vocabulary"):
        by_trees(model, inputs, drafts=[draft], max_new_tokens=12)


class Broken(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        raise KeyError("broken")


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_beams": 2}, ConfigError, "beam_search"),
    ({"prompt_lookup_num_tokens": 3}, ConfigError, "prompt lookup is always on"),
    ({"output_attentions": True, "return_dict_in_generate": True}, ConfigError, "output_attentions"),
    ({"watermarking_config": WatermarkingConfig()}, ConfigError, "watermarking_config"),
    ({"assistant_ensemble_weight": 0.5}, ConfigError, "assistant_ensemble_weight"),
    ({"drafts": "lookup"}, ConfigError, "valid: a list"),
    ({"drafts": [3]}, ConfigError, "3 is neither"),
    ({"token_streamer": print}, ConfigError, "put and end"),
    ({"spec": SpecConfig(sources=("ssm",))}, ConfigError, "sources"),
    ({"logits_processor": [Broken()]}, RequestError, "KeyError: 'broken'"),
    ({"stopping_criteria": [Raises()]}, RequestError, "KeyError: 'criterion'"),
    ({"do_sample": True, "temperature": 1e-9}, ConfigError, "temperature=1e-09"),
    ({"max_new_tokens": 300}, RequestError, "256 positions"),
]


def test_refusals(model: Any) -> None:
    wanted = model.generate(**one_prompt(), max_new_tokens=4, pad_token_id=PAD)
    for options, error, message in REFUSED:
        with pytest.raises(error, match=message):
            by_trees(model, one_prompt(), **({"max_new_tokens": 4} | options))
    assert torch.equal(wanted, by_trees(model, one_prompt(), max_new_tokens=4)), "the engine did not recover"


def test_prompts_that_are_refused(model: Any) -> None:
    inputs, ids, few = padded_prompts(), one_prompt()["input_ids"], {"max_new_tokens": 4}
    for mask in (inputs["attention_mask"].flip(1), inputs["attention_mask"] * (torch.arange(12) != 11)):
        with pytest.raises(RequestError, match="pad on the left"):
            by_trees(model, inputs | {"attention_mask": mask}, **few)
    with pytest.raises(ConfigError, match="position_ids"):
        by_trees(model, inputs, **few, position_ids=torch.arange(12)[None].expand(3, -1) + 1)
    with pytest.raises(ConfigError, match="past_key_values"):
        by_trees(model, one_prompt(12), **few, past_key_values=model(ids, use_cache=True).past_key_values)
    with pytest.raises((ConfigError, RequestError)):
        by_trees(model, {"inputs_embeds": model.get_input_embeddings()(ids)}, **few)
    no_end = {"eos_token_id": None, "generation_config": GenerationConfig()}
    with pytest.raises(ConfigError, match="pass an eos_token_id"):
        by_trees(model, inputs, **few, stopping_criteria=[EndsAfter(3, 1)], **no_end)
    with pytest.raises(RequestError, match="input_ids from -1 to 97; valid: 0 to 96"):
        by_trees(model, {"input_ids": torch.tensor([[-1, 97]])}, **few, attention_mask=torch.ones(1, 2))
    with pytest.raises(ConfigError, match=r"custom_generate=treespec\.hf\.generate"):
        treespec.hf.generate(model, **one_prompt())
    learning = make_model("stablelm").train()
    with pytest.raises(ModelError, match="training mode"):
        by_trees(learning, one_prompt(), **few)
    assert by_trees(learning.eval(), one_prompt(), **few).shape == (1, 13)
