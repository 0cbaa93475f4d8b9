"""Text of a growing output: stable pieces for streaming, and stop strings.

A token's text is what it adds to that of the tokens before it, a few of which are decoded along with it, because a
tokenizer may treat the first token of a text apart. So the text is that of all tokens at once, as far as no token
changes what those before it wrote; and whether or not it is watched while it grows, it is made token by token. A piece
is released once it ends in a whole character and cannot be the beginning of a stop string.
"""

from collections.abc import Callable, Sequence

_BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet
_WINDOW = 6  # tokens decoded ahead of the new ones, at least
_CHARACTER = 4  # bytes of the longest one: among as many places to cut at, one lies between characters


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
        self._longest = max(map(len, self._stop), default=1) - 1
        self._by_letter: dict[str, list[str]] = {}  # stop strings by their first character
        for text in self._stop:
            self._by_letter.setdefault(text[0], []).append(text)
        self._window = self._end_of(prompt)  # tokens since a point where characters were whole, and a few before
        self._decoded = decode(self._window)
        self._shows = False  # whether a token of the output is in the window
        self._known = len(self._whole_characters(self._decoded))  # characters of it that are in `text`, or the prompt's
        self.text = ""
        self.stopped_by: str | None = None
        self._released = 0
        self._may_stop = True

    def push(self, token: int, may_stop: bool = True) -> bool:
        """Add a token; True where it brought a stop string, and `may_stop`. `text` then ends there.

        Bytes at the end that are no whole character wait for the rest of it.
        """
        self._may_stop = may_stop
        decoded = self._decode([*self._window, token])
        if decoded and decoded == self._decoded and not self._decode([token]):
            return False  # not shown: many of these must not fill the window, or the next word would seem the first
        self._window.append(token)
        self._decoded, self._shows = decoded, True
        whole = self._whole_characters(decoded)
        self._add(whole[self._known :])
        self._known = max(self._known, len(whole))
        if len(whole) == len(decoded) and len(self._window) >= 2 * _WINDOW:
            self._shorten()
        return self.stopped_by is not None

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """As much of the prompt's end as shows some text that begins with a whole character."""
        count = _WINDOW
        while count < len(prompt) and self._decode(list(prompt[-count:]))[:1] in ("", _BROKEN):
            count *= 2
        return list(prompt[-count:])

    def _shorten(self) -> None:
        """Keep the end of the window where it decodes to the end of what the window does."""
        for count in range(_WINDOW, _WINDOW + _CHARACTER):
            decoded = self._decode(self._window[-count:])
            if decoded[:1] not in ("", _BROKEN) and self._decoded.endswith(decoded):
                self._window, self._decoded, self._known = self._window[-count:], decoded, len(decoded)
                return

    def flush(self) -> None:
        """The output has ended: what was waiting for the rest of a character is shown as it is, unless all of it is the
        prompt's."""
        if self._shows and self.stopped_by is None:
            self._add(self._decoded[self._known :])
            self._known = max(self._known, len(self._decoded))

    def shown(self, ended: bool) -> str:
        """The text that cannot change any more."""
        return self.text if ended else self.text[: len(self.text) - self._held_back()]

    def release(self, ended: bool) -> str:
        """Text that was not handed out yet and cannot change any more."""
        piece = self.shown(ended)[self._released :]
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
        for count in range(min(self._longest, len(self.text)), 0, -1):
            beginning = self.text[-count:]
            if any(stop.startswith(beginning) for stop in self._by_letter.get(beginning[0], ())):
                return count
        return 0
