"""Token restrictions of a request (allowed_token_ids, grammar). They also apply to drafts."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from treespec.errors import RequestError
from treespec.sampling.grammar import Grammar
from treespec.tree import TokenTree


class Restriction:
    """Token mask from a list of allowed ids, a grammar or both."""

    def __init__(self, allowed: Sequence[int] | None, grammar: Grammar | None, vocab_size: int, device: torch.device):
        self.grammar = grammar
        self._unlisted = np.full(vocab_size, allowed is not None)
        self._unlisted[list(allowed or ())] = False
        self._unlisted_on_device = torch.from_numpy(self._unlisted).to(device)

    def excluded(self, tokens: Sequence[int], ancestors: Sequence[int]) -> Tensor:
        """Return a mask of the tokens that are not allowed next, bool [vocab]. Do not modify it."""
        if self.grammar is None:
            return self._unlisted_on_device
        return self._unlisted_on_device | self.grammar.excluded(tokens, ancestors)

    def narrow(self, logits: Tensor, tokens: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Mask tokens, in draft logits [num_rows, vocab] in place, that the target may not choose after a row's path.

        A row is left unmasked if no token would remain or if the grammar rejects its text. Drafts there are never
        accepted.
        """
        excluded = torch.stack([self._excluded_if_known(tokens, path) for path in paths])
        narrowed = logits.masked_fill(excluded, -torch.inf)
        some_left = narrowed.amax(1, keepdim=True) > -torch.inf
        logits.copy_(torch.where(some_left, narrowed, logits))

    def narrow_probs(
        self, probs: np.ndarray, vocabulary: np.ndarray | int, tokens: Sequence[int], path: Sequence[int]
    ) -> None:
        """Mask and normalise a row of probabilities, in place, like `narrow`; `vocabulary` as in `DraftModels`."""
        excluded = self._excluded_if_known(tokens, path).numpy()
        if not isinstance(vocabulary, int):
            excluded = excluded[vocabulary]
        if (allowed_mass := probs.sum(where=~excluded)) > 0:
            probs[excluded] = 0
            probs /= allowed_mass

    def _excluded_if_known(self, tokens: Sequence[int], path: Sequence[int]) -> Tensor:
        """Return `excluded`, or no mask if the grammar rejects the text."""
        try:
            return self.excluded(tokens, path)
        except RequestError:
            return torch.zeros_like(self._unlisted_on_device)

    def prune(self, tree: TokenTree, tokens: Sequence[int]) -> TokenTree:
        """Remove nodes that the target may not choose, with their subtrees; random draws stay (`TokenTree.keep`)."""
        if tree.draw_rows is not None:
            return tree
        is_allowed = np.append(True, ~self._unlisted[tree.tokens[1:]])
        if self.grammar is not None:
            is_allowed &= self._fits(self.grammar, tree, tokens)
        if is_allowed.all():
            return tree
        reachable, parents = is_allowed.tolist(), tree.parents.tolist()
        for node in range(1, len(reachable)):
            reachable[node] = reachable[node] and reachable[parents[node]]
        return tree.keep(np.flatnonzero(reachable))

    def _fits(self, grammar: Grammar, tree: TokenTree, tokens: Sequence[int]) -> np.ndarray:
        """Return a mask of the nodes whose paths the grammar accepts, queried at the leaves: bool [num_nodes]."""
        is_allowed = np.zeros(len(tree), dtype=bool)
        inner = np.zeros(len(tree), dtype=bool)
        inner[tree.parents[1:]] = True
        for leaf in np.flatnonzero(~inner).tolist():
            path = tree.path_to(leaf)
            is_allowed[path[: 1 + grammar.fitting(tokens, tree.tokens[path[1:]].tolist())]] = True
        return is_allowed
