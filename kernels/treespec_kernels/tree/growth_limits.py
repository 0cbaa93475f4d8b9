"""Limits of growing token trees, shared by trees on the host and on a device."""

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


assert 1 + sum(map(frontier_width, range(1, DEEPEST + 1))) <= MAX_EXPANDED
