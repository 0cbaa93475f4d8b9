"""Selection of the native or the adapter backend, and of the padding that makes the adapter exact."""

import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from treespec.adapter.decoder import AdapterDecoder
from treespec.adapter.experts import has_routed_experts
from treespec.adapter.source import Source
from treespec.errors import ConfigError, ExactnessError, KernelError, ModelError, VariantError
from treespec.models.model_config import ModelConfig
from treespec_weights.errors import Problem, UnsupportedModelError

logger = logging.getLogger("treespec")

_EXPERTS = re.compile(r"experts|moe", re.IGNORECASE)  # matches class names of mixture-of-experts modules


def read_model(
    model: Path | nn.Module, max_model_len: int | None, backend: str, tokenizer: Any = None
) -> ModelConfig | Source:
    """Read a model's config for the native decoder, or its source for transformers."""
    if isinstance(model, nn.Module):
        if backend == "native":
            raise ConfigError("backend='native' reads a folder; a model in memory runs with backend='transformers'")
        return Source.from_model(model, tokenizer)
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
    """Raise KernelError for options that the transformers backend does not support."""
    adapted = [model for model in models if isinstance(model, Source)]
    if not adapted:
        return
    if isinstance(models[0], Source) and linear != "auto":
        raise KernelError(
            f"linear={linear!r} is for native families; {adapted[0].name} runs transformers' code with "
            "its own choice of linear layers; use 'auto'"
        )
    if isinstance(models[0], ModelConfig) and device.type == "cuda" and linear != "torch":
        raise KernelError(
            f"{adapted[0].name} runs transformers' code and cannot draft in captured rounds; use "
            "linear='torch', or a draft of a native family"
        )


def find_exact_adapter(
    # Creates a decoder from attention backend, `min_rows` and `multiple`
    make: Callable[[str, int, int], AdapterDecoder],
    differing: Callable[[AdapterDecoder], list[str]],  # the self-test; returns descriptions of differences
    attentions: Sequence[str],  # attention backends to try, in order
    rows: int,  # fixed number of rows to try last
) -> tuple[AdapterDecoder, int | None]:
    """Find the cheapest padding of passes under which trees are bit-identical to plain decoding.

    Returns:
        The decoder, and the fixed number of rows, or None if none is needed.
    """
    decoder = make(attentions[0], 2, 1)
    experts = sorted({type(m).__name__ for m in decoder.model.modules() if _EXPERTS.search(type(m).__name__)})
    if experts and not has_routed_experts(decoder.model):
        raise ExactnessError(
            f"{decoder.config.folder} has experts ({', '.join(experts)}) that transformers' experts interface does not "
            "reach; their bits depend on the number of rows routed to each. Use exact=False to continue"
        )
    # torch's matrix products are not row-invariant in float32 or on a GPU, so only a fixed number of rows can be exact.
    free = decoder.linear == "onednn" or (decoder.device.type == "cpu" and decoder.dtype == torch.bfloat16)
    differences: list[str] = []
    for attention in attentions:
        for min_rows, multiple in [*([(2, 1), (2, 16)] if free else []), (rows, 1)]:
            decoder = make(attention, min_rows, multiple)
            differences = differing(decoder)
            if not differences:
                return decoder, rows if min_rows == rows else None
            padded = f"multiples of {multiple}" if multiple > 1 else f"at least {min_rows}"
            logger.info("%s, %s, passes of %s rows: %s", decoder.config.folder, attention, padded, differences[0])
    raise ExactnessError(
        f"{decoder.config.folder} run by transformers' code is not bit-identical to plain decoding, with "
        f"attention={decoder.attention.name!r}, {decoder.dtype}, {torch.get_num_threads()} threads, even with {rows} "
        f"rows in every pass: {'; '.join(differences[:3])}. Use exact=False to continue"
    )
