"""One SSM pass over some rows, and the next-token probabilities used for drafting."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec.models.compiled import CompiledDecoder
from treespec.models.decoder import Decoder, Pass
from treespec.request import Request


class Rows(NamedTuple):
    """Scores of some rows, float32 [num_rows, vocab] each.

    Attributes:
        probs: probabilities used for drafting, with each request's temperature, noise and restrictions.
        logits: logits with restrictions, but without temperature and noise, if a request samples; otherwise `probs`.
    """

    probs: np.ndarray
    logits: np.ndarray


class ScoredSlice(NamedTuple):
    """One request's slice of the scored rows.

    Attributes:
        request: determines temperature, noise and restrictions.
        rows: the request's slice of the scored rows.
        position: of the predicted token.
        paths: by row, the tokens that its tree path appends to the request's tokens; empty without a restriction.
    """

    request: Request
    rows: slice
    position: int
    paths: Sequence[Sequence[int]]

    @property
    def is_changed(self) -> bool:
        """Whether temperature, noise or a restriction modifies the probabilities."""
        return self.request.is_sampled or self.request.restriction is not None


def softmax_at(logits: np.ndarray, token: int) -> float:
    """Return the softmax probability of one token."""
    return float(np.exp(logits[token] - logits.max()) / np.exp(logits - logits.max()).sum())


def score_rows(
    model: Decoder,
    pool: Tensor,
    known: int,
    layout: Pass,
    tokens: np.ndarray,
    scored: np.ndarray,
    slices: Sequence[ScoredSlice] = (),
) -> Rows:
    """Run one SSM pass over some rows and score a subset of them.

    Args:
        model, pool: the SSM and its KV pool.
        known: size of the SSM's own vocabulary; tokens from `known` on get probability 0.
        layout: pass layout of the rows, from `model`.
        tokens: int64 [num_rows].
        scored: int64, indices of the rows to score.
        slices: scored rows by request; rows without one are scored without modification.
    """
    hidden = model.forward(torch.from_numpy(tokens).to(model.device), layout, pool)
    if not len(scored):
        nothing = np.empty((0, model.vocab_size), dtype=np.float32)
        return Rows(nothing, nothing)
    hidden = hidden[: len(tokens)]
    if len(scored) < len(tokens):
        hidden = hidden[torch.from_numpy(scored)]
    changed = [each for each in slices if each.is_changed]
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
    sampled = [each for each in changed if each.request.is_sampled]
    tempered = logits.clone() if sampled else logits
    for request, part, position, _ in sampled:
        assert request.sampler is not None
        request.sampler.temper(tempered[part], position, request.spec.verification)
    result = torch.softmax(tempered, -1)
    # Rows of unmodified requests keep the bits that they have in a pass without modified ones.
    if compiled is not None and others.any():
        result[torch.from_numpy(others)] = compiled.probs(hidden[torch.from_numpy(others)])
    probs = result.cpu().numpy()
    return Rows(probs, logits.cpu().numpy() if sampled else probs)
