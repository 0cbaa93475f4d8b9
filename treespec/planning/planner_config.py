"""Constants of the planner and its cost model, with the measurements behind them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PlannerConfig:
    """Learning rates, backoff and priors of the planner.

    Durations of speculation are in rounds of plain decoding. Weights of running means apply to the newest round.
    "Measured" figures are modelled seconds over recorded rounds of 48 held-out texts, with the embedded models compiled
    and a target of 0.5B parameters.

    Args:
        pause: rounds of the first pause after speculation costs more than it saves.
        max_pause: upper bound of the pause, which doubles each time.
        credit: loss that speculation of one request may accumulate before it pauses. Acceptance comes in bursts: with a
            fifth of this credit, lookup paused through most texts and gained 1.11 to 1.15 instead of 1.52 to 1.61
            (measured). A batch of n requests gets an n-th, because the bursts of its requests average out.
        retry_credit: credit after a pause.
        max_credit: upper bound of the credit that gains accumulate.
        margin: gain over plain decoding that counts as none, about the error of modelled seconds.
        gain_ema: weight of running means of gains.
        initial_gain: prior of the gain, before speculation is tried.
        retry_gain: minimum gain that is assumed after a pause.
        recovery: decay towards the priors per round in which nothing is drafted.
        coverage: prior of the share of its open mass that a draft level holds.
        coverage_ema: weight of the running mean of first levels' coverage.
        last_level_weight: weight of the last level's coverage in the prediction of the next one's; the rest is the
            running mean. A level may hold nothing because other sources already proposed its tokens, and the next one
            much: a weight of 1 ended nearly all trees after 2.7 levels, where 4.2 gain more (2.98 instead of 2.91;
            0.5B parameters).
        unique_share: share of an additional SSM's tokens that no other source proposes. Without the SSMs that had 22 %
            of the trust, trees of 8 and 16 nodes, including lookup, lost 2 and 3 % of their drafted tokens.
        calibration_ema: weight of the calibration of node values.
        calibration_prior: pseudo-count of the calibration: tokens that it starts with, accepted as predicted.
        row_window: rows over which the marginal cost of a row is averaged, because two neighbouring row counts may
            measure the same time by chance.
        max_least_value: upper bound of the minimum value of a node. It keeps some nodes in the tree where rows seem
            more expensive, as their acceptance could not be learned otherwise.
        speed_prior: pseudo-count, in rounds of plain decoding, for a request's tokens per round.
        lateness_exponent: exponent of a request's expected remaining time over the batch's longest. With 2, a request
            that ends after seven tenths of the time counts as the last one by half.
        idle_rounds: rounds for which a batch that does not pay is decoded plainly before it is reconsidered; deciding
            in every round costs 3 % of a short one.
        untried_share: share of the mass left open by a tree that an untried shape with more nodes is assumed to hold.
        exploration: weight, per round, of that assumption for shapes that were tried earlier but not in this round.
        seconds_ema: weight of running means of seconds.
        seconds_clip: clipping of a measured time, as a share of the running mean. On a busy machine, interruptions of
            many times a round's length hit its parts at random; an unclipped mean would make everything but plain
            decoding's pass look expensive. Clipping is symmetric, since noise alone would move the mean otherwise.
        min_row_share: minimum size of a row beyond each request's first in the correction of the curve, as a share of a
            pass over one row. A disturbed curve may assign rows no cost, and scaling would keep it at zero.
        warmup_samples: number of first times whose median initialises a running mean.
        host_decay: decay, per further round, of the learned host time on trees towards its usual ratio to that of
            searching, after more than `fruitless_rounds` rounds.
        fruitless_rounds: consecutive rounds in which sources are asked and propose nothing that is verified.
    """

    pause: int = 64
    max_pause: int = 1024
    credit: float = 10.0
    retry_credit: float = 5.0
    max_credit: float = 20.0
    margin: float = 0.04
    gain_ema: float = 0.03
    initial_gain: float = 1.2
    retry_gain: float = 1.08
    recovery: float = 0.0015
    coverage: float = 0.7
    coverage_ema: float = 0.15
    last_level_weight: float = 0.5
    unique_share: float = 0.12
    calibration_ema: float = 0.05
    calibration_prior: float = 1.0
    row_window: int = 16
    max_least_value: float = 0.3
    speed_prior: int = 4
    lateness_exponent: float = 2.0
    idle_rounds: int = 8
    untried_share: float = 0.3
    exploration: float = 0.005
    seconds_ema: float = 0.1
    seconds_clip: float = 0.3
    min_row_share: float = 0.03
    warmup_samples: int = 5
    host_decay: float = 0.02
    fruitless_rounds: int = 64


DEFAULT = PlannerConfig()
