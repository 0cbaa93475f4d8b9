"""Incremental re-encoding of a request's text for a cross-tokenizer draft.

The target's tokens are grouped into words: a token that starts with white space starts a word, unless the previous
token ends with white space. If the draft has all tokens of a word, they are mapped one to one. Otherwise the whole word
is re-encoded with the draft's tokenizer, so that its tokens may span several of the target's and a character split over
tokens is joined. The last word stays open until the next one starts, so only its tokens can change.

A wrong encoding only costs acceptance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from treespec_weights.codec import Codec
from treespec_weights.vocabularies import intersection

MAX_WORD = 16  # maximum tokens per word; longer words are split at a character boundary (some scripts have no spaces)
_SPACES = b" \t\r\n\x0b\x0c"


@dataclass(frozen=True, eq=False)
class Translation:
    """Token mapping from a target's to a draft's vocabulary."""

    target: Codec
    draft: Codec
    target_size: int  # target vocabulary size: embedding rows; the draft's is next
    draft_size: int
    ends: tuple[Sequence[int], Sequence[int]] = ((), ())  # end tokens of target and draft, treated as equivalent

    @cached_property
    def to_draft(self) -> np.ndarray:
        """int64 [target_size]: the draft's id of each target token, or -1."""
        to_draft = intersection(self.target, self.draft, self.target_size, self.draft_size)
        target_ends, other = self.ends
        for id in target_ends:
            if id < self.target_size and to_draft[id] < 0 and other and other[0] < self.draft_size:
                to_draft[id] = other[0]
        return to_draft

    @cached_property
    def texts(self) -> tuple[bytes | None, ...]:
        """Bytes of each target token, by id; None for control tokens and padding."""
        texts = self.target.tokens[: self.target_size]
        return (*texts, *[None] * (self.target_size - len(texts)))

    @cached_property
    def starts_word(self) -> np.ndarray:
        """Mask of tokens that start with white space, control tokens and padding, bool [target_size]."""
        return np.array([data is None or data[:1] in _SPACES for data in self.texts], dtype=bool)

    @cached_property
    def ends_in_space(self) -> np.ndarray:
        """Mask of tokens that end with white space, bool [target_size]."""
        return np.array([data is not None and data[-1:] in _SPACES for data in self.texts], dtype=bool)

    @cached_property
    def is_control(self) -> np.ndarray:
        """Mask of control tokens and padding, bool [target_size]."""
        return np.array([data is None for data in self.texts], dtype=bool)

    def encode(self, tokens: Sequence[int]) -> list[int]:
        """Encode target tokens in the draft's vocabulary.

        Maps them one to one if the draft has all of them, and otherwise re-encodes their text. Control tokens that the
        draft lacks are dropped.
        """
        ids = self.to_draft[np.array(tokens, dtype=np.int64)].tolist()
        if -1 not in ids:
            return ids
        encoded, data = [], b""
        for token, id in zip(tokens, ids, strict=True):
            text = self.texts[token]
            if text is not None:
                data += text
                continue
            encoded += self.draft.encode_bytes(data)
            encoded += [id] if id >= 0 else []
            data = b""
        return encoded + self.draft.encode_bytes(data)


class Context:
    """One request's text in a draft's tokens, extended incrementally."""

    def __init__(self, translation: Translation, fallback: int = 0):
        self.translation = translation
        self.tokens: list[int] = list(translation.draft.start)  # draft tokens of the text
        self.num_encoded = 0  # number of target tokens encoded in `tokens`
        self._fallback = fallback  # draft token to use if the text has an empty encoding
        self._word: list[int] = []  # target tokens of the open word
        self._num_closed = len(self.tokens)  # number of `tokens` before the open word

    def extend(self, new: Sequence[int]) -> int:
        """Append target tokens; return the number of unchanged leading draft tokens."""
        before, first = self.tokens[self._num_closed :], self._num_closed
        translation = self.translation
        started, self.num_encoded = self.num_encoded > 0, self.num_encoded + len(new)
        if not started:
            new = self._start(new)
        if len(new) > MAX_WORD:
            self._extend_vectorized(np.array([*self._word, *new], dtype=np.int64))
        else:
            for token in new:
                if self._starts_word(token):  # closes the open word
                    self.tokens[self._num_closed :] = translation.encode(self._word)
                    self._num_closed, self._word = len(self.tokens), []
                self._word.append(token)
        self.tokens[self._num_closed :] = translation.encode(self._word)
        if not self.tokens:
            self.tokens = [self._fallback]
        same = 0
        for old, now in zip(before, self.tokens[first:], strict=False):
            if old != now:
                break
            same += 1
        return first + same

    def _starts_word(self, token: int) -> bool:
        """Return whether a token starts a new word after the open one."""
        if not self._word:
            return False
        translation, last = self.translation, self._word[-1]
        if translation.is_control[token] or translation.is_control[last]:
            return True
        if translation.starts_word[token]:
            return not translation.ends_in_space[last]
        return len(self._word) >= MAX_WORD and _starts_character(translation.texts[token])

    def _extend_vectorized(self, tokens: np.ndarray) -> None:
        """Append many tokens: map runs of words one to one, and re-encode each run of other words as one text."""
        translation = self.translation
        control = translation.is_control[tokens]
        starts = translation.starts_word[tokens] | control
        starts[1:] &= ~translation.ends_in_space[tokens[:-1]] | control[1:]
        starts[1:] |= control[:-1]
        starts[0] = True
        firsts = np.flatnonzero(starts)
        mapped = np.logical_and.reduceat(translation.to_draft[tokens] >= 0, firsts)
        last = int(firsts[-1])
        if len(tokens) - last > MAX_WORD:  # keep the last part of an overlong word open, from a character boundary
            candidates = range(len(tokens) - MAX_WORD, len(tokens))
            last = next((i for i in candidates if _starts_character(translation.texts[tokens[i]])), len(tokens))
        del self.tokens[self._num_closed :]
        edges = [0, *(np.flatnonzero(mapped[1:] != mapped[:-1]) + 1).tolist(), len(firsts)]
        for begin, end in pairwise(edges):
            stop = min(int(firsts[end]) if end < len(firsts) else len(tokens), last)
            if firsts[begin] < stop:
                self.tokens += translation.encode(tokens[firsts[begin] : stop].tolist())
        self._num_closed, self._word = len(self.tokens), tokens[last:].tolist()

    def _start(self, new: Sequence[int]) -> Sequence[int]:
        """Translate the tokenizers' prefixes (control tokens, a space); return the remaining tokens."""
        translation = self.translation
        prefix = len(translation.target.start)
        if translation.draft.start and tuple(new[:prefix]) == translation.target.start:
            new = new[prefix:]
        first = next((i for i, token in enumerate(new) if not translation.is_control[token]), len(new))
        if translation.draft.spaces_first == translation.target.spaces_first or first == len(new):
            return new
        last = next((i for i in range(first + 1, len(new)) if translation.starts_word[new[i]]), len(new))
        data = b"".join(translation.texts[token] or b"" for token in new[first:last])
        data = b" " + data if translation.draft.spaces_first else data.removeprefix(b" ")
        self.tokens += translation.encode(new[:first]) + translation.draft.encode_bytes(data)
        self._num_closed = len(self.tokens)
        return new[last:]


def _starts_character(data: bytes | None) -> bool:
    """Return whether bytes start at a UTF-8 character boundary."""
    return not data or data[0] & 0xC0 != 0x80
