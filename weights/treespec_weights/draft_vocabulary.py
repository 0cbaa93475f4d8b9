"""Reduced draft vocabularies: drafts that know only some of the target's tokens, and the choice of these tokens.

A folder with `draft_vocab.safetensors` holds a model whose row i stands for the target's token `target_ids[i]`. The
ids are ascending, so that ties between equal logits break as over the full vocabulary. A last row with the id -1 is
the embedding of all other tokens, and is never proposed.

The head of any other draft can be reduced to its most frequent tokens (FR-Spec, arXiv 2502.14856; VocabTrim, arXiv
2506.22694), ranked by their counts in texts or by the order in which the tokenizer's training added them.
"""

import functools
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from treespec_weights.codec import Codec, byte_table, bytes_of, read_tokenizer
from treespec_weights.errors import CheckpointError
from treespec_weights.tokenizer import token_ids

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
    token_ids = ids[:-1] if len(ids) and ids[-1] == -1 else ids
    if (
        len(ids) != rows
        or not len(token_ids)
        or token_ids[0] < 0
        or token_ids[-1] >= target_size
        or (np.diff(token_ids) <= 0).any()
    ):
        valid = f"one per row, ascending from 0 to {target_size - 1}, with an optional last -1 for all others"
        raise problem(f"{len(ids)} ids for {rows} rows; valid: {valid}")
    return ids


def expand_embedding(rows: Tensor, target_ids: np.ndarray, target_size: int) -> Tensor:
    """Return the embedding by target token, [target_size, hidden].

    Tokens without a row get the row of id -1, or the mean of all rows.
    """
    token_ids = target_ids[target_ids >= 0]
    other_row = rows[-1:] if len(token_ids) < len(target_ids) else rows.float().mean(0, keepdim=True).to(rows.dtype)
    result = other_row.expand(target_size, -1).clone()
    result[torch.from_numpy(token_ids).to(rows.device)] = rows[: len(token_ids)]
    return result


def rank_tokens(folder: Path, first: Iterable[int] = (), texts: Sequence[str] = ()) -> np.ndarray:
    """Return the ids of a tokenizer's tokens, int64, by descending expected frequency.

    The ids `first`, added tokens such as the ends of turns, and single bytes precede the tokens of `texts`, which are
    ordered by their counts. All others follow in the order in which training added them: that of BPE's merges, or of
    Unigram's scores. Training sees most of one language, so each script contributes in proportion to its tokens: the
    first half has half of the Latin tokens and half of the Chinese ones. Raises CheckpointError for a folder without
    a usable tokenizer.
    """
    raw = read_tokenizer(folder)
    ids = token_ids(folder, raw)
    added = [token["id"] for token in raw.get("added_tokens") or []]
    try:
        training_order = _training_order(raw["model"], ids)
    except (AttributeError, TypeError, ValueError) as error:
        message = f"malformed: expected model.merges as the tokenizers library writes them ({error})"
        raise CheckpointError.of(folder, "tokenizer", "tokenizer.json", message) from None
    table, singles, shares = byte_table(raw), list[int](), dict[int, float]()
    classes = defaultdict[tuple[str, bool], list[int]](list)
    for token, id in sorted(ids.items(), key=lambda item: (training_order.get(item[1], -1), item[1])):
        data = bytes_of(token, table)
        if len(data) == 1:
            singles.append(id)
        # Single characters of SentencePiece have the last ids and no merges, so they are a class of their own.
        classes[_script(data), id in training_order].append(id)
    for members in classes.values():
        shares |= zip(members, np.linspace(0, 1, len(members), endpoint=False).tolist(), strict=True)
    counts = Counter[int]()
    if texts:
        encode = Codec.read(folder).encode
        counts.update(id for text in texts for id in encode(text))
    order = [*first, *added, *singles, *(id for id, _ in counts.most_common()), *sorted(shares, key=shares.__getitem__)]
    return np.array(list(dict.fromkeys(order)), dtype=np.int64)


def _training_order(model: dict[str, Any], ids: dict[str, int]) -> dict[int, float]:
    """Return the training rank of each token that results from a merge or has a score."""
    if isinstance(vocab := model["vocab"], list):
        return {id: -float(score) for id, (_, score) in enumerate(vocab)}
    order: dict[int, float] = {}
    for rank, merge in enumerate(model.get("merges") or ()):
        token = merge.replace(" ", "", 1) if isinstance(merge, str) else "".join(merge)
        if (id := ids.get(token)) is not None:
            order.setdefault(id, rank)
    return order


def _script(data: bytes) -> str:
    """Return the script of a token's first letter that is not Latin, such as CJK; "" if it has none."""
    if data.isascii():
        return ""
    scripts = map(_script_of, data.decode(errors="ignore"))
    return next((script for script in scripts if script not in ("", "LATIN")), "")


@functools.cache
def _script_of(char: str) -> str:
    return unicodedata.name(char, "").partition(" ")[0] if char.isalpha() else ""
