"""Incremental re-encoding of a request's text in the tokens of a draft with another tokenizer.

A text is cut into words: a token that begins with white space begins a word, unless the one before it ended with some.
Words all of whose tokens the draft knows are taken over one to one. A word with a token that it lacks is written anew
as a whole, so that tokens may merge across the border of the target's, and the parts of a character come together. The
last word is open until the next one begins; so no more than it is ever written again.

A wrong context costs acceptance and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from treespec_weights.codec import Codec
from treespec_weights.vocabularies import intersection

LONGEST = 16  # tokens of a word, after which the next whole character begins another: not every script has spaces
_SPACES = b" \t\r\n\x0b\x0c"


@dataclass(frozen=True, eq=False)
class Translation:
    """Token mapping between a target's and a draft's vocabulary.

    Args:
        target, draft: their tokenizers.
        target_size, draft_size: of the embeddings.
        ends: end tokens of target and draft, as their models name them; they mean the same.
    """

    target: Codec
    draft: Codec
    target_size: int
    draft_size: int
    ends: tuple[Sequence[int], Sequence[int]] = ((), ())

    @cached_property
    def to_draft(self) -> np.ndarray:
        """int64 [target_size]: the draft's id of each of the target's tokens, -1 where it has none."""
        found = intersection(self.target, self.draft, self.target_size, self.draft_size)
        own, other = self.ends
        for id in own:
            if id < self.target_size and found[id] < 0 and other and other[0] < self.draft_size:
                found[id] = other[0]
        return found

    @cached_property
    def texts(self) -> tuple[bytes | None, ...]:
        """By id of the target's what a token adds to the text; None for control tokens and padding."""
        known = self.target.tokens[: self.target_size]
        return (*known, *[None] * (self.target_size - len(known)))

    @cached_property
    def begins(self) -> np.ndarray:
        """bool [target_size]: tokens that begin with white space, and those that are no text."""
        return np.array([data is None or data[:1] in _SPACES for data in self.texts], dtype=bool)

    @cached_property
    def ends_in_space(self) -> np.ndarray:
        """bool [target_size]."""
        return np.array([data is not None and data[-1:] in _SPACES for data in self.texts], dtype=bool)

    @cached_property
    def is_control(self) -> np.ndarray:
        """bool [target_size]: tokens that are no text, and padding."""
        return np.array([data is None for data in self.texts], dtype=bool)

    def write(self, tokens: Sequence[int]) -> list[int]:
        """Some of the target's tokens in the draft's: one to one where it knows all, and else written anew. What is no
        text and unknown to it is left out."""
        ids = self.to_draft[np.array(tokens, dtype=np.int64)].tolist()
        if -1 not in ids:
            return ids
        written, data = [], b""
        for token, id in zip(tokens, ids, strict=True):
            text = self.texts[token]
            if text is not None:
                data += text
                continue
            written += self.draft.encode_bytes(data)
            written += [id] if id >= 0 else []
            data = b""
        return written + self.draft.encode_bytes(data)


class Context:
    """One request's tokens in a draft's vocabulary.

    Args:
        translation: between them.
        fallback: a token of the draft's for a text of which nothing can be written.

    Attributes:
        tokens: the draft's.
        known: how many of the target's tokens they stand for.
    """

    def __init__(self, translation: Translation, fallback: int = 0):
        self.translation = translation
        self.tokens: list[int] = list(translation.draft.start)
        self.known = 0
        self._fallback = fallback
        self._word: list[int] = []  # the target's tokens of the open word
        self._settled = len(self.tokens)  # of `tokens`: those before the open word

    def extend(self, new: Sequence[int]) -> int:
        """Append the tokens that follow; return how many of the draft's tokens so far are unchanged."""
        before, first = self.tokens[self._settled :], self._settled
        translation = self.translation
        begun, self.known = self.known > 0, self.known + len(new)
        if not begun:
            new = self._begin(new)
        if len(new) > LONGEST:
            self._extend_at_once(np.array([*self._word, *new], dtype=np.int64))
        else:
            for token in new:
                if self._begins_word(token):
                    self._settle()
                self._word.append(token)
        self.tokens[self._settled :] = translation.write(self._word)
        if not self.tokens:
            self.tokens = [self._fallback]
        same = 0
        for old, now in zip(before, self.tokens[first:], strict=False):
            if old != now:
                break
            same += 1
        return first + same

    def _begins_word(self, token: int) -> bool:
        if not self._word:
            return False
        own, last = self.translation, self._word[-1]
        if own.is_control[token] or own.is_control[last]:
            return True
        if own.begins[token]:
            return not own.ends_in_space[last]
        return len(self._word) >= LONGEST and _begins_character(own.texts[token])

    def _settle(self) -> None:
        """Close the open word."""
        self.tokens[self._settled :] = self.translation.write(self._word)
        self._settled, self._word = len(self.tokens), []

    def _extend_at_once(self, tokens: np.ndarray) -> None:
        """Take in many tokens: runs of words that are known one to one, and runs that are written anew as one text."""
        own = self.translation
        control = own.is_control[tokens]
        starts = own.begins[tokens] | control
        starts[1:] &= ~own.ends_in_space[tokens[:-1]] | control[1:]
        starts[1:] |= control[:-1]
        starts[0] = True
        at = np.flatnonzero(starts)
        known = np.logical_and.reduceat(own.to_draft[tokens] >= 0, at)
        last = int(at[-1])
        if len(tokens) - last > LONGEST:  # no spaces for long: what stays open begins with a whole character
            near = range(len(tokens) - LONGEST, len(tokens))
            last = next((i for i in near if _begins_character(own.texts[tokens[i]])), len(tokens))
        del self.tokens[self._settled :]
        edges = [0, *(np.flatnonzero(known[1:] != known[:-1]) + 1).tolist(), len(at)]
        for begin, end in pairwise(edges):
            stop = min(int(at[end]) if end < len(at) else len(tokens), last)
            if at[begin] < stop:
                self.tokens += own.write(tokens[at[begin] : stop].tolist())
        self._settled, self._word = len(self.tokens), tokens[last:].tolist()

    def _begin(self, new: Sequence[int]) -> Sequence[int]:
        """What each tokenizer puts before a text: control tokens, a space. Returns the tokens that are left."""
        own = self.translation
        begin = len(own.target.start)
        if own.draft.start and tuple(new[:begin]) == own.target.start:
            new = new[begin:]
        first = next((i for i, token in enumerate(new) if not own.is_control[token]), len(new))
        if own.draft.spaces_first == own.target.spaces_first or first == len(new):
            return new
        last = next((i for i in range(first + 1, len(new)) if own.begins[new[i]]), len(new))
        data = b"".join(own.texts[token] or b"" for token in new[first:last])
        data = b" " + data if own.draft.spaces_first else data.removeprefix(b" ")
        self.tokens += own.write(new[:first]) + own.draft.encode_bytes(data)
        self._settled = len(self.tokens)
        return new[last:]


def _begins_character(data: bytes | None) -> bool:
    """Whether bytes begin at a UTF-8 character boundary."""
    return not data or data[0] & 0xC0 != 0x80
