"""Hidden states of a pass: those after the final norm, and the residual stream between layers."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from treespec.models.model_config import ModelConfig


class HiddenStates(NamedTuple):
    """Hidden states of a pass and of chosen layers."""

    final: Tensor  # after the final norm, [num_rows, hidden_size]
    streams: Tensor  # [num_rows, num layers, hidden_size]


def record_states(
    of: Sequence[int], config: ModelConfig, forward: Callable[[dict[int, Tensor | None]], Tensor]
) -> HiddenStates:
    """Run a pass that also returns hidden states."""
    states: dict[int, Tensor | None] = dict.fromkeys(of)
    final = forward(states)
    if (normed := config.shape.num_layers + 1) in states:
        states[normed] = final
    streams = torch.stack([state for layer in of if (state := states[layer]) is not None], 1)
    return HiddenStates(final, without_scales(streams, of, config))


def without_scales(streams: Tensor, of: Sequence[int], config: ModelConfig) -> Tensor:
    """Return recorded states, [num_rows, len(of), hidden_size], without the factors that `ModelConfig` adds to them.

    Changes `streams` in place.
    """
    normed = config.shape.num_layers + 1
    for i, layer in enumerate(of):
        factor = 1 / config.logit_scale if layer == normed else config.stream_scale
        if factor != 1:
            streams[:, i].mul_(factor)
    return streams
