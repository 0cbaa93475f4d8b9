"""Draft source of grammar-forced tokens: a chain of nodes with probability 1."""

from treespec.request import Request
from treespec.tree import TokenTree


def forced_tree(request: Request, max_depth: int) -> TokenTree:
    """Return a chain of the tokens that the request's grammar forces next, at most `max_depth` of them.

    Return only the root if the request has no grammar, or its grammar allows several next tokens.
    """
    root = request.tokens[-1]
    grammar = request.restriction.grammar if request.restriction is not None else None
    if grammar is None or max_depth < 1 or not request.spec.allows("grammar", "grammar"):
        return TokenTree.root(root)
    forced = grammar.forced(request.tokens)[:max_depth]
    return TokenTree.from_parents([root, *forced], range(-1, len(forced)), 1.0, "grammar")
