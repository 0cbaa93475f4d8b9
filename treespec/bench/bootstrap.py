"""Bootstrap intervals of acceptance lengths over prompts."""

from collections.abc import Sequence

import numpy as np

from treespec.bench.measure import Sample

RESAMPLES, COVERAGE = 2000, 0.95


def resampled_lengths(samples: Sequence[Sample]) -> np.ndarray:
    """Return a mode's tokens per pass over all prompts, followed by those of each resample.

    Prompts are drawn with all their repeats, by a fixed seed: the same prompts for every mode.
    """
    tokens = np.array([[len(tokens) for tokens in sample.tokens] for sample in samples]).sum(0)
    passes = np.array([sample.passes for sample in samples]).sum(0)
    picks = np.random.default_rng(0).integers(0, len(tokens), (RESAMPLES, len(tokens)))
    return np.concatenate([[tokens.sum() / passes.sum()], tokens[picks].sum(1) / passes[picks].sum(1)])


def interval(values: np.ndarray) -> list[float]:
    """Return [value, low, high]: the value of all prompts and the bounds of the bootstrap interval."""
    outside = (1 - COVERAGE) / 2
    return [float(values[0]), *np.quantile(values[1:], [outside, 1 - outside]).tolist()]
