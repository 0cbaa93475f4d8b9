"""Recurrent layers of the eager decoder: Gated DeltaNets, Mamba 2's layers, and LFM2's gated convolutions.

A pass computes the rows that its requests have committed since their states were stored, and then its own rows, each
from its parent. It stores the states after the committed rows only (see `RecurrentState`).
"""

from collections.abc import Mapping, Sequence
from ctypes import CDLL
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec.models.layer import Layer, make_linear, take_projection
from treespec.models.model_config import ModelConfig
from treespec.models.norms import norm_heads
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_kernels.linear.activations import sigmoid, silu, softplus
from treespec_kernels.linear.linear import LinearImpl
from treespec_kernels.recurrent.request_state import RecurrentState, StateShape
from treespec_kernels.recurrent.state_update import (
    Level,
    StatePaths,
    causal_conv_ref,
    causal_conv_triton,
    state_update_ref,
    state_update_triton,
)
from treespec_weights.blocks import Weights
from treespec_weights.rules import RecurrentShape

_MIX = ("mix_q", "mix_k", "mix_v")  # of a Gated DeltaNet
_L2_EPS = 1e-6  # of the norms of queries and keys
# Of compiled passes:
MAX_KERNEL = 16  # tokens of a convolution
STATE_LANES = 16  # numbers of heads, and sizes of keys and values, are multiples of it


