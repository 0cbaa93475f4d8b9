"""Which models run through the adapter, and with what exactness."""

import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from treespec.adapter.decoder import AdapterDecoder
from treespec.adapter.source import Source
from treespec.config import ModelConfig
from treespec.errors import ConfigError, ExactnessError, KernelError, ModelError, VariantError
from treespec_weights.errors import Problem, UnsupportedModelError

logger = logging.getLogger("treespec")

BACKENDS = ("auto", "native", "transformers")
_EXPERTS = re.compile(r"experts|moe", re.IGNORECASE)  # in names of classes


def read_model(model: Path | nn.Module, max_model_len: int | None, backend: str) -> ModelConfig | Source:
    """The config of a native family, or what transformers' own code would run.

    Args:
        model: a folder, or a model in memory, which transformers' code alone can run.
        max_model_len: as `ModelConfig.from_hf`.
        backend: "auto" takes a native family where there is one.

    Raises:
        ConfigError: no such backend, or a native one for a model in memory.
        CheckpointError, ModelError, OSError: as `ModelConfig.from_hf` and `Source.from_folder`.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend={backend!r}; valid: {', '.join(map(repr, BACKENDS))}")
    if isinstance(model, nn.Module):
        if backend == "native":
            raise ConfigError("backend='native' reads a folder; a model in memory runs with backend='transformers'")
        return Source.from_model(model)
    if backend == "transformers":
        return Source.from_folder(model)
    try:
        return ModelConfig.from_hf(model, max_model_len)
    except (UnsupportedModelError, VariantError) as error:
        if backend == "native":
            raise
        try:
            source = Source.from_folder(model)
        except ModelError as other:
            if isinstance(error, VariantError):
                raise VariantError(f"{error}; and backend='transformers' cannot run it: {other}") from other
            also = Problem("config", "backend='transformers'", f"cannot run it either: {other}")
            raise UnsupportedModelError(error.folder, [*error.problems, also]) from other
        logger.info("no native family for %s (%s): backend=transformers", os.fspath(model), error)
        return source


def check_adapter_options(models: Sequence[ModelConfig | Source], linear: str, device: torch.device) -> None:
    """Refuse what transformers' own code is not run with."""
    adapted = [model for model in models if isinstance(model, Source)]
    if not adapted:
        return
    if isinstance(models[0], Source) and linear != "auto":
        raise KernelError(
            f"linear={linear!r} is for native families; {adapted[0].name} runs through transformers' own code, which "
            "has the linear layers that fit; leave it at 'auto'"
        )
    if isinstance(models[0], ModelConfig) and device.type == "cuda" and linear != "torch":
        raise KernelError(
            f"{adapted[0].name} runs through transformers' own code and cannot draft in captured rounds; use "
            "linear='torch', or a draft of a native family"
        )


def find_exact_adapter(
    make: Callable[[str, int, int], AdapterDecoder],
    differing: Callable[[AdapterDecoder], list[str]],
    attentions: Sequence[str],
    rows: int,
) -> tuple[AdapterDecoder, int | None]:
    """The least costly way of padding passes under which trees have the bits of plain decoding.

    Args:
        make: a decoder by attention, `min_rows` and `multiple`.
        differing: the self-test.
        attentions: names of implementations, to be tried in turn.
        rows: of every pass, where nothing less will do.

    Returns:
        The decoder, and the fixed number of rows, or None.

    Raises:
        ExactnessError: there is none.
    """
    decoder = make(attentions[0], 2, 1)
    experts = sorted({type(m).__name__ for m in decoder.model.modules() if _EXPERTS.search(type(m).__name__)})
    if experts:
        raise ExactnessError(
            f"{decoder.config.folder} has experts ({', '.join(experts)}), each of which computes the rows that are "
            "routed to it: how many they are changes their bits. Use exact=False to go on"
        )
    # torch's own products are not row-invariant in float32, nor on a GPU: no need to try.
    free = decoder.linear == "onednn" or (decoder.device.type == "cpu" and decoder.dtype == torch.bfloat16)
    found: list[str] = []
    for attention in attentions:
        for min_rows, multiple in [*([(2, 1), (2, 16)] if free else []), (rows, 1)]:
            decoder = make(attention, min_rows, multiple)
            found = differing(decoder)
            if not found:
                return decoder, rows if min_rows == rows else None
            padded = f"multiples of {multiple}" if multiple > 1 else f"at least {min_rows}"
            logger.info("%s, %s, passes of %s rows: %s", decoder.config.folder, attention, padded, found[0])
    raise ExactnessError(
        f"{decoder.config.folder} run by transformers' code would not have the bits of plain decoding, with "
        f"attention={decoder.attention.name!r}, {decoder.dtype}, {torch.get_num_threads()} threads, even with {rows} "
        f"rows in every pass: {'; '.join(found[:3])}. Use exact=False to go on"
    )
