"""Chooses a draft's vocabulary: the tokens that the target actually writes."""

import numpy as np

from treespec.training.lessons import Lessons

COVERAGE = 0.985  # share of the generated tokens that the vocabulary must contain
MULTIPLE = 64  # of known tokens, for vectorised heads


def choose_vocabulary(lessons: Lessons, target_size: int, ends: tuple[int, ...], most: int) -> np.ndarray:
    """Return the target ids of a draft's rows, int64 ascending, then -1 for all other tokens.

    The most frequent generated tokens, as many as cover `COVERAGE` of them, rounded up to a multiple of `MULTIPLE`
    rows, at most `most`. Tokens with little probability count a little, so that rare likely ones get in.

    Args:
        lessons: what the target wrote.
        target_size: of its vocabulary.
        ends: end tokens, always included.
        most: rows.
    """
    counts = np.zeros(target_size)
    np.add.at(counts, lessons.top_ids.ravel(), np.exp(lessons.top_logprobs.astype(np.float32)).ravel())
    sequences = np.repeat(np.arange(len(lessons)), np.diff(lessons.starts))
    place = np.arange(len(lessons.tokens)) - lessons.starts[sequences]
    is_prompt = place < lessons.firsts[sequences]
    np.add.at(counts, lessons.tokens[is_prompt], 0.05)  # prompt tokens are inputs, and often repeated in the output
    counts[list(ends)] = 0.0
    order = np.argsort(-counts, kind="stable")
    size = int(np.searchsorted(np.cumsum(counts[order]), COVERAGE * counts.sum())) + 1
    known = min(-(-(size + len(ends)) // MULTIPLE) * MULTIPLE, most - 1, target_size)
    chosen = [*ends, *order[~np.isin(order, ends)][: known - len(ends)]]
    return np.concatenate([np.sort(chosen), [-1]])


def rows_of_tokens(target_ids: np.ndarray, target_size: int) -> np.ndarray:
    """Return the draft's row of each of the target's tokens, int64 [target_size]; the last row for all others."""
    rows = np.full(target_size, len(target_ids) - 1)
    rows[target_ids[:-1]] = np.arange(len(target_ids) - 1)
    return rows
