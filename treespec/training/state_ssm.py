"""SSMs that also read hidden states of the target: the training module.

A pair of embedding and state is projected to the model's width, as in DeepSeek-V3's MTP modules (arXiv 2412.19437). As
in EAGLE-3 (arXiv 2503.01840), the states are those of several layers, and training drafts several tokens in a row.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig

from treespec.errors import ModelError
from treespec.models.model_config import ModelConfig
from treespec.training.distillation import LessonBatch, Prediction
from treespec.training.loop import mixed_precision
from treespec.training.student import write_student
from treespec_weights.state_projection import (
    StateProjection,
    load_state_projection,
    state_ssm_form,
    write_state_projection,
)

DEPTHS = 4  # consecutive drafted tokens per training step


class StateSsm(nn.Module):
    """A draft model over pairs of a token's embedding and the previous token's *feature*.

    The feature of a verified token is a projection of the target's hidden states; that of a drafted token is the
    model's output. Both parts of a pair are normalised and projected to the model's width. At first, this projection
    ignores the feature, so that training starts with the predictions of `student` (see `make_student`).
    """

    decay = 0.8  # loss weight of a depth relative to the depth before it

    def __init__(self, student: Any, states: int, eps: float, start: Path | None = None):
        """Read `states` values of the target for each token; `eps` is that of the norms.

        `start` is the folder of a trained student, from which its projection is read, if it has one. The student's
        weights then learn slowly: at the rate of new ones, they would forget more than these learn.
        """
        super().__init__()
        rows = student.get_input_embeddings().weight.detach()
        hidden = rows.shape[1]
        self.student, self._is_trained = student, start is not None
        self.fc, self.eh_proj = nn.Linear(states, hidden, bias=False), nn.Linear(2 * hidden, hidden, bias=False)
        self.enorm, self.hnorm = nn.RMSNorm(hidden, eps), nn.RMSNorm(hidden, eps)
        with torch.no_grad():
            nn.init.normal_(self.fc.weight, std=states**-0.5)
            self.eh_proj.weight.copy_(torch.eye(hidden, 2 * hidden, dtype=rows.dtype, device=rows.device))
        # Size of the student's embeddings, to which a projected pair is scaled. As a part of `eh_proj`, it would make
        # this matrix so small that an update changes it too much.
        self.scale = float(rows.square().mean(1).sqrt().median())
        if start is not None and (form := state_ssm_form(start)) is not None:
            self._read(load_state_projection(form, hidden, states // len(form.layers), torch.float32, rows.device))

    @torch.no_grad()
    def _read(self, projection: StateProjection) -> None:
        for name, tensor in projection._asdict().items():
            getattr(self, name).weight.copy_(tensor / self.scale if name == "eh_proj" else tensor)

    def slow_parameters(self) -> list[nn.Parameter]:
        return list(self.student.parameters()) if self._is_trained else []

    def get_output_embeddings(self) -> nn.Linear:
        head: nn.Linear = self.student.get_output_embeddings()
        return head

    def predict(self, batch: LessonBatch, seed: Sequence[int]) -> Iterator[Prediction]:
        """Yield the logits of a batch's targets after 0, 1, ... drafted tokens; `seed` is unused."""
        pairs = batch.positions[:, 1] - 1
        assert batch.read_states is not None
        states = batch.read_states()[:, :-1]
        with mixed_precision(batch.inputs.device):
            for depth, outputs in enumerate(self(states, batch.inputs, DEPTHS)):
                targets = batch.select(pairs >= depth)
                rows, columns = targets.positions[:, 0], targets.positions[:, 1] - 1
                yield self.get_output_embeddings()(outputs[rows, columns])[:, :-1].float(), targets

    def forward(self, states: Tensor, inputs: Tensor, depths: int) -> Iterator[Tensor]:
        """Yield the normalised outputs [batch, pairs, hidden] of the pairs after 0, 1, ... drafted tokens.

        `states` are the target's at all tokens but the last, [batch, pairs, values]; `inputs`, int64 [batch,
        pairs + 1], are the student's rows of the tokens.
        """
        embedded = self.enorm(self.student.get_input_embeddings()(inputs[:, 1:]))
        features = self.fc(states.to(self.fc.weight.dtype))
        cache, pairs = DynamicCache(), states.shape[1]
        positions = torch.arange(pairs, dtype=torch.int64, device=states.device)[None]
        for depth in range(depths):
            outputs: Tensor = self.student.get_decoder()(
                None,
                path_mask(depth, pairs, states.device)[None, None],
                positions,
                cache,  # positional, because its name depends on the version of transformers
                self.scale * self.eh_proj(torch.cat((embedded, self.hnorm(features.float())), 2)),
            ).last_hidden_state
            yield outputs
            features = F.pad(outputs, (0, 0, 1, 0))[:, :-1]

    def write(self, folder: Path, target_ids: np.ndarray, target: PreTrainedConfig) -> None:
        """Write the folder of a draft that reads the target's states. `target_ids`: int64 [rows]."""
        write_student(self.student, folder, target_ids, target.vocab_size)
        tensors = {name: getattr(self, name).weight.detach().float() for name in StateProjection._fields}
        tensors["eh_proj"] = self.scale * tensors["eh_proj"]
        projection = StateProjection(**{name: tensor.to(torch.bfloat16).cpu() for name, tensor in tensors.items()})
        write_state_projection(folder, projection, read_layers(target.num_hidden_layers))


def check_target(config: ModelConfig) -> None:
    """Raise ModelError for a target whose layers cannot read projected pairs in place of embeddings."""
    shape = config.shape
    if shape.recurrent is not None or shape.learned_positions or config.embed_scale != 1.0:
        raise ModelError(
            f"head='state-ssm' is for models with rotary attention in all layers and unscaled embeddings, not for "
            f"{config.rules.model_type}; omit it to train SSMs"
        )


def path_mask(depth: int, pairs: int, device: torch.device) -> Tensor:
    """Return the pairs that a pair attends to, bool [pairs, (depth + 1) * pairs], like a tree node to its ancestors.

    Pair p at a depth d attends to verified pairs up to p - d and to pairs p - d + 1 to p of depths 1 to d.
    """
    ones = torch.ones(pairs, pairs, dtype=torch.bool, device=device)
    above = [torch.eye(pairs, dtype=torch.bool, device=device).roll(d - depth, 1).tril() for d in range(1, depth + 1)]
    return torch.cat((ones.tril(-depth), *above), 1)


def read_layers(num_layers: int) -> tuple[int, ...]:
    """Return the target layers whose inputs a head reads; `num_layers` + 1 is the output after the final norm."""
    return tuple(sorted({min(2, num_layers - 1), num_layers // 2, num_layers + 1}))
