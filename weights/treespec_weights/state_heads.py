"""Recognise and load published draft heads without attention.

Medusa (arXiv 2401.10774) in the layouts of its authors and of vLLM; MLPSpeculator (arXiv 2404.19124).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec_weights.draft_tensors import DraftOptions, DraftTensors, OutputForm, config_error
from treespec_weights.errors import Problem


@dataclass(frozen=True)
class StateForm(OutputForm):
    """Description of a draft head without attention, read from its published folder."""

    folder: Path  # folder of the head
    kind: Literal["medusa", "mlp_speculator"]  # "medusa" or "mlp_speculator"
    depths: int  # number of tokens that it predicts
    num_layers: int = 0  # residual layers of each Medusa head
    inner_size: int = 0  # width of an MLPSpeculator's state; 0 for the target's
    scale_input: bool = False  # an MLPSpeculator normalises the target's state
    shared: bool = False  # depths share weights; only those of the first depths may be stored

    @property
    def name(self) -> str:
        return "Medusa head" if self.kind == "medusa" else "MLPSpeculator head"

    def describe(self, layers: Sequence[int]) -> str:
        return f"{super().describe(layers)} and predicts {self.depths} tokens"


class DepthWeights(NamedTuple):
    """Weights of one depth, in the compute dtype; tensors that depths share are the same objects."""

    head: Tensor  # [rows, inner]
    # residual layers of a Medusa head: weight [hidden, hidden], and bias or None
    layers: tuple[tuple[Tensor, Tensor | None], ...] = ()
    # embed, project, gain and shift of an MLPSpeculator: [vocab, inner], [inner, hidden or inner], [inner], [inner]
    embed: Tensor | None = None
    project: Tensor | None = None
    gain: Tensor | None = None
    shift: Tensor | None = None

    @property
    def num_parameters(self) -> int:
        """Number of parameters that a draft of this depth reads, without embeddings."""
        layers = [tensor for layer in self.layers for tensor in layer]
        tensors = [self.head, *layers, self.project, self.gain, self.shift]
        return sum(tensor.numel() for tensor in tensors if tensor is not None)


def medusa_form(folder: Path, raw: Mapping[str, Any]) -> StateForm:
    """Return the form of Medusa heads. Raises CheckpointConfigError for an invalid number."""
    keys = ("num_heads", "num_hidden_layers")  # vLLM's names
    if "medusa_num_heads" in raw:  # the authors' names
        keys = ("medusa_num_heads", "medusa_num_layers")
    heads, layers = (_number(folder, raw, name, least) for name, least in zip(keys, (1, 0), strict=True))
    return StateForm(folder, "medusa", heads, layers, shared=bool(raw.get("original_lm_head")))


def speculator_form(folder: Path, raw: Mapping[str, Any]) -> StateForm:
    """Return the form of an MLPSpeculator. Raises CheckpointConfigError for an invalid number."""
    depths, inner = _number(folder, raw, "n_predict", 1), _number(folder, {"inner_dim": 0, **raw}, "inner_dim", 0)
    scales, ties = bool(raw.get("scale_input")), bool(raw.get("tie_weights"))
    return StateForm(folder, "mlp_speculator", depths, 0, inner, scales, ties)


def _number(folder: Path, raw: Mapping[str, Any], key: str, least: int) -> int:
    value = raw.get(key)
    if type(value) is not int or value < least:
        raise config_error(folder, key, f"{value!r}; expected an int, at least {least}")
    return value


def load_state_head(
    form: StateForm, vocab_size: int, options: DraftOptions
) -> tuple[list[DepthWeights], np.ndarray | None]:
    """Load a head by depth, for a target with this vocabulary; tokens and errors as in `load_head`."""
    target_hidden, dtype, device, kept = options
    tensors = _Renamed(form, dtype, device)
    if form.kind == "mlp_speculator":
        tokens = tensors.narrowed(kept, vocab_size)
        weights = _load_speculator(form, target_hidden, vocab_size, tensors, tokens)
    else:
        weights, tokens = _load_medusa(form, target_hidden, vocab_size, tensors, kept)
    tensors.check()
    return weights, tokens


class _Renamed(DraftTensors):
    """Tensors under the names of vLLM's layout; tensors shared by depths are read once."""

    def __init__(self, form: StateForm, dtype: torch.dtype | None, device: torch.device | str):
        super().__init__(form.folder, dtype, device)
        self._stored = {self._rename(form, name): tensor for name, tensor in self._stored.items()}
        self._taken, self._shared = dict[str, Tensor](), form.shared

    @staticmethod
    def _rename(form: StateForm, name: str) -> str:
        name = re.sub(r"^(medusa_heads?|speculator)\.", "", name)
        if form.kind == "medusa" and (match := re.fullmatch(r"(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)", name)):
            head, layer, kind = match.groups()
            return (
                f"lm_heads.{head}.{kind}" if int(layer) == form.num_layers else f"blocks.{head}.layers.{layer}.{kind}"
            )
        return name

    def take_depth(self, pattern: str, depth: int, *shape: int) -> Tensor:
        """Return a depth's tensor; with shared weights, that of the nearest stored depth up to it."""
        while self._shared and depth and pattern.format(depth) not in self:
            depth -= 1
        name = pattern.format(depth)
        if name not in self._taken:
            self._taken[name] = self.take(name, *shape)
        return self._taken[name]


def _load_medusa(
    form: StateForm, hidden: int, vocab_size: int, tensors: _Renamed, kept: np.ndarray | None
) -> tuple[list[DepthWeights], np.ndarray | None]:
    tokens, stored = kept, tensors.raw("token_map")
    if stored is not None:
        tokens = stored.to(torch.int64).numpy()
        if (np.diff(tokens) <= 0).any() or not 0 <= tokens[0] <= tokens[-1] < vocab_size:
            reason = f"{len(tokens)} tokens; expected distinct ones of the target's {vocab_size}, ascending"
            tensors.problems.append(Problem("value", "'token_map'", reason))
            tensors.check()
    tensors.narrowed(tokens, vocab_size)
    rows, steps = vocab_size if tokens is None else len(tokens), []
    for depth in range(form.depths):
        layers = []
        for i in range(form.num_layers):
            weight = tensors.take(f"blocks.{depth}.layers.{i}.weight", hidden, hidden)
            layers.append((weight, tensors.take_if_stored(f"blocks.{depth}.layers.{i}.bias", hidden)))
        steps.append(DepthWeights(tensors.take_depth("lm_heads.{}.weight", depth, rows, hidden), tuple(layers)))
    return steps, tokens


def _load_speculator(
    form: StateForm, hidden: int, vocab_size: int, tensors: _Renamed, tokens: np.ndarray | None
) -> list[DepthWeights]:
    inner, steps = form.inner_size or hidden, []
    rows = vocab_size if tokens is None else len(tokens)
    for depth in range(form.depths):
        steps.append(
            DepthWeights(
                tensors.take_depth("head.{}.weight", depth, rows, inner),
                (),
                tensors.take_depth("emb.{}.weight", depth, vocab_size, inner),
                tensors.take_depth("proj.{}.weight", depth, inner, inner if depth else hidden),
                tensors.take_depth("ln.{}.weight", depth, inner),
                tensors.take_depth("ln.{}.bias", depth, inner),
            )
        )
    return steps
