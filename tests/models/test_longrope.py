"""LongRoPE: a request has the short factors or the long ones, whatever else is in the engine or in its batch."""

import functools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.architectures import continuations
from tests.helpers.exactness import differences, run
from tests.helpers.families import CASES, fitting, make_model
from tests.helpers.models import VOCAB, greedy, make_draft, new_folder, open_llm, random_prompts, tokens_of
from tests.helpers.quantized_checkpoints import needs_compiler
from tests.helpers.sharing import samples
from treespec import LLM, SpecConfig

ORIGINAL = 64
COUNT = 16
PROMPTS = random_prompts((5, ORIGINAL + 1, ORIGINAL - COUNT + 2, ORIGINAL - COUNT, 90), vocab=VOCAB)
SHORT, BETWEEN, LONG = [0, 3], [2], [1, 4]  # indices; the text of `BETWEEN` outgrows the original context
TREES = SpecConfig(nodes=12, max_depth=4)
CHAIN = SpecConfig(branching=(1, 1, 1), sources=("ssm",))
COMPILED = [False, pytest.param(True, marks=needs_compiler)]


@functools.cache
def target() -> Path:
    case = CASES["phi3, longrope"]
    longer = [2.0 + 3.0 * i for i in range(8)]  # with other factors, other tokens
    rope = case.config["rope_parameters"] | {"long_factor": longer}
    changes = {"vocab_size": VOCAB, "max_position_embeddings": 2048, "rope_parameters": rope}
    return make_model(new_folder("longrope") / "target", case, 3, **fitting(case), **changes)


def always(factors: str) -> list[list[int]]:
    """Tokens of transformers after `PROMPTS`, with the same factors for all lengths."""
    model = AutoModelForCausalLM.from_pretrained(target(), dtype=torch.float32)
    rope = model.config.rope_parameters
    rope |= dict.fromkeys(("short_factor", "long_factor"), rope[factors])
    model = type(model).from_pretrained(target(), config=model.config, dtype=torch.float32)
    return continuations(model, PROMPTS, COUNT)


@functools.cache
def engine(compiled: bool, noise: float) -> LLM:
    """With the default length, which is beyond the original one, and with a draft that has longrope too."""
    draft = make_draft(new_folder("longrope-draft"), target(), 1, noise)
    options = {"compile": compiled, "max_model_len": None, "max_num_seqs": 5, "draft_quantization": None}
    return open_llm(target(), [draft], **options)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", COMPILED)
def test_tokens_are_those_of_transformers(compiled: bool) -> None:
    """All in one batch: each request has the factors of its own limit."""
    model = AutoModelForCausalLM.from_pretrained(target(), dtype=torch.float32)
    own, short, long = continuations(model, PROMPTS, COUNT), always("short_factor"), always("long_factor")
    found = tokens_of(engine(compiled, 0.0).generate(PROMPTS, greedy(COUNT), "off"))
    assert [a != b for a, b in zip(short, long, strict=True)] == [True] * len(PROMPTS)
    assert found == [short[i] if i in SHORT else long[i] for i in range(len(PROMPTS))]
    assert [i for i in range(len(PROMPTS)) if found[i] != own[i]] == BETWEEN


@pytest.mark.parametrize("compiled", COMPILED)
def test_a_batch_of_both_is_exact(compiled: bool) -> None:
    llm = engine(compiled, 0.05)
    plain = run(llm, PROMPTS, greedy(COUNT))
    tree = run(llm, PROMPTS, greedy(COUNT), TREES)
    assert tree.acceptance_length > 2
    assert not differences(plain, tree)
    for spec in ("off", TREES):
        for i, prompt in enumerate(PROMPTS):
            alone = run(llm, [prompt], greedy(COUNT), spec)
            assert alone.tokens == [plain.tokens[i]]
            assert all(torch.equal(plain.logits[p], alone.logits[p]) for p in plain.logits.keys() & alone.logits.keys())


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("compiled", COMPILED)
def test_a_draft_has_the_factors_of_the_request(compiled: bool, temperature: float) -> None:
    """The target as its own draft: all that it proposes is accepted."""
    params = greedy(COUNT, temperature=temperature, seed=5)
    outputs = engine(compiled, 0.0).generate(PROMPTS, params, CHAIN)
    assert tokens_of(outputs) == tokens_of(engine(compiled, 0.0).generate(PROMPTS, params, "off"))
    assert [output.metrics.target_passes for output in outputs] == [COUNT // 4] * len(PROMPTS)


@pytest.mark.slow
@needs_compiler
def test_a_draft_behind_what_its_table_held() -> None:
    for prompt in random_prompts((1000, 1060), vocab=VOCAB):
        [output] = engine(True, 0.0).generate(prompt, greedy(COUNT), CHAIN)
        assert output.metrics.target_passes == COUNT // 4


@pytest.mark.slow
def test_samples_share_a_prompt_and_other_limits_do_not() -> None:
    llm = engine(False, 0.0)
    limits = [greedy(count, n=2, temperature=0.7, seed=3) for count in (COUNT, 2 * COUNT)]
    alone = [llm.generate([PROMPTS[3]], params, "off")[0] for params in limits]
    before = llm.stats()["prefill_tokens"]
    both = llm.generate([PROMPTS[3]] * 2, limits, "off")
    read = llm.stats()["prefill_tokens"] - before
    assert read == 2 * (len(PROMPTS[3]) - 1), "once for both samples of a limit"
    assert tokens_of(both) == tokens_of(alone)
    assert both[0].outputs[0].token_ids != both[1].outputs[0].token_ids[:COUNT]
    short, long = samples(llm, PROMPTS[3], [COUNT, 2 * COUNT])
    llm.engine.scheduler.add(short)
    with pytest.raises(AssertionError, match="in prompt, spec, adapter or rope factors"):
        llm.engine.scheduler.add(long)
    llm.engine.finish(short, "abort")


@pytest.mark.slow
def test_an_engine_of_short_contexts_has_one_table() -> None:
    limited, prompts = open_llm(target(), max_model_len=ORIGINAL), [PROMPTS[i] for i in SHORT]
    assert limited.engine.runner.target.config.short_context == 0
    expected = engine(False, 0.0).generate(prompts, greedy(COUNT), "off")
    assert tokens_of(limited.generate(prompts, greedy(COUNT), "off")) == tokens_of(expected)
