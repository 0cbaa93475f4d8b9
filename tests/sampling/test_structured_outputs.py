"""SamplingParams(structured_outputs=...): the output has the form that was asked for, and plain decoding's tokens."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.drafters.test_vocabularies import llm_of
from tests.helpers.forms import CLOSED, ENGINES, FORMS, PROMPTS, SPECS, asked, check_form, every_engine, grammars
from tests.helpers.models import OracleDrafter, drafting_by, open_llm
from tests.helpers.quantized_checkpoints import needs_compiler
from tests.helpers.sampled import DRAWN, TREE
from tests.helpers.sharing import assert_clean
from tests.helpers.speech import checked, speaking_folder, speaking_llm
from treespec import LLM, SamplingParams, SpecConfig
from treespec.drawing.recording import watch
from treespec.text.prompt_tokenizer import load_tokenizer

# --- the tokens of plain decoding, in the form that was asked for


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "name"),
    [*(("default", name) for name in FORMS), ("eager", "schema"), pytest.param("int8", "schema", marks=needs_compiler)],
)
def test_trees_write_what_plain_decoding_writes(engine: str, name: str) -> None:
    llm, form, ended = ENGINES[engine](), FORMS[name][0], 0
    specs = [*SPECS.values()] if (engine, name) == ("default", "schema") else [SPECS["tree"], SPECS["auto"]]
    each = [asked(form), asked(form, temperature=2.0, seed=1, top_p=0.9)]
    for params in each:
        plain = llm.generate(PROMPTS, params, "off")
        assert [output.error for output in plain] == [None] * len(PROMPTS)
        for output in plain:
            check_form(name, output)
        ended += sum(output.outputs[0].finish_reason == "stop" for output in plain)
        for spec in specs:
            with checked(llm):
                outputs = llm.generate(PROMPTS, params, spec)
            assert [output.outputs for output in outputs] == [output.outputs for output in plain]
    assert ended or name == "any object", "`check_form` leaves beginnings alone"
    assert_clean(llm)


@pytest.mark.slow
@pytest.mark.parametrize("spec", DRAWN.values(), ids=DRAWN)
@pytest.mark.parametrize("name", ["schema", "regex", "gbnf"])
def test_rules_that_draw_at_random_keep_the_form(spec: SpecConfig, name: str) -> None:
    llm = speaking_llm()
    with checked(llm):
        outputs = llm.generate(PROMPTS, asked(FORMS[name][0], temperature=0.9, seed=5, n=2), spec)
    for output in outputs:
        assert output.error is None
        check_form(name, output)


def test_each_keeps_its_form_in_company() -> None:
    """Beside others with other forms, without one, and with one that cannot be read."""
    llm = speaking_llm()
    each = [asked(form, 30, temperature=i % 2 * 0.8, seed=i) for i, (form, _) in enumerate(FORMS.values())]
    each += [SamplingParams(max_tokens=30), SamplingParams(max_tokens=30, temperature=0.8, seed=2)]
    alone = [llm.generate("def main", params, "off")[0].outputs[0].token_ids for params in each]
    for spec in ("off", TREE, SpecConfig()):
        with checked(llm):
            bad, *outputs = llm.generate(["def main"] * (1 + len(each)), [asked({"regex": "["}), *each], spec)
        assert [output.outputs[0].token_ids for output in outputs] == alone
        assert bad.error is not None and bad.outputs[0].finish_reason == "error"
    assert_clean(llm)


@pytest.mark.slow
def test_what_else_is_asked_for_still_counts() -> None:
    """A form narrows what other parameters leave, and they narrow what it leaves."""
    llm = speaking_llm()
    form = {"regex": "[ab]{4,8}"}
    a = load_tokenizer(None, speaking_folder()).encode("a", add_special_tokens=False)
    text = llm.generate("x", asked(form, allowed_token_ids=[*a, 0], min_tokens=6))[0].outputs[0].text
    assert re.fullmatch("a{6,8}", text or "")
    text = llm.generate("x", asked(form, bad_words=["b"], logit_bias={0: 50.0}))[0].outputs[0].text
    assert text == "aaaa" or (text and "b" in text and len(text) == 4)  # "ab" may be one token, and no bad word
    for options, error in (
        ({"min_tokens": 20}, "no token is left at position"),
        ({"allowed_token_ids": [5]}, "no token is left at position"),
    ):
        outputs = llm.generate(["x", "x"], [asked(form, **options), SamplingParams(max_tokens=2)], TREE)
        assert error in str(outputs[0].error) and outputs[1].error is None
    assert "structured_outputs" in str(outputs[0].error)


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["rejection", "traversal"])
def test_what_must_follow_gives_way_to_random_draws(verification: Any) -> None:
    """Of a draft that draws as many nodes as a tree may have."""
    llm = llm_of("perm-1")
    params = asked({"regex": "the arguments of the parser [a-z]{20} of the parser"}, temperature=0.8, seed=1)
    for nodes in (4, 16):
        (output,) = llm.generate(PROMPTS[:1], params, SpecConfig(nodes=nodes, verification=verification))
        assert output.error is None and output.metrics.accepted_by_source["perm-1"]
        assert re.fullmatch("the arguments of the parser [a-z]{20} of the parser", output.outputs[0].text or "")
    assert_clean(llm)


# --- drafts know


@pytest.mark.slow
@every_engine
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_row_is_spent_on_what_cannot_follow(opened: Callable[[], LLM], temperature: float) -> None:
    """Whoever guessed it: SSMs, lookup, a drafter from outside."""
    llm = opened()
    params = asked(CLOSED, temperature=temperature, seed=1)
    (plain,) = llm.generate(PROMPTS[0], params, "off")
    oracle = OracleDrafter([[*plain.prompt_token_ids, *plain.outputs[0].token_ids]], 4, wrong=3, bushy=True)
    with drafting_by(llm, oracle, beside=True), watch(llm.engine) as rounds:
        (output,) = llm.generate(PROMPTS[0], params, TREE)
    assert output.outputs == plain.outputs
    nodes, proposers = 0, set()
    grammar = grammars().grammar(params.structured_outputs, len(plain.prompt_token_ids))
    for tokens, tree in (([*each.context, int(each.tree.tokens[0])], each.tree) for each in rounds):
        for node in range(1, len(tree)):
            path = tree.tokens[tree.path_to(node)[1:]].tolist()
            assert grammar.fitting(tokens, path) == len(path)
            if any(name.startswith("ssm") for name in tree.sources_of(node)):
                assert not grammar.excluded(tokens, path[:-1])[path[-1]]
            proposers |= set(tree.sources_of(node))
            nodes += 1
    assert nodes > len(rounds) and proposers >= {"grammar", "ssm-1", "ssm-2", "oracle"}, (nodes, proposers)


@pytest.mark.slow
@every_engine
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_guess_allowed_tokens_only(opened: Callable[[], LLM], temperature: float) -> None:
    llm, allowed = opened(), list(range(40, 60))
    params = SamplingParams(max_tokens=30, allowed_token_ids=allowed, temperature=temperature, seed=1)
    plain = llm.generate(PROMPTS, params, "off")
    spec = SpecConfig(nodes=8, max_depth=3)
    with watch(llm.engine) as rounds:
        outputs = llm.generate(PROMPTS, params, spec)
    assert [output.outputs for output in outputs] == [output.outputs for output in plain]
    guessed = {token for each in rounds for token in each.tree.tokens[1:].tolist()}
    assert guessed and guessed <= set(allowed)


@pytest.mark.slow
def test_what_must_follow_is_accepted_without_any_draft() -> None:
    llm = open_llm(speaking_folder())
    form = {"regex": "the arguments of the parser, which are [0-9]"}
    params = asked(form)
    (plain,) = llm.generate("x", params, "off")
    for spec in (SpecConfig(nodes=8, max_depth=4), SpecConfig(nodes=8, max_depth=4, sources=("grammar",))):
        (output,) = llm.generate("x", params, spec)
        assert output.outputs == plain.outputs and set(output.metrics.accepted_by_source) == {"grammar"}
        assert output.metrics.acceptance_length > 2.5
    backoffs = llm.engine.host.planner.state
    backoffs.model_free.pause_left = backoffs.ssms.pause_left = 10**6  # nobody is asked to guess, but this is no guess
    (output,) = llm.generate("x", params)
    assert output.outputs == plain.outputs and set(output.metrics.accepted_by_source) == {"grammar"}
    assert output.metrics.acceptance_length > 2.5
    (output,) = llm.generate("x", params, SpecConfig(nodes=8, sources=("lookup",)))
    assert output.outputs == plain.outputs and "grammar" not in output.metrics.accepted_by_source
