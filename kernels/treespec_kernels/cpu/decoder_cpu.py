"""Runs a whole pass of a decoder on a CPU in one call of C++, compiled on the user's machine.

The source is `decoder_cpu.cpp`; the reference is the eager decoder in treespec/models/decoder.py, whose pass of a small
model is bound by call overhead: 25 torch calls per layer at 1 to 15 us each.
"""

import copy
import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec_kernels.attention.tree_batch import UpdatedRows
from treespec_kernels.cpu.compiled_experts import CompiledExperts, expert_linears
from treespec_kernels.cpu.compiled_plan import CompiledPlan, TreeBatch
from treespec_kernels.cpu.compiled_updates import set_updated
from treespec_kernels.cpu.cpu_library import function_address, l3_bytes
from treespec_kernels.cpu.decoder_library import LANES, STRUCTS, PanelLinear, Weight
from treespec_kernels.cpu.huge_pages import HugePages
from treespec_kernels.linear.quantized import BLOCK_TYPES, BlockWeight

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu")  # in the order of the C++ enum

_NORMS = ("attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm", "input_norm")
_LINEARS = ("qkv", "o", "gate_up", "down", "mix", "mix_out")
_INPUTS = ("input_gate", "input_out")
_FLOATS = ("head_norm", "sinks", "conv", "conv_bias", "dt_bias", "rate", "skip", "gain")
_NormStruct, _LayerStruct, _LinearStruct = STRUCTS["Norm"], STRUCTS["Layer"], STRUCTS["Linear"]


class CompiledLayerWeights(NamedTuple):
    """Weights of one layer. Projections are as `PanelLinear` takes them, dense ones in the model's dtype."""

    attn_norm: Tensor | None  # norms are [hidden_size]; None for inputs that are not normalised
    mlp_norm: Tensor | None
    head_norm: Tensor | None  # norm of each head of Q, K and maybe V, [up to num_heads + 2 num_kv_heads, head_dim]
    qkv: Weight | Sequence[Weight] | None  # None in the first layer of a draft head, which is given these projections
    qkv_bias: Tensor | None
    o: Weight | Sequence[Weight] | None  # None in a layer without attention
    o_bias: Tensor | None
    # gate and up stacked; only up in an MLP without a gate. Of the shared expert in a sparse layer, None without one,
    # and in a layer without an MLP
    gate_up: Weight | Sequence[Weight] | None
    gate_up_bias: Tensor | None
    down: Weight | Sequence[Weight] | None
    down_bias: Tensor | None
    ropes: tuple[int, int]  # indices of the ropes of queries and of keys
    window: int | None  # number of positions that a row attends to, its own included; None for all
    attn_norm_bias: Tensor | None = None
    mlp_norm_bias: Tensor | None = None
    attn_post_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None
    sinks: Tensor | None = None  # [num_heads], scores of attention sinks
    experts: CompiledExperts | None = None
    # Recurrent layers only, up to `gain`. mix: projections to the convolution's inputs, beta (not Mamba 2), decay and
    # mix_gate, or LFM2's three; mix_out: output projection
    mix: Weight | Sequence[Weight] | None = None
    mix_bias: Tensor | None = None
    mix_out: Weight | Sequence[Weight] | None = None
    mix_out_bias: Tensor | None = None
    conv: Tensor | None = None  # [kernel, channels]
    conv_bias: Tensor | None = None  # [channels]
    dt_bias: Tensor | None = None  # [state_heads]; this and the next three: layers with a state per head
    rate: Tensor | None = None  # factor of softplus in the logarithm of the decay, [state_heads]
    skip: Tensor | None = None  # Mamba 2's factor on the value that is added to the output, [state_heads]
    gain: Tensor | None = None  # weight of the output norm, [value_dim]; of Mamba 2's, [state_heads * value_dim]
    # If layers are of unequal sizes:
    num_kv_heads: int | None = None  # None for the architecture's
    parts: int = 1  # its head size, as a multiple of the library's
    plane: int | None = None  # first cache plane of its K/V; None if every layer has one plane
    owns_kv: bool = True  # whether it writes K/V, instead of reading those of an earlier layer
    input_gate: Weight | Sequence[Weight] | None = None  # this and the next two: for per-layer inputs (`InputTable`)
    input_out: Weight | Sequence[Weight] | None = None
    input_norm: Tensor | None = None
    scalar: Tensor | None = None  # factor on the residual stream after the layer, [1]


