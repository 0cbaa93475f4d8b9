"""Looks at single rounds from outside: nothing in the engine knows of it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from treespec.config import SpecConfig
from treespec.drawing import RoundPicture
from treespec.engine import Decided, Engine
from treespec.llm import LLM, Prompt
from treespec.params import SamplingParams
from treespec.tree import TokenTree

_WINDOW = 8  # tokens decoded ahead of one whose text is wanted
_CONTEXT = 64  # tokens of context in a picture


@dataclass(frozen=True, eq=False)
class Round:
    """What one round did for one request.

    Attributes:
        number: counted from 1.
        context: the tokens before the root.
        tree: what the target pass verified.
        path: int64 [1 + accepted], the accepted nodes that were emitted, the root first.
        bonus: the target's own token after them; None where the request ended inside the path.
        request_id: whose.
    """

    number: int
    context: list[int]
    tree: TokenTree
    path: np.ndarray
    bonus: int | None
    request_id: str

    @property
    def accepted(self) -> int:
        """Drafted tokens that were accepted."""
        return len(self.path) - 1

    @property
    def emitted(self) -> list[int]:
        """The tokens that the round added to the output."""
        tokens = self.tree.tokens[self.path[1:]].tolist()
        return tokens if self.bonus is None else [*tokens, self.bonus]


def record_rounds(
    llm: LLM,
    prompt: Prompt,
    count: int,
    spec: SpecConfig | str | None = None,
    temperature: float = 0.0,
    seed: int | None = None,
) -> list[Round]:
    """The first `count` rounds of a prompt's continuation; fewer where it ends before.

    Raises:
        RequestError: as `LLM.stream`.
    """
    deepest = SpecConfig.resolve(spec, llm.spec).max_depth
    most = count * (deepest + 1)  # so that no tree is cut by the end of the output
    params = SamplingParams(max_tokens=most, temperature=temperature, seed=seed)
    with watch(llm.engine) as rounds:
        own: list[Round] = []
        for chunk in llm.stream(prompt, params, spec):
            own = [each for each in rounds if each.request_id == chunk.request_id]
            if len(own) >= count:
                break
    return own


@contextmanager
def watch(engine: Engine) -> Iterator[list[Round]]:
    """A list to which every round of every request is added while the context is open."""
    rounds: list[Round] = []
    commit = engine.commit

    def commit_and_record(decided: Sequence[Decided]) -> None:
        before = [list(each.scored.request.tokens) for each in decided]
        commit(decided)
        for ((request, tree, _), (path, bonus)), tokens in zip(decided, before, strict=True):
            emitted = len(request.tokens) - len(tokens)
            complete = emitted == len(path)  # accepted nodes and the bonus token; fewer after a stop in the path
            kept = path if complete else path[: 1 + emitted]
            number = 1 + sum(each.request_id == request.request_id for each in rounds)
            rounds.append(Round(number, tokens[:-1], tree, kept, bonus if complete else None, request.request_id))

    engine.commit = commit_and_record  # type: ignore[method-assign]
    try:
        yield rounds
    finally:
        del engine.commit  # the class's own again


def picture(each: Round, tokenizer: Any) -> RoundPicture:
    """A round, ready to be drawn. A node's text is what it adds to the text before it; [id] without a tokenizer."""
    tree, before = each.tree, each.context[-_WINDOW:]
    paths = [tree.tokens[tree.path_to(node)].tolist() for node in range(len(tree))]
    context = each.context[-_CONTEXT:]
    return RoundPicture(
        tokens=[_last_text([*before, *path], tokenizer) for path in paths],
        parents=tree.parents.tolist(),
        sources=[tree.sources_of(node) for node in range(len(tree))],
        probs=[None, *tree.probs[1:].tolist()],
        path=each.path.tolist(),
        bonus=None if each.bonus is None else _last_text([*before, *paths[each.path[-1]], each.bonus], tokenizer),
        context="".join(f"[{t}]" for t in context) if tokenizer is None else tokenizer.decode(context),
    )


def _last_text(tokens: list[int], tokenizer: Any) -> str:
    """The text of the last of some tokens, as it reads after the others."""
    if tokenizer is None:
        return f"[{tokens[-1]}]"
    before, whole = tokenizer.decode(tokens[:-1]), tokenizer.decode(tokens)
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(tokens[-1:])
