"""Configuration of a draft head, or block draft, for a certain target."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from treespec.adapter.mtp import MtpForm
from treespec.adapter.trace import AdapterConfig
from treespec.errors import ModelError
from treespec.models.model_config import ModelConfig
from treespec_weights.block_drafts import BlockForm
from treespec_weights.heads import DraftForm
from treespec_weights.state_heads import StateForm
from treespec_weights.vocabularies import connect


@dataclass(frozen=True)
class HeadConfig:
    """A draft head, or block draft, and what it reads of its target.

    Attributes:
        form: of the published folder.
        decoder: config of its layers, with the target's vocabulary size; of a head without attention, the target's with
            no layers.
        layers: of the target, whose inputs it reads; see `HeadForm.read_layers`.
        target_hidden: hidden size of the target.
    """

    form: DraftForm | MtpForm
    decoder: ModelConfig | AdapterConfig
    layers: tuple[int, ...]
    target_hidden: int

    @property
    def folder(self) -> Path:
        return self.form.folder

    @property
    def num_parameters(self) -> int:
        """Number of values of its layers and its projections, without embeddings; at most."""
        shape = self.decoder.shape
        if isinstance(self.form, StateForm):
            inner = self.form.inner_size or self.target_hidden
            return self.form.depths * inner * (shape.vocab_size + max(self.form.num_layers, 1) * self.target_hidden)
        qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim * shape.hidden_size
        return shape.num_parameters() + qkv + len(self.layers) * self.target_hidden * shape.hidden_size

    @classmethod
    def of(cls, form: DraftForm, target: ModelConfig | AdapterConfig, max_model_len: int | None) -> "HeadConfig":
        """Return the config of a head for a target.

        Raises:
            ModelError: a PARD draft has other tokens.
            CheckpointError: contradictory or unsupported config values.
        """
        layers = form.read_layers(target.shape.num_layers)
        if isinstance(form, StateForm):
            shape = replace(target.shape, num_layers=0)
            without = (
                replace(target, shape=shape, layers=())
                if isinstance(target, ModelConfig)
                else replace(target, shape=shape, masks=(), sinks=())
            )
            return cls(form, without, layers, shape.hidden_size)
        decoder = ModelConfig.from_raw(form.folder, form.config, form.rules, max_model_len)
        size = target.shape.vocab_size
        if isinstance(form, BlockForm) and form.kind == "pard":
            connection = connect(target.folder, size, form.folder, decoder.shape.vocab_size)
            if connection.kind in ("translated", "text"):
                raise ModelError(
                    f"{form.folder} is a PARD draft with other token ids than the target {target.folder}; use a draft "
                    "that was trained for this target"
                )
        decoder = replace(decoder, shape=replace(decoder.shape, vocab_size=size))
        return cls(form, decoder, layers, target.shape.hidden_size)

    def __str__(self) -> str:
        article = "an" if self.form.name.startswith(("EAGLE", "MLP", "MTP")) else "a"
        return f"{article} {self.form.name} that {self.form.describe(self.layers)}"


def all_layers(heads: Iterable[HeadConfig]) -> tuple[int, ...]:
    """Return all layers of the target that any head reads, ascending."""
    return tuple(sorted({layer for head in heads for layer in head.layers}))
