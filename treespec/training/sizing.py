"""Choice of the drafts' size from passes measured on this machine."""

import logging
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedConfig

from treespec.llm import LLM
from treespec.training.settings import WIDTH_STEP
from treespec.training.student import WIDTHS

logger = logging.getLogger(__name__)

PASS_SHARE = 0.03  # maximum time of one draft level, as a share of a plain target pass
HEAD_SHARE = 0.5  # maximum bytes of a draft's LM head, as a share of that limit
# Minimum for the limit of vocabulary rows: a vocabulary of 3,072 tokens, chosen from instructions about code, covers 93
# % of SmolLM2's tokens there and 76 % of those of general answers.
LEAST_ROWS = 8192
LEAST_LAYERS = 2  # one layer cannot copy from the context (induction heads, arXiv 2209.11895)
# Widths to try if two layers of the target's width are too slow, as shares of that width
NARROWER = (3 / 4, 2 / 3, 1 / 2, 1 / 3, 1 / 4)


def most_rows(target_bytes: int, hidden_size: int) -> int:
    """Return the maximum rows of a draft's vocabulary; its head takes time in proportion to its bytes."""
    return max(int(HEAD_SHARE * PASS_SHARE * target_bytes / (2 * hidden_size)), LEAST_ROWS)


def measure_level(
    model: Any,  # the target
    write: Callable[[int, int | None, Path], None],  # writes an untrained draft of these layers and width to a folder
    options: dict[str, Any],  # options of `LLM`
    layers: int,
    width: int | None,  # None for the target's
) -> tuple[float, float]:
    """Return the seconds of a draft level, and of a plain target pass."""
    with TemporaryDirectory(prefix="treespec-draft-") as folder:
        write(layers, width, Path(folder))
        curve = LLM(model, drafts=[folder], max_num_seqs=1, **options).engine.host.planner.costs.curve
    level, pass_seconds = curve.draft_seconds, float(curve.verify(1.0))
    text = f"{1e3 * level:.3g} ms, {level / pass_seconds:.0%} of a target pass"
    logger.info("draft level with %d layers, width %s: %s", layers, width or "of the target", text)
    return level, pass_seconds


def choose_size(
    measure: Callable[[int, int | None], tuple[float, float]],  # `measure_level` of this target
    config: PreTrainedConfig,
    max_layers: int,
    layers: int | None,
    hidden: int | None,
) -> tuple[int, int | None]:
    """Return the number of layers and the width (None for the target's) of a draft with cheap enough levels.

    A level may take `PASS_SHARE` of a target pass. Untrained drafts of two and three layers are measured; each further
    layer is assumed to cost as much as the third. If two layers take too long, narrower drafts are measured. `layers`
    or `hidden` given by the user are kept; a given number of layers is not measured. `config` has the target's widths,
    and `max_layers` is its number of layers.
    """
    least = min(layers or LEAST_LAYERS, max_layers)
    if layers is not None:
        return least, hidden
    level, pass_seconds = measure(least, hidden)
    if level <= PASS_SHARE * pass_seconds:
        if least == max_layers:
            return least, hidden
        layer_seconds = max(measure(least + 1, hidden)[0] - level, 0.05 * level)
        return min(least + int((PASS_SHARE * pass_seconds - level) / layer_seconds), max_layers), hidden
    if hidden is not None or not all(isinstance(getattr(config, name, None), int) for name in WIDTHS):
        return least, hidden
    for share in NARROWER:
        width = max(round(share * config.hidden_size / WIDTH_STEP), 1) * WIDTH_STEP
        if width < (hidden or config.hidden_size):
            hidden = width
            level, pass_seconds = measure(least, hidden)
            if level <= PASS_SHARE * pass_seconds:
                break
    return least, hidden
