"""Tables on disk: n-gram continuations with probabilities, written by `treespec train --table`."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from treespec.errors import ModelError
from treespec_kernels.cpu.table_cpu import PROBS

CONFIG, FILE = "config.json", "model.safetensors"
KIND = "treespec_table"
_PRIME = 0x9E3779B1


@dataclass(frozen=True)
class StoredTable:
    """Continuations of contexts of 1 to 3 tokens, and the frequencies of single tokens.

    If a context's interpolated weight of a token is `d`, the token's probability is `d` plus the context's remaining
    mass (1 minus all its weights) times the token's probability after the context shortened by one token.
    """

    hashes: np.ndarray  # uint32 [contexts], ascending, from `hash_contexts`
    sizes: np.ndarray  # uint8 [contexts], number of continuations
    tokens: np.ndarray  # uint16 or uint32 [continuations], grouped by context
    codes: np.ndarray  # uint8 [continuations], weights as indices into `PROBS`
    frequencies: np.ndarray  # uint8 [vocab], codes of the tokens' probabilities without a context

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in vars(self).values())

    def save(self, folder: Path) -> None:
        """Write the table into a folder, creating it."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(vars(self), folder / FILE)
        (folder / CONFIG).write_text(json.dumps({"model_type": KIND, "vocab_size": len(self.frequencies)}) + "\n")

    @classmethod
    def load(cls, folder: Path, vocab_size: int) -> "StoredTable":
        """Read the table of a target with `vocab_size` tokens. Raises ModelError."""
        try:
            table = cls(**load_file(folder / FILE))
        except (OSError, SafetensorError, TypeError) as error:
            raise ModelError(f"{folder}: {error}; write the table again with `treespec train --table`") from error
        if len(table.frequencies) != vocab_size:
            raise ModelError(
                f"{folder} is the table of a target with {len(table.frequencies)} tokens, but this target has "
                f"{vocab_size}; train a table for this target"
            )
        ends = int(table.sizes.sum()) == len(table.tokens) == len(table.codes) and len(table.sizes)
        if ends != len(table.hashes) or (len(table.tokens) and int(table.tokens.max()) >= vocab_size):
            raise ModelError(f"{folder} is damaged: its arrays are inconsistent; write the table again")
        return table

    @classmethod
    def empty(cls) -> "StoredTable":
        """Return a table without contexts."""
        return cls(*(np.zeros(0, dtype=kind) for kind in (np.uint32, np.uint8, np.uint32, np.uint8, np.uint8)))


def is_table(folder: Path) -> bool:
    """Return whether a folder contains a table."""
    try:
        return bool(json.loads((folder / CONFIG).read_text())["model_type"] == KIND)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def hash_contexts(tokens: np.ndarray) -> np.ndarray:
    """Return the hashes of the last 1 to CONTEXTS tokens, uint32 [CONTEXTS, count].

    Args:
        tokens: int [CONTEXTS, count], the last token first.
    """
    hashes, value = [], np.zeros(tokens.shape[1], dtype=np.uint32)
    for token in tokens.astype(np.uint32):
        value = (value ^ token) * np.uint32(_PRIME)
        value ^= value >> np.uint32(15)
        value += np.uint32(1)
        hashes.append(np.maximum(value, 1))  # 0 marks a free slot
    return np.stack(hashes)


def quantize_probs(probs: np.ndarray) -> np.ndarray:
    """Return the nearest indices into `PROBS`: uint8, of the shape of `probs`."""
    middles = (PROBS[1:] + PROBS[:-1]) / 2
    return np.searchsorted(middles, probs).astype(np.uint8)
