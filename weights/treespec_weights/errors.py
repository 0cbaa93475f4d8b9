"""Errors about checkpoints. Each carries every problem that was found, not only the first."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

MAX_LISTED = 1000


class Problem(NamedTuple):
    """One thing that is wrong with a checkpoint."""

    kind: str  # "file", "index", "config", "tokenizer", "missing", "unexpected", "shape", "dtype", "tied", "value"
    where: str  # the file, tensor or config key
    message: str  # what is wrong, with the bad value and what would be valid

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


class CheckpointError(ValueError):
    """A checkpoint folder that cannot be used as it is.

    Attributes: `folder`, and `problems`, all of them; the message lists the first 1,000.
    """

    def __init__(self, folder: Path | str, problems: Sequence[Problem]) -> None:
        assert problems, "an error without a problem"
        super().__init__(folder, tuple(problems))
        self.folder = Path(folder)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"{self.folder}: {self.problems[0]}"
        lines = [f"{self.folder}: {len(self.problems)} problems"]
        lines += [f"  - {problem}" for problem in self.problems[:MAX_LISTED]]
        if len(self.problems) > MAX_LISTED:
            lines.append(f"  ... and {len(self.problems) - MAX_LISTED} more")
        return "\n".join(lines)


class CheckpointConfigError(CheckpointError):
    """A config.json that is missing, malformed, incomplete or contradicts itself."""


class UnsupportedModelError(CheckpointConfigError):
    """A model that is described correctly but that no family here covers."""


class WriteError(CheckpointError):
    """A checkpoint that could not be written. Nothing of it is at its place."""


class OptionError(ValueError):
    """An option with a value that it cannot have. The message names both, and what would be valid."""


class HubError(ValueError):
    """A model of the Hugging Face hub that is neither in the cache nor to be had, and what to do."""
