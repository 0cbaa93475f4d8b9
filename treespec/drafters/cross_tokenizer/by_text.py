"""Drafts by text: a cross-tokenizer draft generates text greedily, which is encoded with the target's tokenizer.

For drafts that share too few tokens with the target. The proposal is one deterministic chain, so any verification
rule stays lossless. The last token of the encoding is dropped, because it may change once the text continues.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from treespec.drafters.cross_tokenizer.cross_tokenizer_drafter import (
    CrossTokenizerDrafter,
    CrossTokenizerState,
    Drafting,
)
from treespec.request import Request
from treespec.tree import TokenTree
from treespec_kernels.attention.tree_batch import RequestRows

DRAFT_TOKENS_PER_TOKEN = 2  # maximum number of generated draft tokens per token of the chain


class _Generation:
    """The text that the draft generates for one request in one round, for a chain of at most `depth` tokens."""

    def __init__(self, request: Request, depth: int, state: CrossTokenizerState):
        self.request, self.depth, self.state = request, depth, state
        self.tokens: list[int] = []  # generated draft tokens, excluding an end token
        self.probs: list[float] = []  # the draft's probability of each generated token, including an end token
        self.data = b""  # UTF-8 bytes of the generated text
        self.ended = False  # whether generation is complete
        self.end: int | None = None  # the target's end token if the draft ended the text, or None
        self.encoded: list[int] = []  # the text in the target's tokens

    @property
    def value(self) -> float:
        """The draft's probability of the text so far."""
        return float(np.prod(self.probs))

    @property
    def position(self) -> int:
        """Draft position of the last generated token."""
        return len(self.state.context.tokens) + len(self.tokens) - 1


class TextDrafter(CrossTokenizerDrafter):
    """Drafts one chain per request from generated text, re-encoded with the target's tokenizer.

    The K/V of generated tokens are already in place; `CrossTokenizerState.update` finds their valid prefix in the next
    round.
    """

    def _draft(self, batch: Sequence[Drafting]) -> None:
        if not self._begins(batch, 1.0):
            return
        adaptive = all(request.spec.is_adaptive for request, *_ in batch)
        generations, states = [_Generation(*row) for row in batch], [row.state for row in batch]
        with self.pass_value.timed(all(state.is_timed for state in states)):
            self._append(generations, self._score_roots(states))
        while running := [generation for generation in generations if not generation.ended]:
            if adaptive and not self.pass_value.pays(sum(generation.value for generation in running)):
                break
            with self.pass_value.timed():
                rows = [RequestRows.chain(g.position, 1, g.state.pages, g.state.max_len) for g in running]
                self._append(running, self._forward(rows, [generation.tokens[-1] for generation in running]))
            for generation in running:
                generation.state.ahead = generation.tokens[:-1]
        for generation in generations:
            generation.state.proposed = self._chain(generation)

    def _append(self, generations: Sequence[_Generation], logits: torch.Tensor) -> None:
        """Append the most likely token of each row of `logits`, and mark complete generations as ended."""
        best, tokens = torch.softmax(logits, -1).cpu().max(-1)
        for generation, prob, token in zip(generations, best.tolist(), tokens.tolist(), strict=True):
            if not np.isfinite(prob):
                generation.ended = generation.state.poisoned = True
                continue
            text = self.translation.draft.tokens[token] if token < len(self.translation.draft.tokens) else None
            if text is None:
                generation.ended, generation.end = True, self._end(generation.request, token)
                generation.probs += [prob] if generation.end is not None else []
                continue
            generation.tokens.append(token)
            generation.probs.append(prob)
            generation.data += text
            generation.encoded = self._encode_text(generation.data)
            max_tokens = min(DRAFT_TOKENS_PER_TOKEN * generation.depth + 2, self.scratch - 1)
            generation.ended = len(generation.encoded) > generation.depth or len(generation.tokens) >= max_tokens

    def _end(self, request: Request, token: int) -> int | None:
        """Return the target's end token if `token` is an end token of the draft, otherwise None."""
        if token not in self.model.config.eos_token_ids:
            return None
        return next((end for end in request.eos_token_ids if end < self.translation.target_size), None)

    def _encode_text(self, data: bytes) -> list[int]:
        """Encode text with the target's tokenizer, dropping an incomplete last character."""
        try:
            data.decode()
        except UnicodeDecodeError as error:
            if error.end == len(data):
                data = data[: error.start]
        ids = self.translation.target.encode_bytes(data)
        return [id for id in ids if id < self.translation.target_size]

    def _chain(self, generation: _Generation) -> TokenTree:
        """Build the chain of target tokens from the generated text, up to an end token."""
        root, ends = generation.request.tokens[-1], generation.request.end_tokens
        tokens = generation.encoded if generation.end is not None else generation.encoded[:-1]
        tokens = tokens[: generation.depth]
        probs = self._probs(generation, tokens)
        if generation.end is not None and len(tokens) < generation.depth:
            tokens, probs = [*tokens, generation.end], [*probs, generation.probs[-1]]
        stop = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        return TokenTree.from_parents([root, *tokens[:stop]], range(-1, stop), [1.0, *probs[:stop]], self.name)

    def _probs(self, generation: _Generation, tokens: Sequence[int]) -> list[float]:
        """Return the probability of each target token: the product over the draft tokens that start within it."""
        draft_texts, texts = self.translation.draft.tokens, self.translation.texts
        ends = [*accumulate(len(texts[token] or b"") for token in tokens)]
        starts = [0, *accumulate(len(draft_texts[token] or b"") for token in generation.tokens)][:-1]
        containing = np.searchsorted(ends, starts, side="right")
        probs = np.ones(len(tokens) + 1)
        np.multiply.at(probs, np.minimum(containing, len(tokens)), generation.probs[: len(generation.tokens)])
        return np.minimum(probs[:-1], 0.99).tolist()
