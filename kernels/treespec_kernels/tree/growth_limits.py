"""Limits of growing token trees, shared by trees on the host and on a device."""

from collections.abc import Sequence

CHILDREN = 8  # maximum number of proposals of one source at one node
FRONTIER = 8  # maximum number of nodes of one depth that SSMs expand, down to WIDE_DEPTH
SEEDS = 32  # maximum number of nodes of one tree proposed by sources without a draft model; the best are kept
MAX_DEPTH = 12  # levels of a captured round
MIN_MIXTURE, MAX_MIXTURE = 0.05, 0.999  # bounds of the mixture probability that a seed's evidence ratio is applied to
# Below WIDE_DEPTH fewer nodes of a depth are expanded, and below DEEPEST none, so that a tree never expands more than
# MAX_EXPANDED nodes. A limit on the total would give different trees on the host, which drops candidates that cannot be
# selected, and on a device, which does not.
WIDE_DEPTH, NARROW_FRONTIER, DEEPEST = 5, 2, 16
MAX_EXPANDED = 64


def frontier_width(depth: int, widest: int = FRONTIER) -> int:
    """Return the maximum number of nodes of a depth, 1 or more, to expand. Depth 0 has only the root."""
    if depth > DEEPEST:
        return 0
    return widest if depth <= WIDE_DEPTH else min(widest, NARROW_FRONTIER)


def level_widths(depth: int, branching: Sequence[int] | None, widest: int = FRONTIER) -> list[int]:
    """Return the maximum numbers of nodes of a tree to expand, by depth up to `depth` - 1, the root included.

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
