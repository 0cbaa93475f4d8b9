"""Rows of a pass of recurrent layers, with states of single requests or of captured rounds.

A pass computes the rows that its requests have committed since their states were stored, and then its own rows, each
from its parent. It stores the states after the committed rows only (see `RecurrentState`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec_kernels.attention.tree_batch import RequestRows
from treespec_kernels.recurrent.mixer_rows import (
    MixedRows,
    gate_rows_ref,
    gate_rows_triton,
    mix_rows_ref,
    mix_rows_triton,
)
from treespec_kernels.recurrent.request_state import RecurrentState, StateTensors
from treespec_kernels.recurrent.round_states import RoundPlan, exchange_inputs_triton, round_plan_triton
from treespec_kernels.recurrent.state_update import (
    Level,
    StatePaths,
    causal_conv_ref,
    causal_conv_triton,
    state_update_ref,
    state_update_triton,
)


class StatePass(ABC):
    """Rows of a pass of recurrent layers: replayed rows, then the pass's own.

    Replayed rows were computed by earlier passes, which kept only their inputs: tokens committed since the requests'
    states were stored, or the ancestors of a tree's later level. Layers are numbered among the recurrent ones.

    Attributes:
        taps: the inputs that each row's convolution reads, int64 [num_replayed + num_rows, history + 1].
        num_replayed: number of replayed rows.
    """

    taps: Tensor
    num_replayed: int
    _paths: StatePaths | None = None  # None without Triton

    @abstractmethod
    def exchange(self, layer: int, new_inputs: Tensor) -> Tensor:
        """Store the inputs of the pass's rows, [num_rows, width]; return all inputs that `taps` index."""

    @abstractmethod
    def update(
        self, layer: int, qk: Tensor, v: Tensor, beta: Tensor, decay: Tensor, reads: bool, tiled: bool
    ) -> Tensor:
        """Compute `state_update_ref` of all rows, and store the states after the committed ones."""

    @property
    def convolve(self) -> Callable[..., Tensor]:
        """The implementation of `causal_conv_ref`."""
        return causal_conv_ref if self._paths is None else causal_conv_triton

    @property
    def mix(self) -> Callable[..., MixedRows]:
        """The implementation of `mix_rows_ref`."""
        return mix_rows_ref if self._paths is None else mix_rows_triton

    @property
    def gate(self) -> Callable[..., Tensor]:
        """The implementation of `gate_rows_ref`."""
        return gate_rows_ref if self._paths is None else gate_rows_triton

    @abstractmethod
    def finish(self) -> None:
        """Advance the states' lengths, after the last layer."""


class _Rows(NamedTuple):
    """A request's rows in a pass of recurrent layers, and the stored inputs that they read."""

    state: RecurrentState
    num_rows: int  # the pass's own rows
    commits: int  # as in `StateRows`
    earlier: int  # tree slots that earlier passes computed
    before: np.ndarray  # int64 [stored + num_rows], each input's predecessor on its path; stored inputs come first
    depths: np.ndarray  # int64 [stored + num_rows], each input's distance from the state; negative in the history
    again: np.ndarray  # bool [stored], whether an input's row is replayed

    @classmethod
    def of(cls, rows: RequestRows) -> "_Rows":
        assert rows.state is not None, "a pass of recurrent layers needs the requests' states"
        state, commits = rows.state
        committed, earlier = rows.context_len - state.length, rows.num_earlier
        state.check(rows.context_len, rows.num_rows, commits, earlier)
        first = state.history + committed  # input of the tree
        before = np.concatenate((np.arange(first) - 1, first + rows.parents))
        slot_depths = rows.depths if rows.slot_depths is None else rows.slot_depths
        depths = np.concatenate((np.arange(-state.history, committed), committed + slot_depths))
        again = np.arange(first + earlier) >= state.history
        if rows.visible is not None:
            again[first:] = rows.visible[:, :earlier].any(0)
        return cls(state, rows.num_rows, commits, earlier, before, depths, again)

    @property
    def stored(self) -> int:
        return len(self.again)

    @property
    def committed(self) -> int:
        """Rows that the request has committed since its state was stored."""
        return self.stored - self.earlier - self.state.history

    @property
    def replayed(self) -> int:
        return int(self.again.sum())


