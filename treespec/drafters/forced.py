"""Draft source of grammar-forced tokens: a chain of nodes with probability 1."""

import numpy as np

from treespec.request import Request
from treespec.tree import Draws, TokenTree


def forced_tree(request: Request, max_depth: int) -> TokenTree:
    """Return a chain of the tokens that the request's grammar forces next, at most `max_depth` of them.

    Return only the root if the request has no grammar, or its grammar allows several next tokens.
    """
    root = request.tokens[-1]
    grammar = request.restriction.grammar if request.restriction is not None else None
    if grammar is None or max_depth < 1 or not request.spec.allows("grammar", "grammar"):
        return TokenTree.root(root)
    forced = grammar.forced(request.tokens)[:max_depth]
    if not forced:
        return TokenTree.root(root)
    nodes = np.arange(1 + len(forced))
    draws = Draws(nodes[:-1], nodes[1:], np.zeros(len(forced), dtype=np.int64), np.ones(len(forced)))
    return TokenTree(np.array([root, *forced]), nodes - 1, nodes, np.ones(len(nodes)), draws, ("grammar",))
