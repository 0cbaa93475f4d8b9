"""Engines around models in memory: kept with the model, and built anew when it is no longer what it was.

An engine reads the model's own parameters in every pass, so values that change in place (a training step) are simply
seen. It is built anew when a parameter of it or of a draft was replaced, moved or cast, for other drafts or another
exactness, and for longer texts or larger trees than it has room for. It goes when the model goes.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from treespec.config import AUTO_NODES, SpecConfig
from treespec.llm import LLM

MAX_ROWS = 8  # decoded at once; more wait
LEAST_LENGTH = 512  # positions that an engine has room for, so that the next text need not build another


class _Entry(NamedTuple):
    key: tuple[Any, ...]
    llm: LLM


_engines: "weakref.WeakKeyDictionary[nn.Module, _Entry]" = weakref.WeakKeyDictionary()


def engine_for(
    model: nn.Module, drafts: Sequence[Any], spec: SpecConfig, exact: bool, length: int, most_positions: int
) -> LLM:
    """The engine of a model.

    Args:
        model: a `PreTrainedModel` in eval mode.
        drafts: folders, hub ids, models in memory or `Drafter` objects.
        spec: how to speculate.
        exact: refuse where trees would not have the bits of plain decoding.
        length: positions that this call needs.
        most_positions: that the model has.

    Raises:
        ConfigError, ModelError, DraftError, ExactnessError: as `LLM`.
    """
    models = [model, *(draft for draft in drafts if isinstance(draft, nn.Module))]
    tensors = [tensor for each in models for tensor in (*each.parameters(), *each.buffers())]
    key = (
        tuple((id(tensor), tensor.data_ptr(), tensor.dtype, tensor.device) for tensor in tensors),
        tuple(weakref.ref(draft) if isinstance(draft, nn.Module) else draft for draft in drafts),
        exact,
        spec.max_nodes > AUTO_NODES and spec.max_nodes,
    )
    known = _engines.get(model)
    if known is not None and known.key == key and length <= known.llm.config.max_model_len:
        return known.llm
    _engines.pop(model, None)  # its memory goes before the next one's comes
    parameter = next(model.parameters())
    room = min(max(LEAST_LENGTH, 1 << (length - 1).bit_length()), most_positions)
    widest = SpecConfig(nodes=max(spec.max_nodes, AUTO_NODES))
    llm = LLM(
        model, drafts, widest, device=parameter.device, dtype=parameter.dtype, exact=exact, max_num_seqs=MAX_ROWS,
        max_model_len=room, generation_config="treespec",
    )  # fmt: skip
    llm.release_models()
    _engines[model] = _Entry(key, llm)
    return llm
