"""Assignment of lessons to specialists: by the user's groups, or by a generalist's errors."""

from collections.abc import Sequence

import numpy as np

OWN_SHARE = 0.7  # share of a specialist's lessons from its own cluster
ITERATIONS, RESTARTS = 20, 8  # k-means iterations and restarts


def cluster_groups(groups: np.ndarray, count: int) -> np.ndarray:
    """Return the specialist of each lesson, int64: groups stay together, and sizes are balanced."""
    names, sizes = np.unique(groups, return_counts=True)
    loads, specialist_of = np.zeros(count), {}
    for i in np.argsort(-sizes, kind="stable"):
        specialist_of[names[i]] = int(loads.argmin())
        loads[specialist_of[names[i]]] += sizes[i]
    return np.array([specialist_of[group] for group in groups])


def cluster_errors(missed: Sequence[np.ndarray], rows: int, count: int, seed: int) -> np.ndarray:
    """Cluster lessons by the tokens (draft rows) that a generalist missed in each; return int64 [lessons].

    Spherical k-means over tf-idf vectors of the missed tokens, from k-means++ starts.
    """
    vectors = np.zeros((len(missed), rows), dtype=np.float32)
    for i, tokens in enumerate(missed):
        np.add.at(vectors[i], tokens, 1.0)
    weight = np.log((1 + len(missed)) / (1 + (vectors > 0).sum(0)))
    vectors = np.log1p(vectors) * weight
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
    runs = [_k_means(vectors, count, np.random.default_rng((seed, 3, run))) for run in range(RESTARTS)]
    return max(runs, key=lambda run: run[1])[0]


def _k_means(vectors: np.ndarray, count: int, rng: np.random.Generator) -> tuple[np.ndarray, float]:
    """Cluster unit vectors; return each vector's cluster and the summed similarity to the centres."""
    centres = vectors[rng.integers(len(vectors), size=1)]
    while len(centres) < count:
        distances = np.maximum(1 - (vectors @ centres.T).max(1), 1e-9) ** 2
        centres = np.concatenate((centres, vectors[rng.choice(len(vectors), 1, p=distances / distances.sum())]))
    for _ in range(ITERATIONS):
        clusters = balanced_owners(-(vectors @ centres.T))
        centres = np.stack([vectors[clusters == i].mean(0) for i in range(count)])
        centres /= np.maximum(np.linalg.norm(centres, axis=1, keepdims=True), 1e-9)
    return clusters, float((vectors @ centres.T)[np.arange(len(vectors)), clusters].sum())


def balanced_owners(costs: np.ndarray) -> np.ndarray:
    """Assign lessons to cheap specialists by costs [lessons, specialists]; each gets at least half a fair share."""
    number, count = costs.shape
    clusters = costs.argmin(1)
    for i in np.argsort(np.bincount(clusters, minlength=count)):
        lack = number // (2 * count) - int((clusters == i).sum())
        if lack > 0:
            sizes = np.bincount(clusters, minlength=count)
            movable = sizes[clusters] > number // (2 * count) + lack
            regret = np.where(movable & (clusters != i), costs[:, i] - costs[np.arange(number), clusters], np.inf)
            clusters[np.argsort(regret, kind="stable")[:lack]] = i
    return clusters


def odds_of(cluster_of: np.ndarray, specialist: int) -> np.ndarray:
    """Return the probability of drawing each lesson for a specialist."""
    is_own = cluster_of == specialist
    odds = np.full(len(cluster_of), (1 - OWN_SHARE) / len(cluster_of))
    odds[is_own] += OWN_SHARE / max(int(is_own.sum()), 1)
    return odds / odds.sum()