class InputTable(NamedTuple):
    """Weights of per-layer inputs, norm(project x) + embed[token] * scale, where x is the token's embedding."""

    embed: Tensor | BlockWeight  # [vocab, num_layers * size]
    project: Weight | Sequence[Weight]  # [num_layers * size, hidden_size]
    gain: Tensor  # weight of the norm, [size]
    scale: float
    eps: float  # epsilon of the norm


class Architecture(NamedTuple):
    """Architecture of a model. Sizes are multiples of 16 (`unsupported_reason`)."""

    num_heads: int
    num_kv_heads: int
    norm_eps: float
    query_scale: float  # factor on the attention scores
    activation: str = "silu"  # one of ACTIVATIONS
    layer_norm: bool = False  # LayerNorm instead of RMSNorm
    parallel: bool = False  # attention and MLP of a layer have the same input
    num_ropes: int = 1  # number of different ropes, 0 for learned positions
    embed_scale: float = 1.0  # factor on the embeddings
    score_cap: float | None = None  # soft cap c: scores x become c tanh(x / c); None for no cap
    wide_head_norm: bool = False  # the norms of q and k are each over all heads together
    norm_after_rope: bool = False  # the norms of q and k follow the rotation
    output_gate: bool = False  # attention is multiplied by the sigmoid of further projections, after those of V
    kernel: int = 1  # recurrent layers from here to `step_scale`, as in `RecurrentShape`
    channels: int = 0  # channels of the convolution
    key_heads: int = 0
    state_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    tiled: bool = False
    rates: int = 0
    mixer_eps: float = 0.0  # epsilon of the output norm
    mixer_norm: bool = True  # whether Mamba 2's outputs are normalised, or only multiplied by `gain`
    beta_scale: float = 1.0
    step_scale: float = 1.0  # factor on Mamba 2's time steps, before their bias
    value_scale: float = 1.0  # factor on the values of attention
    widest_head: int = 0  # head size of the rotations; 0 for that of the library


class PassEntries(NamedTuple):
    """Addresses and sizes with which another library runs a model's passes.

    All are 0 for a block draft, which runs no pass in the call that grows trees.
    """

    forward: int  # addresses of the functions
    probs: int
    model: int  # addresses of their first arguments
    head: int
    num_layers: int
    num_learned_positions: int  # number of learned positions, or 0
    hidden_bytes: int  # size of one row's hidden state
    threads: int
    pairs: int = 0  # this and the rest: of a draft head, from `PairInputs`; 0 for an SSM
    pairing: int = 0
    qkv_bytes: int = 0
    norm_output: bool = False


