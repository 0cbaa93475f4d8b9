"""One SSM pass over some rows, and the next-token probabilities used for drafting."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec.cache.kv_cache import KVCache
from treespec.models.decoder import Pass
from treespec.models.group_model import GroupModel, StepModel
from treespec.models.head_vocabulary import HeadVocabulary
from treespec.request import Request
from treespec_kernels.attention.tree_batch import RequestRows

NO_FEATURES = torch.empty(0, dtype=torch.float32, device="cpu")


class Rows(NamedTuple):
    """Scores of some rows.

    Attributes:
        probs: float32 [num_rows, width], probabilities used for drafting, with each request's temperature, noise and
            restrictions.
        logits: float32 [num_rows, vocab_size], with restrictions, but without temperature and noise; None if `probs`
            are without them, too.
        head: the vocabulary of the columns; None if they are the whole vocabulary.
        outputs: [num_rows, hidden_size], what a draft head passes on to the children of these rows; None for SSMs.
    """

    probs: np.ndarray
    logits: np.ndarray | None = None
    head: HeadVocabulary | None = None
    outputs: Tensor | None = None

    @property
    def tokens(self) -> np.ndarray | None:
        """The tokens of the columns, as in `SsmProbs`."""
        return None if self.head is None else self.head.tokens

    def select(self, rows: np.ndarray | slice) -> "Rows":
        """Return some of the rows."""
        logits = None if self.logits is None else self.logits[rows]
        return Rows(self.probs[rows], logits, self.head, None if self.outputs is None else self.outputs[rows])

    def expanded(self) -> "Rows":
        """Return rows without a sampling request over the whole vocabulary."""
        if self.head is None:
            return self
        probs = self.head.expand(torch.from_numpy(np.array(self.probs)), 0.0).numpy()
        return Rows(probs, outputs=self.outputs)

    def probs_of(self, rows: Sequence[int] | np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        """Return the probability of one token in each of some rows, [len(rows)]."""
        if self.head is not None:
            return self.head.probs_of(self.probs[rows], np.array(tokens, dtype=np.int64))
        probs: np.ndarray = self.probs[rows, tokens]
        return probs

    def plain_probs_of(self, rows: Sequence[int] | np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        """Return the same without temperature and noise: with a token's own noise, the probability would be biased."""
        if self.logits is None:
            return self.probs_of(rows, tokens)
        return np.array([_softmax_at(self.logits[row], token) for row, token in zip(rows, tokens, strict=True)])


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


def _softmax_at(logits: np.ndarray, token: int) -> float:
    """Return the softmax probability of one token."""
    return float(np.exp(logits[token] - logits.max()) / np.exp(logits - logits.max()).sum())


Chain = tuple[Request, int, int]  # a request, and the first and last (exclusive) of some of its positions


def rows_of(model: StepModel, chains: Sequence[Chain]) -> list[RequestRows]:
    """Return the rows of a pass over committed tokens, and roots, of some requests."""
    return [RequestRows.chain(start - model.offset, stop - start, r.pages, r.max_len) for r, start, stop in chains]


def inputs_of(model: StepModel, cache: KVCache, chains: Sequence[Chain]) -> tuple[np.ndarray, Tensor]:
    """Return the tokens of a pass over `rows_of` the same arguments, int64, and the features that a head reads."""
    tokens = np.array([token for request, start, stop in chains for token in request.tokens[start:stop]])
    if not model.columns:
        return tokens, NO_FEATURES
    states = [cache.read_features(request.pages, start - 1, stop - 1) for request, start, stop in chains]
    return tokens, model.features_of(torch.cat(states))


def score_rows(
    model: StepModel,
    pool: Tensor,
    layout: Pass,
    tokens: np.ndarray,
    features: Tensor,
    scored: np.ndarray,
    slices: Sequence[ScoredSlice] = (),
) -> Rows:
    """Run one SSM pass over some rows and score a subset of them.

    Args:
        model, pool: the SSM and its KV pool.
        layout: pass layout of the rows, from `model`.
        tokens: int64 [num_rows].
        features: [num_rows, hidden_size], of the rows' parents, for a draft head; `NO_FEATURES` for an SSM.
        scored: int64, indices of the rows to score.
        slices: scored rows by request; rows without one are scored without modification.
    """
    ids = torch.from_numpy(tokens).to(model.device)
    hidden, outputs = model.forward_features(ids, features, layout, pool)
    if not len(scored):
        nothing = np.empty((0, 0), dtype=np.float32)
        return Rows(nothing, head=model.head_vocabulary)
    hidden = hidden[: len(tokens)]
    if len(scored) < len(tokens):
        rows = torch.from_numpy(scored)
        hidden, outputs = hidden[rows], None if outputs is None else outputs[rows]
    return draft_probs(model, hidden, slices, outputs)


def draft_probs(
    model: GroupModel, hidden: Tensor, slices: Sequence[ScoredSlice], outputs: Tensor | None = None
) -> Rows:
    """Score rows by their hidden states, [num_rows, hidden_size]; other arguments as in `score_rows` and `Rows`."""
    head = model.head_vocabulary
    changed = [scored_slice for scored_slice in slices if scored_slice.is_changed]
    if not changed:
        probs = model.probs(hidden).cpu().numpy()
        return Rows(probs, None, head, outputs)
    logits = model.logits(hidden).float()
    others = np.ones(len(hidden), dtype=bool)
    for request, part, _, paths in changed:
        others[part] = False
        if request.restriction is not None:
            request.restriction.narrow(logits[part], request.tokens, paths)
    sampled = [scored_slice for scored_slice in changed if scored_slice.request.is_sampled]
    tempered = logits.clone() if sampled else logits
    for request, part, position, _ in sampled:
        assert request.sampler is not None
        request.sampler.temper(tempered[part], position, request.spec.verification)
    result = torch.softmax(tempered, -1)
    # Rows of unmodified requests keep the bits that they have in a pass without modified ones. Compiled probabilities
    # differ from the softmax of logits, which are rounded to the model's dtype.
    if others.any():
        probs_of_others = model.probs(hidden[torch.from_numpy(others)])
        result[torch.from_numpy(others)] = probs_of_others if head is None else head.expand(probs_of_others, 0.0)
    probs = result.cpu().numpy()
    return Rows(probs, logits.cpu().numpy() if sampled else None, outputs=outputs)
