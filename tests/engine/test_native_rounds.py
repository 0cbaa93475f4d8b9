"""Rounds that C++ runs ahead of the engine: tokens, ends and pages are those of the host's steps."""

from collections import Counter

import pytest
import torch

from tests.helpers.calls import by_the_host, calls_of
from tests.helpers.models import VOCAB, assert_same_tree, greedy, open_llm, random_prompts, tiny, tokens_of
from tests.helpers.quantized_checkpoints import needs_compiler
from tests.helpers.sharing import assert_clean
from tests.helpers.speech import checked, speaking_llm
from treespec import RequestOutput, SamplingParams, SpecConfig
from treespec.drawing.recording import watch
from treespec.engine.host_executor import HostExecutor
from treespec.engine.native_rounds import NativeRounds

pytestmark = needs_compiler

TREE = SpecConfig(nodes=16, max_depth=5)
SPECS = {"off": "off", "tree": TREE, "auto": SpecConfig()}


def ends_of(outputs: list[RequestOutput]) -> list[tuple[object, ...]]:
    said = [output.outputs[0] for output in outputs]
    return [(each.token_ids, each.text, each.finish_reason, each.stop_reason) for each in said]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_request_ends_where_it_ends_by_the_hosts_steps(spec: str, temperature: float) -> None:
    """At any length, at a stop token, and at a stop string, which C++ does not look for."""
    llm, prompt = speaking_llm(), "def f(x):\n"

    def generate(**options: object) -> list[RequestOutput]:
        params = SamplingParams(temperature=temperature, seed=3, **({"max_tokens": 40} | options))  # type: ignore[arg-type]
        return llm.generate([prompt, "import os\n"], params, SPECS[spec])

    with by_the_host(llm):
        text, tokens = (whole := generate()[0].outputs[0]).text, whole.token_ids
    ends = [{"max_tokens": count} for count in range(1, 12)]
    ends += [{"stop_token_ids": [tokens[i]]} for i in (3, 9, 14)] + [{"stop": [text[i : i + 3]]} for i in (8, 21)]
    for end in ends:
        with by_the_host(llm):
            expected = ends_of(generate(**end))
        with checked(llm):
            assert ends_of(generate(**end)) == expected, end
        assert_clean(llm)


@pytest.mark.parametrize("spec", SPECS)
def test_several_rounds_run_in_a_call(spec: str) -> None:
    llm = open_llm(*tiny())
    prompts = random_prompts((9, 40))
    with (
        calls_of(NativeRounds, "run") as calls,
        watch(llm.engine) as rounds,
        calls_of(HostExecutor, "forward") as steps,
    ):
        tokens = tokens_of(llm.generate(prompts, greedy(60), SPECS[spec]))
    assert len(calls) < len(rounds) / 2 and len(steps) <= 2  # in which SSMs read the prompts
    with by_the_host(llm):
        assert tokens_of(llm.generate(prompts, greedy(60), SPECS[spec])) == tokens


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trees_ahead_are_those_of_the_hosts_steps(temperature: float) -> None:
    """Those of one SSM do not depend on what earlier rounds teach, so that they are equal however far ahead."""
    llm, prompts = open_llm(tiny()[0], tiny()[1][:1]), random_prompts((9, 64))
    params, spec = greedy(60, temperature=temperature, seed=2), SpecConfig(nodes=12, max_depth=4, sources=("ssm",))
    with by_the_host(llm), watch(llm.engine) as expected:
        llm.generate(prompts, params, spec)
    with watch(llm.engine) as rounds:
        llm.generate(prompts, params, spec)
    assert len(rounds) > 20
    for ours, theirs in zip(rounds, expected, strict=True):
        assert ours.context == theirs.context
        assert_same_tree(ours.tree, theirs.tree)


def test_requests_join_and_leave_while_rounds_are_ahead() -> None:
    llm = open_llm(*tiny(), max_num_seqs=2)
    prompts = random_prompts((20, 33, 12))
    alone = [tokens_of(llm.generate(prompt, greedy(40), TREE))[0] for prompt in prompts]
    first, second = (llm.stream(prompt, greedy(40), TREE) for prompt in prompts[:2])
    said, left = [next(first) for _ in range(3)], [next(second) for _ in range(2)]
    with checked(llm):
        second.close()  # with rounds ahead
        (third,) = tokens_of(llm.generate(prompts[2], greedy(40), TREE))
        said += first
    assert third == alone[2]
    for chunks, tokens in ((said, alone[0]), (left, alone[1])):
        streamed = [token for chunk in chunks for token in chunk.token_ids]
        assert streamed == tokens[: len(streamed)]
    assert said[-1].finish_reason == "length"
    assert_clean(llm)


def test_nan_after_a_drafted_token_is_left_to_the_host() -> None:
    """The target overflows at a token that an SSM drafts and nobody accepts, in a round ahead or not."""
    llm = open_llm(tiny()[0], tiny()[1][:1])
    prompts = random_prompts((20, 45))
    with watch(llm.engine) as rounds:
        expected = tokens_of(llm.generate(prompts, greedy(40), TREE))
    drafted = Counter(int(token) for each in rounds for token in each.tree.tokens)
    fine = {token for said in (*prompts, *expected) for token in said}
    (bad, count), *_ = [(token, n) for token, n in drafted.most_common() if token not in fine]
    assert count > 1 and bad < VOCAB
    with torch.inference_mode():
        llm.engine.runner.target.embed[bad] = float("nan")
    with checked(llm), calls_of(HostExecutor, "forward") as steps, calls_of(NativeRounds, "run") as calls:
        assert tokens_of(llm.generate(prompts, greedy(40), TREE)) == expected
    assert 1 <= len(steps) < len(calls)
    assert_clean(llm)
