"""Decoders from what was read of models: native ones, and those that run transformers' own code."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from treespec.adapter.decoder import AdapterDecoder, open_adapter
from treespec.adapter.source import Source
from treespec.adapter.trace import AdapterConfig
from treespec.config import ModelConfig
from treespec.drafters.foreign.vocabularies import fit_weights
from treespec.models.attention import make_attention
from treespec.models.attention_triton import TritonAttention
from treespec.models.compiled import CompiledDecoder
from treespec.models.decoder import Decoder
from treespec.models.quantized_weights import quantized_library
from treespec.models.triton_decoder import TritonDecoder
from treespec.planning import cost_measurement as costs
from treespec_kernels.linear.linear import LinearImpl
from treespec_kernels.tuning.tuned import KernelConfigs
from treespec_weights import load_weights


def libraries_folder() -> Path:
    """Where what the machine's C++ compiler builds is kept. Raises OSError where there is no place for it."""
    return costs.cache_folder() / "compiled"


@dataclass(frozen=True)
class Loader:
    """How an engine's models are loaded.

    Args:
        device, dtype: to compute on and in.
        attention: the name of an implementation.
        linear: the implementation of native models' linear layers; "compiled" compiles whole passes.
        exact: as `LLM`.
        configs: what was tuned for Triton's kernels, where they are used.
    """

    device: torch.device
    dtype: torch.dtype
    attention: str
    linear: LinearImpl | Literal["compiled", "triton"]
    exact: bool
    configs: KernelConfigs | None
    _modules: dict[Source, nn.Module] = field(default_factory=dict)

    def open(self, model: ModelConfig | Source) -> ModelConfig | AdapterConfig:
        """The config of a model; one that transformers runs is loaded for it."""
        if isinstance(model, ModelConfig):
            return model
        config, self._modules[model] = open_adapter(model, self.dtype, self.device, self.attention)
        return config

    def load(
        self,
        config: ModelConfig | AdapterConfig,
        known: int,
        positions: int,
        min_rows: int,
        quantization: str | None = None,
    ) -> Decoder:
        """A model's decoder.

        Args:
            config: from `open`, perhaps fitted to another vocabulary.
            known: tokens of the model's own.
            positions: that will ever be asked for.
            min_rows: rows that every pass is padded to.
            quantization: of weights that are not quantised yet.
        """
        if isinstance(config, AdapterConfig):
            return self.adapt(config, known, positions, self.attention, min_rows, 1)
        size, stored = config.shape.vocab_size, replace(config.shape, vocab_size=known)
        weights = load_weights(config.folder, stored, config.rules, self.dtype, self.device, quantization)
        if known != size:
            fit_weights(weights, known, size)
        if self.linear == "compiled":
            return CompiledDecoder(config, weights, libraries_folder())
        op = make_attention(self.attention, config.shape, self.dtype, self.device, self.configs, self.exact)
        if self.configs is not None:
            assert isinstance(op, TritonAttention)
            return TritonDecoder(config, weights, op, self.configs, self.exact, positions)
        assert self.linear == "onednn" or self.linear == "torch"
        library = None
        if quantization is not None or (config.quantization is not None and not config.quantization.floating):
            library = quantized_library(self.dtype, self.device, libraries_folder)
        return Decoder(config, weights, op, self.linear, min_rows, library)

    def adapt(
        self, config: AdapterConfig, known: int, positions: int, attention: str, min_rows: int, multiple: int
    ) -> AdapterDecoder:
        """The decoder of a model that transformers runs, which was loaded by `open`."""
        op = make_attention(attention, config.shape, self.dtype, self.device, self.configs, self.exact)
        return AdapterDecoder(config, self._modules[config.source], op, positions, min_rows, multiple, known)
