"""Selection of the native or the adapter backend."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from treespec.adapter.source import Source
from treespec.errors import ConfigError, KernelError, ModelError, VariantError
from treespec.models.model_config import ModelConfig
from treespec_weights.errors import Problem, UnsupportedModelError

logger = logging.getLogger("treespec")


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
