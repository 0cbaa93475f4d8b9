"""Scores rows with an SSM: one pass, and the probabilities of the next token."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec.models.compiled import CompiledDecoder
from treespec.models.decoder import Decoder, Pass
from treespec.request import Request


class Rows(NamedTuple):
    """An SSM's probabilities as drafts are made by, and its logits without temperature and noise where they are not the
    same thing: where a request samples. float32 [num rows, vocab] each."""

    probs: np.ndarray
    logits: np.ndarray


class Guess(NamedTuple):
    """Scored rows that guess a request's next token.

    Attributes:
        request: whose temperature, noise and restrictions go into their probabilities.
        rows: of those that are scored.
        position: of the token that they guess.
        paths: by row, what the tree adds to the request's tokens; empty where nothing restricts it.
    """

    request: Request
    rows: slice
    position: int
    paths: Sequence[Sequence[int]]

    @property
    def is_changed(self) -> bool:
        """Whether temperature, noise or a restriction changes the probabilities."""
        return self.request.is_sampled or self.request.restriction is not None


def softmax_at(logits: np.ndarray, token: int) -> float:
    """The probability of one token."""
    return float(np.exp(logits[token] - logits.max()) / np.exp(logits - logits.max()).sum())


def score_rows(
    model: Decoder,
    pool: Tensor,
    known: int,
    layout: Pass,
    tokens: np.ndarray,
    scored: np.ndarray,
    guesses: Sequence[Guess] = (),
) -> Rows:
    """One pass of an SSM over some rows; the scores of the scored ones.

    Args:
        model, pool: the SSM and its part of the cache.
        known: how many tokens it has of its own; it never guesses one from there on.
        layout: of the rows, from `model`.
        tokens: int64 [num rows].
        scored: int64, which rows.
        guesses: for a part of the scored rows, what a request makes of them.
    """
    hidden = model.forward(torch.from_numpy(tokens).to(model.device), layout, pool)
    if not len(scored):
        nothing = np.empty((0, model.vocab_size), dtype=np.float32)
        return Rows(nothing, nothing)
    hidden = hidden[: len(tokens)]
    if len(scored) < len(tokens):
        hidden = hidden[torch.from_numpy(scored)]
    changed = [guess for guess in guesses if guess.is_changed]
    compiled = model if isinstance(model, CompiledDecoder) and known == model.vocab_size else None
    if compiled is not None and not changed:
        probs = compiled.probs(hidden).numpy()
        return Rows(probs, probs)
    logits = model.logits(hidden).float()
    logits[:, known:] = -torch.inf
    others = np.ones(len(scored), dtype=bool)
    for request, part, _, paths in changed:
        others[part] = False
        if request.restriction is not None:
            request.restriction.narrow(logits[part], request.tokens, paths)
    sampled = [guess for guess in changed if guess.request.is_sampled]
    tempered = logits.clone() if sampled else logits
    for request, part, position, _ in sampled:
        assert request.sampler is not None
        request.sampler.temper(tempered[part], position, request.spec.verification)
    result = torch.softmax(tempered, -1)
    if compiled is not None and others.any():  # as without the changed ones beside them
        result[torch.from_numpy(others)] = compiled.probs(hidden[torch.from_numpy(others)])
    probs = result.cpu().numpy()
    return Rows(probs, logits.cpu().numpy() if sampled else probs)
