"""Chooses the size of drafts from measured passes of this machine."""

import logging
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from treespec.llm import LLM

logger = logging.getLogger("treespec")

PASS_SHARE = 0.08  # of a plain target pass that one level of one draft may take
HEAD_SHARE = 0.5  # of that share, in bytes, that a draft's vocabulary may take


def most_rows(target_bytes: int, hidden_size: int) -> int:
    """Return the most rows of a draft's vocabulary, whose head takes time in proportion to its bytes.

    Args:
        target_bytes: weights that a target pass reads.
        hidden_size: of the draft.
    """
    return max(int(HEAD_SHARE * PASS_SHARE * target_bytes / (2 * hidden_size)), 1024)


def choose_layers(model: Any, write: Callable[[int, Path], None], most: int, options: dict[str, Any]) -> int:
    """Return the number of layers with which a draft level takes at most `PASS_SHARE` of a target pass, at least 1.

    Untrained drafts of one and two layers are measured; a further layer costs what the second one does.

    Args:
        model: the target.
        write: writes an untrained draft of so many layers to a folder.
        most: layers of the target.
        options: further ones of `LLM`.
    """
    levels, plain = [], 0.0
    for layers in range(1, min(most, 2) + 1):
        with TemporaryDirectory(prefix="treespec-draft-") as folder:
            write(layers, Path(folder))
            curve = LLM(model, drafts=[folder], max_num_seqs=1, **options).engine.host.planner.costs.curve
            levels.append(curve.draft_seconds)
            plain = float(curve.verify(1.0))
    further = max(levels[-1] - levels[0], 0.05 * levels[0])
    chosen = 1 + int(max(PASS_SHARE * plain - levels[0], 0.0) / further)
    logger.info("a target pass takes %.3g ms, a draft level of one layer %.3g ms", 1e3 * plain, 1e3 * levels[0])
    return min(chosen, most)
