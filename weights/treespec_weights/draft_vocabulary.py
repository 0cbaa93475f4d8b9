"""Reduced draft vocabularies: a draft whose embedding and head cover only some of the target's tokens.

A folder with `draft_vocab.safetensors` holds a model whose row i stands for the target's token `target_ids[i]`. The
ids are ascending, so that ties between equal logits break as over the full vocabulary. A last row with the id -1 is
the embedding of all other tokens; it is never proposed.
"""

from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from treespec_weights.errors import CheckpointError

FILE = "draft_vocab.safetensors"


def write_draft_vocabulary(folder: Path, target_ids: np.ndarray, target_size: int) -> None:
    """Write `draft_vocab.safetensors`: `target_ids` are int64 [rows], ascending but for a last -1."""
    save_file({"target_ids": torch.from_numpy(target_ids)}, folder / FILE, {"target_size": str(target_size)})


def read_draft_vocabulary(folder: Path, rows: int, target_size: int) -> np.ndarray | None:
    """Return the target's ids of a draft's rows, int64 [rows]; None for a full vocabulary. Raises CheckpointError."""
    path = folder / FILE
    if not path.exists():
        return None

    def problem(text: str) -> CheckpointError:
        return CheckpointError.of(folder, "file", FILE, text)

    try:
        with safe_open(path, "pt") as file:
            size = int((file.metadata() or {}).get("target_size", target_size))
            ids = file.get_tensor("target_ids").to(torch.int64).numpy()
    except (SafetensorError, OSError, ValueError) as error:
        raise problem(f"not a draft vocabulary: {error}") from error
    if size != target_size:
        raise problem(f"maps to a vocabulary of {size} tokens, the target has {target_size}; use its own target")
    named = ids[:-1] if len(ids) and ids[-1] == -1 else ids
    if len(ids) != rows or not len(named) or named[0] < 0 or named[-1] >= target_size or (np.diff(named) <= 0).any():
        valid = f"one per row, ascending from 0 to {target_size - 1}, with an optional last -1 for all others"
        raise problem(f"{len(ids)} ids for {rows} rows; valid: {valid}")
    return ids


def expand_embedding(rows: Tensor, target_ids: np.ndarray, target_size: int) -> Tensor:
    """Return the embedding by target token, [target_size, hidden].

    Tokens without a row get the row of id -1, or the mean of all rows.
    """
    token_ids = target_ids[target_ids >= 0]
    other = rows[-1:] if len(token_ids) < len(target_ids) else rows.float().mean(0, keepdim=True).to(rows.dtype)
    result = other.expand(target_size, -1).clone()
    result[torch.from_numpy(token_ids).to(rows.device)] = rows[: len(token_ids)]
    return result