class PairInputs:
    """Inputs of a draft head's pass: a token's embedding and the feature of the token before it, a pair."""

    STREAMS = ("feature", "normed feature", "product")

    def __init__(
        self,
        library: ctypes.CDLL,  # from `decoder_library.build`, for the dtype of the embeddings
        # Weight and bias or None of the product of a pair, [..., 2 * hidden_size]
        product: tuple[Weight | Sequence[Weight], Tensor | None],
        embed: Tensor | BlockWeight,  # embeddings, [vocab_size, hidden_size], contiguous
        embed_norm: Tensor,  # weights of the RMSNorms, [hidden_size]
        feature_norm: Tensor,
        eps: float,  # epsilon of the norms
        # Start of the residual stream, one of `STREAMS`; unless it is the product, that is the layer's projections
        stream: str,
        num_threads: int,  # number of threads that share the products
        integer: bool = False,
    ):
        rows = embed.rows if isinstance(embed, BlockWeight) else embed
        assert rows.is_contiguous()
        self._library, self._threads, self._embed = library, num_threads, rows
        self._product, self._projects = PanelLinear(library, *product, integer), stream != "product"
        self._norms = [norm.float().contiguous() for norm in (embed_norm, feature_norm)]
        self.nbytes = self._product.nbytes
        self._pairing = STRUCTS["Pairing"](
            ctypes.addressof(self._product.struct),
            rows.data_ptr(),
            BLOCK_TYPES[embed.kind].number if isinstance(embed, BlockWeight) else 0,
            *(_NormStruct(norm.data_ptr()) for norm in self._norms),
            len(embed_norm),
            self.STREAMS.index(stream),
            eps,
        )

    def __call__(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream before the first layer, and this layer's projections or None for the stream's.

        Args:
            tokens: int64 [num_rows].
            features: [num_rows, hidden_size], of the tokens before them.
        """
        features, tokens = features.contiguous(), tokens.contiguous()
        assert features.shape == (len(tokens), len(self._norms[0]))
        inputs, qkv = torch.empty_like(features), None
        if self._projects:
            qkv = torch.empty(len(tokens), self._product.out_features, dtype=features.dtype, device="cpu")
        self._library.treespec_pairs(
            ctypes.byref(self._pairing),
            tokens.data_ptr(),
            features.data_ptr(),
            len(tokens),
            inputs.data_ptr(),
            None if qkv is None else qkv.data_ptr(),
            self._threads,
        )
        return inputs, qkv

    def add_to(self, entries: PassEntries, norm_output: bool) -> PassEntries:
        """Return the entries of the head's layers completed with those of its inputs."""
        pairs, pairing = function_address(self._library.treespec_pairs), ctypes.addressof(self._pairing)
        itemsize = entries.hidden_bytes // len(self._norms[0])
        qkv_bytes = self._product.out_features * itemsize if self._projects else 0
        return entries._replace(pairs=pairs, pairing=pairing, qkv_bytes=qkv_bytes, norm_output=norm_output)


class CompiledModel:
    """Model with packed weights that runs in the library."""

    def __init__(
        self,
        library: ctypes.CDLL,  # from `build`, for this head size and dtype
        dtype: torch.dtype,
        architecture: Architecture,
        embed: Tensor | BlockWeight,  # embeddings [vocab, hidden]
        positions: Tensor | None,  # learned positions [positions, hidden], or None
        layers: Iterable[CompiledLayerWeights],  # weights of the layers in order, packed one by one
        final_norm: tuple[Tensor, Tensor | None],  # weight of the final norm, [hidden], and its bias or None
        head: Weight | Sequence[Weight],  # weight of the LM head, [vocab, hidden]
        num_threads: int,  # number of threads of a pass; bits do not depend on it
        integer: bool = False,  # quantise activations to int8 before products with quantised weights
        inputs: InputTable | None = None,  # for per-layer inputs
    ):
        self._library, self._threads, self.num_ropes = library, num_threads, architecture.num_ropes
        # From the last pass over whole trees: rotation, cache and the struct with their addresses
        self._cached_batch: tuple[Tensor, Tensor, Any] | None = None
        self._round_arguments: tuple[Any, Any, dict[str, int]] | None = None
        self._integer = integer
        self._memory = HugePages()
        self._num_learned_positions = 0 if positions is None else len(positions)
        # Keeps the tensors alive whose addresses are in the structs.
        rows = embed.rows if isinstance(embed, BlockWeight) else embed
        self._held: list[Tensor] = [rows] if positions is None else [rows, positions]
        self._linears: list[PanelLinear] = []
        self._structs: list[Any] = []
        self.dtype, self.hidden_size = dtype, embed.shape[1]
        structs = list[ctypes.Structure]()
        for layer in layers:
            structs.append(self._layer(layer, len(structs), architecture.num_kv_heads))
            if layer.plane is None:
                structs[-1].plane = sum(not struct.conv for struct in structs[:-1])
        self._layers = (_LayerStruct * len(structs))(*structs)
        table = inputs and inputs.embed
        table_rows = table.rows if isinstance(table, BlockWeight) else table
        self._held += [] if table_rows is None else [table_rows]
        numbers = architecture._asdict() | {"activation": ACTIVATIONS.index(architecture.activation)}
        self._model = STRUCTS["Model"](
            layers=ctypes.addressof(self._layers),
            embed=rows.data_ptr(),
            embed_type=BLOCK_TYPES[embed.kind].number if isinstance(embed, BlockWeight) else 0,
            positions=None if positions is None else positions.data_ptr(),
            final_norm=self._norm(*final_norm),
            input_embed=None if table_rows is None else table_rows.data_ptr(),
            input_type=BLOCK_TYPES[table.kind].number if isinstance(table, BlockWeight) else 0,
            input_size=0 if inputs is None else len(inputs.gain),
            input_project=self._linear(inputs and inputs.project, None),
            input_norm=self._norm(inputs and inputs.gain, None),
            input_scale=0.0 if inputs is None else inputs.scale,
            input_eps=0.0 if inputs is None else inputs.eps,
            hidden=self.hidden_size,
            mlp=max(layer.down.inputs for layer in self._layers),
            threads=num_threads,
            **(numbers | {"score_cap": architecture.score_cap or 0.0}),
        )
        self._head = self._linear(head, None)
        self.vocab_size = self._head.stride
        self.streams = self.nbytes > (l3_bytes() or math.inf)  # whether weights are read past the caches
        if self.streams:
            for linear in (self._head, *(linear for layer in self._layers for linear in _linears(layer))):
                for matrix in _matrices(linear):
                    matrix.streams = True

    def keep(self, layers: Sequence[int], windows: Sequence[int | None], planes: Sequence[int]) -> "CompiledModel":
        """Return a model of only these layers, with these windows and planes, that shares the weights."""
        model = copy.copy(self)
        model._cached_batch = model._round_arguments = None
        model._layers = (_LayerStruct * len(layers))(*(self._layers[i] for i in layers))
        for layer, window, plane in zip(model._layers, windows, planes, strict=True):
            layer.window, layer.plane = window or 0, plane
        model._model = STRUCTS["Model"].from_buffer_copy(self._model)
        model._model.layers = ctypes.addressof(model._layers)
        return model

    @property
    def weight_forms(self) -> list[tuple[object, ...]]:
        """The forms of each layer's matrices, which are equal if the same kernels compute them."""
        return [
            tuple(part for name in _LINEARS for part in _forms(getattr(layer, name)))
            + tuple(part for linear in expert_linears(layer)[:2] for part in _forms(linear))
            for layer in self._layers
        ]

    @property
    def nbytes(self) -> int:
        """Size of all weights in memory, in bytes."""
        return sum(tensor.nbytes for tensor in self._held)

    def _layer(self, layer: CompiledLayerWeights, index: int, num_kv_heads: int) -> ctypes.Structure:
        norms = {name: self._norm(getattr(layer, name), getattr(layer, f"{name}_bias", None)) for name in _NORMS}
        linears = {
            name: self._linear(getattr(layer, name), getattr(layer, f"{name}_bias", None), padded=True)
            for name in (*_LINEARS, *_INPUTS)
        }
        floats = {name: self._floats(getattr(layer, name)) for name in _FLOATS}
        experts = None
        if layer.experts is not None:
            packed = layer.experts.pack(self._linear, self._floats, self._norm)
            self._structs += packed
            experts = ctypes.addressof(packed[0])
        ropes = dict(zip(("query_rope", "rope"), layer.ropes, strict=True))
        kv = {"kv_heads": layer.num_kv_heads or num_kv_heads, "parts": layer.parts, "owns_kv": layer.owns_kv}
        kv |= {"plane": layer.plane or 0, "normed_heads": 0 if layer.head_norm is None else len(layer.head_norm)}
        scalar = 1.0 if layer.scalar is None else float(layer.scalar)
        parts = norms | linears | floats | ropes | kv
        return _LayerStruct(**parts, window=layer.window or 0, experts=experts, index=index, scalar=scalar)

    def _floats(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._held.append(tensor.float().contiguous().clone())
        return self._held[-1].data_ptr()

    def _norm(self, weight: Tensor | None, bias: Tensor | None) -> ctypes.Structure:
        return _NormStruct(self._floats(weight), self._floats(bias))

    def _linear(
        self, weight: Weight | Sequence[Weight] | None, bias: Tensor | None, padded: bool = False
    ) -> ctypes.Structure:
        if weight is None:
            return _LinearStruct()
        packed = PanelLinear(self._library, weight, bias, self._integer, self._memory, padded)
        self._linears.append(packed)
        self._held += packed.held
        return packed.struct

    def forward(
        self,
        tokens: Tensor,  # int64 [num_rows]
        plan: CompiledPlan,  # from `plan_compiled`
        rotation: Tensor,  # fp32 [positions, 2 * num_ropes, head_dim], cos and signed sin of each rope, contiguous
        kv: Tensor,  # [num_planes, 2, num_pages, num_kv_heads, PAGE_SIZE, head_dim] in the model's dtype, contiguous
        num_layers: int | None = None,  # number of layers to run; None for all
        learned_positions: Tensor | None = None,  # int64 [num_rows], indices into the learned position embeddings
        # [num_rows, hidden_size], the residual stream before the first layer; None for the embeddings
        inputs: Tensor | None = None,
        # [num_rows, (num_heads + 2 * num_kv_heads) * head_dim], the first layer's projections; None for those of
        # `inputs`
        qkv: Tensor | None = None,
        # [num_rows, len(state_layers), hidden_size], receives the residual stream before `state_layers`
        states: Tensor | None = None,
        state_layers: Sequence[int] = (),  # the number of layers means after the last one
        updated: Sequence[UpdatedRows] = (),  # rows with the updates of adapters, `CompiledUpdates`
    ) -> Tensor:
        """Run a pass: return the hidden states after the final norm, and write the rows' K/V to their slots.

        All hidden states, [num_rows, hidden_size], are in the model's dtype and contiguous.
        """
        assert tokens.dtype == torch.int64 and tokens.is_contiguous() and len(tokens) == plan.num_rows
        layers = len(self._layers) if num_layers is None else num_layers
        assert qkv is None or inputs is not None
        for tensor in (inputs, qkv, states):
            assert tensor is None or (
                tensor.is_contiguous() and tensor.dtype == self.dtype and len(tensor) == len(tokens)
            )
        out = torch.empty(plan.num_rows, self.hidden_size, dtype=self.dtype, device="cpu")
        layer_indices = (ctypes.c_int64 * len(state_layers))(*state_layers)
        batch = self._batch(plan, rotation, kv, layers)
        set_updated(batch, updated)
        batch.tokens, batch.out = tokens.data_ptr(), out.data_ptr()
        batch.learned_positions = None if learned_positions is None else learned_positions.data_ptr()
        batch.inputs, batch.qkv, batch.states = (
            None if tensor is None else tensor.data_ptr() for tensor in (inputs, qkv, states)
        )
        batch.state_layers, batch.num_states = ctypes.addressof(layer_indices), len(state_layers)
        self._library.treespec_forward(ctypes.byref(self._model), ctypes.byref(batch))
        return out

    def tree_logits(
        self,
        trees: TreeBatch,
        rotation: Tensor,  # this, `kv` and `updated`: as in `forward`
        kv: Tensor,
        updated: Sequence[UpdatedRows] = (),
    ) -> Tensor:
        """Run a pass over whole trees: return the logits, and write node i's K/V to its request's slot context + i."""
        batch = self._tree_batch(rotation, kv)
        set_updated(batch, updated)
        logits = torch.empty(trees.num_rows, self.vocab_size, dtype=self.dtype, device="cpu")
        pointers = [ctypes.byref(struct) for struct in (self._model, self._head, batch, trees.struct)]
        placed = self._library.treespec_tree_logits(*pointers, logits.data_ptr())
        assert placed, "a tree outgrew its request's pages"
        return logits

    def _tree_batch(self, rotation: Tensor, kv: Tensor) -> ctypes.Structure:
        """Return the arguments of a pass over whole trees, without the trees."""
        if self._cached_batch is None or self._cached_batch[0] is not rotation or self._cached_batch[1] is not kv:
            assert rotation.is_contiguous() and rotation.dtype == torch.float32 and kv.is_contiguous()
            arguments = {"rotation": rotation.data_ptr(), "cache": kv.data_ptr(), "num_pages": kv.shape[2]}
            self._cached_batch = rotation, kv, STRUCTS["Batch"](num_layers=len(self._layers), **arguments)
        return self._cached_batch[2]

    def round_arguments(self, rotation: Tensor, kv: Tensor, pools: ctypes.Array[Any]) -> dict[str, Any]:
        """Return the model's part of a `Rounds` (rounds_cpu.h); arguments as in `tree_logits` and `walk`."""
        batch = self._tree_batch(rotation, kv)
        set_updated(batch, ())
        if self._round_arguments is None or self._round_arguments[0] is not pools:
            walks = STRUCTS["Walks"](None, self.vocab_size, len(pools), self._threads, ctypes.addressof(pools))
            arguments = {
                "tree_logits": function_address(self._library.treespec_tree_logits),
                "walk": function_address(self._library.treespec_walk),
                "model": ctypes.addressof(self._model),
                "head": ctypes.addressof(self._head),
                "walks": ctypes.addressof(walks),
                "logit_bytes": self.vocab_size * self.dtype.itemsize,
            }
            self._round_arguments = pools, walks, arguments
        return self._round_arguments[2] | {"batch": ctypes.addressof(batch)}

    def walk(self, trees: TreeBatch, logits: Tensor, pools: ctypes.Array[Any]) -> tuple[list[np.ndarray], list[int]]:
        """Return the accepted path of each tree, int64, root first, and the token after it, by the tree's rule.

        Compacts the pools to these paths. If the caller must choose a token, the path ends before it, the token is -1,
        and nothing is compacted. The path of a tree whose logits are not finite is empty; of a tree that is not greedy,
        only the first logit of each row is checked.

        Args:
            logits: [num_rows, vocab_size] in the model's dtype, of the trees' nodes.
            pools: from `kv_pools`.
        """
        assert logits.is_contiguous() and logits.dtype == self.dtype and logits.shape[1] == self.vocab_size
        sizes = self.vocab_size, len(pools), self._threads
        walks = STRUCTS["Walks"](logits.data_ptr(), *sizes, ctypes.addressof(pools), *trees.walk_outputs)
        self._library.treespec_walk(ctypes.byref(trees.struct), ctypes.byref(walks))
        return trees.walked()

    def write_context(self, rows: Tensor, plan: CompiledPlan, rotation: Tensor, kv: Tensor) -> None:
        """Write the projections of rows, [num_rows, hidden_size], to their slots, as K and V of all layers."""
        assert rows.is_contiguous() and rows.dtype == self.dtype and len(rows) == plan.num_rows
        batch = self._batch(plan, rotation, kv, len(self._layers))
        batch.inputs = rows.data_ptr()
        self._library.treespec_write_context(ctypes.byref(self._model), ctypes.byref(batch))

    def _batch(self, plan: CompiledPlan, rotation: Tensor, kv: Tensor, num_layers: int) -> ctypes.Structure:
        """Return the arguments of a pass, without its inputs and outputs."""
        assert rotation.is_contiguous() and rotation.dtype == torch.float32
        assert rotation.shape[1] == 2 * self.num_ropes
        assert kv.is_contiguous() and kv.dtype == self.dtype
        rows, step = plan.rows.data_ptr(), plan.num_rows * 8
        return STRUCTS["Batch"](
            plan.num_rows,
            num_layers,
            slots=plan.slots.data_ptr(),
            tables=rows,
            direct=rows + step,
            starts=rows + 2 * step,
            counts=rows + 3 * step,
            pages=plan.pages.data_ptr(),
            paths=plan.paths.data_ptr(),
            positions=plan.positions.data_ptr(),
            rotation=rotation.data_ptr(),
            cache=kv.data_ptr(),
            num_pages=kv.shape[2],
            **({} if plan.states is None else plan.states.arguments),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [num_rows, vocab_size] of hidden [num_rows, hidden_size], both in the model's dtype."""
        out = torch.empty(len(hidden), self.vocab_size, dtype=self.dtype, device="cpu")
        self._run_head(self._library.treespec_linear, hidden, out)
        return out

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest logit of each row in fp32 (NaN if any logit is NaN), and its first token, int64.

        Logits are [num_rows, vocab_size] in the model's dtype.
        """
        assert logits.is_contiguous() and logits.dtype == self.dtype and logits.shape[1] == self.vocab_size
        values = torch.empty(len(logits), dtype=torch.float32, device="cpu")
        tokens = torch.empty(len(logits), dtype=torch.int64, device="cpu")
        self._library.treespec_best(
            logits.data_ptr(), len(logits), self.vocab_size, values.data_ptr(), tokens.data_ptr(), self._threads
        )
        return values, tokens

    @property
    def entries(self) -> PassEntries | None:
        """Entry points for another library; None if this one cannot compute `probs` in one call."""
        if self.vocab_size % LANES:
            return None
        return PassEntries(
            function_address(self._library.treespec_forward),
            function_address(self._library.treespec_probs),
            ctypes.addressof(self._model),
            ctypes.addressof(self._head),
            len(self._layers),
            self._num_learned_positions,
            self.hidden_size * self.dtype.itemsize,
            self._threads,
        )

    def probs(self, hidden: Tensor) -> Tensor:
        """Return the softmax of fp32 logits, fp32 [num_rows, vocab_size], of hidden [num_rows, hidden_size]."""
        if self.vocab_size % LANES:  # the library writes only whole vectors of fp32, so this path rounds the logits
            return torch.softmax(self.logits(hidden).float(), -1)
        out = torch.empty(len(hidden), self.vocab_size, dtype=torch.float32, device="cpu")
        self._run_head(self._library.treespec_probs, hidden, out)
        return out

    def _run_head(self, entry: Callable[..., None], hidden: Tensor, out: Tensor) -> None:
        assert hidden.dtype == self.dtype and hidden.shape[1] == self.hidden_size
        hidden = hidden.contiguous()
        entry(ctypes.byref(self._head), hidden.data_ptr(), len(hidden), out.data_ptr(), self._threads)


def _linears(layer: ctypes.Structure) -> list[ctypes.Structure]:
    """Return all projections of a layer."""
    return [*(getattr(layer, name) for name in (*_LINEARS, *_INPUTS)), *expert_linears(layer)]


def _matrices(linear: ctypes.Structure | None) -> Iterator[ctypes.Structure]:
    """Yield the matrices of a product."""
    while linear is not None:
        yield linear
        linear = _LinearStruct.from_address(linear.rest) if linear.rest else None


def _forms(linear: ctypes.Structure) -> Iterator[tuple[int, ...]]:
    """Yield the sizes and the form of each matrix of a product."""
    for part in _matrices(linear):
        yield part.inputs, part.outputs, part.code, part.group, part.has_min, part.integer
