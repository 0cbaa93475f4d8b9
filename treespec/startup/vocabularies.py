"""Connects drafts to the target: as members of the SSM group, or as foreign drafts with another tokenizer."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch.nn.functional as F

from treespec.adapter.trace import AdapterConfig
from treespec.cache.kv_cache import KVCache
from treespec.drafters.foreign.by_text import TextDrafter
from treespec.drafters.foreign.foreign_drafter import CAPACITY_FACTOR, ForeignDrafter
from treespec.drafters.foreign.retokenize import Translation
from treespec.drafters.foreign.translated import TranslatedDrafter
from treespec.drafters.ssm.ssm_drafter import SsmDrafter
from treespec.errors import DraftError
from treespec.models.decoder import Decoder
from treespec.models.model_config import ModelConfig
from treespec.planning.planner import Planner
from treespec.request import Request
from treespec_weights.draft_vocabulary import expand_embedding, read_draft_vocabulary
from treespec_weights.gguf.blocks import Blocks, Weights
from treespec_weights.vocabularies import REDUCED, Connection, connect

logger = logging.getLogger("treespec")


class Draft(NamedTuple):
    """A draft and its connection to the target."""

    name: str  # for attribution
    config: ModelConfig | AdapterConfig  # with the target's vocabulary size if the draft joins the SSM group
    connection: Connection  # between the vocabularies
    vocab_size: int  # of the draft itself
    # int64 [vocab_size], target token of each row of a reduced vocabulary, -1 for all others; None if ids are equal
    target_ids: np.ndarray | None = None

    @property
    def is_foreign(self) -> bool:
        """Whether the draft has another tokenizer than the target."""
        return self.connection.kind in ("translated", "text")

    def capacity(self, length: int) -> int:
        """Return the maximum draft tokens of a request, if the target has `length` positions."""
        return min(self.config.max_positions, int(CAPACITY_FACTOR * length))


def connect_drafts(
    target: ModelConfig | AdapterConfig, drafts: Sequence[tuple[str, ModelConfig | AdapterConfig]]
) -> list[Draft]:
    """Return how each draft proposes tokens of the target: in the SSM group, at its vocabulary size, or translated."""
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
        logger.info("draft %s (%s): %s", name, config.folder, connection)
        if connection.kind in ("padded", "reduced"):
            config = replace(config, shape=replace(config.shape, vocab_size=size))
            if isinstance(config, ModelConfig) and draft_size < size:
                config = replace(config, head_rows=draft_size if target_ids is None else int((target_ids >= 0).sum()))
        connected.append(Draft(name, config, connection, draft_size, target_ids))
    return connected


def _connect(target: ModelConfig | AdapterConfig, draft: ModelConfig | AdapterConfig) -> Connection:
    """Compare the tokenizers of target and draft. Those of models in memory are saved to files meanwhile."""
    with TemporaryDirectory(prefix="treespec-tokenizers-") as root:
        folders = [
            config.folder if isinstance(config, ModelConfig) else config.source.tokenizer_folder(Path(root, name))
            for name, config in (("target", target), ("draft", draft))
        ]
        return connect(folders[0], target.shape.vocab_size, folders[1], draft.shape.vocab_size)


def fit_weights(weights: Weights, size: int, target_ids: np.ndarray | None) -> np.ndarray | None:
    """Resize a draft's embedding and head to the target's vocabulary of `size`, in place.

    The embedding gets a row for every token, so that the draft can process any text; the head keeps the rows of tokens
    that the draft has. Returns those, int64, ascending; None if they are all.
    """
    embed = weights["embed"]
    rows = embed.rows if isinstance(embed, Blocks) else embed
    if target_ids is None and len(rows) >= size:
        for name in weights.keys() & {"embed", "lm_head"}:
            weights[name] = _first_rows(weights[name], size)
        return None
    ids = np.arange(len(rows)) if target_ids is None else target_ids
    tokens: np.ndarray = ids[ids >= 0]
    head = _first_rows(weights.setdefault("lm_head", embed), len(tokens))
    weights["lm_head"] = head if isinstance(head, Blocks) else head.clone()
    if isinstance(embed, Blocks):  # a GGUF file's vocabulary is never a reduced one; other tokens get zeros
        weights["embed"] = embed._replace(rows=F.pad(rows, (0, 0, 0, size - len(rows))))
    else:
        weights["embed"] = expand_embedding(embed, ids, size)
    return tokens


def _first_rows(matrix: Any, count: int) -> Any:
    """Return the first rows of a Tensor or Blocks."""
    return matrix._replace(rows=matrix.rows[:count]) if isinstance(matrix, Blocks) else matrix[:count]


def foreign_drafters(
    drafts: Sequence[Draft],
    load: Callable[[Draft, int], tuple[Decoder, KVCache]],
    target: ModelConfig | AdapterConfig,
    length: int,
    scratch: int,
    prices: Planner,
    ssms: SsmDrafter | None,
    has_others: bool,
) -> list[ForeignDrafter]:
    """Create the drafters of foreign drafts, translated ones first.

    `load` loads a draft's decoder, with a cache for a number of positions of every concurrent request: the longest has
    `length` and `scratch` slots for its tree. `has_others` says whether there are custom drafters, which may draw at
    random too.
    """
    drafters: list[ForeignDrafter] = []

    def draws_for(name: str, request: Request) -> bool:
        """Return whether a translated draft draws at random for a request, which depends on the request only."""
        # Only one source may, because random draws cannot be cut to a node budget: the SSMs, or the first draft.
        if has_others or (ssms is not None and ssms.may_draft(request)):
            return False
        translated = (d for d in drafters if isinstance(d, TranslatedDrafter) and d.allows(request))
        return (first := next(translated, None)) is not None and first.name == name

    for draft in sorted(drafts, key=lambda draft: draft.connection.kind == "text"):
        codecs = draft.connection.codecs
        assert codecs is not None
        model, cache = load(draft, draft.capacity(length) + scratch)
        ends = (target.eos_token_ids, draft.config.eos_token_ids)
        translation = Translation(*codecs, target.shape.vocab_size, draft.vocab_size, ends)
        arguments = (draft.name, model, cache, translation, draft.capacity(length), scratch, prices)
        if draft.connection.kind == "translated":
            drafters.append(TranslatedDrafter(*arguments, draws_for=partial(draws_for, draft.name)))
        else:
            drafters.append(TextDrafter(*arguments))
    return drafters
