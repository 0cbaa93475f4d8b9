"""State of a request's recurrent layers, and the rows of a pass that update it."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class StateShape(NamedTuple):
    """Sizes of a request's state."""

    num_layers: int
    matrix: tuple[int, int, int]  # a layer's state: heads, key_dim, value_dim; all 0 if there is only a convolution
    history: int  # tokens before the current one that the convolution reads
    width: int  # inputs of a token that a layer keeps: those of the convolution, then the rates of all heads
    num_nodes: int  # maximum rows of a token tree
    dtype: torch.dtype  # dtype of the inputs

    @property
    def nbytes(self) -> int:
        heads, key_dim, value_dim = self.matrix
        inputs = (self.history + self.num_nodes) * self.width * self.dtype.itemsize
        return self.num_layers * (4 * heads * key_dim * value_dim + inputs)

    def tensors(self, count: int, device: torch.device | str = "cpu") -> "StateTensors":
        """Return the memory of the states of `count` requests. On a CPU, it is committed on first write."""
        shape = (count, self.num_layers)
        matrices = torch.zeros(*shape, *self.matrix, dtype=torch.float32, device=device)
        inputs = torch.zeros(*shape, self.history + self.num_nodes, self.width, dtype=self.dtype, device=device)
        return StateTensors(matrices, inputs, self.history)

    def allocate(self, count: int, device: torch.device | str = "cpu") -> list["RecurrentState"]:
        """Return the states of `count` requests."""
        return self.tensors(count, device).states


class StateTensors(NamedTuple):
    """States of several requests in shared tensors, whose addresses captured graphs contain."""

    matrices: Tensor  # fp32 [num_slots, num_layers, heads, key_dim, value_dim]
    inputs: Tensor  # [num_slots, num_layers, history + num_nodes, width]
    history: int
    scratch: Tensor | None = None  # for `state_update_triton`; None allocates it in each pass

    @property
    def states(self) -> list["RecurrentState"]:
        parts = enumerate(zip(self.matrices, self.inputs, strict=True))
        return [RecurrentState(*tensors, self.history, slot) for slot, tensors in parts]


class RecurrentState:
    """State of a request's recurrent layers after `length` committed tokens.

    The state of a tree's node is as large as `matrices`, so a pass keeps the nodes' inputs instead. The next pass
    recomputes the states of the accepted path, with the same bits, and stores only the last one. `inputs` are those of
    the last `history` of the `length` tokens, then those of the tokens accepted since, or of the tree's nodes. A pass
    of a draft over a later level also recomputes the states of its nodes' ancestors.
    """

    scratch: Tensor | None = None  # as in `StateTensors`

    def __init__(self, matrices: Tensor, inputs: Tensor, history: int, slot: int = 0):
        self.matrices = matrices  # fp32 [num_layers, heads, key_dim, value_dim]
        self.inputs = inputs  # [num_layers, history + num_nodes, width]
        self.history, self.length = history, 0
        self.slot = slot  # index in `StateTensors`

    @torch.inference_mode()
    def reset(self) -> None:
        """Reset to the state before the first token."""
        self.length = 0
        self.matrices.zero_()
        self.inputs[:, : self.history] = 0

    @torch.inference_mode()
    def copy_from(self, other: "RecurrentState") -> None:
        """Copy the state after the other's `length` tokens, without later inputs."""
        self.length = other.length
        self.matrices.copy_(other.matrices)
        self.inputs[:, : self.history] = other.inputs[:, : self.history]

    @torch.inference_mode()
    def clone(self) -> "RecurrentState":
        state = RecurrentState(self.matrices.clone(), self.inputs.clone(), self.history)
        state.length = self.length
        return state

    def check(self, context_len: int, num_rows: int, commits: int, earlier: int = 0) -> None:
        """Assert that a pass can compute rows after `context_len` committed tokens and `earlier` rows of the tree."""
        kept, replayed = self.inputs.shape[1] - self.history, context_len - self.length
        assert 0 <= replayed <= kept, "the state does not lead to the rows' context"
        assert not earlier or not (replayed or commits), "a tree's first pass replays and commits tokens"
        assert earlier + num_rows - commits <= kept, "a tree outgrew its request's state"

    @torch.inference_mode()
    def commit(self, path: np.ndarray) -> None:
        """Keep the inputs of the accepted nodes of the tree after `length` tokens; `path` is as in `KVCache.commit`."""
        if path[-1] != len(path) - 1:
            slots = torch.from_numpy(self.history + path).to(self.inputs.device)
            self.inputs[:, self.history : self.history + len(path)] = self.inputs[:, slots]


class StateRows(NamedTuple):
    """A request's state in a pass."""

    state: RecurrentState
    commits: int = 0  # number of leading rows with committed tokens, such as a prompt's; the state after them is kept
