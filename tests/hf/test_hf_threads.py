"""A model in memory belongs to its owner while treespec decodes with it, in this thread and in others."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import treespec.hf
from tests.helpers.architectures import random_ids
from treespec.adapter.route import NAME, configs_of, implementation, routed


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    return model(input_ids=random_ids(), use_cache=False).logits


def attentions_of(model: Any) -> list[str]:
    return [config._attn_implementation for config in configs_of(model)]


@pytest.mark.slow
@pytest.mark.parametrize("own", ["sdpa", "eager"])
def test_another_thread_runs_the_model_as_it_is(own: str, model: Any) -> None:
    """While a layer runs in a pass of treespec, and while its head does: at the start of an engine, and later."""
    model = copy.deepcopy(model)
    model.set_attn_implementation(own)
    wanted, here = logits_of(model), threading.current_thread()
    seen: dict[str, list[bool]] = {"layer": [], "head": []}

    def look(place: str, *_: Any) -> None:
        if threading.current_thread() is here:
            with ThreadPoolExecutor(1) as other:
                seen[place].append(torch.equal(other.submit(logits_of, model).result(), wanted))

    handles = [
        model.model.layers[1].register_forward_pre_hook(partial(look, "layer")),
        model.lm_head.register_forward_pre_hook(partial(look, "head")),
    ]
    ids = model.generate(random_ids(), max_new_tokens=2, do_sample=False, custom_generate=treespec.hf.generate)
    for handle in handles:
        handle.remove()
    for place, same in seen.items():
        assert len(same) > 4 and all(same), f"{place}: {same.count(False)} of {len(same)} passes elsewhere differ"
    assert torch.equal(ids, model.generate(random_ids(), max_new_tokens=2, do_sample=False))
    assert {*attentions_of(model)} == {own}


def test_routes_that_overlap_leave_nothing_behind(model: Any) -> None:
    configs = configs_of(model)
    before = attentions_of(model)
    wanted = logits_of(model)
    first, second = routed(configs, lambda call: call.value), implementation(configs, "eager")
    release, entered = threading.Event(), threading.Event()

    def hold() -> None:
        with second:
            entered.set()
            release.wait()

    other = threading.Thread(target=hold)
    with first:
        other.start()
        entered.wait()
    assert {*attentions_of(model)} == {NAME}
    twin = copy.deepcopy(model)  # it keeps the name for good
    assert torch.equal(logits_of(model), wanted)
    release.set()
    other.join()
    assert attentions_of(model) == before
    assert torch.equal(logits_of(model), wanted)
    torch.testing.assert_close(logits_of(twin), wanted, rtol=1e-4, atol=1e-4)
