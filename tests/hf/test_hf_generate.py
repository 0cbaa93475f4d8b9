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
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria, WatermarkingConfig
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import treespec.hf
from tests.helpers.architectures import VOCAB, make_model, random_ids
from tests.helpers.models import add_noise
from tests.helpers.scripts import run_script
from tests.hf.test_hf_accelerate import Raises
from treespec import SpecConfig
from treespec.errors import ConfigError, DraftError, ModelError, RequestError
from treespec.hf.engines import _engines

PAD = 2
TREES = SpecConfig(nodes=16)
pytestmark = [pytest.mark.usefixtures("engines_start_quickly"), pytest.mark.slow]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("stablelm")


@pytest.fixture(scope="module")
def draft() -> Any:
    """The model with noise: deep paths are accepted, and others are not."""
    return add_noise(make_model("stablelm"), 0.03)


def one_prompt(length: int = 9, seed: int = 0) -> dict[str, Tensor]:
    return {"input_ids": random_ids(1, length, seed)}


def padded_prompts() -> dict[str, Tensor]:
    """Three rows, two of them padded on the left."""
    torch.manual_seed(3)
    ids, mask = torch.randint(3, VOCAB, (3, 12)), torch.ones(3, 12, dtype=torch.int64)
    for row, pad in ((0, 5), (2, 11)):
        ids[row, :pad], mask[row, :pad] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask}


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
        for options in ({"drafts": [draft], "spec": TREES}, {"drafts": ["lookup"]}):
            found = by_trees(model, inputs, do_sample=False, **GREEDY[name], **options)
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted), f"{name}, {options}"


def test_trees_are_deep(model: Any, draft: Any) -> None:
    by_trees(model, one_prompt(), max_new_tokens=32, drafts=[draft], spec=TREES)
    assert treespec.hf.last_metrics(model).acceptance_length > 2


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
    options |= {"max_new_tokens": 20, "num_return_sequences": 2}
    for inputs in (one_prompt(), padded_prompts()):
        found = []
        for seed in (1, 1, 1, 2):
            drafts: list[Any] = [[draft], None, [draft, model], [draft]][len(found)]
            torch.manual_seed(seed)
            spec = "off" if drafts is None else TREES
            found.append(by_trees(model, inputs, drafts=drafts, spec=spec, **options))
        assert found[0].shape[0] == 2 * len(inputs["input_ids"])
        assert all(torch.equal(found[0], other) for other in found[1:3])
        assert found[3].shape != found[0].shape or not torch.equal(found[3], found[0])
        assert not torch.equal(found[0][0], found[0][1]), "two samples of one prompt are the same"


# --- the distribution


