"""Recording of rounds, and their conversion to pictures."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from treespec.drawing import RoundPicture
from treespec.engine.engine import Engine
from treespec.engine.round_record import RoundRecord
from treespec.llm import LLM, Prompt
from treespec.sampling_params import SamplingParams

_WINDOW = 8  # tokens decoded before the token to render
_CONTEXT = 64  # tokens of context in a picture


def record_rounds(
    llm: LLM, prompt: Prompt, count: int, temperature: float = 0.0, seed: int | None = None
) -> list[RoundRecord]:
    """Record the first `count` rounds of a continuation, or fewer if the output ends earlier."""
    max_tokens = count * (llm.spec.max_depth + 1)  # enough that max_tokens truncates no tree
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    with watch(llm.engine) as rounds:
        request_rounds: list[RoundRecord] = []
        for chunk in llm.stream(prompt, params):
            request_rounds = [record for record in rounds if record.request_id == chunk.request_id]
            if len(request_rounds) >= count:
                break
    return request_rounds


@contextmanager
def watch(engine: Engine) -> Iterator[list[RoundRecord]]:
    """Collect every round of every request in a list while the context is open."""
    rounds: list[RoundRecord] = []
    with engine.observers.add(rounds.append):
        yield rounds


def picture(record: RoundRecord, tokenizer: Any) -> RoundPicture:
    """Convert a round to a picture. A node's text is the text that it appends, or [id] without a tokenizer."""
    tree, before = record.tree, record.context[-_WINDOW:]
    paths = [tree.tokens[tree.path_to(node)].tolist() for node in range(len(tree))]
    context = record.context[-_CONTEXT:]
    return RoundPicture(
        tokens=[_last_text([*before, *path], tokenizer) for path in paths],
        parents=tree.parents.tolist(),
        sources=[tree.sources_of(node) for node in range(len(tree))],
        probs=[None, *tree.probs[1:].tolist()],
        path=record.path.tolist(),
        bonus=None if record.bonus is None else _last_text([*before, *paths[record.path[-1]], record.bonus], tokenizer),
        context="".join(f"[{t}]" for t in context) if tokenizer is None else tokenizer.decode(context),
    )


def _last_text(tokens: list[int], tokenizer: Any) -> str:
    """Return the text that the last token adds to the others'."""
    if tokenizer is None:
        return f"[{tokens[-1]}]"
    prefix, text = tokenizer.decode(tokens[:-1]), tokenizer.decode(tokens)
    return text[len(prefix) :] if text.startswith(prefix) else tokenizer.decode(tokens[-1:])
