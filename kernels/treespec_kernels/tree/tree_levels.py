"""What trees consist of while they grow, a level at a time, in numpy (treespec/drafters/ssm/forest.py) as in C++
(`growth_cpu`)."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np


class Level(NamedTuple):
    """Nodes of one depth, in the order of their trees and parents.

    tokens, parents, owners, seeds: int64 [size]; parents and owners as nodes and owners of a `Frontier`. probs, values:
    float64 [size]. proposed: bool [size, num_ssms]; draft_probs: float64 [size, num_ssms].
    """

    tokens: np.ndarray
    parents: np.ndarray
    owners: np.ndarray
    seeds: np.ndarray
    probs: np.ndarray
    values: np.ndarray
    proposed: np.ndarray
    draft_probs: np.ndarray


class Frontier(NamedTuple):
    """Nodes to score, those of a tree side by side; [num_rows] each, int64 but values.

    nodes: their numbers over all levels of all trees. owners: which tree. seeds: the same node among the seeds' nodes,
    -1 where it is none. above: slot of the parent in its tree. values: float64, the products of probs on the paths.
    """

    nodes: np.ndarray
    tokens: np.ndarray
    owners: np.ndarray
    seeds: np.ndarray
    above: np.ndarray
    values: np.ndarray

    def parts(self) -> dict[int, slice]:
        """The rows of each tree that has any."""
        if len(self.owners) and self.owners[0] == self.owners[-1]:
            return {int(self.owners[0]): slice(0, len(self.owners))}
        starts = [0, *(np.flatnonzero(self.owners[1:] != self.owners[:-1]) + 1).tolist()]
        bounds = pairwise([*starts, len(self.owners)])
        return {owner: slice(*own) for owner, own in zip(self.owners[starts].tolist(), bounds, strict=True)}
