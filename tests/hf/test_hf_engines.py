"""Which engine serves a call of `treespec.hf.generate`, and the torch state it runs in."""

import importlib
import itertools
import logging
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers.generation import MaxTimeCriteria

import treespec.hf
from tests.helpers.architectures import make_model, random_ids
from tests.helpers.calls import calls_of
from tests.helpers.exactness import threads
from tests.helpers.models import greedy, random_prompts, tiny_llm
from treespec.errors import RequestError
from treespec.hf import engines
from treespec.hf.rows import with_delayed_start

module = importlib.import_module("treespec.hf.generate")  # its name is the function's in the package
pytestmark = pytest.mark.slow


@pytest.fixture
def model() -> Any:
    return make_model("stablelm")


def plainly(model: Any, ids: Tensor, **options: Any) -> Tensor:
    return model.generate(ids, **({"max_new_tokens": 8, "do_sample": False, "pad_token_id": 2} | options))


def by_trees(model: Any, ids: Tensor, **options: Any) -> Tensor:
    return plainly(model, ids, custom_generate=treespec.hf.generate, **options)


def test_another_number_of_threads_is_another_engine(model: Any) -> None:
    wanted = plainly(model, random_ids())
    assert torch.equal(by_trees(model, random_ids()), wanted)
    [first] = engines.engines_of(model)
    with threads(torch.get_num_threads() + 1):
        assert torch.equal(by_trees(model, random_ids()), wanted)
    assert torch.equal(by_trees(model, random_ids()), wanted)
    assert engines.engines_of(model)[-1] is first


def test_the_last_few_engines_are_kept(model: Any) -> None:
    drafts = [make_model("stablelm", seed=seed) for seed in range(1, 4)]
    wanted = plainly(model, random_ids())
    assert torch.equal(by_trees(model, random_ids()), wanted)
    [plain] = engines.engines_of(model)
    for draft in drafts[:2]:
        assert torch.equal(by_trees(model, random_ids(), drafts=[draft]), wanted)
    by_trees(model, random_ids())
    assert engines.engines_of(model)[-1] is plain and len(engines.engines_of(model)) == 3
    by_trees(model, random_ids(), drafts=[drafts[2]])
    assert engines.engines_of(model)[1] is plain and len(engines.engines_of(model)) == 3  # that of the first draft went
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    assert torch.equal(by_trees(model, random_ids()), plainly(model, random_ids()))
    assert len(engines.engines_of(model)) == 1, "engines around tensors that the model no longer has"


def test_an_engine_has_room_for_the_rows_of_the_call(model: Any) -> None:
    by_trees(model, random_ids())
    assert [llm.config.max_num_seqs for llm in engines.engines_of(model)] == [1]
    assert torch.equal(by_trees(model, random_ids(3)), plainly(model, random_ids(3)))
    assert [llm.config.max_num_seqs for llm in engines.engines_of(model)] == [3], "the smaller one is of no more use"
    by_trees(model, random_ids(2))
    assert [llm.config.max_num_seqs for llm in engines.engines_of(model)] == [3]


def test_where_memory_is_short(model: Any) -> None:
    """Room to spare goes first, then rows at once; then the message names what the caller can lower."""
    page = 64 * 2 * 4 * model.config.num_hidden_layers * model.config.hidden_size
    with mock.patch("treespec.startup.memory.free_memory") as free:
        free.return_value = 8 * page
        assert torch.equal(by_trees(model, random_ids(4)), plainly(model, random_ids(4)))
        [llm] = engines.engines_of(model)
        assert llm.config.max_model_len < 512
        free.return_value = page
        with pytest.raises(RequestError, match=r"one row of 209 tokens.*lower max_new_tokens"):
            by_trees(model, random_ids(), max_new_tokens=200)


def test_time_runs_from_the_first_round_on(model: Any) -> None:
    """Building an engine takes no time of `max_time`, and the caller's own criterion stays as it is."""
    now = [1000.0]
    slow = calls_of(module, "engine_for", lambda _: now.append(now[-1] + 60.0))
    own = MaxTimeCriteria(10.0, initial_timestamp=1060.0)
    with mock.patch("time.time", lambda: now[-1]), slow:
        found = [
            by_trees(model, random_ids(), **options) for options in ({"max_time": 5.0}, {"stopping_criteria": [own]})
        ]
    assert all(torch.equal(each, plainly(model, random_ids())) for each in found)
    assert own.initial_timestamp == 1060.0
    assert with_delayed_start([own], 60.0)[0].initial_timestamp == 1120.0


def test_autocast_changes_nothing_and_the_log_says_so(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    module.warn_autocast.cache_clear()
    wanted = plainly(model, random_ids())
    with torch.autocast("cpu", torch.bfloat16), caplog.at_level(logging.WARNING, "treespec"):
        for _ in range(2):  # built under it, and used under it
            assert torch.equal(by_trees(model, random_ids(), drafts=["lookup"]), wanted)
    assert [record.message for record in caplog.records if "autocast" in record.message] == [
        "torch.autocast has no effect in treespec.hf.generate: the model computes in torch.float32"
    ]
    llm, params = tiny_llm(), greedy(12, temperature=0.8, seed=1)
    [expected] = llm.generate(random_prompts([9]), params)
    with torch.autocast("cpu", torch.bfloat16):
        [found] = llm.generate(random_prompts([9]), params)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


def test_code_from_outside_may_keep_its_tensors(model: Any) -> None:
    """And change them later."""
    kept: dict[str, list[Tensor]] = {"processor": [], "criterion": [], "ours": []}

    def keep(who: str, *given: Tensor) -> None:
        assert not torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
        kept[who] += [*given, *(torch.zeros_like(each) for each in given)]

    def processor(who: str, ids: Tensor, scores: Tensor) -> Tensor:
        keep(who, ids, scores)
        return scores

    def criterion(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        keep("criterion", ids, *scores)
        return torch.zeros(len(ids), dtype=torch.bool)

    options: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    options |= {"logits_processor": [partial(processor, "processor")], "stopping_criteria": [criterion]}
    found: Any = by_trees(model, random_ids(), **options)
    assert torch.equal(found.sequences, plainly(model, random_ids()))
    tiny_llm().generate(random_prompts([9]), greedy(3, logits_processors=(partial(processor, "ours"),)))
    assert all(kept.values())
    for tensor in itertools.chain(found.scores, found.logits, [found.sequences], *kept.values()):
        tensor.mul_(2)
