"""Drafts by text: a model with another tokenizer decodes greedily, and the target's tokenizer encodes its text.

One chain, chosen without chance: any rule of verification is lossless with it. This is for drafts that share too few
tokens with the target; how a text is cut into tokens at its end is not known before it goes on, so the last token of a
chain is left out.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from treespec.drafters.foreign.foreign_drafter import ForeignDrafter, Reading, roots
from treespec.request import Request
from treespec.tree import Draws, TokenTree
from treespec_kernels.attention.tree_batch import RequestRows

MOST = 2  # draft tokens for one of the target's, at most


class _Writing:
    """The text that the draft generates for one request in this round."""

    def __init__(self, reading: Reading, request: Request, depth: int):
        self.reading, self.request, self.depth = reading, request, depth
        self.tokens: list[int] = []
        self.probs: list[float] = []
        self.data = b""
        self.ended = False
        self.end: int | None = None  # the target's end token, where the draft ended the text
        self.read: list[int] = []  # the target's tokens of the text so far

    @property
    def value(self) -> float:
        """The draft's probability of the text so far."""
        return float(np.prod(self.probs))

    def position_rows(self) -> RequestRows:
        """The K/V position of the last generated token."""
        return RequestRows.chain(len(self.reading.context.tokens) + len(self.tokens) - 1, 1, self.reading.pages)


class TextDrafter(ForeignDrafter):
    """Drafts a chain per request by re-encoding generated text with the target's tokenizer."""

    def propose(self, requests: Sequence[Request], max_depths: Sequence[int]) -> list[TokenTree]:
        """One chain per request over its last token."""
        trees, places = roots(requests), self._serve(requests, max_depths)
        if not places:
            return trees
        adaptive = all(requests[i].spec.is_adaptive for i in places)
        if adaptive and not self.pays.worth(float(len(places))):
            self.pays.rested()
            return trees
        readings = self._of(requests, places)
        writings = [_Writing(reading, requests[i], max_depths[i]) for i, reading in zip(places, readings, strict=True)]
        with self.pays.timed(all(each.is_near for each in readings)):
            self._take(writings, self._score_roots(readings))
        while writing := [each for each in writings if not each.ended]:
            if adaptive and not self.pays.worth(sum(each.value for each in writing)):
                break
            with self.pays.timed():
                rows = [each.position_rows() for each in writing]
                self._take(writing, self._forward(rows, [each.tokens[-1] for each in writing], None))
            for each in writing:
                each.reading.ahead = each.tokens[:-1]
        for i, each in zip(places, writings, strict=True):
            trees[i] = each.reading.proposed = self._chain(each)
        return trees

    def commit(self, requests: Sequence[Request], paths: Sequence[np.ndarray]) -> None:
        """The K/V of what was written lie where they belong already: the next round sees how much of it holds."""
        for request in requests:
            reading = self._readings.get(request.request_id)
            if reading is not None and reading.proposed is not None:
                self._learn(request, reading)

    def _take(self, writings: Sequence[_Writing], logits: torch.Tensor) -> None:
        """Append the most likely token of each, and return which drafts are complete."""
        best, tokens = torch.softmax(logits, -1).cpu().max(-1)
        for each, prob, token in zip(writings, best.tolist(), tokens.tolist(), strict=True):
            if not np.isfinite(prob):
                each.ended = each.reading.poisoned = True
                continue
            text = self.translation.draft.tokens[token] if token < len(self.translation.draft.tokens) else None
            if text is None:
                each.ended, each.end = True, self._end(each.request, token)
                each.probs += [prob] if each.end is not None else []
                continue
            each.tokens.append(token)
            each.probs.append(prob)
            each.data += text
            each.read = self._read_text(each.data)
            most = min(MOST * each.depth + 2, self.scratch - 1)
            each.ended = len(each.read) > each.depth or len(each.tokens) >= most

    def _end(self, request: Request, token: int) -> int | None:
        """The end token of the request's target for the draft's own; None where it is none."""
        if token not in self.model.config.eos_token_ids:
            return None
        return next((end for end in request.eos_token_ids if end < self.translation.target_size), None)

    def _read_text(self, data: bytes) -> list[int]:
        """Encode a text with the target's tokenizer, without an incomplete last character."""
        try:
            data.decode()
        except UnicodeDecodeError as error:
            if error.end == len(data):
                data = data[: error.start]
        ids = self.translation.target.encode_bytes(data)
        return [id for id in ids if id < self.translation.target_size]

    def _chain(self, writing: _Writing) -> TokenTree:
        """The chain of a generated text."""
        root, ends = writing.request.tokens[-1], writing.request.end_tokens
        tokens = writing.read if writing.end is not None else writing.read[:-1]
        tokens = tokens[: writing.depth]
        probs = self._probs(writing, tokens)
        if writing.end is not None and len(tokens) < writing.depth:
            tokens, probs = [*tokens, writing.end], [*probs, writing.probs[-1]]
        stop = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        if not stop:
            return TokenTree.root(root)
        steps = np.arange(stop + 1)
        return TokenTree(
            np.array([root, *tokens[:stop]]),
            steps - 1,
            steps,
            np.array([1.0, *probs[:stop]]),
            Draws(steps[:-1], steps[1:], np.zeros(stop, dtype=np.int64), np.ones(stop)),
            (self.name,),
        )

    def _probs(self, writing: _Writing, tokens: Sequence[int]) -> list[float]:
        """The chance of each of the target's tokens: of those of the draft's that begin in it."""
        own, other = self.translation.draft.tokens, self.translation.texts
        ends = [*accumulate(len(other[token] or b"") for token in tokens)]
        begins = [0, *accumulate(len(own[token] or b"") for token in writing.tokens)][:-1]
        places = np.searchsorted(ends, begins, side="right")
        probs = np.ones(len(tokens) + 1)
        np.multiply.at(probs, np.minimum(places, len(tokens)), writing.probs[: len(writing.tokens)])
        return np.minimum(probs[:-1], 0.99).tolist()
