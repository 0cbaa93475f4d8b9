"""Low-rank updates of a decoder's products (LoRA, arXiv 2106.09685): W x becomes W x + B (A x) in an adapter's rows."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from treespec.errors import ExactnessError
from treespec.models.layer import Products, prepare, present
from treespec.models.model_config import ModelConfig
from treespec_kernels.linear.linear import Linear, LinearImpl
from treespec_weights.rules import RecurrentShape

RANK_STEP = 32  # ranks of fused updates are padded to multiples; zeros change no sum
_ROWS = (2, 3, 7, 16, 33, 64)  # sizes of passes whose bits `check_rows` compares

LowRank = tuple[Tensor, Tensor]
"""A [rank, inputs] and B [outputs, rank] of a matrix, scaled."""


def updates_by_matrix(
    config: ModelConfig, matrices: Mapping[str, LowRank], products: Products
) -> list[dict[str, list[LowRank]]]:
    """Return each layer's updates by product, from those of decoder parameters, such as `layers.0.q`.

    A product has one update for each of its matrices, of rank 0 where the adapter has none.
    """
    dtype, downs = next(iter(matrices.values()))[0].dtype, {name: down for name, (down, _) in matrices.items()}
    sizes = {name: size[0] for name, size in config.shape.parameters().items() if len(size) == 2}
    ups: dict[str, Tensor] = {name: torch.empty(size, 0, dtype=dtype, device="cpu") for name, size in sizes.items()}
    ups |= {name: up for name, (_, up) in matrices.items()}
    prepare(config, ups)  # permutes the rows of q and k, and copies keys that serve as values
    if (recurrent := config.shape.recurrent) is not None and recurrent.tiled:
        _tile_heads(recurrent, downs, ups)
    layers: list[dict[str, list[LowRank]]] = []
    for i in range(config.shape.num_layers):
        layers.append({})
        if not config.shape.layer(i).has_v and (down := downs.get(f"layers.{i}.k")) is not None:
            downs[f"layers.{i}.v"] = down
        for product, fused in products.items():
            names = [f"layers.{i}.{name}" for name in present(fused, f"layers.{i}.", ups)]
            if updated := [downs[name] for name in names if name in downs]:
                layers[i][product] = [(downs.get(name, updated[0][:0]), ups[name]) for name in names]
    return layers


def _tile_heads(shape: RecurrentShape, downs: dict[str, Tensor], ups: dict[str, Tensor]) -> None:
    """Order the value heads of updates in place as those of a GGUF file (`RecurrentShape.tiled`)."""

    def tiled(rows: Tensor) -> Tensor:
        heads = rows.unflatten(0, (shape.key_heads, shape.heads // shape.key_heads, -1))
        return heads.transpose(0, 1).flatten(0, 2)

    for name, up in ups.items():
        if name.endswith((".mix_v", ".mix_gate", ".beta", ".decay")):
            ups[name] = tiled(up)
        if name.endswith(".mix_out") and name in downs:
            downs[name] = tiled(downs[name].t()).t()


def fused_updates(config: ModelConfig, matrices: Mapping[str, LowRank], products: Products) -> list[dict[str, LowRank]]:
    """Return `updates_by_matrix` fused by product: A is stacked, and B is block-diagonal."""
    layers = updates_by_matrix(config, matrices, products)
    return [{name: _joined(pairs) for name, pairs in layer.items()} for layer in layers]


def _joined(pairs: Sequence[LowRank]) -> LowRank:
    down, up = torch.cat([down for down, _ in pairs]), torch.block_diag(*(up for _, up in pairs))
    padding = -len(down) % RANK_STEP
    return F.pad(down, (0, 0, 0, padding)), F.pad(up, (0, padding))


class Updates:
    """Updates of an eager decoder's products."""

    def __init__(self, layers: Sequence[Mapping[str, LowRank]], impl: LinearImpl):
        self.layers = [
            {name: (Linear(down, None, impl), Linear(up, None, impl)) for name, (down, up) in layer.items()}
            for layer in layers
        ]

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for layer in self.layers for pair in layer.values() for matrix in pair)

    def of(self, layer: int, product: str, x: Tensor) -> Tensor | None:
        """Return the update of a layer's product for rows x [num_rows, inputs]; None without one.

        `x` are all rows of the pass, even those without the adapter: linear layers are row-invariant for their number.
        """
        if (pair := self.layers[layer].get(product)) is None:
            return None
        down, up = pair
        return up(down(x))

    def check_rows(self, dtype: torch.dtype) -> None:
        """Raise ExactnessError if a row's bits depend on the number of rows, for a shape of these matrices."""
        pairs = [pair for layer in self.layers for pair in layer.values()]
        for matrix in {(m.in_features, m.out_features): m for pair in pairs for m in pair}.values():
            generator = torch.Generator("cpu").manual_seed(0)
            size = _ROWS[-1], matrix.in_features
            x = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
            whole = matrix(x)
            for count in _ROWS:
                if not torch.equal(matrix(x[:count]), whole[:count]):
                    raise ExactnessError(
                        f"a low-rank product of {matrix.in_features} inputs and {matrix.out_features} outputs is not "
                        f"row-invariant with linear={matrix.impl!r} and {dtype}: {count} rows have other bits; use "
                        "compile=True or linear='torch'"
                    )
