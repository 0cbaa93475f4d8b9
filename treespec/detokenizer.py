"""Text of a growing output: stable pieces for streaming, and stop strings.

Tokens are decoded together with a few before them, because a tokenizer may treat the first token of a text apart. A
piece is released once it ends in a whole character and cannot be the beginning of a stop string.
"""

from collections.abc import Callable, Sequence

_BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet
_WINDOW = 6  # tokens decoded ahead of the new ones


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
        self._window = list(prompt[-_WINDOW:])  # tokens since a point where characters were whole, and a few before
        self._known = len(self._whole_characters(decode(self._window)))  # characters of the window that are in `text`
        self.text = ""
        self.stopped_by: str | None = None
        self._released = 0
        self._may_stop = True

    def push(self, token: int, may_stop: bool = True) -> bool:
        """Add a token; True where it brought a stop string, and `may_stop`. `text` then ends there."""
        self._may_stop = may_stop
        self._extend([token])
        return self.stopped_by is not None

    def push_all(self, tokens: Sequence[int]) -> None:
        """Add a whole output at once, where nobody watches it grow."""
        self._extend(tokens)
        self.flush()

    def _extend(self, tokens: Sequence[int]) -> None:
        """Bytes at the end that are no whole character wait for the rest of it."""
        self._window.extend(tokens)
        decoded = self._decode(self._window)
        whole = self._whole_characters(decoded)
        self._add(whole[self._known :])
        self._known = max(self._known, len(whole))
        if len(whole) == len(decoded):
            self._window = self._window[-_WINDOW:]
            self._known = len(self._whole_characters(self._decode(self._window)))

    def flush(self) -> None:
        """The output has ended: what was waiting for the rest of a character is shown as it is."""
        if self.stopped_by is None:
            decoded = self._decode(self._window)
            self._add(decoded[self._known :])
            self._known = len(decoded)

    def release(self, ended: bool) -> str:
        """Text that was not handed out yet and cannot change any more."""
        held = 0 if ended else self._held_back()
        piece = self.text[self._released : len(self.text) - held]
        self._released += len(piece)
        return piece

    @staticmethod
    def _whole_characters(text: str) -> str:
        """`text` without what later bytes may still turn into another character."""
        return text.rstrip(_BROKEN)

    def _add(self, piece: str) -> None:
        """Append, and end the text at the stop string that appears first; of several at one place, at the longest."""
        searched = len(self.text)
        self.text += piece
        found = []
        for stop in self._stop if self._may_stop else ():
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
