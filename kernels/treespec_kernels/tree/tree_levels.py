"""Levels and frontiers of growing trees on the host.

They are shared by growth in C++ and in numpy (treespec/drafters/ssm/forest.py and reference_forest.py).
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np


class Level(NamedTuple):
    """Nodes of one depth, ordered by tree and parent."""

    tokens: np.ndarray  # int64 [size]
    parents: np.ndarray  # int64 [size], as `Frontier.nodes`; owners and seeds likewise
    owners: np.ndarray
    seeds: np.ndarray
    probs: np.ndarray  # float32 [size], probability after the parent
    values: np.ndarray  # float32 [size], product of probabilities along the path
    proposed: np.ndarray  # bool [size, num_ssms], whether each SSM proposed the node
    draft_probs: np.ndarray  # float32 [size, num_ssms], each SSM's probability of the node

    def select(self, nodes: np.ndarray | slice) -> "Level":
        """Return some of the nodes."""
        return Level(*(column[nodes] for column in self))


class Frontier(NamedTuple):
    """Nodes to score, grouped by tree; [num_rows] each, int64 except values."""

    nodes: np.ndarray  # indices over all levels of all trees
    tokens: np.ndarray  # tokens of the nodes
    owners: np.ndarray  # index of the tree
    seeds: np.ndarray  # index of the node among the seeds, or -1
    above: np.ndarray  # slot of the parent in its tree
    values: np.ndarray  # float32, product of probabilities along the path

    def select(self, rows: np.ndarray | slice) -> "Frontier":
        """Return some of the nodes."""
        return Frontier(*(column[rows] for column in self))

    def slices(self) -> dict[int, slice]:
        """Return the slice of rows of each tree that has any, by tree index."""
        if len(self.owners) and self.owners[0] == self.owners[-1]:
            return {int(self.owners[0]): slice(0, len(self.owners))}
        starts = [0, *(np.flatnonzero(self.owners[1:] != self.owners[:-1]) + 1).tolist()]
        bounds = pairwise([*starts, len(self.owners)])
        return {owner: slice(*bound) for owner, bound in zip(self.owners[starts].tolist(), bounds, strict=True)}
