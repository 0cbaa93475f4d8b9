"""Verification rules: which drafted tokens are the target's own.

Vocabulary of the results: *accepted* tokens are drafted nodes that the target would have produced; the *bonus* token is
the target's own choice after the last accepted node, at no further cost. Greedy decoding emits both, so every target
pass emits at least one token.
"""

from typing import NamedTuple

import numpy as np

from treespec.tree import TokenTree


class Verified(NamedTuple):
    """What one target pass decided for one request.

    `path`: int64 [1 + accepted], node indices from the root. `bonus`: the token after it.
    """

    path: np.ndarray
    bonus: int


def verify_greedy(tree: TokenTree, choices: np.ndarray) -> Verified:
    """Walk down from the root as long as a child carries the target's choice.

    This is the naive rule at temperature 0: lossless for any tree, whatever drafted it, because the emitted tokens are
    `choices` along the path and nothing else.

    Args:
        tree: num_nodes nodes; siblings carry different tokens.
        choices: int64 [num_nodes], the target's argmax after each node.
    """
    path, parents, tokens, wanted = [0], tree.parents.tolist(), tree.tokens.tolist(), choices.tolist()
    for node in range(1, len(tree)):  # parents precede their children
        if parents[node] == path[-1] and tokens[node] == wanted[path[-1]]:
            path.append(node)
    return Verified(np.array(path, dtype=np.int64), wanted[path[-1]])
