"""Feed transformers' streamers as transformers' own loop does, and end them in every case."""

from collections.abc import Sequence
from typing import Any

import torch

from treespec.errors import ConfigError
from treespec.hf.checks import Prompts
from treespec.hf.rows import Row


class EndingStreamer:
    """Wraps a streamer, or None, and ends it exactly once with the context, so that no reader waits forever."""

    def __init__(self, streamer: Any):
        self._streamer, self._ended = streamer, streamer is None

    @classmethod
    def of(cls, name: str, streamer: Any) -> "EndingStreamer":
        """Wrap the streamer of the argument `name`, unless it is wrapped. Raises ConfigError if it is no streamer."""
        if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
            raise ConfigError(f"{name}={streamer!r}; valid: an object with put and end")
        return streamer if isinstance(streamer, cls) else cls(streamer)

    def put(self, tokens: Any) -> None:
        if self._streamer is not None:
            self._streamer.put(tokens)

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._streamer.end()

    def __enter__(self) -> "EndingStreamer":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class RowStreamer:
    """Feeds a streamer with the prompt, then with one step of all rows at a time; finished rows get `pad`."""

    def __init__(self, streamer: Any, prompts: Prompts, rows: Sequence[Row], pad: int):
        self._streamer, self._rows, self._pad, self._steps = streamer, rows, pad, 0
        streamer.put(prompts.input_ids.cpu())

    def due(self) -> list[list[int]]:
        """Return the steps that all unfinished rows have reached and that are not streamed yet."""
        due: list[list[int]] = []
        while True:
            step = self._steps
            open_rows = [row for row in self._rows if row.ended is None]
            if any(row.num_generated <= step for row in open_rows) or all(
                row.num_generated <= step for row in self._rows
            ):
                return due
            tokens = [row.output_token_ids[step] if step < row.num_generated else self._pad for row in self._rows]
            due.append(tokens)
            self._steps += 1

    def put(self, steps: list[list[int]]) -> None:
        """Stream the tokens of each step, one per row."""
        for tokens in steps:
            self._streamer.put(torch.tensor(tokens, dtype=torch.int64, device="cpu"))
