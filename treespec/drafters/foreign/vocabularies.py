"""Connects each draft to the target: in the SSM group, or as a foreign draft with a vocabulary of its own."""

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
from treespec.drafters.foreign.foreign_drafter import ROOM, ForeignDrafter
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
    """A draft's folder, read and connected. `known`: tokens of its own, whatever `config` was fitted to."""

    name: str
    config: ModelConfig | AdapterConfig
    connection: Connection
    known: int

    @property
    def is_foreign(self) -> bool:
        """Whether it has another tokenizer than the target."""
        return self.connection.kind in ("translated", "text")

    def capacity(self, length: int) -> int:
        """Tokens of a request that a foreign draft reads at most, where the target has `length` positions."""
        return min(self.config.max_positions, int(ROOM * length))


def connect_drafts(
    target: ModelConfig | AdapterConfig, drafts: Sequence[tuple[str, ModelConfig | AdapterConfig]]
) -> list[Draft]:
    """Choose how each draft proposes tokens of the target, and log it.

    A draft with the target's ids takes part in the SSMs' group, whose models have one vocabulary: its config comes back
    with the target's size.

    Raises:
        DraftError: a draft that cannot guess for it at all.
        CheckpointError: a tokenizer that cannot be read.
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
    """Give a model of `known` tokens a vocabulary of `size`, in place.

    Rows beyond the target's vocabulary fall away, which is to mask them before anything is chosen. A token that the
    draft lacks has the mean of its embeddings, so that the text can go on behind it; what the head says of one counts
    for nothing, and whoever reads logits masks it.

    Args:
        weights: decoder parameters by name; of those, `embed` and `lm_head` go by token.
        known, size: rows that there are, and that there shall be.
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
    """Make the drafters of drafts with another tokenizer, translated ones first.

    Args:
        drafts: them.
        load: the decoder of one of them, for so many positions.
        target: what they guess for.
        cache_dtype: of their caches.
        length: positions of the longest request.
        scratch: slots behind them.
        max_num_seqs: requests that run at once.
        planner: of the engine.
        ssms: the drafts with the target's vocabulary.
        has_others: whether there are drafters from outside, which may draw at random too.
    """
    found: list[ForeignDrafter] = []

    def draws_for(name: str, request: Request) -> bool:
        """One source may draw at random, the SSMs before all others: what was drawn cannot be cut to a budget. The
        answer follows from the request alone."""
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
