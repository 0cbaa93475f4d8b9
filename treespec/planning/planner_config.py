"""Constants of the planner and its cost model, each with what it was measured on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PlannerConfig:
    """How the planner learns, how long it rests, and what it assumes before it has seen anything.

    Times of speculation are in rounds of plain decoding. "Measured" means: modelled seconds over recorded rounds of 48
    held-out texts, the embedded models compiled, and a target of 0.5B parameters.

    Args:
        pause: rounds of rest after speculation was seen to cost more than it saves.
        longest_pause: each pause in a row doubles, up to this.
        credit: what speculation of one request may lose before it rests. Guesses hold in bursts: with a fifth of it
            lookup rested through most of the texts, and gained 1.11 to 1.15 where it can gain 1.52 to 1.61. A batch of
            n gets an nth, as bursts of several requests make up for each other's lack.
        second_credit: the same after a rest.
        largest_credit: that gains can build up.
        margin: gain that counts as none, about the error of modelled seconds.
        gain_memory: weight of the newest round in running means of gains.
        first_gain: what speculation is assumed to gain before it was tried.
        second_gain: what it is assumed to gain at least after a pause.
        recovery: share of the initial assumption that returns with each round in which nothing is drafted.
        reach: share of its open mass that a level is assumed to hold before one was tried.
        reach_memory: weight of the newest first level in its running mean.
        own_share: how far the last level says what the next one will hold; the rest is usual. A level may hold nothing
            because other sources have said it all, and those below it much: with 1 it ended nearly all trees after 2.7
            levels where 4.2 gain more (2.98 instead of 2.91; 0.5B parameters).
        unique_share: share of an extra SSM's tokens that no other source proposes. Without the SSMs that had 22 % of
            the trust, trees of 8 and 16 nodes, lookup in them, lost 2 and 3 % of their drafted tokens.
        calibration_memory: weight of the newest round in the calibration of node values.
        calibration_prior: tokens that the calibration starts with, accepted as promised.
        row_window: rows over which the cost of one row is taken; the times of two neighbours may be alike by chance.
        largest_least_value: upper bound of the value that a node must have: where rows seem dearer, guesses are made
            all the same, or nothing would be learned of them.
        speed_prior: rounds of plain decoding that a request's own speed is drawn towards.
        sharpness: exponent of a request's expected remaining time over the batch's longest. With 2 a request that ends
            after seven tenths of the time counts as the last one by half.
        idle_rounds: rounds for which a batch that is not worth drafting for is not asked again; asked in every round,
            the question costs 3 % of a short one.
        untried_share: of what a tree leaves open, what one of more nodes is assumed to hold before it was tried.
        exploration: share of that assumption that returns with each round in which a shape that was tried is not.
        seconds_memory: weight of the newest round in running means of seconds.
        seconds_reach: share of the learned time beyond which a measured one counts as this far off. On a busy machine
            rounds are interrupted for many times their length, now here, now there; a mean of such times would call
            everything dear that is not plain decoding's pass. Both sides are as wide, or noise alone would move it.
        row_seconds: of a row beyond each request's first, as a share of a pass over one row, at least. A curve that was
            disturbed may call rows free: what it says times anything would remain so.
        first_times: times whose median is the first learned one.
        fading: of what the host's work on trees seems to take beyond the usual, the share that goes with each round of
            a search in vain that lasts for more than `barren_rounds`.
        barren_rounds: rounds of searching in vain.
    """

    pause: int = 64
    longest_pause: int = 1024
    credit: float = 10.0
    second_credit: float = 5.0
    largest_credit: float = 20.0
    margin: float = 0.04
    gain_memory: float = 0.03
    first_gain: float = 1.2
    second_gain: float = 1.08
    recovery: float = 0.0015
    reach: float = 0.7
    reach_memory: float = 0.15
    own_share: float = 0.5
    unique_share: float = 0.12
    calibration_memory: float = 0.05
    calibration_prior: float = 1.0
    row_window: int = 16
    largest_least_value: float = 0.3
    speed_prior: int = 4
    sharpness: float = 2.0
    idle_rounds: int = 8
    untried_share: float = 0.3
    exploration: float = 0.005
    seconds_memory: float = 0.1
    seconds_reach: float = 0.3
    row_seconds: float = 0.03
    first_times: int = 5
    fading: float = 0.02
    barren_rounds: int = 64


DEFAULT = PlannerConfig()
