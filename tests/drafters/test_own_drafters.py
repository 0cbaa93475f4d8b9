"""Drafters of a user's own: where they are asked, what is refused, and what their faults cost."""

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import treespec.hf
from tests.helpers.models import VOCAB, OracleDrafter, greedy, open_llm, random_prompts, tiny, tiny_llm
from tests.helpers.sampled import tokens_of
from tests.helpers.sharing import assert_clean
from treespec import LLM, Drafter, SpecConfig, TokenTree
from treespec.errors import ConfigError, DraftError
from treespec.request import Request

PROMPTS = random_prompts((20, 33))
TOKENS = 14
MINE = SpecConfig(nodes=16, sources=("mine",))


@functools.cache
def truths() -> tuple[list[int], ...]:
    """The prompts with what the target writes after them."""
    outputs = tiny_llm(ssms=()).generate(PROMPTS, greedy(TOKENS), "off")
    return tuple([*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs)


def continuations() -> list[list[int]]:
    return [truth[len(prompt) :] for truth, prompt in zip(truths(), PROMPTS, strict=True)]


class Mine(OracleDrafter):
    """Right about everything, but for what `fault` raises in a method, or makes of a proposal."""

    def __init__(self, fault: Callable[[str, Sequence[Request]], Any] = lambda method, requests: None):
        super().__init__(truths(), 4, wrong=1, name="mine")
        self.fault = fault
        self.asked: list[tuple[list[str], list[int]]] = []

    def propose(self, requests: Sequence[Request], max_depths: Sequence[int]) -> list[TokenTree]:
        self.asked.append(([request.request_id for request in requests], list(max_depths)))
        trees = super().propose(requests, max_depths)
        made = self.fault("propose", requests)
        return trees if made is None else made(trees)

    def commit(self, requests: Sequence[Request], paths: Sequence[np.ndarray]) -> None:
        super().commit(requests, paths)
        self.fault("commit", requests)

    def release(self, request: Request) -> None:
        super().release(request)
        self.fault("release", [request])


@functools.cache
def shared() -> tuple[LLM, Mine]:
    """An engine and its drafter, for one fault after the other."""
    drafter = Mine()
    return open_llm(tiny()[0], [tiny()[1][0], drafter], max_num_seqs=2), drafter


@contextmanager
def engine_with(fault: Callable[[str, Sequence[Request]], Any]) -> Iterator[tuple[LLM, Mine]]:
    llm, drafter = shared()
    drafter.asked.clear()
    drafter.fault = fault
    try:
        yield llm, drafter
    finally:
        drafter.fault = lambda method, requests: None
    assert_clean(llm)


# --- sources


def test_sources_name_a_drafter() -> None:
    drafter = Mine()
    assert isinstance(drafter, Drafter)
    llm = open_llm(tiny()[0], [tiny()[1][0], drafter])
    assert llm.draft_names == ("ssm-1", "mine")
    asked = {
        ("mine",): {"mine"},
        ("ssm",): {"ssm-1"},
        ("ssm-1", "mine"): {"ssm-1", "mine"},
        ("lookup",): set(),
        (): set(),
        None: {"ssm-1", "mine"},
    }
    for sources, names in asked.items():
        drafter.asked.clear()
        outputs = llm.generate(PROMPTS, greedy(TOKENS), SpecConfig(nodes=16, sources=sources))
        assert tokens_of(outputs) == continuations()
        assert {name for o in outputs for name in o.metrics.accepted_by_source} - {"lookup"} == names
        assert bool(drafter.asked) == ("mine" in names)
    llm.engine.check_integrity()


def test_only_requests_whose_trees_may_grow_are_asked_about() -> None:
    """Beside plain requests, and up to the last token, which nothing can follow."""
    with engine_with(lambda method, requests: None) as (llm, drafter):
        drafter.committed.clear()
        plain = llm.stream(PROMPTS[1], greedy(TOKENS), "off")
        first = next(plain)
        [output] = llm.generate(PROMPTS[:1], greedy(TOKENS), MINE)
        assert [*first.token_ids, *(token for chunk in plain for token in chunk.token_ids)] == continuations()[1]
    assert tokens_of([output]) == continuations()[:1]
    assert drafter.asked and all(ids == [output.request_id] and depths[0] > 0 for ids, depths in drafter.asked)
    assert list(drafter.committed) == [output.request_id]
    assert output.request_id in drafter.released


# --- faults


def raising(error: Exception, where: str = "propose") -> Callable[[str, Sequence[Request]], Any]:
    def fault(method: str, requests: Sequence[Request]) -> None:
        if method == where:
            raise error

    return fault


def proposing(make: Callable[[list[TokenTree]], Any]) -> Callable[[str, Sequence[Request]], Any]:
    return lambda method, requests: make if method == "propose" else None


def writing(method: str, requests: Sequence[Request]) -> None:
    if method == "propose":
        requests[0].tokens.append(5)  # as one would who extends "the text so far" by a guess


def replacing(method: str, requests: Sequence[Request]) -> None:
    if method == "commit":
        requests[0].tokens = [1, 2, 3]


FAULTS: dict[str, tuple[Callable[[str, Sequence[Request]], Any], str]] = {
    "raises": (raising(KeyError("table")), "propose raised KeyError: 'table'; .* leave the drafter out of `sources`"),
    "None": (proposing(lambda trees: None), r"propose returned NoneType for 1 requests; return a list with one"),
    "too few": (proposing(lambda trees: []), "propose returned 0 trees for 1 requests; return a list with one"),
    "no tree": (proposing(lambda trees: ["x"]), r"proposed str instead of a TokenTree \(TokenTree.root"),
    "lists": (
        proposing(lambda trees: [TokenTree([1, 2], [-1, 0], [0, 1], [1, 1], None, None, None, ())]),
        r"proposed tokens as list instead of int64 \[num_nodes\]; TokenTree.from_parents",
    ),
    "no draws": (
        proposing(lambda trees: [replace(tree, draw_nodes=None) for tree in trees]),
        r"returned a malformed tree \(TypeError: .*; TokenTree.from_parents",
    ),
    "writes": (writing, r"propose changed request.tokens, the engine's own list; work on list\(request.tokens\)"),
    "replaces": (replacing, "commit changed request.tokens"),
    "commit": (raising(ValueError("full"), "commit"), "commit raised ValueError: full"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_names_drafter_request_and_remedy(name: str) -> None:
    fault, message = FAULTS[name]
    with engine_with(fault) as (llm, drafter):
        other = llm.stream(PROMPTS[1], greedy(TOKENS), "off")
        first = next(other)
        with pytest.raises(DraftError, match=f"(?s)drafter 'mine' .*{message}") as caught:
            llm.generate(PROMPTS[0], greedy(TOKENS), MINE)
        assert drafter.asked[0][0][0] in str(caught.value)
        if name in ("raises", "commit"):
            assert isinstance(caught.value.__cause__, KeyError | ValueError)
        with pytest.raises(DraftError, match="drafter 'mine'"):
            for _ in llm.stream(PROMPTS[0], greedy(TOKENS), MINE):
                pass
        assert [*first.token_ids, *(token for chunk in other for token in chunk.token_ids)] == continuations()[1]
        assert tokens_of(llm.generate(PROMPTS, greedy(TOKENS), SpecConfig(sources=("lookup",)))) == continuations()


def test_a_fault_for_one_request_ends_that_one() -> None:
    calls = 0

    def spoil(trees: list[TokenTree]) -> list[Any]:
        nonlocal calls
        calls += 1
        return [trees[0], None] if calls == 2 else trees

    with engine_with(proposing(spoil)) as (llm, _):
        good, bad = llm.generate(PROMPTS, greedy(TOKENS), MINE)
    assert good.error is None and tokens_of([good]) == continuations()[:1]
    assert bad.outputs[0].finish_reason == "error" and "drafter 'mine' proposed NoneType" in str(bad.error)
    assert bad.request_id in str(bad.error)
    written = bad.outputs[0].token_ids
    assert 0 < len(written) < TOKENS and continuations()[1][: len(written)] == written


@pytest.mark.parametrize("method", ["commit", "release"])
def test_a_fault_at_the_end_loses_nothing(method: str, caplog: pytest.LogCaptureFixture) -> None:

    def fault(called: str, requests: Sequence[Request]) -> None:
        if called == method and (method == "release" or requests[0].tokens_left <= 5):
            raise ZeroDivisionError("late")

    with engine_with(fault) as (llm, _), caplog.at_level(logging.ERROR, "treespec"):
        outputs = llm.generate(PROMPTS[:1], greedy(5 if method == "commit" else TOKENS), MINE)
    assert outputs[0].error is None and continuations()[0][: len(tokens_of(outputs)[0])] == tokens_of(outputs)[0]
    [record] = caplog.records
    assert f"drafter 'mine' failed for request {outputs[0].request_id}: {method} raised" in record.getMessage()
    assert record.exc_info is not None and record.exc_info[0] is ZeroDivisionError


@pytest.mark.usefixtures("engines_start_quickly")
def test_a_fault_inside_transformers_generate() -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny()[0])
    inputs = torch.tensor(PROMPTS[:1])
    options: dict[str, Any] = {"custom_generate": treespec.hf.generate, "max_new_tokens": TOKENS, "do_sample": False}
    with pytest.raises(DraftError, match=r"drafter 'mine' failed .* KeyError"):
        model.generate(inputs, drafts=[Mine(raising(KeyError("table")))], **options)
    right = model.generate(inputs, drafts=[Mine()], spec=MINE, **options)
    assert right[0].tolist() == truths()[0]


def test_arrays_of_other_types_are_taken() -> None:
    def narrow(trees: list[TokenTree]) -> list[TokenTree]:
        types = {"tokens": np.int32, "parents": np.int16, "depths": np.uint8, "probs": np.float32}
        return [replace(t, **{name: getattr(t, name).astype(kind) for name, kind in types.items()}) for t in trees]

    with engine_with(proposing(narrow)) as (llm, _):
        outputs = llm.generate(PROMPTS, greedy(TOKENS), MINE)
    assert tokens_of(outputs) == continuations() and outputs[0].metrics.acceptance_length > 3


# --- proposals that break the rules: "whatever it proposes, the output is the target's"


def making(make: Callable[[Request], Any]) -> Callable[[str, Sequence[Request]], Any]:
    """Proposes whatever `make(request)` returns."""
    return lambda method, requests: (lambda trees: list(map(make, requests))) if method == "propose" else None


def chain(request: Request, tokens: list[int], probs: list[float] | float = 0.5) -> TokenTree:
    return TokenTree.from_parents([request.tokens[-1], *tokens], range(-1, len(tokens)), probs, "mine")


def star(request: Request, tokens: list[int]) -> TokenTree:
    return TokenTree.from_parents([request.tokens[-1], *tokens], [-1] + [0] * len(tokens), 0.5, "mine")


def true_next(request: Request, count: int) -> list[int]:
    """What the target goes on with."""
    texts = (text for text in truths() if text[: len(request.tokens)] == request.tokens)
    return next(texts)[len(request.tokens) :][:count]


BAD_TREES: dict[str, Callable[[Request], TokenTree]] = {
    "wrong root": lambda r: TokenTree.from_parents([(r.tokens[-1] + 1) % VOCAB, 5], [-1, 0], 0.5, "mine"),
    "equal siblings": lambda r: star(r, 2 * true_next(r, 1)),
    "token out of range": lambda r: star(r, [VOCAB]),
    "negative token": lambda r: star(r, [-1]),
    "too wide": lambda r: star(r, [*range(200)]),
    "too deep": lambda r: chain(r, [*range(300)]),
    "probabilities of NaN": lambda r: chain(r, true_next(r, 2), [1.0, math.nan, 0.5]),
    "probabilities above one": lambda r: chain(r, true_next(r, 2), [1.0, 7.0, 9.0]),
}


@pytest.mark.parametrize("name", BAD_TREES)
@pytest.mark.parametrize("shape", [{}, {"branching": (2, 2)}], ids=["auto", "static"])
def test_a_bad_tree_changes_no_token(name: str, shape: dict[str, Any]) -> None:
    """It is used as far as it is sound, alone and beside an SSM's, or refused by name; never are there other tokens."""
    with engine_with(making(BAD_TREES[name])) as (llm, _):
        for sources in (("mine",), None):
            try:
                outputs = llm.generate(PROMPTS, greedy(10), SpecConfig(**shape, sources=sources))
            except DraftError as error:
                assert "drafter 'mine'" in str(error)
            else:
                assert tokens_of(outputs) == [tokens[:10] for tokens in continuations()]


def drawn_chain(request: Request, tokens: list[int], probs: np.ndarray, excluded: Any = None) -> TokenTree:
    """Tokens one below the other, each said to be drawn from the same distribution."""
    rows = np.zeros(len(tokens), dtype=np.int64)
    return replace(chain(request, tokens), draw_rows=rows, draw_excluded=excluded, draft_probs=(probs,))


UNIFORM, HALF = np.full(VOCAB, 1 / VOCAB), np.repeat([2 / VOCAB, 0.0], VOCAB // 2)
BAD_DRAWS: dict[str, tuple[Callable[[Request], TokenTree], str]] = {
    "impossible": (lambda r: drawn_chain(r, [VOCAB - 1], HALF), "token 511 as drawn from row 0"),
    "excluded itself": (lambda r: drawn_chain(r, [3], UNIFORM, ((3,),)), "token 3 as drawn from row 0"),
    "excluded beyond": (lambda r: drawn_chain(r, [3], UNIFORM, ((VOCAB,),)), r"excluded tokens \(512,\)"),
    "no distribution": (lambda r: drawn_chain(r, [3], UNIFORM * 2), "not probabilities of 512 tokens"),
    "too many": (lambda r: drawn_chain(r, [3] * 16, UNIFORM), "drew 17 nodes at random"),
    "too deep": (lambda r: drawn_chain(r, [3] * 300, UNIFORM), "at most 256 are possible"),
}


@pytest.mark.parametrize("name", BAD_DRAWS)
def test_bad_random_draws_are_refused(name: str) -> None:
    """Rules that need the drafts' distributions reject the tree; the others accept it."""
    make, message = BAD_DRAWS[name]
    params = greedy(8, temperature=1.0, seed=1)
    with engine_with(making(make)) as (llm, _):
        with pytest.raises(DraftError, match=f"mine.*{message}"):
            llm.generate(PROMPTS[0], params, replace(MINE, verification="rejection"))
        plain, trees = (llm.generate(PROMPTS[0], params, spec) for spec in ("off", MINE))
    assert tokens_of(trees) == tokens_of(plain)


# --- construction


class Whole:
    """The least that is a drafter."""

    name: Any = "whole"

    def propose(self, requests: Sequence[Request], max_depths: Sequence[int]) -> list[TokenTree]:
        return [TokenTree.root(request.tokens[-1]) for request in requests]

    def commit(self, requests: Sequence[Request], paths: Sequence[np.ndarray]) -> None:
        pass

    def release(self, request: Request) -> None:
        pass


def named(name: Any) -> Whole:
    whole = Whole()
    whole.name = name
    return whole


class Headless(Whole):
    commit = release = None  # type: ignore[assignment]


class Nameless:
    propose, commit, release = Whole.propose, Whole.commit, Whole.release


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        ([Whole], r"Whole is a class; pass an instance, such as Whole\(\)"),
        ([Headless()], r"Headless has no commit\(\), release\(\); a Drafter has propose\(\), commit\(\) and release"),
        ([Nameless()], "Nameless.name is None; give it a name, such as name = 'nameless'"),
        ([named("lookup")], "Whole.name is 'lookup', which is reserved for a built-in source"),
        ([named("ssm-1"), tiny()[1][0]], "Whole.name is 'ssm-1', like another draft's; rename one of them"),
        ([object()], "neither a folder, a hub id, a model nor a Drafter"),
    ],
)
def test_what_is_no_drafter(drafts: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^drafts: .*{message}"):
        open_llm(tiny()[0], drafts)


def test_the_least_drafter() -> None:
    outputs = open_llm(tiny()[0], [Whole()]).generate(PROMPTS, greedy(TOKENS), SpecConfig(sources=("whole",)))
    assert tokens_of(outputs) == continuations()
    assert all(output.metrics.acceptance_length == 1 for output in outputs)


# --- trees


@pytest.mark.parametrize(
    ("tokens", "parents", "probs", "message"),
    [
        ([7, 1], [-1], 0.5, "2 tokens, 1 parents and 2 probs"),
        ([7, 1], [-1, 0], [1.0], "2 tokens, 2 parents and 1 probs"),
        ([7, 1, 2], [-1, 2, 0], 0.5, "node 1 has parent 2; valid: 0 to 0"),
    ],
)
def test_parents_that_make_no_tree(tokens: list[int], parents: list[int], probs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTree.from_parents(tokens, parents, probs, "mine")