class RequestStates(StatePass):
    """Rows of any requests, in a pass that the host launches."""

    def __init__(self, requests: Sequence[RequestRows], num_rows: int, on_triton: bool = False):
        self._requests = [_Rows.of(rows) for rows in requests]
        self._history, self._device = self._requests[0].state.history, self._requests[0].state.matrices.device
        self._num_stored = sum(rows.stored for rows in self._requests)
        self.num_replayed = sum(rows.replayed for rows in self._requests)
        self.taps = torch.from_numpy(self._taps(num_rows)).to(self._device)
        parents, depths, last = self._parents()
        self._stores = sorted({*last.values()})  # requests whose states change
        self._paths = self._state_paths(parents, last) if on_triton else None
        self._levels = [] if on_triton else _levels(parents, depths, last)

    def _taps(self, num_rows: int) -> np.ndarray:
        """Return `taps`, which index the stored inputs of all requests, followed by those of the pass."""
        replayed, new_taps, first, row = list[np.ndarray](), list[np.ndarray](), 0, self._num_stored
        for rows in self._requests:
            places = np.concatenate((first + np.arange(rows.stored), row + np.arange(rows.num_rows)))
            path = [np.arange(len(places))]
            for _ in range(self._history):
                path.append(rows.before[path[-1]])
            taps = places[np.stack(path[::-1], 1)]
            replayed.append(taps[: rows.stored][rows.again])
            new_taps.append(taps[rows.stored :])
            first, row = first + rows.stored, row + rows.num_rows
        padding = np.arange(row, self._num_stored + num_rows)[:, None]
        return np.concatenate((*replayed, *new_taps, padding.repeat(self._history + 1, 1)))

    def _parents(self) -> tuple[list[int], list[int], dict[int, int]]:
        """Return the parent of each row, replayed ones first, and its depth; a first row's parent is ~request.

        The last result maps each row after which a state is stored to its request.
        """
        size = self.num_replayed + sum(rows.num_rows for rows in self._requests)
        parents, depths, last = np.zeros(size, np.int64), np.zeros(size, np.int64), dict[int, int]()
        first, first_new = 0, self.num_replayed
        for request, rows in enumerate(self._requests):
            computed = np.flatnonzero(np.append(rows.again, np.ones(rows.num_rows, dtype=bool)))
            numbers = np.full(rows.stored + rows.num_rows, ~request)  # row number of each input
            numbers[computed] = [*range(first, first + rows.replayed), *range(first_new, first_new + rows.num_rows)]
            parents[numbers[computed]] = numbers[rows.before[computed]]
            depths[numbers[computed]] = rows.depths[computed]
            if rows.commits or rows.committed:
                last[first_new + rows.commits - 1 if rows.commits else first + rows.committed - 1] = request
            first, first_new = first + rows.replayed, first_new + rows.num_rows
        return parents.tolist(), depths.tolist(), last

    def _state_paths(self, parents: Sequence[int], last: Mapping[int, int]) -> StatePaths:
        """List the rows of `_parents` request by request, in preorder; see `round_plan_ref`.

        A state that a later child needs is kept in scratch memory, in the place after those kept above it.
        """
        order, starts, kept, num_kept = list[int](), [0], dict[int, int](), 0
        below: dict[int, list[int]] = {}
        for row, parent in enumerate(parents):
            below.setdefault(parent, []).append(row)
        for request in range(len(self._requests)):
            following = [(row, num_kept) for row in below.get(~request, [])]
            while following:
                row, place = following.pop()
                order.append(row)
                children = below.get(row, [])
                if len(children) > 1:
                    kept[row], place = place, place + 1
                following += [(child, place) for child in reversed(children)]
            num_kept = max(kept.values(), default=-1) + 1
            starts.append(len(order))
        ends = dict(zip(last.values(), last, strict=True))

        def uploaded(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device="cpu").to(self._device)

        return StatePaths(
            uploaded(range(len(self._requests))),
            uploaded(starts[:-1]),
            uploaded(starts[1:]),
            uploaded(order),
            uploaded([max(parent, -1) for parent in parents]),
            uploaded([kept.get(row, -1) for row in range(len(parents))]),
            uploaded([ends.get(request, -1) for request in range(len(self._requests))]),
            num_kept,
        )

    def exchange(self, layer: int, new_inputs: Tensor) -> Tensor:
        inputs = torch.cat([*(rows.state.inputs[layer, : rows.stored] for rows in self._requests), new_inputs])
        first, row, history = 0, self._num_stored, self._history
        for rows in self._requests:
            kept, end = rows.state.inputs[layer], first + rows.stored - rows.earlier
            new, tree = inputs[row : row + rows.num_rows], history + rows.earlier
            kept[:history] = torch.cat((inputs[end - history : end], new[: rows.commits]))[rows.commits :]
            kept[tree : tree + rows.num_rows - rows.commits] = new[rows.commits :]
            first, row = first + rows.stored, row + rows.num_rows
        return inputs

    def update(
        self, layer: int, qk: Tensor, v: Tensor, beta: Tensor, decay: Tensor, reads: bool, tiled: bool
    ) -> Tensor:
        matrices = torch.stack([rows.state.matrices[layer] for rows in self._requests])
        if self._paths is None:
            out = state_update_ref(matrices, qk, v, beta, decay, self._levels, reads, tiled)
        else:
            scratch = self._requests[0].state.scratch
            out = state_update_triton(matrices, qk, v, beta, decay, self._paths, reads, tiled, scratch)
        for request in self._stores:
            self._requests[request].state.matrices[layer].copy_(matrices[request])
        return out

    def finish(self) -> None:
        for rows in self._requests:
            rows.state.length += rows.committed + rows.commits


