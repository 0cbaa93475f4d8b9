"""Observers of rounds: what they are told, and what their faults cost."""

import json
import logging

import numpy as np
import pytest

from tests.graphs.test_graph_engine import scripted
from tests.helpers.models import greedy, random_prompts, tiny_llm
from tests.helpers.observed import assert_tell
from treespec import RoundRecord, SamplingParams, SpecConfig, TokenTree
from treespec.errors import ConfigError, RequestError

PROMPTS = random_prompts((20, 33))
TREE = SpecConfig(nodes=12, max_depth=4)


def test_every_round_of_every_request_is_told() -> None:
    """As JSON too, from which the tree can be made again."""
    llm = tiny_llm()
    records: list[RoundRecord] = []
    params = [greedy(20), SamplingParams(max_tokens=12, temperature=0.9, seed=3, n=2, ignore_eos=True)]
    with llm.add_round_observer(records.append):
        outputs = llm.generate(PROMPTS, params, spec=TREE)
        plain = llm.generate(PROMPTS, greedy(4), spec="off")
        form = llm.generate(PROMPTS[:1], greedy(5, allowed_token_ids=[3, 4, 5]), spec=TREE)
    llm.generate(PROMPTS, greedy(4), spec=TREE)
    assert_tell(records, [*outputs, *plain, *form])
    assert {each.request_id for each in records} == {output.request_id for output in [*outputs, *plain, *form]}
    assert all(0 < (each.target_seconds or 0) <= each.seconds for each in records)
    assert max(each.accepted for each in records) > 1
    for record in records:
        read, tree = json.loads(json.dumps(record.as_dict())), record.tree
        again = TokenTree.from_parents(read["tokens"], read["parents"], read["probs"], "again")
        for name in ("tokens", "parents", "depths", "probs"):
            assert np.array_equal(getattr(again, name), getattr(tree, name)), name
        assert [tuple(names) for names in read["sources"]] == [tree.sources_of(node) for node in range(len(tree))]
        assert (read["context"], read["path"], read["bonus"]) == (record.context, record.path.tolist(), record.bonus)
        assert (read["request_id"], read["number"]) == (record.request_id, record.number)
        assert tuple(read["plain_reasons"]) == record.plain_reasons


@pytest.mark.parametrize(
    ("prompt", "spec", "params", "reasons"),
    [
        (PROMPTS[0], "off", greedy(4), ("off",)),
        (PROMPTS[0], TREE, greedy(1), ("room",)),
        (list(range(20, 40)), SpecConfig(nodes=12, sources=("lookup",)), greedy(4), ("nothing_proposed",)),
        ([7, 8, 9] * 5, SpecConfig(nodes=12, sources=("lookup",)), greedy(4, allowed_token_ids=[3, 4]), ("cut",)),
    ],
)
def test_a_record_says_why_nothing_was_drafted(prompt, spec, params, reasons) -> None:
    llm, records = tiny_llm(), list[RoundRecord]()
    with llm.add_round_observer(records.append):
        llm.generate([prompt], params, spec=spec)
    assert records[0].plain_reasons == reasons


def test_an_observer_that_fails_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """It is removed, others are still called, and the log has one line with the traceback."""
    llm, records = tiny_llm(), list[RoundRecord]()
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy(12), spec=TREE)]
    calls = []

    def failing(record: RoundRecord) -> None:
        calls.append(record.number)
        if record.number == 2:
            raise ZeroDivisionError("mine")

    with caplog.at_level(logging.ERROR, "treespec"), llm.add_round_observer(failing) as handle:
        with llm.add_round_observer(records.append):
            outputs = llm.generate(PROMPTS, greedy(12), spec=TREE)
        handle.remove()  # once more than needed
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert_tell(records, outputs)
    assert calls == [1, 1, 2]
    [logged] = caplog.records
    assert "failing failed in round 2 of request " in logged.getMessage() and "was removed" in logged.getMessage()
    assert logged.exc_info is not None and logged.exc_info[0] is ZeroDivisionError


def test_what_is_no_observer() -> None:
    with pytest.raises(ConfigError, match="observer=None; valid: a function that takes a RoundRecord"):
        tiny_llm().add_round_observer(None)  # type: ignore[arg-type]


def test_an_observer_may_abort_and_not_generate() -> None:
    llm, refused = tiny_llm(), list[str]()

    def observer(record: RoundRecord) -> None:
        try:
            llm.generate(PROMPTS[1], greedy(2))
        except RequestError as error:
            refused.append(str(error))
        if record.number == 3:
            llm.abort(record.request_id)

    with llm.add_round_observer(observer):
        [output] = llm.generate(PROMPTS[:1], greedy(60), spec=TREE)
    assert len(refused) == 3 and "observer cannot generate with the engine that called it" in refused[0]
    assert output.outputs[0].finish_reason == "abort" and output.metrics.target_passes == 3
    llm.engine.check_integrity()
    assert llm.engine.scheduler.is_idle


# --- captured rounds


def test_a_stop_inside_the_path_of_a_captured_round() -> None:
    llm, rounds, prompts, plain = scripted(3)
    rounds.seconds = lambda: (0.25, 0.5)  # type: ignore[method-assign]
    records: list[RoundRecord] = []
    params = SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=[plain[0][5]])
    with llm.add_round_observer(records.append):
        outputs = llm.generate(prompts[:1], params, spec=SpecConfig(nodes=8, sources=("ssm",)))
    assert_tell(records, outputs)
    assert records[-1].bonus is None and records[0].bonus == plain[0][3]
    assert records[0].tree.sources_of(1) == ("ssm-1",) and np.isnan(records[0].tree.draw_probs).all()
    assert records[0].tree.probs.tolist() == pytest.approx([1.0, 0.9, 0.9, 0.9])
    assert records[0].target_seconds == 0.5 and records[0].draft_seconds >= 0.25, "lookup takes its own"


def test_a_round_that_found_nan_is_told_once() -> None:
    """What is decided step by step after a captured round is one round."""
    llm, rounds, prompts, plain = scripted(None)
    records: list[RoundRecord] = []
    with llm.add_round_observer(records.append):
        outputs = llm.generate(prompts, greedy(7), spec=SpecConfig(nodes=8, sources=("ssm",)))
    assert rounds.seen and [output.outputs[0].token_ids for output in outputs] == [tokens[:7] for tokens in plain]
    assert_tell(records, outputs, decided_anew=True)
