"""Measured costs of passes that an engine starts with."""

import logging

from treespec.drafters.ssm.ssm_drafter import SsmDrafter
from treespec.planning import cost_measurement as costs
from treespec.planning.round_costs import CostCurve
from treespec.runner import Runner
from treespec.utils.torch_state import threads_of_passes

logger = logging.getLogger("treespec")

START_SECONDS = 0.5  # time limit for measuring costs that are not stored by `treespec autotune`
THREADS_MARGIN = 0.9  # recommend another number of threads below this fraction of the current round time


def load_costs(runner: Runner, ssms: SsmDrafter | None, threads: int, interpreted: bool) -> CostCurve:
    """Return the stored costs of these models on this machine, or measure them."""
    if interpreted:
        return CostCurve((1,), (1.0,), 0.1)  # times in Triton's interpreter are slow and meaningless
    key = costs.cost_key(runner, ssms, threads)
    known = costs.load(key)
    if known is None:
        with costs.measuring_alone(), threads_of_passes(runner.target.linear == "compiled"):
            return costs.load(key) or costs.measure(runner, ssms, START_SECONDS)
    if runner.target.device.type == "cpu":
        warn_of_threads(costs.by_threads(key), threads)
    return known


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