class RoundStates(StatePass):
    """Rows of trees in passes of one shape, such as those of captured rounds.

    A pass advances the stored states by the replayed rows; the host, which does not wait for it, advances the lengths.
    """

    def __init__(
        self,
        tensors: StateTensors,
        slots: Tensor,  # int32 [B], states of the requests
        replayed: Tensor,  # int32 [B], committed tokens since the states, at most `width`
        nodes: int,
        width: int,
    ):
        self._tensors, self._slots, self._replayed, self._width = tensors, slots, replayed, width
        self._plan = RoundPlan.allocate(slots, nodes, width, tensors.history, slots.device)
        self.taps, self._paths, self.num_replayed = self._plan.taps, self._plan.paths, len(slots) * width
        self._chain: Tensor | None = None  # ancestors of single nodes
        if nodes == 1:
            self._chain = torch.zeros(len(slots), 1, width, dtype=torch.int32, device=slots.device)
        self._depths: Tensor  # depths of the current pass's rows, as in `round_plan_ref`

    def place(self, depths: Tensor, ancestors: Tensor | None, spreads: Tensor) -> "RoundStates":
        """Plan a pass; arguments as in `round_plan_ref`. Single nodes need no ancestors."""
        self._depths, ancestors = depths, self._chain if ancestors is None else ancestors
        assert ancestors is not None, "only single nodes have no ancestors"
        round_plan_triton(self._replayed, depths, ancestors, spreads, out=self._plan)
        return self

    def exchange(self, layer: int, new_inputs: Tensor) -> Tensor:
        kept, history = self._tensors.inputs[:, layer], self._tensors.history
        return exchange_inputs_triton(kept, new_inputs, self._slots, self._replayed, self._depths, self._width, history)

    def update(
        self, layer: int, qk: Tensor, v: Tensor, beta: Tensor, decay: Tensor, reads: bool, tiled: bool
    ) -> Tensor:
        matrices, scratch = self._tensors.matrices[:, layer], self._tensors.scratch
        return state_update_triton(matrices, qk, v, beta, decay, self._plan.paths, reads, tiled, scratch)

    def finish(self) -> None:
        """Leave the lengths to the host."""


def _levels(parents: Sequence[int], depths: Sequence[int], last: Mapping[int, int]) -> list[Level]:
    """Group the rows of `RequestStates._parents` by depth."""
    by_level = [list[int]() for _ in range(max(depths, default=-1) + 1)]
    place = dict[int, int]()
    for row, depth in enumerate(depths):
        place[row] = len(by_level[depth])
        by_level[depth].append(row)
    levels = []
    for rows_of in by_level:
        above = [place[parents[row]] if parents[row] >= 0 else ~parents[row] for row in rows_of]
        ending = [(i, last[row]) for i, row in enumerate(rows_of) if row in last]
        ended = torch.from_numpy(np.array(ending, dtype=np.int64).reshape(-1, 2))
        level_rows, parent = (torch.from_numpy(np.array(column, dtype=np.int64)) for column in (rows_of, above))
        levels.append(Level(level_rows, parent, ended[:, 0], ended[:, 1]))
    return levels
