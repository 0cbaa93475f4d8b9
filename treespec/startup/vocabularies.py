"""Connects drafts to the target: as members of the SSM group, or as cross-tokenizer drafts."""

import hashlib
import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from treespec.adapter.trace import AdapterConfig
from treespec.drafters.cross_tokenizer.cross_tokenizer_drafter import CAPACITY_FACTOR
from treespec.errors import ConfigError, DraftError
from treespec.models.model_config import ModelConfig
from treespec.startup.cost_measurement import STARTS, cache_folder
from treespec.text.training_prompts import read_training_prompts
from treespec.utils.files import replacing
from treespec.utils.scalars import as_int
from treespec.version import __version__
from treespec_weights.blocks import Blocks, Weights
from treespec_weights.codec import has_tokenizer
from treespec_weights.documents import TOKENIZER
from treespec_weights.draft_vocabulary import expand_embedding, rank_tokens, read_draft_vocabulary
from treespec_weights.errors import CheckpointError
from treespec_weights.vocabularies import REDUCED, Connection, connect

logger = logging.getLogger("treespec")

# "auto" reduces heads of at least this many tokens that are at least this share of the weights of a pass.
MIN_VOCABULARY, MIN_HEAD_SHARE = 65_536, 0.25
# Default share of tokens to keep. Drafting for Qwen2.5-Coder-1.5B on six questions in trees of 8 nodes, the 0.5B
# (q4_k_m) then gives 3.73 tokens per pass instead of 3.80, and a pass reads 320 MB instead of 392. In ten languages and
# code, keeping half costs 3 to 12 % of the tokens per pass of a chain of 4; keeping fewer gains nothing more.
KEPT = 0.5
MULTIPLE = 64  # the number of kept rows is a multiple of this, for vectorised heads


