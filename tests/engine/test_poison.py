"""NaN and infinity: they end the request that computes them, alone, and leave nothing in its pages."""

import itertools
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.exactness import altered_logits
from tests.helpers.models import VOCAB, Poisoner, greedy, new_folder, open_llm, quick, random_prompts, tiny, tiny_llm
from tests.helpers.quantized_checkpoints import needs_compiler
from tests.helpers.sampled import tokens_of
from tests.helpers.sharing import assert_clean
from tests.helpers.speech import around_steps, checked
from treespec import LLM, SpecConfig
from treespec.errors import ModelError, RequestError
from treespec.request import Request
from treespec.tree import TokenTree

TREE = SpecConfig(nodes=16, max_depth=5)
PASSES: dict[str, Any] = {name: {"attention": name} for name in ("cpu-packed", "cpu-gathered")}
PASSES["compiled"] = {}  # where there is a compiler
POISON = 511  # the token whose embedding `poisoned` spoils; no output below has it


def poisoned(llm: LLM, value: float = math.nan) -> LLM:
    """Spoil one embedding of the target, after the engine's self-test met no fault."""
    with torch.inference_mode():
        llm.engine.runner.target.embed[POISON] = value
    return llm


def safe_prompts(*lengths: int) -> list[list[int]]:
    return random_prompts(lengths, vocab=POISON)


def test_nan_in_the_head_is_named_before_anything_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    folder = shutil.copytree(tiny()[0], new_folder("nan") / "target")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][POISON, 3] = math.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ModelError, match=rf"logits of 1 tokens are NaN, beginning with token {POISON};.*lm_head\.weight"
    ):
        open_llm(folder, prove=True)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("passes", quick(PASSES, ("cpu-packed", "compiled")))
@pytest.mark.parametrize("spec", [TREE, "off"], ids=["tree", "off"])
@pytest.mark.parametrize("where", ["prompt", "root"])
def test_one_request_ends_and_the_others_finish(where: str, spec: SpecConfig | str, passes: str) -> None:
    llm = poisoned(open_llm(tiny()[0], tiny()[1][:1], max_num_seqs=3, **PASSES[passes]))
    good = safe_prompts(5, 70, 30, 64)
    alone = [tokens_of(llm.generate(prompt, greedy(12), "off"))[0] for prompt in good]
    bad = [*good[1][:40], POISON, *([5] * 30 if where == "prompt" else [])]
    with checked(llm):
        outputs = llm.generate([good[0], bad, *good[1:]], greedy(12), spec)
    assert not any(POISON in tokens for tokens in alone)
    assert tokens_of(outputs) == [alone[0], [], *alone[1:]]
    failed = outputs[1]
    assert failed.outputs[0].finish_reason == "error" and "NaN" in str(failed.error)
    assert f"position {len(bad) - 1}" in str(failed.error)
    assert [o.error for o in outputs if o is not failed] == [None] * 4
    assert llm.stats()["failed_requests"] == 1
    assert_clean(llm)
    with pytest.raises(RequestError, match="NaN"):
        llm.generate(bad, greedy(4), spec)
    with pytest.raises(RequestError, match="NaN"):
        list(llm.stream(bad, greedy(4), spec))
    assert tokens_of(llm.generate(good, greedy(12), spec)) == alone
    assert_clean(llm)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["abort", "interrupt"])
def test_a_poisoned_prompt_that_is_given_up_before_it_fails(how: str) -> None:
    """Its prompt is in the cache, and nobody has seen its logits yet: the next holder of its pages must not suffer."""
    llm = poisoned(open_llm(tiny()[0], max_num_seqs=1, max_num_batched_tokens=8))
    (prompt,) = safe_prompts(100)
    expected = tokens_of(llm.generate(prompt, greedy(8)))
    bad = [POISON] * 60
    calls = itertools.count(1)

    @contextmanager
    def leave_after_three() -> Iterator[None]:
        yield
        if next(calls) == 3:
            if how == "interrupt":
                raise KeyboardInterrupt
            llm.abort(llm.engine.scheduler.running[0].request_id)

    with around_steps(llm, leave_after_three):
        try:
            llm.generate(bad, greedy(4))
        except KeyboardInterrupt:
            assert how == "interrupt"
    assert tokens_of(llm.generate(prompt, greedy(8))) == expected
    assert_clean(llm)


@pytest.mark.parametrize("value", quick((math.nan, math.inf, -math.inf), (math.nan,)))
def test_a_poisoned_node_off_the_path_changes_nothing(value: float) -> None:
    """The drafter proposes the bad token beside the true ones, at every depth: only its own subtree is lost."""
    prompts = safe_prompts(20, 62)
    expected = tokens_of(tiny_llm(ssms=()).generate(prompts, greedy(24)))
    truths = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
    assert not any(POISON in truth for truth in truths)

    for drafts in ([Poisoner(POISON, truths, 4)], [*tiny()[1][:2], Poisoner(POISON, truths, 4)]):
        llm = poisoned(open_llm(tiny()[0], drafts, max_num_seqs=2), value)
        with checked(llm):
            outputs = llm.generate(prompts, greedy(24), SpecConfig(nodes=48, max_depth=5))
        assert tokens_of(outputs) == expected
        assert all(output.metrics.acceptance_length > 1 for output in outputs)
        assert_clean(llm)


DRAFTING = {"nodes": TREE, "static": SpecConfig(branching=(3, 2))}
DRAFTING |= {rule: SpecConfig(branching=(2, 1), verification=rule) for rule in ("rejection", "traversal")}


@needs_compiler
@pytest.mark.parametrize("compile", quick((False, True), (True,)))
@pytest.mark.parametrize("name", quick(DRAFTING, ("nodes", "static")))
def test_a_draft_that_computes_nan_costs_only_time(name: str, compile: bool) -> None:
    """The one beside it drafts as if it were alone, and no NaN stays behind."""
    target, (*_, good) = tiny()
    folder = Path(shutil.copytree(good, new_folder("bad-draft") / "ssm-bad"))
    tensors = load_file(good / "model.safetensors")
    tensors["model.norm.weight"][3] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    prompts, passes, spec = safe_prompts(9, 50, 63), [], DRAFTING[name]
    drawn = spec.verification != "coupled"
    params = greedy(16, **({"temperature": 1.0, "seed": 1, "top_k": 9, "top_p": 0.9} if drawn else {}))
    plain = tokens_of(open_llm(target, compile=compile).generate(prompts, params))
    for drafts in ([good], [good, folder], [folder]):
        llm = open_llm(target, drafts, compile=compile)
        with checked(llm):
            outputs = llm.generate(prompts, params, spec)
        assert all(output.error is None for output in outputs) and (drawn or tokens_of(outputs) == plain)
        passes.append(sum(output.metrics.target_passes for output in outputs))
        assert_clean(llm)
    assert max(passes[:2]) < 3 * 15 and (drawn or passes[0] == passes[1])


def test_ties_and_minus_infinity() -> None:
    """Of equal logits, common in bf16, the smallest id wins; minus infinity forbids a token, and is no error."""
    llm = tiny_llm(torch.bfloat16, (0,))

    def change(request: Request, tree: TokenTree, logits: Tensor) -> None:
        tied = torch.arange(VOCAB) % 7 == len(request.tokens) % 5
        logits[:, tied] = logits.amax(1, keepdim=True)
        logits[:, ::2] = -math.inf

    with altered_logits(llm, change):
        for spec in ("off", TREE):
            (output,) = llm.generate(safe_prompts(9), greedy(12), spec)
            assert output.error is None and all(token % 2 and token < 12 for token in output.outputs[0].token_ids)
