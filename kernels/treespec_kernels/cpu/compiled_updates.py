"""Low-rank updates of adapters (LoRA) in compiled passes."""

import ctypes
from collections.abc import Mapping, Sequence

from torch import Tensor

from treespec_kernels.attention.tree_batch import UpdatedRows
from treespec_kernels.cpu.decoder_library import STRUCTS, PanelLinear


class CompiledUpdates:
    """Low-rank updates of a model's products (LoRA), in the library's layout."""

    def __init__(
        self,
        library: ctypes.CDLL,  # from `decoder_library.build`
        # By layer, for "qkv", "o", "gate_up" and "down": A [rank, inputs] and B [outputs, rank] in the library's dtype,
        # with an even rank; W x becomes W x + B (A x)
        layers: Sequence[Mapping[str, tuple[Tensor, Tensor]]],
    ):
        self._linears: list[PanelLinear] = []  # keeps the tensors alive whose addresses are in the structs
        self._layers = (STRUCTS["LayerUpdates"] * len(layers))()
        for struct, updates in zip(self._layers, layers, strict=True):
            for name, matrices in updates.items():
                packed = [PanelLinear(library, matrix, None) for matrix in matrices]
                setattr(struct, name, STRUCTS["Update"](*(linear.struct for linear in packed)))
                self._linears += packed
        self.address = ctypes.addressof(self._layers)

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in self._linears)


def set_updated(batch: ctypes.Structure, updated: Sequence[UpdatedRows]) -> None:
    """Set the rows of a pass with the updates of adapters."""
    if updated:
        made = [STRUCTS["UpdatedRows"](rows.adapter.address, rows.first, rows.num_rows) for rows in updated]
        structs = (STRUCTS["UpdatedRows"] * len(made))(*made)
        batch.updated, batch.num_updated = ctypes.addressof(structs), len(structs)
        batch.held = structs  # as long as the batch lives
