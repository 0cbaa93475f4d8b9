"""Evidence ratios of seeds: what a seed tells beside SSMs, as shipped and as learned from verified trees."""

import numpy as np
import pytest

from tests.helpers.models import tree_of
from treespec.drafters.evidence import SeedEvidence
from treespec.tree import TokenTree
from treespec_kernels.tree.tree_merge import merge_children


def test_ratios_are_positive_and_rise_with_the_seeds_own_probability() -> None:
    ratios = SeedEvidence().ratios(np.array([0.0, 1e-5, 0.1, 0.5, 0.9, 1.0]))
    assert ratios.dtype == np.float32 and np.isfinite(ratios).all() and (ratios > 0).all()
    assert (np.diff(ratios) >= 0).all() and ratios[-1] > ratios[2]


def verified(own: float, mixture: float, held: bool, evidence: SeedEvidence) -> tuple[TokenTree, TokenTree, int]:
    """A tree of one seed that SSMs gave `mixture`, that seed, and the target's token."""
    probs = np.array([own], dtype=np.float32)
    merged = float(merge_children([{7: np.float32(mixture)}], {7: 0}, 1, probs, evidence.ratios(probs))[7][0])
    return tree_of(3, {(7,): merged}, "lookup"), tree_of(3, {(7,): own}, "lookup"), 7 if held else 8


@pytest.mark.slow
@pytest.mark.parametrize(("bias", "slope"), [(2.0, 0.3), (-0.5, 1.2)])
def test_what_verification_says_is_learned(bias: float, slope: float) -> None:
    """Guesses that hold as another bias and slope say."""
    rng, evidence = np.random.default_rng(0), SeedEvidence()
    for _ in range(20000):
        own, mixture = rng.uniform(0.05, 0.95, 2)
        odds = bias + slope * np.log(own / (1 - own)) + np.log(mixture / (1 - mixture))
        tree, seed, token = verified(own, mixture, rng.random() < 1 / (1 + np.exp(-odds)), evidence)
        path = np.array([0, 1]) if token == 7 else np.array([0])
        evidence.observe(tree, seed, path, 1 if token == 7 else token)
    assert evidence.bias == pytest.approx(bias, abs=0.25) and evidence.slope == pytest.approx(slope, abs=0.25)


@pytest.mark.slow
def test_only_seeds_below_accepted_nodes_that_ssms_scored_count() -> None:
    before = SeedEvidence()
    seed = tree_of(3, {(7,): 0.5, (7, 8): 0.25, (9,): 0.125, (7, 8, 1): 0.5}, "lookup")
    for paths, path, bonus in (
        ({(7,): 0.5, (7, 8): 0.25}, [0, 1, 2], 1),  # no SSM spoke: the probabilities are the seeds' own
        ({(4,): 0.6}, [0, 1], 8),  # no seed in the tree
        ({(4,): 0.6, (7,): 0.5, (7, 8): 0.9}, [0, 1], 2),  # below a node that was turned down
    ):
        evidence = SeedEvidence()
        evidence.observe(tree_of(3, paths, "ssm"), seed, np.array(path), bonus)
        assert (evidence.bias, evidence.slope) == (before.bias, before.slope)
    for bonus, rises in ((8, True), (2, False)):  # the bonus token may be a seed's that was verified
        evidence = SeedEvidence()
        evidence.observe(tree_of(3, {(7,): 0.5, (7, 8): 0.9}, "ssm"), seed, np.array([0, 1]), bonus)
        assert (evidence.bias > before.bias) == rises and evidence.bias != before.bias


@pytest.mark.slow
def test_one_guess_changes_little_and_no_stream_runs_away() -> None:
    evidence = SeedEvidence()
    ratio = evidence.ratios(np.array([0.5]))[0]
    tree, seed, _ = verified(0.5, 0.5, False, evidence)
    evidence.observe(tree, seed, np.array([0]), 8)
    assert evidence.ratios(np.array([0.5]))[0] == pytest.approx(ratio, rel=0.05)
    for _ in range(20000):
        tree, seed, _ = verified(0.9, 0.9, False, evidence)
        evidence.observe(tree, seed, np.array([0]), 8)
    assert 0 < evidence.ratios(np.array([0.9]))[0] < 1