SMALL, SAMPLES = 8, 1000
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
    """float64 [8, 8], of the first two tokens: transformers' forward, processors and softmax."""
    processors = LogitsProcessorList()
    if "repetition_penalty" in options:
        processors.append(RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    processors.append(TemperatureLogitsWarper(options["temperature"]))
    if top_k := options.get("top_k", 50):
        processors.append(TopKLogitsWarper(top_k))
    if "top_p" in options:
        processors.append(TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        processors.append(MinPLogitsWarper(options["min_p"]))

    def after(tokens: list[int]) -> np.ndarray:
        ids = torch.tensor([tokens])
        with torch.no_grad():
            scores = processors(ids, model(ids).logits[:, -1].float())
        return torch.softmax(scores, -1)[0].double().numpy()

    first = after(prompt)
    return np.stack([first[token] * after([*prompt, token]) for token in range(SMALL)])


@pytest.mark.parametrize(
    "name, verification", [(name, ("coupled", "rejection")[i % 2]) for i, name in enumerate(SAMPLED_OPTIONS)]
)
def test_the_distribution_is_transformers(name: str, verification: str) -> None:
    small, far = small_models()
    prompt = [1, 2, 3, 4, 1, 2]
    probs = probs_of(small, prompt, SAMPLED_OPTIONS[name])
    torch.manual_seed(7)
    spec = SpecConfig(branching=(2, 1), verification=verification, sources=("ssm",))
    out = by_trees(
        small,
        {"input_ids": torch.tensor([prompt])},
        do_sample=True,
        max_new_tokens=2,
        drafts=[far],
        spec=spec,
        num_return_sequences=SAMPLES,
        pad_token_id=0,
        **SAMPLED_OPTIONS[name],
    )
    counts = np.zeros((SMALL, SMALL))
    for first, second in out[:, len(prompt) :].tolist():
        counts[first, second] += 1
    assert not counts[probs == 0].any(), "a token that processors exclude"
    seen = counts > 0
    statistic = 2 * float((counts[seen] * np.log(counts[seen] / (SAMPLES * probs[seen]))).sum())
    freedom = int((probs > 0).sum()) - 1
    assert statistic < freedom + 6 * (2 * freedom) ** 0.5 + 10, f"G = {statistic:.0f} of {freedom} degrees of freedom"
    wrong = np.roll(probs, 1, axis=1)
    off = seen & (wrong > 0)
    assert 2 * float((counts[off] * np.log(counts[off] / (SAMPLES * wrong[off]))).sum()) > 2 * statistic


# --- streaming


class Collector:
    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        assert not self.ended
        self.parts.append(value)

    def end(self) -> None:
        self.ended += 1


def test_streamers_get_what_transformers_gives_them(model: Any, draft: Any) -> None:
    options = {"max_new_tokens": 30, "eos_token_id": [5, 7, 11], "pad_token_id": PAD}
    for inputs in (one_prompt(), padded_prompts()):
        ours, theirs = Collector(), Collector()
        model.generate(**inputs, streamer=theirs, **options)
        by_trees(model, inputs, token_streamer=ours, drafts=[draft], spec=TREES, **options)
        assert ours.ended == theirs.ended == 1
        assert [part.tolist() for part in ours.parts] == [part.tolist() for part in theirs.parts]


# --- the model and its engine


def test_the_model_stays_as_it_was(draft: Any) -> None:
    model = make_model("gpt2")
    state = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    before = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
    implementation = model.config._attn_implementation
    inputs = one_prompt()
    wanted = model.generate(**inputs, max_new_tokens=12, pad_token_id=PAD)
    assert torch.equal(wanted, by_trees(model, inputs, max_new_tokens=12))
    assert model.config._attn_implementation == implementation
    assert before == [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
    assert state.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == state[name][0], "a weight was copied"
        assert torch.equal(tensor, state[name][1])
    assert torch.equal(wanted, model.generate(**inputs, max_new_tokens=12, pad_token_id=PAD))


def test_an_engine_follows_its_model() -> None:
    """Kept from call to call, sees new values, is built anew for new parameters, and goes with the model."""
    model, inputs = make_model("stablelm", seed=4), one_prompt()
    by_trees(model, inputs, max_new_tokens=8)
    first = _engines[model].entries[-1].llm
    by_trees(model, inputs, max_new_tokens=20, do_sample=True)
    assert _engines[model].entries[-1].llm is first
    add_noise(model, 0.5)
    wanted = model.generate(**inputs, max_new_tokens=20, pad_token_id=PAD)
    assert torch.equal(wanted, by_trees(model, inputs, max_new_tokens=20))
    assert _engines[model].entries[-1].llm is first
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    wanted = model.generate(**inputs, max_new_tokens=20, pad_token_id=PAD)
    assert torch.equal(wanted, by_trees(model, inputs, max_new_tokens=20))
    assert _engines[model].entries[-1].llm is not first
    gc.collect()  # models of other tests
    gone, count = weakref.ref(model), len(_engines)
    del model, first
    gc.collect()
    assert gone() is None
    assert len(_engines) == count - 1


def test_an_engine_follows_its_drafts() -> None:
    """One that changed its type or its vocabulary is not run as what it was."""
    model, draft, inputs = make_model("stablelm"), make_model("stablelm", seed=1), one_prompt()
    options: dict[str, Any] = {"custom_generate": treespec.hf.generate, "drafts": [draft], "max_new_tokens": 12}
    wanted = model.generate(**inputs, max_new_tokens=12, pad_token_id=PAD)
    assert torch.equal(model.generate(**inputs, **options, pad_token_id=PAD), wanted)
    draft.bfloat16()
    with pytest.raises(ModelError, match=r"but torch\.float32"):
        model.generate(**inputs, **options)
    draft.float().resize_token_embeddings(VOCAB + 7)
    with pytest.raises(DraftError, match="vocabulary"):
        model.generate(**inputs, **options)


def test_bfloat16_model(draft: Any) -> None:
    model = make_model("stablelm", torch.bfloat16)
    inputs = one_prompt()
    plain = by_trees(model, inputs, max_new_tokens=20, spec="off")
    assert torch.equal(plain, by_trees(model, inputs, max_new_tokens=20, drafts=[model], spec=TREES))


# --- refusals


class Broken(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        raise KeyError("broken")


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "beams": ({"num_beams": 2}, ConfigError, "beam_search"),
    "guidance": ({"guidance_scale": 1.5}, ConfigError, "guidance_scale=1.5"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, ConfigError, "prompt lookup is always on"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, ConfigError, "output_attentions"),
    "hidden states": ({"output_hidden_states": True, "return_dict_in_generate": True}, ConfigError, "output_hidden"),
    "watermarks": ({"watermarking_config": WatermarkingConfig()}, ConfigError, "watermarking_config"),
    "drafts of text": ({"drafts": "lookup"}, ConfigError, "valid: a list"),
    "a draft that is none": ({"drafts": [3]}, ConfigError, "3 is neither"),
    "a streamer that is none": ({"token_streamer": print}, ConfigError, "put and end"),
    "an unknown source": ({"spec": SpecConfig(sources=("ssm",))}, ConfigError, "sources"),
    "a processor that fails": ({"logits_processor": [Broken()]}, RequestError, "KeyError: 'broken'"),
    "a criterion that fails": ({"stopping_criteria": [Raises()]}, RequestError, "KeyError: 'criterion'"),
    "a tiny temperature": ({"do_sample": True, "temperature": 1e-9}, ConfigError, "temperature=1e-09"),
    "a long text": ({"max_new_tokens": 300}, RequestError, "256 positions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, model: Any) -> None:
    options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        by_trees(model, one_prompt(), **({"max_new_tokens": 4} | options))
    wanted = model.generate(**one_prompt(), max_new_tokens=4, pad_token_id=PAD)
    assert torch.equal(wanted, by_trees(model, one_prompt(), max_new_tokens=4)), "the engine did not recover"


def test_prompts_that_are_refused(model: Any) -> None:
    inputs = padded_prompts()
    for mask in (inputs["attention_mask"].flip(1), inputs["attention_mask"] * (torch.arange(12) != 11)):
        with pytest.raises(RequestError, match="pad on the left"):
            by_trees(model, inputs | {"attention_mask": mask}, max_new_tokens=4)
    with pytest.raises(ConfigError, match="position_ids"):
        by_trees(model, inputs, max_new_tokens=4, position_ids=torch.arange(12)[None].expand(3, -1) + 1)
    cache = model(one_prompt()["input_ids"], use_cache=True).past_key_values
    with pytest.raises(ConfigError, match="past_key_values"):
        by_trees(model, one_prompt(12), max_new_tokens=4, past_key_values=cache)
    embeds = model.get_input_embeddings()(one_prompt()["input_ids"])
    with pytest.raises((ConfigError, RequestError)):
        model.generate(inputs_embeds=embeds, max_new_tokens=4, pad_token_id=PAD, custom_generate=treespec.hf.generate)
    with pytest.raises(ConfigError, match="give an eos_token_id"):
        by_trees(
            model,
            inputs,
            max_new_tokens=4,
            eos_token_id=None,
            stopping_criteria=[EndsAfter(3, 1)],
            generation_config=GenerationConfig(),
        )


def test_another_way_to_call(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"custom_generate=treespec\.hf\.generate"):
        treespec.hf.generate(model, **one_prompt())


def test_a_model_that_learns_in_between() -> None:
    model = make_model("stablelm")
    by_trees(model, one_prompt(), max_new_tokens=4)
    model.train()
    with pytest.raises(ModelError, match="training mode"):
        by_trees(model, one_prompt(), max_new_tokens=4)
    model.eval()
    assert by_trees(model, one_prompt(), max_new_tokens=4).shape == (1, 13)


def test_tokens_outside_the_vocabulary(model: Any) -> None:
    with pytest.raises(RequestError, match="input_ids from -1 to 97; valid: 0 to 96"):
        by_trees(model, {"input_ids": torch.tensor([[-1, 97]])}, max_new_tokens=4, attention_mask=torch.ones(1, 2))


def test_it_waits_for_its_imports() -> None:
    code = (
        "import sys, treespec; assert 'torch' not in sys.modules; treespec.hf.generate; "
        "assert not any(name.startswith('transformers.models') for name in sys.modules)"
    )
    run_script(code)


def test_every_sample_of_a_batch_has_its_own_noise(model: Any) -> None:
    torch.manual_seed(0)
    out = by_trees(model, one_prompt(), do_sample=True, max_new_tokens=8, num_return_sequences=6, top_k=0)
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(out, 2))
