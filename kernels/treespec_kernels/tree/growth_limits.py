"""Limits of tree growth, shared by host and device."""

from collections.abc import Sequence

CHILDREN = 8  # maximum number of proposals per source and node
FRONTIER = 8  # maximum number of nodes per depth that SSMs expand, down to WIDE_DEPTH
SEEDS = 32  # maximum number of nodes per tree from model-free sources; the best are kept
MAX_DEPTH = 12  # levels of a captured round
MIN_MIXTURE, MAX_MIXTURE = 0.05, 0.999  # bounds of the mixture probability to which a seed's evidence ratio is applied
# Below WIDE_DEPTH fewer nodes per depth are expanded, and below DEEPEST none, so that a tree never expands more than
# MAX_EXPANDED nodes. A limit on the total would give different trees on the host, which drops candidates that cannot be
# selected, and on a device, which does not.
WIDE_DEPTH, NARROW_FRONTIER, DEEPEST = 5, 2, 16
MAX_EXPANDED = 64


def frontier_width(depth: int, widest: int = FRONTIER) -> int:
    """Return the maximum number of nodes to expand at a depth of at least 1. Depth 0 has only the root."""
    if depth > DEEPEST:
        return 0
    return widest if depth <= WIDE_DEPTH else min(widest, NARROW_FRONTIER)


def level_widths(depth: int, branching: Sequence[int] | None, widest: int = FRONTIER) -> list[int]:
    """Return the maximum number of nodes to expand at each depth from 0 (the root) to `depth` - 1.

    Args:
        depth: maximum depth of the tree.
        branching: static number of children per node by depth, the last one for all further depths; None if nodes are
            selected by value.
        widest: as in `frontier_width`.
    """
    widths = [1] * min(depth, 1)
    for level in range(1, depth):
        below = frontier_width(level, widest) if branching is None else branching[min(level, len(branching)) - 1]
        widths.append(below if branching is None else widths[-1] * below)
    return widths


assert 1 + sum(map(frontier_width, range(1, DEEPEST + 1))) <= MAX_EXPANDED
