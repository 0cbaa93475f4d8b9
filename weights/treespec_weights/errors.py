"""Errors about checkpoints. Each one holds all problems found, not only the first."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

MAX_LISTED = 1000


class Problem(NamedTuple):
    kind: str  # "file", "index", "config", "tokenizer", "missing", "unexpected", "shape", "dtype", "tied", "value"
    where: str  # the file, tensor or config key
    message: str  # description of the problem, with the bad value and the valid ones

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


class CheckpointError(ValueError):
    """A checkpoint folder that cannot be used.

    Attributes: `folder`; `problems`, all of them. The message lists the first 1,000.
    """

    def __init__(self, folder: Path | str, problems: Sequence[Problem]) -> None:
        assert problems, "an error without a problem"
        super().__init__(folder, tuple(problems))
        self.folder = Path(folder)
        self.problems = tuple(problems)

    @classmethod
    def of(cls, folder: Path | str, kind: str, name: str, message: str) -> Self:
        """Return the error of one problem, of a named file, tensor or key."""
        return cls(folder, [Problem(kind, repr(name), message)])

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"{self.folder}: {self.problems[0]}"
        lines = [f"{self.folder}: {len(self.problems)} problems"]
        lines += [f"  - {problem}" for problem in self.problems[:MAX_LISTED]]
        if len(self.problems) > MAX_LISTED:
            lines.append(f"  ... and {len(self.problems) - MAX_LISTED} more")
        return "\n".join(lines)


class CheckpointConfigError(CheckpointError):
    """A config.json that is missing, malformed, incomplete or contradictory."""


class UnsupportedModelError(CheckpointConfigError):
    """A valid model of a family or variant that is not supported."""


class WriteError(CheckpointError):
    """A checkpoint that could not be written. Its destination does not exist."""


class OptionError(ValueError):
    """An invalid option value. The message names the option, the value and the valid values."""


class HubError(ValueError):
    """A model of the Hugging Face hub that is not cached and cannot be downloaded."""