def recurrent_sizes(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of `Architecture` that recurrent layers have; {} without any."""
    shape = config.shape.recurrent
    if shape is None:
        return {}
    sizes = {name: getattr(shape, name) for name in ("kernel", "key_heads", "key_dim", "value_dim", "tiled", "rates")}
    sizes |= {"channels": shape.channels(config.shape.hidden_size), "state_heads": shape.heads}
    return sizes | {"mixer_eps": _epsilon(config), "beta_scale": 2.0 if shape.doubled else 1.0}


def _epsilon(config: ModelConfig) -> float:
    """Return the epsilon of a mixer's norm, whose input is not divided by `stream_scale` as the residual stream is."""
    own = config.shape.recurrent and config.shape.recurrent.eps
    return own or config.norm_eps * config.stream_scale**2


def take_mixer(weights: Weights, prefix: str, config: ModelConfig) -> dict[str, Any]:
    """Pop the parameters of a recurrent layer that take the place of attention, as `CompiledLayerWeights` has them."""
    shape = config.shape.recurrent
    assert shape is not None
    names = ("mix",) if shape.kind == "conv" else (*_MIX, *_rates(shape), "mix_gate")
    return {
        "qkv": [take_projection(weights, prefix, (name,)) for name in names],
        "qkv_bias": _take_bias(weights, prefix, names),
        **_take_conv(weights, prefix),
        **({} if shape.kind == "conv" else _take_steps(weights, prefix)),
    }


def _rates(shape: RecurrentShape) -> tuple[str, ...]:
    """Return the names of the projections to a head's inputs that are not convolved."""
    return ("beta", "decay")[2 - shape.rates :]


def _take_bias(weights: Weights, prefix: str, names: Sequence[str]) -> Tensor | None:
    """Pop the bias of a product of several matrices, if they have biases."""
    parts = [weights.pop(f"{prefix}{name}_bias") for name in names if f"{prefix}{name}_bias" in weights]
    return torch.cat(parts) if parts else None


def _take_conv(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """Pop a convolution, fp32: its weight [kernel, channels], and its bias, if it has one."""
    names = [name for name in ("conv", "conv_q", "conv_k", "conv_v") if prefix + name in weights]
    weight, bias = torch.cat([weights.pop(prefix + name) for name in names]), _take_bias(weights, prefix, names)
    return {"conv": weight[:, 0].float().t().contiguous()} | ({} if bias is None else {"conv_bias": bias.float()})


def _take_steps(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """Pop the vectors of a layer with a state per head, fp32."""
    dt_bias, log, gain = (weights.pop(prefix + name).float() for name in ("dt_bias", "decay_log", "mix_gain"))
    skip = {"skip": weights.pop(f"{prefix}skip").float()} if f"{prefix}skip" in weights else {}
    return {"dt_bias": dt_bias, "rate": -log.exp(), "gain": gain} | skip


def state_shape(config: ModelConfig, num_nodes: int, dtype: torch.dtype) -> StateShape | None:
    """Return the sizes of a request's state for trees of up to `num_nodes` nodes; None without recurrent layers."""
    shape = config.shape.recurrent
    if shape is None:
        return None
    width = shape.width(config.shape.hidden_size)
    sizes = shape.heads, shape.key_dim, shape.value_dim
    return StateShape(len(shape.layers), sizes, shape.kernel - 1, width, num_nodes, dtype)


class _Rows(NamedTuple):
    """A request's rows in a pass of recurrent layers, and the stored inputs that they read."""

    state: RecurrentState
    num_rows: int  # the pass's own rows
    commits: int  # as in `StateRows`
    earlier: int  # tree slots that earlier passes computed
    # Of all inputs, stored ones first: the index of the input before on its path, and the number of rows between the
    # state and it, negative in the history; int64 [stored + num_rows]
    before: np.ndarray
    depths: np.ndarray
    again: np.ndarray  # bool [stored], the stored inputs of replayed rows

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


class StatePass:
    """Rows of a pass of recurrent layers: those of which only the inputs are kept (replayed rows), then the pass's own.

    Replayed are the tokens that the requests have committed since their states were stored, or the ancestors of a
    tree's later level, which earlier passes computed.
    """

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
        """Return the inputs that each row's convolution reads, int64 [num_replayed + num_rows, history + 1].

        They index the stored inputs of all requests, followed by those of the pass.
        """
        replayed, own, first, row = list[np.ndarray](), list[np.ndarray](), 0, self._num_stored
        for rows in self._requests:
            places = np.concatenate((first + np.arange(rows.stored), row + np.arange(rows.num_rows)))
            path = [np.arange(len(places))]
            for _ in range(self._history):
                path.append(rows.before[path[-1]])
            taps = places[np.stack(path[::-1], 1)]
            replayed.append(taps[: rows.stored][rows.again])
            own.append(taps[rows.stored :])
            first, row = first + rows.stored, row + rows.num_rows
        padding = np.arange(row, self._num_stored + num_rows)[:, None]
        return np.concatenate((*replayed, *own, padding.repeat(self._history + 1, 1)))

    def _parents(self) -> tuple[list[int], list[int], dict[int, int]]:
        """Return the parent of each row, replayed ones first, and its depth; a first row's parent is ~request.

        The last result maps each row after which a state is stored to its request.
        """
        size = self.num_replayed + sum(rows.num_rows for rows in self._requests)
        parents, depths, last = np.zeros(size, np.int64), np.zeros(size, np.int64), dict[int, int]()
        first, own = 0, self.num_replayed
        for request, rows in enumerate(self._requests):
            computed = np.flatnonzero(np.append(rows.again, np.ones(rows.num_rows, dtype=bool)))
            numbers = np.full(rows.stored + rows.num_rows, ~request)  # of the rows of its inputs
            numbers[computed] = [*range(first, first + rows.replayed), *range(own, own + rows.num_rows)]
            parents[numbers[computed]] = numbers[rows.before[computed]]
            depths[numbers[computed]] = rows.depths[computed]
            if rows.commits or rows.committed:
                last[own + rows.commits - 1 if rows.commits else first + rows.committed - 1] = request
            first, own = first + rows.replayed, own + rows.num_rows
        return parents.tolist(), depths.tolist(), last

    def _state_paths(self, parents: Sequence[int], last: Mapping[int, int]) -> StatePaths:
        """List the rows of `_parents` request by request."""
        order, starts = list[int](), [0]
        replayed = own = 0
        for rows in self._requests:
            order += range(replayed, replayed + rows.replayed)
            order += range(self.num_replayed + own, self.num_replayed + own + rows.num_rows)
            replayed, own = replayed + rows.replayed, own + rows.num_rows
            starts.append(len(order))
        before = dict(zip(order[1:], order, strict=False))
        kept = dict.fromkeys(parent for row, parent in enumerate(parents) if parent >= 0 and before.get(row) != parent)
        places = {row: place for place, row in enumerate(kept)}
        ends = dict(zip(last.values(), last, strict=True))

        def uploaded(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device="cpu").to(self._device)

        return StatePaths(
            uploaded(starts),
            uploaded(order),
            uploaded([max(parent, -1) for parent in parents]),
            uploaded([places.get(row, -1) for row in range(len(parents))]),
            uploaded([ends.get(request, -1) for request in range(len(self._requests))]),
            len(places),
        )

    def convolve(self, inputs: Tensor, taps: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute `causal_conv_ref`, by Triton's kernel if the pass has one."""
        return (causal_conv_ref if self._paths is None else causal_conv_triton)(inputs, taps, weight, bias)

    def update(
        self, matrices: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, reads: bool
    ) -> Tensor:
        """Compute `state_update_ref` of all rows, by Triton's kernel if the pass has one."""
        if self._paths is None:
            return state_update_ref(matrices, q, k, v, beta, decay, self._levels, reads)
        q, k, v, beta, decay = (rows.contiguous() for rows in (q, k, v, beta, decay))
        return state_update_triton(matrices, q, k, v, beta, decay, self._paths, reads)

    def exchange(self, layer: int, own: Tensor) -> Tensor:
        """Store the inputs of the pass's rows, and return all that its rows read, as `taps` indexes them.

        `layer` counts the recurrent layers; `own`: [num_rows, width].
        """
        inputs = torch.cat([*(rows.state.inputs[layer, : rows.stored] for rows in self._requests), own])
        first, row, history = 0, self._num_stored, self._history
        for rows in self._requests:
            kept, end = rows.state.inputs[layer], first + rows.stored - rows.earlier
            new, tree = inputs[row : row + rows.num_rows], history + rows.earlier
            kept[:history] = torch.cat((inputs[end - history : end], new[: rows.commits]))[rows.commits :]
            kept[tree : tree + rows.num_rows - rows.commits] = new[rows.commits :]
            first, row = first + rows.stored, row + rows.num_rows
        return inputs

    def matrices(self, layer: int) -> Tensor:
        """Return a copy of the requests' stored states, fp32 [num_requests, heads, key_dim, value_dim]."""
        return torch.stack([rows.state.matrices[layer] for rows in self._requests])

    def store(self, layer: int, matrices: Tensor) -> None:
        for request in self._stores:
            self._requests[request].state.matrices[layer].copy_(matrices[request])

    def finish(self) -> None:
        """Advance the states' lengths, after the last layer."""
        for rows in self._requests:
            rows.state.length += rows.committed + rows.commits


def _levels(parents: Sequence[int], depths: Sequence[int], last: Mapping[int, int]) -> list[Level]:
    """Group the rows of `StatePass._parents` by depth."""
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
        own, parent = (torch.from_numpy(np.array(column, dtype=np.int64)) for column in (rows_of, above))
        levels.append(Level(own, parent, ended[:, 0], ended[:, 1]))
    return levels


class StateMixer:
    """A layer with a short convolution and a state per head, up to its output projection."""

    reads: bool  # as of `state_update_ref`

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        config: ModelConfig,
        impl: LinearImpl | Literal["triton"],
        dtype: torch.dtype,
        library: CDLL | None,
    ):
        shape = config.shape.recurrent
        assert shape is not None
        self._shape, self._eps, self._dtype = shape, _epsilon(config), dtype
        self._channels = shape.channels(config.shape.hidden_size)
        self.mix, self.rates = (
            make_linear(
                take_projection(weights, prefix, names), _take_bias(weights, prefix, names), dtype, impl, library
            )
            for names in ((*_MIX, "mix_gate"), _rates(shape))
        )
        self.vectors = _take_conv(weights, prefix) | _take_steps(weights, prefix)

    def __call__(self, h: Tensor, rows: StatePass, layer: int) -> Tensor:
        """Return the mixed rows before the output projection, [num_rows, heads * value_dim]."""
        shape, channels = self._shape, self._channels
        mixed = self.mix(h)
        inputs = rows.exchange(layer, torch.cat((mixed[:, :channels], self.rates(h)), 1))
        vectors = self.vectors
        made = silu(rows.convolve(inputs[:, :channels], rows.taps, vectors["conv"], vectors.get("conv_bias")))
        qk, v = made.split([2 * shape.key_heads * shape.key_dim, shape.heads * shape.value_dim], 1)
        qk = qk.reshape(len(qk), 2 * shape.key_heads, shape.key_dim)
        self.normalize(qk)
        each = shape.heads // shape.key_heads
        q, k = (x.repeat(1, each, 1) if shape.tiled else x.repeat_interleave(each, 1) for x in qk.chunk(2, 1))
        rates = inputs[rows.taps[:, -1], channels:].float()
        step = softplus(rates[:, -shape.heads :] + vectors["dt_bias"])
        beta = self.factor(rates, step)
        matrices = rows.matrices(layer)
        v = v.reshape(len(v), shape.heads, shape.value_dim)
        out = rows.update(matrices, q, k, v, beta, torch.exp(vectors["rate"] * step), self.reads)
        rows.store(layer, matrices)
        out, v = out[rows.num_replayed :], v[rows.num_replayed :]
        return self.gated(out, v, silu(mixed[:, channels:].float())).to(self._dtype)

    def normalize(self, qk: Tensor) -> None:
        """Normalise queries and keys, fp32 [rows, 2 * key_heads, key_dim], in place."""

    def factor(self, rates: Tensor, step: Tensor) -> Tensor:
        """Return beta of `state_update_ref` from a row's further inputs and time step, fp32 [rows, heads]."""
        raise NotImplementedError

    def gated(self, out: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        """Return the rows' outputs, [num_rows, heads * value_dim], from what the states give for their queries.

        out, v: fp32 [num_rows, heads, value_dim]; gate: [num_rows, heads * value_dim].
        """
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        return self.mix.nbytes + self.rates.nbytes + sum(vector.nbytes for vector in self.vectors.values())


class DeltaMixer(StateMixer):
    """A Gated DeltaNet (arXiv 2412.06464)."""

    reads = True

    @cached_property
    def _scale(self) -> Tensor:
        # `norm_heads` divides by the root of the mean square; a query is also divided by sqrt(key_dim).
        key_heads, key_dim = self._shape.key_heads, self._shape.key_dim
        scale = torch.full((2 * key_heads, 1), key_dim**-0.5, dtype=torch.float32, device=self.vectors["conv"].device)
        scale[:key_heads] = 1 / key_dim
        return scale

    def normalize(self, qk: Tensor) -> None:
        norm_heads(qk, self._scale, _L2_EPS / self._shape.key_dim)

    def factor(self, rates: Tensor, step: Tensor) -> Tensor:
        beta = sigmoid(rates[:, : self._shape.heads])
        return beta * 2 if self._shape.doubled else beta

    def gated(self, out: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        norm_heads(out, self.vectors["gain"].expand(self._shape.heads, -1), self._eps)
        return out.flatten(1) * gate


class Mamba2Mixer(StateMixer):
    """A layer of Mamba 2 (arXiv 2405.21060), whose gate precedes its norm."""

    reads = False

    def factor(self, rates: Tensor, step: Tensor) -> Tensor:
        return step

    def gated(self, out: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        out = ((out + v * self.vectors["skip"][:, None]).flatten(1) * gate).unflatten(1, (self._shape.key_heads, -1))
        norm_heads(out, self.vectors["gain"].view(self._shape.key_heads, -1), self._eps)
        return out.flatten(1)


class ConvMixer:
    """LFM2's gated convolution, up to its output projection."""

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        config: ModelConfig,
        impl: LinearImpl | Literal["triton"],
        dtype: torch.dtype,
        library: CDLL | None,
    ):
        self._dtype = dtype
        self.mix = make_linear(take_projection(weights, prefix, ("mix",)), None, dtype, impl, library)
        self.conv = _take_conv(weights, prefix)["conv"]

    def __call__(self, h: Tensor, rows: StatePass, layer: int) -> Tensor:
        """Return the mixed rows before the output projection, [num_rows, hidden_size]."""
        before, after, x = self.mix(h).chunk(3, 1)
        inputs = rows.exchange(layer, before * x)
        mixed = rows.convolve(inputs, rows.taps[rows.num_replayed :], self.conv)
        return (mixed * after.float()).to(self._dtype)

    @property
    def nbytes(self) -> int:
        return self.mix.nbytes + self.conv.nbytes


def make_mixer(
    weights: Weights,
    i: int,
    config: ModelConfig,
    impl: LinearImpl | Literal["triton"],
    dtype: torch.dtype,
    library: CDLL | None = None,
) -> StateMixer | ConvMixer:
    """Pop the parameters of the mixer of layer i, and return it."""
    assert config.shape.recurrent is not None
    kinds: dict[str, type[StateMixer] | type[ConvMixer]]
    kinds = {"delta": DeltaMixer, "mamba2": Mamba2Mixer, "conv": ConvMixer}
    return kinds[config.shape.recurrent.kind](weights, f"layers.{i}.", config, impl, dtype, library)


class RecurrentLayer(Layer):
    """A layer with a mixer in place of attention."""

    def __init__(
        self,
        weights: Weights,
        i: int,
        config: ModelConfig,
        impl: LinearImpl,
        dtype: torch.dtype,
        library: CDLL | None,
        min_rows: int,
    ):
        super().__init__(weights, i, config, impl, dtype, library, min_rows)
        self.mixer = make_mixer(weights, i, config, impl, dtype, library)
