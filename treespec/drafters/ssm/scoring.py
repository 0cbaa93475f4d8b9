"""Next-token probabilities used for drafting: rows scored by an SSM pass, and block drafts' predictions."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec.cache.kv_cache import KVCache
from treespec.drafters.ssm.forest import SsmProbs, top_tokens
from treespec.models.block_draft import BlockDraft, Unread
from treespec.models.decoder import Pass
from treespec.models.group_model import GroupModel, StepModel
from treespec.models.head_vocabulary import HeadVocabulary
from treespec.request import Request

NO_FEATURES = torch.empty(0, dtype=torch.float32, device="cpu")


class Rows(NamedTuple):
    """Scores of the rows of a pass."""

    # float32 [num_rows, width], probabilities used for drafting, after each request's temperature, noise and
    # restrictions
    probs: np.ndarray
    # float32 [num_rows, vocab_size], with restrictions, without temperature and noise; None if `probs` also have
    # neither
    logits: np.ndarray | None = None
    head: HeadVocabulary | None = None  # vocabulary of the columns; None for the whole vocabulary
    outputs: Tensor | None = None  # [num_rows, hidden_size], a draft head's inputs for the rows' children

    @property
    def tokens(self) -> np.ndarray | None:
        """Token ids of the columns, as in `SsmProbs`."""
        return None if self.head is None else self.head.tokens

    def select(self, rows: np.ndarray | slice) -> "Rows":
        logits = None if self.logits is None else self.logits[rows]
        return Rows(self.probs[rows], logits, self.head, None if self.outputs is None else self.outputs[rows])

    def expanded(self) -> "Rows":
        """Expand rows without a sampling request to the whole vocabulary."""
        if self.head is None:
            return self
        probs = self.head.expand(torch.from_numpy(np.array(self.probs)), 0.0).numpy()
        return Rows(probs, outputs=self.outputs)

    def probs_of(self, rows: Sequence[int] | np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        """Return the probability of `tokens[i]` in row `rows[i]`, [len(rows)]."""
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
    """One request's slice of the scored rows."""

    request: Request  # determines temperature, noise and restrictions
    rows: slice  # the request's slice of the scored rows
    position: int  # position of the predicted token
    paths: Sequence[Sequence[int]]  # by row, the tokens of its tree path; empty without restrictions

    @property
    def is_changed(self) -> bool:
        """Whether temperature, noise or a restriction modifies the probabilities."""
        return self.request.is_sampled or self.request.restriction is not None


def _softmax_at(logits: np.ndarray, token: int) -> float:
    return float(np.exp(logits[token] - logits.max()) / np.exp(logits - logits.max()).sum())


Chain = tuple[Request, int, int]  # a request, its first position and its last position (exclusive)


def inputs_of(model: StepModel, cache: KVCache, chains: Sequence[Chain]) -> tuple[np.ndarray, Tensor]:
    """Return the tokens (int64) of a pass over committed tokens and roots, and the features that a head reads."""
    tokens = np.array([token for request, start, stop in chains for token in request.tokens[start:stop]])
    if not model.columns:
        return tokens, NO_FEATURES
    states = [cache.read_features(request.pages, start - 1, stop - 1) for request, start, stop in chains]
    return tokens, model.features_of(torch.cat(states))


def score_rows(
    model: StepModel,
    pool: Tensor,
    layout: Pass,  # layout of the pass, from `model`
    tokens: np.ndarray,  # int64 [num_rows]
    features: Tensor,  # [num_rows, hidden_size], the parents' features for a draft head; `NO_FEATURES` for an SSM
    scored: np.ndarray,  # int64, indices of the rows to score
    slices: Sequence[ScoredSlice] = (),  # rows by request; rows without a slice are scored without modification
) -> Rows:
    """Run one SSM pass over some rows and score a subset of them."""
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
    # Rows of unmodified requests keep the bits of a pass without modified rows: compiled probabilities differ from the
    # softmax of logits, which are rounded to the model's dtype.
    if others.any():
        probs_of_others = model.probs(hidden[torch.from_numpy(others)])
        result[torch.from_numpy(others)] = probs_of_others if head is None else head.expand(probs_of_others, 0.0)
    probs = result.cpu().numpy()
    return Rows(probs, logits.cpu().numpy() if sampled else None, outputs=outputs)


