"""Chooses a draft's vocabulary: the tokens that the target actually writes."""

from collections.abc import Sequence

import numpy as np

from treespec.training.lessons import Lessons

COVERAGE = 0.985  # share of the counted tokens that the vocabulary must contain
PROMPT_WEIGHT = 0.05  # of a prompt token: outputs often repeat it
MULTIPLE = 64  # of known tokens, for vectorised heads


def choose_vocabulary(lessons: Lessons, target_size: int, kept: Sequence[int], most: int) -> np.ndarray:
    """Return the target ids of a draft's rows, int64 ascending, then -1 for all other tokens.

    Tokens are counted by the probability that the target gives them in its own outputs, and by `PROMPT_WEIGHT` in its
    prompts. The vocabulary has the tokens `kept` and as many of the most frequent ones as cover `COVERAGE` of the
    counts, rounded up to a multiple of `MULTIPLE`, or down where `most` rows, the last one included, or the target's
    vocabulary end.
    """
    if most >= target_size:
        return np.append(np.arange(target_size), -1)
    counts = np.zeros(target_size)
    np.add.at(counts, lessons.top_ids.ravel(), np.exp(lessons.top_logprobs.astype(np.float32)).ravel())
    sequences = np.repeat(np.arange(len(lessons)), np.diff(lessons.starts))
    position = np.arange(len(lessons.tokens)) - lessons.starts[sequences]
    is_prompt = position < lessons.firsts[sequences]
    np.add.at(counts, lessons.tokens[is_prompt], PROMPT_WEIGHT)
    missing = COVERAGE * counts.sum() - counts[list(kept)].sum()
    counts[list(kept)] = 0.0
    order = np.argsort(-counts, kind="stable")
    size = int(np.searchsorted(np.cumsum(counts[order]), missing)) + 1
    room = min(most - 1, target_size)
    num_known = min(-(-(size + len(kept)) // MULTIPLE) * MULTIPLE, room // MULTIPLE * MULTIPLE or room)
    token_ids = [*kept, *order[~np.isin(order, kept)][: max(num_known - len(kept), 0)]]
    return np.concatenate([np.sort(token_ids), [-1]])


def rows_of_tokens(target_ids: np.ndarray, target_size: int) -> np.ndarray:
    """Return the draft's row of each of the target's tokens, int64 [target_size]; the last row for all others."""
    rows = np.full(target_size, len(target_ids) - 1)
    rows[target_ids[:-1]] = np.arange(len(target_ids) - 1)
    return rows
