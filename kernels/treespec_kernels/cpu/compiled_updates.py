"""Low-rank updates of adapters (LoRA) in compiled passes."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treespec_kernels.attention.tree_batch import UpdatedRows
from treespec_kernels.cpu.decoder_library import LANES, STRUCTS, PanelLinear
from treespec_kernels.cpu.huge_pages import HugePages

_Linear = STRUCTS["Linear"]


class CompiledUpdates:
    """Low-rank updates of a model's products (LoRA), in the library's layout."""

    def __init__(
        self,
        library: ctypes.CDLL,  # from `decoder_library.build`
        # By layer, for the products of `LayerUpdates`: A [rank, inputs] and B [outputs, rank] of each matrix of the
        # product, in the library's dtype, with a rank of 0 if it has no update; W x becomes W x + B (A x)
        layers: Sequence[Mapping[str, Sequence[tuple[Tensor, Tensor]]]],
    ):
        self._linears: list[PanelLinear] = []  # keeps the tensors alive whose addresses are in the structs
        self._ups: list[ctypes.Array[Any]] = []
        self._layers, memory = (STRUCTS["LayerUpdates"] * len(layers))(), HugePages(smallest=0)
        for struct, updates in zip(self._layers, layers, strict=True):
            for name, parts in updates.items():
                outputs = [len(up) for _, up in parts]
                stride = -(-sum(outputs) // LANES) * LANES  # as of a layer's products
                downs = [F.pad(down, (0, 0, 0, len(down) % 2)) for down, _ in parts]  # read in pairs
                ups = (_Linear * len(parts))(*(_Linear(outputs=count) for count in outputs))
                for i, (down, up) in enumerate(parts):
                    if len(down):
                        self._linears.append(PanelLinear(library, F.pad(up, (0, len(down) % 2)), None, memory=memory))
                        ups[i] = self._linears[-1].struct
                    ups[i].stride = stride
                self._ups.append(ups)
                self._linears.append(PanelLinear(library, torch.cat(downs), None, memory=memory))
                update = self._linears[-1].struct, ctypes.addressof(ups), len(ups)
                setattr(struct, name, STRUCTS["Update"](*update))
        self.address = ctypes.addressof(self._layers)

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in self._linears)


def set_updated(batch: ctypes.Structure, updated: Sequence[UpdatedRows]) -> None:
    """Set the rows of a pass that use adapters."""
    batch.num_updated = 0
    if updated:
        rows_of_adapters = [STRUCTS["UpdatedRows"](rows.adapter.address, rows.first, rows.num_rows) for rows in updated]
        structs = (STRUCTS["UpdatedRows"] * len(rows_of_adapters))(*rows_of_adapters)
        batch.updated, batch.num_updated = ctypes.addressof(structs), len(structs)
        batch.held = structs  # as long as the batch lives