class HeadLimit(NamedTuple):
    """Number and choice of the head rows that draft models keep."""

    rows: int | None = None  # number of rows; None for the share `KEPT` of the vocabulary
    texts: Sequence[str] = ()  # texts whose tokens are kept first
    always: bool = False  # whether small heads are reduced too

    @classmethod
    def resolve(cls, option: object) -> "HeadLimit | None":
        """Parse `LLM(draft_vocabulary=...)`; None for full heads. Raises ConfigError."""
        if option in (None, "none"):
            return None
        if option == "auto":
            return cls()
        if (rows := as_int(int(option) if isinstance(option, str) and option.isdecimal() else option, 1)) is not None:
            return cls(rows, always=True)
        if not isinstance(option, str | os.PathLike) or not (path := Path(option).expanduser()).exists():
            valid = '"auto", None, the number of tokens (at least 1), or a file or folder of texts'
            raise ConfigError(f"draft_vocabulary={option!r}; valid: {valid}")
        texts = list[str]()
        for prompt in read_training_prompts([path], chat=False):
            messages = prompt.content if isinstance(prompt.content, list) else [{"content": prompt.content}]
            contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
            texts += [content for content in contents if isinstance(content, str)]
        return cls(texts=texts, always=True)

    def applies_to(self, config: ModelConfig) -> bool:
        """Return whether a draft's head is large enough to be reduced."""
        shape = config.shape
        if (experts := shape.experts) is not None:  # a row reads only the chosen experts
            shape = replace(shape, experts=replace(experts, count=experts.top_k))
        head = shape.vocab_size * shape.hidden_size
        layer_shapes = [size for name, size in shape.parameters().items() if name not in ("embed", "lm_head")]
        in_pass = head + sum(map(math.prod, layer_shapes))  # a pass reads only a few rows of the embedding
        return self.always or (shape.vocab_size >= MIN_VOCABULARY and head >= MIN_HEAD_SHARE * in_pass)

    def num_kept(self, size: int) -> int:
        """Return how many of `size` tokens stay."""
        return min(self.rows or max(int(KEPT * size) // MULTIPLE * MULTIPLE, 1), size)

    def kept(self, folder: Path, size: int, ends: Sequence[int]) -> np.ndarray:
        """Return the ids below `size` whose rows stay, int64, ascending. `ends` are among them."""
        ranked = _ranked(folder, ends, self.texts)
        return np.sort(ranked[ranked < size][: self.num_kept(size)])


def _ranked(folder: Path, ends: Sequence[int], texts: Sequence[str]) -> np.ndarray:
    """Return `rank_tokens`, cached until a file changes: it takes 0.7 s for 150,000 tokens."""
    files = [folder, folder.parent / TOKENIZER] if folder.is_file() else sorted(folder.iterdir())
    states = [(str(file), (state := file.stat()).st_size, state.st_mtime_ns) for file in files if file.is_file()]
    key = int.from_bytes(hashlib.sha256(repr((__version__, states, [*ends], [*texts])).encode()).digest()[:7], "big")
    name = f"tokens-{hashlib.sha256(str(folder).encode()).hexdigest()[:24]}.npy"
    with suppress(OSError, ValueError, EOFError, IndexError):  # missing or damaged file
        stored: np.ndarray = np.load(cache_folder() / STARTS / name)
        if stored[0] == key:
            return stored[1:]
    ranked = rank_tokens(folder, ends, texts)
    with suppress(OSError), replacing(cache_folder() / STARTS / name) as temporary, temporary.open("wb") as file:
        np.save(file, np.concatenate([[key], ranked]))
    return ranked


class Draft(NamedTuple):
    """A draft and its connection to the target."""

    name: str  # name in statistics
    config: ModelConfig | AdapterConfig  # has the target's vocabulary size if the draft joins the SSM group
    connection: Connection  # relation of the two vocabularies
    vocab_size: int  # the draft's own vocabulary size
    # int64 [vocab_size], target token of each row of a reduced vocabulary, -1 for others; None if ids are equal
    target_ids: np.ndarray | None = None
    kept: np.ndarray | None = None  # int64, ascending, draft tokens whose head rows are kept; None for all

    def __str__(self) -> str:
        """Describe how the draft proposes tokens."""
        cut = "" if self.kept is None else f", {len(self.kept):,} of {self.vocab_size:,} tokens"
        return f"{self.connection}{cut}"

    @property
    def is_cross_tokenizer(self) -> bool:
        """Whether the draft's tokenizer differs from the target's."""
        return self.connection.kind in ("translated", "text")

    def capacity(self, length: int) -> int:
        """Return a request's maximum number of draft tokens if the target has `length` positions."""
        return min(self.config.max_positions, int(CAPACITY_FACTOR * length))


def connect_drafts(
    target: ModelConfig | AdapterConfig,
    drafts: Sequence[tuple[str, ModelConfig | AdapterConfig]],
    limit: HeadLimit | None = None,
) -> list[Draft]:
    """Connect each draft to the target: in the SSM group, with the target's vocabulary size, or through translation.

    `limit` reduces the heads of native models, except those that already have a reduced vocabulary.
    """
    connected = []
    size = target.shape.vocab_size
    for name, config in drafts:
        draft_size = config.shape.vocab_size
        target_ids = read_draft_vocabulary(config.folder, draft_size, size) if isinstance(config, ModelConfig) else None
        connection = _connect(target, config) if target_ids is None else REDUCED
        if connection.kind == "none":
            raise DraftError(
                f"draft {name} ({config.folder}) has a vocabulary of {draft_size} tokens, the target {target.folder} "
                f"one of {size}, and {connection.reason}; put the tokenizer files of both into their folders, or give "
                "the tokenizers of models in memory: LLM(model, drafts=[(draft, its tokenizer)], tokenizer=...), "
                "or generate(assistant_model=..., assistant_tokenizer=..., tokenizer=...) of an accelerated model"
            )
        if connection.kind in ("translated", "text") and isinstance(config, ModelConfig) and config.shape.recurrent:
            raise DraftError(
                f"draft {name} ({config.folder}) has recurrent layers and another tokenizer than the target "
                f"{target.folder}; such models draft for targets with their tokenizer only"
            )
        kept = None
        if limit is not None and isinstance(config, ModelConfig) and target_ids is None and limit.applies_to(config):
            kept = kept_tokens(limit, name, target, config, connection)
        if connection.kind in ("padded", "reduced"):
            config = replace(config, shape=replace(config.shape, vocab_size=size))
            if isinstance(config, ModelConfig) and draft_size < size:
                config = replace(config, head_rows=draft_size if target_ids is None else int((target_ids >= 0).sum()))
        if kept is not None and isinstance(config, ModelConfig):
            config = replace(config, head_rows=len(kept))
        connected.append(Draft(name, config, connection, draft_size, target_ids, kept))
        logger.info("draft %s (%s): %s", name, config.folder, connected[-1])
    return connected


def kept_tokens(
    limit: HeadLimit, name: str, target: ModelConfig | AdapterConfig, config: ModelConfig, connection: Connection
) -> np.ndarray | None:
    """Return `HeadLimit.kept` of a draft; None for all, also if no tokenizer can rank the tokens.

    With `HeadLimit.always`, raises DraftError for a missing tokenizer, and the errors of `rank_tokens`.
    """
    folder, size, ends = config.folder, config.shape.vocab_size, config.eos_token_ids
    if connection.kind in ("same", "padded"):  # equal ids
        size, ends = min(size, target.shape.vocab_size), (*ends, *target.eos_token_ids)
        if not has_tokenizer(folder) and isinstance(target, ModelConfig):
            folder = target.folder
    if limit.num_kept(size) == size:
        return None
    if has_tokenizer(folder):
        try:
            return limit.kept(folder, size, ends)
        except CheckpointError as error:
            if limit.always:
                raise
            logger.info("draft %s keeps its whole head: %s", name, error)
    elif limit.always:
        raise DraftError(
            f"draft_vocabulary ranks the tokens of draft {name} by its tokenizer, and {folder} has none; put the "
            "tokenizer's files there, or use draft_vocabulary=None"
        )
    return None


def _connect(target: ModelConfig | AdapterConfig, draft: ModelConfig | AdapterConfig) -> Connection:
    """Compare the tokenizers of target and draft; those of in-memory models are saved to temporary files."""
    with TemporaryDirectory(prefix="treespec-tokenizers-") as root:
        folders = [
            config.folder if isinstance(config, ModelConfig) else config.source.tokenizer_folder(Path(root, name))
            for name, config in (("target", target), ("draft", draft))
        ]
        return connect(folders[0], target.shape.vocab_size, folders[1], draft.shape.vocab_size)


def fit_weights(
    weights: Weights, size: int, target_ids: np.ndarray | None, kept: np.ndarray | None = None
) -> np.ndarray | None:
    """Resize a draft's embedding and head to a vocabulary of `size` tokens, in place.

    The embedding gets a row for every token, so that the draft can read any text; the head keeps the rows of the
    draft's own tokens, or of `kept`. Returns the tokens of the head's rows, int64, ascending; None for all.
    """
    embed = weights["embed"]
    rows = embed.rows if isinstance(embed, Blocks) else embed
    ids = np.arange(len(rows)) if target_ids is None else target_ids
    head_rows = np.flatnonzero((ids >= 0) & (ids < size)) if kept is None else kept
    tokens: np.ndarray = ids[head_rows]
    if len(tokens) < size or "lm_head" in weights:
        weights |= rows_of_head(weights, head_rows)
    if target_ids is None and len(rows) >= size:
        weights["embed"] = _rows_of(embed, slice(size))
    elif isinstance(embed, Blocks):  # GGUF files have no reduced vocabularies; missing tokens get zeros
        weights["embed"] = embed._replace(rows=F.pad(rows, (0, 0, 0, size - len(rows))))
    else:
        weights["embed"] = expand_embedding(embed, ids, size)
    return tokens if len(tokens) < size else None


def rows_of_head(weights: Weights, rows: np.ndarray) -> Weights:
    """Return a head's parameters with copies of only these rows, int64."""
    names = weights.keys() & {"lm_head", "lm_head_scale", "lm_head_zero"}
    full_head = {name: weights[name] for name in names} if names else {"lm_head": weights["embed"]}
    return {name: _rows_of(matrix, rows) for name, matrix in full_head.items()}


def _rows_of(matrix: Any, rows: np.ndarray | slice) -> Any:
    """Return rows of a Tensor or Blocks: a view for a slice, else a copy."""
    if isinstance(matrix, Blocks):
        selected = matrix._replace(rows=_rows_of(matrix.rows, rows))
        matrix.release()  # drops the pages that were read
        return selected
    return matrix[rows if isinstance(rows, slice) else torch.from_numpy(rows).to(matrix.device)]
