"""Measured costs of passes that an engine starts with."""

import logging
from pathlib import Path

from treespec.drafters.ssm.ssm_drafter import SsmDrafter
from treespec.planning.round_costs import CostCurve
from treespec.runner import Runner
from treespec.startup import cost_measurement as costs
from treespec.utils.torch_state import threads_of_passes

logger = logging.getLogger("treespec")

START_SECONDS = 0.5  # intended duration of measuring costs that are not stored
THREADS_MARGIN = 0.9  # recommend another number of threads below this fraction of the current round time


def load_costs(runner: Runner, ssms: SsmDrafter | None, threads: int, interpreted: bool) -> CostCurve:
    """Return the stored costs of these models on this machine, by `treespec autotune` or an earlier start.

    Otherwise measure and store them. Starts of other models are waited for as long as a measurement may take.
    """
    if interpreted:
        return CostCurve((1,), (1.0,), 0.1)  # times in Triton's interpreter are slow and meaningless
    key = costs.cost_key(runner, ssms, threads)
    if (known := costs.load(key)) is not None:
        if runner.target.device.type == "cpu":
            warn_of_threads(costs.by_threads(key), threads)
        return known
    own, folder = costs.start_key(runner, key), starts_folder()
    if (known := costs.load(own, folder)) is not None:
        return known
    with (
        costs.measuring_alone(START_SECONDS * costs.PATIENCE),
        threads_of_passes(runner.target.linear == "compiled"),
    ):
        if (known := costs.load(key) or costs.load(own, folder)) is None:
            known = costs.measure(runner, ssms, START_SECONDS)
            try:
                costs.save(known, own, folder)
            except OSError as error:
                logger.info("measured pass costs cannot be stored, and the next start measures them again: %s", error)
    return known


def starts_folder() -> Path | None:
    """Return the folder of costs measured at starts, apart from those of `treespec autotune`; None without a home."""
    try:
        return costs.cache_folder() / "starts"
    except OSError:
        return None


def warn_of_threads(seconds: dict[int, float], threads: int) -> None:
    """Recommend another number of threads if its rounds were clearly faster.

    The number is not changed here, because bits may depend on it.
    """
    if threads not in seconds:
        return
    best = min(seconds, key=lambda number: seconds[number])
    if seconds[best] < THREADS_MARGIN * seconds[threads]:
        logger.warning(
            "with %d threads a round took %.3g ms here, with %d %.3g ms (treespec autotune); "
            "set OMP_NUM_THREADS=%d, or call torch.set_num_threads(%d) before LLM",
            threads,
            1000 * seconds[threads],
            best,
            1000 * seconds[best],
            best,
            best,
        )
