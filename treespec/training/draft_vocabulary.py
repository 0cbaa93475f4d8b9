"""Selection of a draft's vocabulary: the tokens that the target actually writes."""

from collections.abc import Sequence

import numpy as np

from treespec.training.lessons import Lessons

COVERAGE = 0.985  # share of the counted tokens that the vocabulary must cover
PROMPT_WEIGHT = 0.05  # weight of a prompt token: outputs often repeat prompts
MULTIPLE = 64  # the number of known tokens is a multiple of this, for vectorised heads


def choose_vocabulary(lessons: Lessons, target_size: int, required: Sequence[int], max_rows: int) -> np.ndarray:
    """Return the target ids of a draft's rows: int64, ascending, followed by -1 for all other tokens.

    Counts tokens by the target's probabilities in its own outputs, and by `PROMPT_WEIGHT` in prompts. The vocabulary
    has the `required` tokens and the most frequent ones that cover `COVERAGE` of the counts. Their number is a multiple
    of `MULTIPLE`, at most `max_rows` (including the last row) and the target's vocabulary.
    """
    if max_rows >= target_size:
        return np.append(np.arange(target_size), -1)
    counts = np.zeros(target_size)
    np.add.at(counts, lessons.top_ids.ravel(), np.exp(lessons.top_logprobs.astype(np.float32)).ravel())
    sequences = np.repeat(np.arange(len(lessons)), np.diff(lessons.starts))
    position = np.arange(len(lessons.tokens)) - lessons.starts[sequences]
    is_prompt = position < lessons.firsts[sequences]
    np.add.at(counts, lessons.tokens[is_prompt], PROMPT_WEIGHT)
    missing = COVERAGE * counts.sum() - counts[list(required)].sum()
    counts[list(required)] = 0.0
    order = np.argsort(-counts, kind="stable")
    size = int(np.searchsorted(np.cumsum(counts[order]), missing)) + 1
    room = min(max_rows - 1, target_size)
    num_known = min(-(-(size + len(required)) // MULTIPLE) * MULTIPLE, room // MULTIPLE * MULTIPLE or room)
    token_ids = [*required, *order[~np.isin(order, required)][: max(num_known - len(required), 0)]]
    return np.concatenate([np.sort(token_ids), [-1]])


def rows_of_tokens(target_ids: np.ndarray, target_size: int) -> np.ndarray:
    """Map each target token to its draft row, int64 [target_size]; unknown tokens map to the last row."""
    rows = np.full(target_size, len(target_ids) - 1)
    rows[target_ids[:-1]] = np.arange(len(target_ids) - 1)
    return rows
