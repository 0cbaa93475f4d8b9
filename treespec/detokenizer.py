"""Text of a growing output: stable pieces for streaming, and stop strings.

Tokens are decoded together with a few before them, because a tokenizer may treat the first token of a text apart. A
piece is released once it ends in a whole character and cannot be the beginning of a stop string.
"""

from collections.abc import Callable, Sequence

_BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet
_WINDOW = 6  # tokens decoded ahead of the new ones
_LONGEST_CHARACTER = 4  # tokens: a character has at most 4 bytes


class Detokenizer:
    """The text of one request's output.

    Args:
        decode: token ids to text; special tokens are dropped or kept there.
        prompt: the prompt's token ids.
        stop: strings that end the text.
        include_stop: keep the stop string that ended it.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], prompt: Sequence[int], stop: Sequence[str], include_stop: bool
    ):
        self._decode, self._stop, self._include_stop = decode, tuple(stop), include_stop
        self._tokens = list(prompt[-_WINDOW:])
        self._before = decode(self._tokens)  # text of the tokens that were there before the newest piece
        self._start = 0
        self._pending = len(self._tokens)  # first token whose text is not in `text` yet
        self.text = ""
        self.stopped_by: str | None = None
        self._released = 0

    def push(self, token: int) -> bool:
        """Add a token; True where the text now holds a stop string. `text` then ends there."""
        self._tokens.append(token)
        whole = self._decode(self._tokens[self._start :])
        waiting = len(self._tokens) - self._pending
        if whole.endswith(_BROKEN) and waiting < _LONGEST_CHARACTER:
            return False
        self._add(whole)
        return self.stopped_by is not None

    def push_all(self, tokens: Sequence[int]) -> None:
        """Add a whole output at once, where nobody watches it grow."""
        self._tokens.extend(tokens)
        self.flush()

    def flush(self) -> None:
        """The output has ended: take in what was waiting for the rest of a character."""
        if self._pending < len(self._tokens) and self.stopped_by is None:
            self._add(self._decode(self._tokens[self._start :]))

    def release(self, ended: bool) -> str:
        """Text that was not handed out yet and cannot change any more."""
        held = 0 if ended else self._held_back()
        piece = self.text[self._released : len(self.text) - held]
        self._released += len(piece)
        return piece

    def _add(self, whole: str) -> None:
        searched = len(self.text)
        self.text += whole[len(self._before) :]
        self._pending = len(self._tokens)
        self._start = max(self._pending - _WINDOW, 0)
        self._before = self._decode(self._tokens[self._start :])
        self._cut_at_stop(searched)

    def _cut_at_stop(self, searched: int) -> None:
        """End the text at the stop string that appears first; of several at one place, at the longest."""
        found = []
        for stop in self._stop:
            at = self.text.find(stop, max(searched - len(stop) + 1, 0))
            if at >= 0:
                found.append((at, -len(stop), stop))
        if found:
            at, _, stop = min(found)
            self.text = self.text[: at + len(stop) if self._include_stop else at]
            self.stopped_by = stop

    def _held_back(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for count in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-count:]) for stop in self._stop):
                return count
        return 0
