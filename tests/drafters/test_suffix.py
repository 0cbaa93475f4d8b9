"""What an engine remembers of its outputs: tokens are plain decoding's, and later requests are faster."""

import re
from typing import Any

import pytest

from tests.helpers.exactness import differences, run
from tests.helpers.models import greedy, open_llm, quick, random_prompts, tiny, tiny_llm
from tests.helpers.speech import checked
from treespec import LLM, SpecConfig
from treespec.config.engine_options import MAX_SUFFIX_TOKENS
from treespec.errors import ConfigError

PROMPTS = random_prompts((17, 20, 9, 31))
PAST = SpecConfig(nodes=16, sources=("suffix",))
BOTH = SpecConfig(nodes=16, sources=("lookup", "suffix"))
SPECS = {
    "suffix": PAST,
    "both": BOTH,
    "auto": SpecConfig(),
    "chain": SpecConfig(branching=(1,) * 6, sources=("suffix",)),
    "static": SpecConfig(branching=(3, 2, 1)),
    "named": SpecConfig(nodes=9, max_depth=3, sources=("ssm-2", "suffix")),
}


def remembering(**options: Any) -> LLM:
    """An engine that remembers, and remembers nothing yet."""
    llm = tiny_llm(max_num_seqs=4, suffix_tokens=4096, **options)
    llm.reset_suffix_cache()
    assert llm.stats()["suffix_tokens"] == 0
    return llm


def accepted(outputs: Any, source: str = "suffix") -> int:
    return sum(output.metrics.accepted_by_source.get(source, 0) for output in outputs)


@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize("name", quick(SPECS, ("both", "auto")))
def test_tokens_are_those_of_plain_decoding(name: str, temperature: float) -> None:
    """First with nothing remembered, then with the very texts, where guesses are many and deep."""
    llm, spec = remembering(), SPECS[name]
    prompts = [prompt * 2 for prompt in PROMPTS]
    params = [greedy(40, temperature=temperature, seed=i) for i in range(4)]
    plain = run(tiny_llm(max_num_seqs=4), prompts, params, "off")
    for again in range(2):
        tree = run(llm, prompts, params, spec)
        assert not differences(plain, tree)
        here = {"lookup", "suffix", "ssm-1", "ssm-2", "ssm-3"}
        for output in tree.outputs:
            assert output.metrics.accepted_by_source.keys() <= (here & {*spec.sources} if spec.sources else here)
        if again:
            least = {"named": 2.0, "static": 2.5, "auto": 2.0}.get(name, 4.0)
            assert tree.acceptance_length > least
            assert accepted(tree.outputs) > 0.5 * len(prompts) * 40 * (1 - 1 / least)


@pytest.mark.slow
def test_a_call_may_ask_for_what_the_engine_leaves_out() -> None:
    """The engine's own sources are those of calls that name none; what it has is there for all."""
    llm = open_llm(tiny()[0], spec=SpecConfig(sources=("lookup",)), suffix_tokens=5000)
    llm.generate(PROMPTS[:1], greedy(9))
    assert llm.stats()["suffix_tokens"] == 0 and llm.stats()["memory"]["suffix"] == 8192 * 64
    llm.generate(PROMPTS[:1], greedy(9), PAST)
    assert accepted(llm.generate(PROMPTS[:1], greedy(9), PAST)) > 0
    assert accepted(llm.generate(PROMPTS[:1], greedy(9))) == 0


@pytest.mark.slow
def test_a_reset_in_the_middle_of_a_stream() -> None:
    """It changes no token. What was written before is forgotten, by the running request too; what comes is not."""
    llm = remembering()
    (plain,) = tiny_llm(max_num_seqs=4).generate(PROMPTS[0], greedy(40), "off")
    llm.generate(PROMPTS[0], greedy(20), PAST)
    tokens: list[int] = []
    with checked(llm):
        for chunk in llm.stream(PROMPTS[0], greedy(40), PAST):
            tokens += chunk.token_ids
            if 10 <= len(tokens) - len(chunk.token_ids) <= 25:
                llm.reset_suffix_cache()
                assert llm.stats()["suffix_tokens"] == 0
                since = len(tokens)
    assert tokens == plain.outputs[0].token_ids
    assert llm.stats()["suffix_tokens"] == 40 - since > 5
    beginning, ending = (llm.generate(PROMPTS[0] + tokens[:n], greedy(5), BOTH)[0] for n in (3, since + 4))
    assert accepted([beginning]) == 0 and accepted([ending]) > 0


@pytest.mark.parametrize("value", [True, -1, MAX_SUFFIX_TOKENS + 1])
def test_bad_values(value: Any) -> None:
    message = f"suffix_tokens={value!r}; valid: an int from 0 to {MAX_SUFFIX_TOKENS}"
    with pytest.raises(ConfigError, match=re.escape(message)):
        open_llm(tiny()[0], suffix_tokens=value)


@pytest.mark.slow
def test_an_engine_without_memory() -> None:
    llm = tiny_llm(max_num_seqs=4)
    llm.generate(PROMPTS[:1], greedy(9))
    assert llm.stats()["suffix_tokens"] == llm.stats()["memory"]["suffix"] == 0
    llm.reset_suffix_cache()
    message = "sources=('suffix',): this engine does not store its outputs; use LLM(suffix_tokens="
    with pytest.raises(ConfigError, match=re.escape(message)):
        llm.generate(PROMPTS[0], greedy(5), PAST)
    with pytest.raises(ConfigError, match=re.escape(message)):
        open_llm(tiny()[0], spec=PAST)
    with pytest.raises(ConfigError, match="did you mean 'suffix'"):
        remembering().generate(PROMPTS[0], greedy(5), SpecConfig(sources=("sufix",)))
