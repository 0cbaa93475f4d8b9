"""Connects drafts to the target: as members of the SSM group, or as foreign drafts with another tokenizer."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from treespec.adapter.trace import AdapterConfig
from treespec.cache import KVCache, pages_for
from treespec.config import ModelConfig
from treespec.drafters.foreign.by_text import TextDrafter
from treespec.drafters.foreign.foreign_drafter import CAPACITY_FACTOR, ForeignDrafter
from treespec.drafters.foreign.retokenize import Translation
from treespec.drafters.foreign.translated import TranslatedDrafter
from treespec.drafters.ssm.ssm_drafter import SsmDrafter
from treespec.errors import DraftError
from treespec.models.decoder import Decoder
from treespec.planning.planner import Planner
from treespec.request import Request
from treespec_weights.vocabularies import Connection, connect

logger = logging.getLogger("treespec")


class Draft(NamedTuple):
    """A draft and its connection to the target.

    Attributes:
        name: for attribution.
        config: with the target's vocabulary size if the draft joins the SSM group.
        connection: between the vocabularies.
        known: size of the draft's own vocabulary.
    """

    name: str
    config: ModelConfig | AdapterConfig
    connection: Connection
    known: int

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
    """Determine how each draft proposes tokens of the target, and log it.

    A draft with the target's token ids joins the SSM group, whose models have equal vocabulary sizes: its config is
    returned with the target's size.

    Raises:
        DraftError: a draft's vocabulary cannot be connected to the target's.
        CheckpointError: a tokenizer cannot be read.
    """
    connected = []
    size = target.shape.vocab_size
    for name, config in drafts:
        known = config.shape.vocab_size
        connection = connect(target.folder, size, config.folder, known)
        if connection.kind == "none":
            raise DraftError(
                f"draft {name} ({config.folder}) has a vocabulary of {known} tokens, the target {target.folder} one of "
                f"{size}, and {connection.reason}; put the tokenizer files of both into their folders"
            )
        logger.info("draft %s (%s): %s", name, config.folder, connection)
        if connection.kind == "padded":
            config = replace(config, shape=replace(config.shape, vocab_size=size))
        connected.append(Draft(name, config, connection, known))
    return connected


def fit_weights(weights: dict[str, Tensor], known: int, size: int) -> None:
    """Resize a draft's embeddings and head to the target's vocabulary, in place.

    Rows beyond the target's vocabulary are dropped, which excludes these tokens from drafting. Tokens that the draft
    lacks get the mean of all rows, so that the draft can process texts that contain them; their logits are meaningless
    and must be masked.

    Args:
        weights: decoder parameters by name; `embed` and `lm_head*` are resized.
        known: number of rows.
        size: new number of rows.
    """
    for name in [name for name in weights if name == "embed" or name.startswith("lm_head")]:
        rows = weights[name]
        if known >= size:
            weights[name] = rows[:size]
        else:
            mean = rows.float().mean(0, keepdim=True).to(rows.dtype)
            weights[name] = torch.cat((rows, mean.expand(size - known, *rows.shape[1:])))


def foreign_drafters(
    drafts: Sequence[Draft],
    load: Callable[[Draft, int], Decoder],
    target: ModelConfig | AdapterConfig,
    cache_dtype: torch.dtype,
    length: int,
    scratch: int,
    max_num_seqs: int,
    planner: Planner,
    ssms: SsmDrafter | None,
    has_others: bool,
) -> list[ForeignDrafter]:
    """Create the drafters of foreign drafts, translated ones first.

    Args:
        drafts: the foreign drafts.
        load: loads a draft's decoder for a number of positions.
        target: config of the target.
        cache_dtype: of their KV caches.
        length: positions of the longest request.
        scratch: additional slots per request, for trees.
        max_num_seqs: maximum number of concurrent requests.
        planner: of the engine.
        ssms: the SSM group, or None.
        has_others: whether the engine has custom drafters, which may draw at random too.
    """
    found: list[ForeignDrafter] = []

    def draws_for(name: str, request: Request) -> bool:
        """Return whether a translated draft draws at random for a request.

        Only one source may, because random draws cannot be cut to a node budget: the SSMs if they may draft, otherwise
        the first translated draft that the request allows. Depends on the request only.
        """
        if has_others or (ssms is not None and ssms.may_draft(request)):
            return False
        translated = [each for each in found if isinstance(each, TranslatedDrafter) and each.allows(request)]
        return bool(translated) and translated[0].name == name

    for draft in sorted(drafts, key=lambda draft: draft.connection.kind == "text"):
        codecs, room = draft.connection.codecs, draft.capacity(length) + scratch
        assert codecs is not None
        model = load(draft, room)
        cache = KVCache([draft.config.shape], max_num_seqs * pages_for(room), cache_dtype, model.device)
        ends = (target.eos_token_ids, draft.config.eos_token_ids)
        translation = Translation(*codecs, target.shape.vocab_size, draft.known, ends)
        parts = (draft.name, model, cache, translation, draft.capacity(length), scratch, planner)
        if draft.connection.kind == "translated":
            found.append(TranslatedDrafter(*parts, partial(draws_for, draft.name)))
        else:
            found.append(TextDrafter(*parts))
    return found
