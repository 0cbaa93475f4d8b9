"""Cache of engines for models in memory.

An engine reads the model's own parameters in every pass, so in-place updates (a training step) take effect. A model's
engines are dropped when one of its parameters is replaced, moved or cast, and when the model is deleted. Calls with
different drafts, `exact` or number of threads, more rows, longer texts or larger trees need another engine. The most
recently used engines are kept.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from treespec.config.configs import AUTO_NODES, SpecConfig
from treespec.errors import CacheMemoryError, RequestError
from treespec.llm import LLM

logger = logging.getLogger("treespec")

MAX_ROWS = 8  # maximum rows decoded concurrently; further rows are queued
MAX_ENGINES = 3  # per model, for calls that alternate between drafts, no drafts and many rows
MIN_LENGTH = 512  # minimum positions of an engine, so that a slightly longer text does not need another one
_LENGTH_STEP = 4096  # lengths are rounded up, to powers of two below this number and to multiples of it above


class _Entry(NamedTuple):
    tensors: tuple[Any, ...]
    key: tuple[Any, ...]
    llm: LLM


class _Engines:
    """Engines of one model, least recently used first. The lock prevents two threads from building the same engine."""

    def __init__(self) -> None:
        self.lock, self.entries = threading.RLock(), list[_Entry]()


_engines: "weakref.WeakKeyDictionary[nn.Module, _Engines]" = weakref.WeakKeyDictionary()
_guard = threading.Lock()


def room_for(length: int, max_positions: int) -> int:
    """Return the number of positions of an engine built for a call that needs `length`."""
    if length <= _LENGTH_STEP:
        return min(max(MIN_LENGTH, 1 << (length - 1).bit_length()), max_positions)
    return min(-(-length // _LENGTH_STEP) * _LENGTH_STEP, max_positions)


def engines_of(model: nn.Module) -> list[LLM]:
    """Return the engines in the cache that serve a model, the latest last."""
    return [entry.llm for entry in _engines[model].entries]


def engine_for(
    model: nn.Module,
    drafts: Sequence[Any],
    spec: SpecConfig,
    exact: bool,
    rows: int,
    length: int,
    max_positions: int,
    tokenizer: Any,
) -> LLM:
    """Return an engine of a model in eval mode, from the cache or newly built. Raises the errors of `LLM`, and
    RequestError if one row's cache does not fit into memory."""
    components = [component for draft in drafts for component in (draft if isinstance(draft, tuple) else (draft,))]
    key = (
        tuple(_tensors(component) if isinstance(component, nn.Module) else component for component in components),
        tuple(weakref.ref(component) for component in components if isinstance(component, nn.Module)),
        tokenizer,
        exact,
        spec.max_nodes > AUTO_NODES and spec.max_nodes,
        torch.get_num_threads(),  # the self-test holds for one number of threads only
    )
    rows, tensors = min(rows, MAX_ROWS), _tensors(model)
    with _guard:
        engines = _engines.setdefault(model, _Engines())
    with engines.lock:
        # To free memory, first drop unusable engines and those of deleted drafts.
        engines.entries = [
            entry
            for entry in engines.entries
            if entry.tensors == tensors and all(reference() is not None for reference in entry.key[1])
        ]
        for index, entry in enumerate(engines.entries):
            config = entry.llm.config
            if entry.key == key and length <= config.max_model_len and rows <= config.max_num_seqs:
                engines.entries.append(engines.entries.pop(index))
                return entry.llm
        room = room_for(length, max_positions)
        for entry in engines.entries.copy():  # the new engine replaces engines with at most as many rows and positions
            if entry.key == key and entry.llm.config.max_num_seqs <= rows and entry.llm.config.max_model_len <= room:
                engines.entries.remove(entry)
        del engines.entries[: max(len(engines.entries) - MAX_ENGINES + 1, 0)]
        parameter = next(model.parameters())
        build = partial(
            LLM,
            model,
            drafts,
            SpecConfig(nodes=max(spec.max_nodes, AUTO_NODES)),
            tokenizer,
            device=parameter.device,
            dtype=parameter.dtype,
            exact=exact,
            generation_config="treespec",
        )
        llm = _build(build, dict.fromkeys([(rows, room), (rows, length), (1, length)]), engines.entries)
        llm.release_models()
        engines.entries.append(_Entry(tensors, key, llm))
        return llm


def _tensors(model: nn.Module) -> tuple[Any, ...]:
    """Return a key that changes when a tensor of the model is replaced, moved or cast."""
    tensors = (*model.parameters(), *model.buffers())
    return tuple((id(tensor), tensor.data_ptr(), tensor.dtype, tensor.device) for tensor in tensors)


def _build(build: Callable[..., LLM], sizes: Iterable[tuple[int, int]], other_entries: list[_Entry]) -> LLM:
    """Build an engine with the first of `sizes` (rows, positions) that fits, after dropping `other_entries`."""
    for rows, positions in sizes:
        while True:
            try:
                return build(max_num_seqs=rows, max_model_len=positions)
            except CacheMemoryError as error:
                reason = str(error)
            if not other_entries:
                break
            other_entries.pop(0)
        logger.info("%d rows of %d positions do not fit into memory: %s", rows, positions, reason)
    raise RequestError(f"the cache of one row of {positions} tokens does not fit into memory; lower max_new_tokens")
