"""How large token trees grow: one set of limits for trees on the host and on a device."""

CHILDREN = 8  # proposals of one source at one node
FRONTIER = 8  # nodes of one depth that SSMs expand, down to WIDE_DEPTH
SEEDS = 32  # nodes that sources without a pass propose for one tree; the best count
MAX_DEPTH = 12  # levels of a captured round
# Below WIDE_DEPTH fewer nodes of a depth are expanded and below DEEPEST none, so that a tree never has more than
# MAX_EXPANDED of them. A count over all depths would differ between a host, which leaves out what cannot be selected,
# and a device, which does not.
WIDE_DEPTH, NARROW_FRONTIER, DEEPEST = 5, 2, 16
MAX_EXPANDED = 64


def frontier_width(depth: int, widest: int = FRONTIER) -> int:
    """How many nodes of a depth, 1 or more, are expanded at most. The root is expanded alone."""
    if depth > DEEPEST:
        return 0
    return widest if depth <= WIDE_DEPTH else min(widest, NARROW_FRONTIER)


assert 1 + sum(map(frontier_width, range(1, DEEPEST + 1))) <= MAX_EXPANDED
