"""Per-layer inputs: an additional input of each layer, computed from a row's token (Gemma 4)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from treespec.models.layer import LinearMaker, take_projection
from treespec.models.model_config import ModelConfig
from treespec_kernels.linear.rms_norm import Norm, norm_heads, rms_norm_triton
from treespec_weights.blocks import Blocks, Weights


class PerLayerInputs:
    """Inputs of all layers: (norm(W x) + e) / sqrt(2), for a token's embedding x and its row e of a second table."""

    def __init__(self, weights: Weights, config: ModelConfig, make_linear: LinearMaker):
        self._dtype = make_linear.dtype
        self.embed, self.gain, self._scale, self._eps = take_input_table(weights, config, self._dtype)
        self._project = make_linear(take_projection(weights, "", ("input_project",)))

    def __call__(self, tokens: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of each layer, [num_rows, size], of tokens, int64 [num_rows], and their embeddings."""
        rows = table_rows(self.embed, tokens, torch.float32)
        projected = self._project(x).float().unflatten(1, (-1, len(self.gain)))
        norm_heads(projected, self.gain, self._eps)
        return projected.add_(rows.view_as(projected).mul_(self._scale)).to(self._dtype).unbind(1)

    @property
    def nbytes(self) -> int:
        table = self.embed.rows if isinstance(self.embed, Blocks) else self.embed
        return self._project.nbytes + self.gain.nbytes + table.nbytes


class TritonPerLayerInputs(PerLayerInputs):
    """`PerLayerInputs` on Triton kernels, with the table on the device."""

    def __call__(self, tokens: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        assert isinstance(self.embed, Tensor)
        rows = F.embedding(tokens, self.embed).mul_(self._scale).view(-1, len(self.gain))
        norm = Norm(None, self._eps, post_weight=self.gain)
        projected = rms_norm_triton(self._project(x).view_as(rows), norm, residual=rows)
        return projected.view(len(tokens), -1, len(self.gain)).unbind(1)


def table_rows(table: Tensor | Blocks, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows of an embedding for tokens, int64 [num_rows]."""
    if isinstance(table, Blocks):
        return table._replace(rows=table.rows[tokens]).dequantize(dtype)
    return F.embedding(tokens, table).to(dtype)


def take_input_table(
    weights: Weights, config: ModelConfig, dtype: torch.dtype
) -> tuple[Tensor | Blocks, Tensor, float, float]:
    """Pop the table and the norm's weight, and return them with a factor on the table and the norm's epsilon.

    The weight and the factor include 1 / sqrt(2). The epsilon is scaled, because the norm's input lacks the model's
    division by sqrt(hidden_size). The table of a mapped file stays mapped, since a pass reads few of its rows.
    """
    gain, size = weights.pop("input_norm").float() * 0.5**0.5, config.shape.per_layer_size
    scale = float(torch.tensor(size**0.5, dtype=dtype, device="cpu")) * 0.5**0.5
    return weights.pop("input_embed"), gain, scale, config.norm_eps * config.shape.hidden_size
