"""Incremental detokenization with stop strings.

A token's text is the text that it adds to the few tokens before it, because tokenizers may treat the first token of a
text specially. The result equals decoding all tokens at once, provided that no token changes earlier text, and does not
depend on streaming. A token that changes earlier text is decoded without the tokens before it: SentencePiece decodes a
run of bytes either whole or not at all, so a broken character would corrupt the complete ones before it. A piece is
released once it ends in a complete character and cannot be the beginning of a stop string.

`tokenizers.decoders.DecodeStream` gives the same text, but never releases an incomplete character at the end and
accepts only a `tokenizers.Tokenizer`. `LLM(tokenizer=...)` accepts any object with `encode` and `decode`.
"""

from collections.abc import Callable, Sequence

_BROKEN = "\ufffd"  # decoders' output for invalid or incomplete UTF-8
_WINDOW = 6  # minimum number of tokens decoded before the new ones
_CHARACTER = 4  # maximum bytes of a UTF-8 character: among 4 consecutive cuts, at least one lies between characters


class Detokenizer:
    """Detokenizes one request's output. `decode` handles special tokens; the strings `stop` end the text."""

    def __init__(
        self, decode: Callable[[list[int]], str], prompt: Sequence[int], stop: Sequence[str], include_stop: bool
    ):
        self._decode, self._stop, self._include_stop = decode, tuple(stop), include_stop
        end = self._end_of(prompt)
        self._window = end[:-_CHARACTER]  # tokens since a character boundary, and a few before it
        self._decoded = decode(self._window)  # its complete characters are in `text` or the prompt
        for token in end[-_CHARACTER:]:
            self._append(token)
        self._shows = False  # whether the window contains an output token
        self.text = ""
        self.stopped_by: str | None = None
        self._released = 0
        self._may_stop = True

    def push(self, token: int, may_stop: bool = True) -> bool:
        """Append a token. Returns True if it completes a stop string and `may_stop`; `text` then ends there."""
        self._may_stop = may_stop
        self._add(self._append(token))
        return self.stopped_by is not None

    def _append(self, token: int) -> str:
        """Append a token to the window. Returns the complete characters it adds."""
        previous = self._decoded.rstrip(_BROKEN)
        decoded = self._decode([*self._window, token])
        if decoded and decoded == self._decoded and not self._decode([token]):
            return ""  # tokens without text must not fill the window: the next word would be decoded like a first one
        if not decoded.startswith(previous):
            self._window, decoded, previous = [], self._decode([token]), ""
        self._window.append(token)
        self._decoded, self._shows = decoded, True
        complete = decoded.rstrip(_BROKEN)
        if len(complete) == len(decoded) and len(self._window) >= 2 * _WINDOW:
            self._shorten()
        return complete[len(previous) :]

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """Return the end of the prompt, long enough to begin with a complete character."""
        count = _WINDOW
        while count < len(prompt) and self._decode(list(prompt[-count:]))[:1] in ("", _BROKEN):
            count *= 2
        return list(prompt[-count:])

    def _shorten(self) -> None:
        """Shorten the window to a suffix that decodes to the end of its text."""
        for count in range(_WINDOW, _WINDOW + _CHARACTER):
            decoded = self._decode(self._window[-count:])
            if decoded[:1] not in ("", _BROKEN) and self._decoded.endswith(decoded):
                self._window, self._decoded = self._window[-count:], decoded
                return

    def flush(self) -> None:
        """End the output: release an incomplete character unchanged, unless it belongs only to the prompt."""
        if self._shows and self.stopped_by is None:
            self._add(self._decoded[len(self._decoded.rstrip(_BROKEN)) :])
            self._shows = False

    def shown(self, ended: bool) -> str:
        """Return the text that can no longer change: unless `ended`, without a possible beginning of a stop string."""
        return self.text if ended else self.text[: len(self.text) - partial_match_length(self.text, self._stop)]

    def release(self, ended: bool) -> str:
        """Return the text that can no longer change and was not released before."""
        piece = self.shown(ended)[self._released :]
        self._released += len(piece)
        return piece

    def _add(self, piece: str) -> None:
        """Append a piece, and cut the text at the first stop string (the longest one if several start there)."""
        searched = len(self.text)
        self.text += piece
        stops = self._stop if self._may_stop else ()
        starts = [(self.text.find(stop, max(searched - len(stop) + 1, 0)), -len(stop), stop) for stop in stops]
        if matches := [match for match in starts if match[0] >= 0]:
            start, _, stop = min(matches)
            self.text = self.text[: start + len(stop) if self._include_stop else start]
            self.stopped_by = stop


def partial_match_length(text: str, strings: Sequence[str]) -> int:
    """Return the number of trailing characters of a text that may begin one of the strings."""
    most = min(max(map(len, strings), default=1) - 1, len(text))
    return next((n for n in range(most, 0, -1) if any(string.startswith(text[-n:]) for string in strings)), 0)
