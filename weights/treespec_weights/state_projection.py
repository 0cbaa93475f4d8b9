"""SSMs that also read hidden states of the target: a draft model's folder with a file `state_projection.safetensors`.

As in DeepSeek-V3's MTP modules (arXiv 2412.19437), the layers read a projection of a token's embedding and the feature
of the token before it; as in EAGLE-3 (arXiv 2503.01840), a feature combines the states of several target layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from treespec_weights.errors import CheckpointError, Problem

FILE = "state_projection.safetensors"


class StateProjection(NamedTuple):
    """Tensors of the file."""

    fc: Tensor  # projection of the target's states to a feature, [hidden, number of layers * hidden of the target]
    eh_proj: Tensor  # projection of a pair's normalised embedding and feature, [hidden, 2 * hidden]
    enorm: Tensor  # weights of these RMSNorms, [hidden]
    hnorm: Tensor

    @classmethod
    def shapes(cls, hidden: int, states: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes by name, with `states` values that the target provides for each token."""
        return {"fc": (hidden, states), "eh_proj": (hidden, 2 * hidden), "enorm": (hidden,), "hnorm": (hidden,)}


@dataclass(frozen=True)
class StateSsmForm:
    """The layout of such a folder, with the interface of a draft head's form."""

    folder: Path
    layers: tuple[int, ...]  # target layers whose inputs it reads, numbered as by `HeadForm.read_layers`
    name = "state SSM"

    def describe(self, layers: Sequence[int]) -> str:
        return f"reads the inputs of the target's layers {', '.join(map(str, layers))}"

    def read_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers of a target with `num_layers` layers. Raises CheckpointError if it has no such layer."""
        if not all(0 <= layer <= num_layers + 1 for layer in self.layers):
            reason = f"reads layers {self.layers}, and the target has {num_layers} layers; use a draft of this target"
            raise CheckpointError.of(self.folder, "value", FILE, reason)
        return self.layers


def write_state_projection(folder: Path, projection: StateProjection, layers: Sequence[int]) -> None:
    """Write the file of a draft that reads these target layers."""
    save_file(projection._asdict(), folder / FILE, {"format": "pt", "layers": ",".join(map(str, layers))})


def state_ssm_form(folder: Path) -> StateSsmForm | None:
    """Return the form of a folder with the file; None without it. Raises CheckpointError for an unreadable file."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            layers = tuple(map(int, (file.metadata() or {}).get("layers", "").split(",")))
    except (SafetensorError, OSError, ValueError) as error:
        reason = f"expected safetensors with metadata `layers`, the target's layers to read ({error})"
        raise CheckpointError.of(folder, "file", FILE, reason) from error
    return StateSsmForm(folder, layers)


def load_state_projection(
    form: StateSsmForm, hidden: int, target_hidden: int, dtype: torch.dtype | None, device: torch.device | str
) -> StateProjection:
    """Load the file of a draft and a target of these hidden sizes. Raises CheckpointError if a tensor does not fit."""
    stored, problems = load_file(form.folder / FILE), list[Problem]()
    for name, shape in StateProjection.shapes(hidden, len(form.layers) * target_hidden).items():
        if name not in stored:
            problems.append(Problem("missing", repr(name), f"expected a tensor of shape {list(shape)}"))
        elif tuple(stored[name].shape) != shape:
            reason = f"{list(stored[name].shape)}, expected {list(shape)}; use a draft of this target"
            problems.append(Problem("shape", repr(name), reason))
    if problems:
        raise CheckpointError(form.folder, problems)
    return StateProjection(*(stored[name].to(device, dtype) for name in StateProjection._fields))
