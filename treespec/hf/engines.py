"""Engines around models in memory: kept with the model, and built anew when it is no longer what it was.

An engine reads the model's own parameters in every pass, so values that change in place (a training step) are simply
seen. All of a model's engines go when a parameter of it was replaced, moved or cast, and when the model goes. Another
is built for other drafts, another exactness or number of threads, and for more rows, longer texts or larger trees than
one has room for; the last few are kept.
"""

import logging
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from treespec.config import AUTO_NODES, SpecConfig
from treespec.errors import CacheMemoryError, RequestError
from treespec.llm import LLM

logger = logging.getLogger("treespec")

MAX_ROWS = 8  # decoded at once; more wait
MAX_ENGINES = 3  # of one model: a call with drafts, one without, and one of many rows may follow each other
LEAST_LENGTH = 512  # positions that an engine has room for, so that the next text need not build another
_LENGTH_STEP = 4096  # up to here powers of two, beyond multiples: the room that nobody asked for stays below so much


class _Entry(NamedTuple):
    tensors: tuple[Any, ...]
    key: tuple[Any, ...]
    llm: LLM


class _Engines:
    """Of one model, the least recently used first. The lock keeps two threads from building the same one."""

    def __init__(self) -> None:
        self.lock, self.entries = threading.RLock(), list[_Entry]()


_engines: "weakref.WeakKeyDictionary[nn.Module, _Engines]" = weakref.WeakKeyDictionary()
_guard = threading.Lock()


def room_for(length: int, most_positions: int) -> int:
    """Positions that an engine is built with for a call that needs `length`."""
    if length <= _LENGTH_STEP:
        return min(max(LEAST_LENGTH, 1 << (length - 1).bit_length()), most_positions)
    return min(-(-length // _LENGTH_STEP) * _LENGTH_STEP, most_positions)


def engine_for(
    model: nn.Module, drafts: Sequence[Any], spec: SpecConfig, exact: bool, rows: int, length: int, most_positions: int
) -> LLM:
    """The engine of a model.

    Args:
        model: a `PreTrainedModel` in eval mode.
        drafts: folders, hub ids, models in memory or `Drafter` objects.
        spec: how to speculate.
        exact: refuse where trees would not have the bits of plain decoding.
        rows: of this call.
        length: positions that this call needs.
        most_positions: that the model has.

    Raises:
        ConfigError, ModelError, DraftError, ExactnessError: as `LLM`.
        RequestError: the cache of one row does not fit into memory.
    """
    key = (
        tuple(_tensors(draft) if isinstance(draft, nn.Module) else draft for draft in drafts),
        tuple(weakref.ref(draft) for draft in drafts if isinstance(draft, nn.Module)),
        exact,
        spec.max_nodes > AUTO_NODES and spec.max_nodes,
        torch.get_num_threads(),  # an engine proves its bits for one number
    )
    rows, tensors = min(rows, MAX_ROWS), _tensors(model)
    with _guard:
        engines = _engines.setdefault(model, _Engines())
    with engines.lock:
        # What nobody can ask for any more goes first: its memory is needed.
        engines.entries = [each for each in engines.entries if each.tensors == tensors and None not in _drafts_of(each)]
        for place, each in enumerate(engines.entries):
            config = each.llm.config
            if each.key == key and length <= config.max_model_len and rows <= config.max_num_seqs:
                engines.entries.append(engines.entries.pop(place))
                return each.llm
        room = room_for(length, most_positions)
        others = [each for each in engines.entries if each.key != key or not _replaced_by(each.llm, rows, room)]
        engines.entries = others[len(others) - MAX_ENGINES + 1 :] if len(others) >= MAX_ENGINES else others
        llm = _build(model, drafts, spec, exact, rows, length, most_positions, engines.entries)
        engines.entries.append(_Entry(tensors, key, llm))
        return llm


def _replaced_by(llm: LLM, rows: int, room: int) -> bool:
    """Whether an engine for so many rows and positions would do all that this one does."""
    return llm.config.max_num_seqs <= rows and llm.config.max_model_len <= room


def _tensors(model: nn.Module) -> tuple[Any, ...]:
    """What tells whether a model still has the tensors that it had."""
    tensors = (*model.parameters(), *model.buffers())
    return tuple((id(tensor), tensor.data_ptr(), tensor.dtype, tensor.device) for tensor in tensors)


def _drafts_of(entry: _Entry) -> list[nn.Module | None]:
    """The drafts in memory that an engine drafts with; None for one that is gone."""
    return [reference() for reference in entry.key[1]]


def _build(
    model: nn.Module,
    drafts: Sequence[Any],
    spec: SpecConfig,
    exact: bool,
    rows: int,
    length: int,
    most_positions: int,
    others: list[_Entry],
) -> LLM:
    """A new engine: with room to spare, or, where memory is short, without the `others` and for this call alone."""
    parameter = next(model.parameters())
    widest = SpecConfig(nodes=max(spec.max_nodes, AUTO_NODES))
    sizes = dict.fromkeys([(rows, room_for(length, most_positions)), (rows, length), (1, length)])
    for at_once, room in sizes:
        while True:
            try:
                llm = LLM(
                    model,
                    drafts,
                    widest,
                    device=parameter.device,
                    dtype=parameter.dtype,
                    exact=exact,
                    max_num_seqs=at_once,
                    max_model_len=room,
                    generation_config="treespec",
                )
            except CacheMemoryError as error:
                short = str(error)
            else:
                llm.release_models()
                return llm
            if not others:
                break
            others.pop(0)
        logger.info("%d rows of %d positions do not fit: %s", at_once, room, short)
    raise RequestError(
        f"the cache of one row of {length} tokens, those of max_new_tokens or max_length included, does not fit into "
        f"the memory of {parameter.device}; lower max_new_tokens"
    )