class Block(NamedTuple):
    """Predictions of a block draft below one root; row d predicts the tokens at depth d + 1."""

    hidden: Tensor  # [block, hidden_size], inputs of `BlockDraft.logits`
    rows: Rows | None  # scores without a request's restriction; None if they depend on the nodes' tokens

    def at(
        self, model: BlockDraft, request: Request, depth: int, tokens: np.ndarray, paths: Sequence[Sequence[int]]
    ) -> Rows:
        """Return the scores of the nodes of one depth: int64 `tokens`, and their paths for a restriction."""
        count = len(tokens)
        if self.rows is None or request.restriction is not None:
            hidden = self.hidden[depth].expand(count, -1)
            scored_slice = ScoredSlice(request, slice(0, count), request.context_len + 1 + depth, paths)
            return draft_probs(model.for_tokens(tokens), hidden, [scored_slice])
        row = self.rows.select(slice(depth, depth + 1))
        return row.select(np.zeros(count, dtype=np.int64))


def unread_of(model: BlockDraft, cache: KVCache, chains: Sequence[Chain]) -> list[Unread]:
    """Return the chains' tokens that a block draft has not read; each chain ends with the root's position."""
    unread = []
    for request, start, stop in chains:
        states = None
        if model.columns:
            states = cache.read_features(request.pages, start - model.offset, stop - 1)
        unread.append(Unread(request.tokens[start:stop], start, request.pages, states, request.max_len))
    return unread


def score_blocks(
    model: BlockDraft, cache: KVCache, pool: Tensor, chains: Sequence[Chain], plain: bool = False
) -> list[Block]:
    """Run a block draft's pass at the roots of some requests, after reading the tokens before them.

    Each chain ends with the root's position. `plain` omits the requests' temperature and noise.
    """
    block, slices = model.block, []
    hidden = model.forward_block(unread_of(model, cache, chains), pool)
    slices_of_roots = [slice(i * block, (i + 1) * block) for i in range(len(chains))]
    if model.uses_node_tokens:
        return [Block(hidden[part], None) for part in slices_of_roots]
    for i, (request, _, _) in enumerate(chains):
        if not plain and request.is_sampled and request.restriction is None:
            for depth in range(block):
                row = i * block + depth
                slices.append(ScoredSlice(request, slice(row, row + 1), request.context_len + 1 + depth, [()]))
    rows = draft_probs(model, hidden, slices)
    return [Block(hidden[part], rows.select(part)) for part in slices_of_roots]


def level_probs(ssm: int, scored: Mapping[int, tuple[np.ndarray, Rows]], differ: bool, num_top: int | None) -> SsmProbs:
    """Return a block draft's probabilities for a level, from each tree's frontier rows and their scores.

    `differ`: whether a tree's rows may differ. `num_top`: how many of a row's most likely tokens matter; None for all.
    """
    rows, scores = [tree_rows for tree_rows, _ in scored.values()], [part for _, part in scored.values()]
    if any(part.head is None for part in scores):  # restricted rows cover the vocabulary, others a reduced one
        scores = [part.expanded() for part in scores]
    tokens = scores[0].tokens
    if differ or num_top is None:
        return SsmProbs(ssm, np.concatenate(rows), np.concatenate([part.probs for part in scores]), tokens)
    # A tree's rows are equal: repeat only the columns of their best tokens, not the whole vocabulary.
    columns = np.unique(np.concatenate([top_tokens(part.probs[:1].copy(), num_top)[1][0] for part in scores]))
    probs = [
        np.repeat(part.probs[:1, columns], len(tree_rows), 0) for tree_rows, part in zip(rows, scores, strict=True)
    ]
    return SsmProbs(ssm, np.concatenate(rows), np.concatenate(probs), columns if tokens is None else tokens[columns])
