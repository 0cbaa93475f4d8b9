"""Runs a decoder's whole pass on a CPU in one call of C++, compiled on the user's machine.

The source is `decoder_cpu.cpp`; its specification is the eager decoder in treespec/models/decoder.py. The eager pass of
a small model is bound by call overhead: 25 torch calls per layer at 1 to 15 us each. Inductor does not help: half a
layer (o, norm, MLP) took 110 us with it and 80 us eagerly, for 2 rows of 256 on one thread.

It needs only a C++ compiler, no headers of torch or Python; a library compiles in 3 seconds (`cpu_library`).
"""

import copy
import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows
from treespec_kernels.cpu.cpu_library import compile_library
from treespec_kernels.linear.quantized import QuantizedWeight

SOURCE = Path(__file__).with_name("decoder_cpu.cpp")
PARTS = tuple(  # included files
    SOURCE.with_name(name)
    for name in (
        "vectors_cpu.h",
        "batch_cpu.h",
        "parallel_cpu.h",
        "pointwise_cpu.h",
        "attention_cpu.h",
        "quantized_cpu.h",
    )
)
DTYPES = (torch.bfloat16, torch.float32)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")  # in the order of the C++ enum

_LANES, _PANEL = 16, 64


class _Linear(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "bits", "group")),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
    )


class _Norm(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Norm) for name in ("attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm")),
        ("head_norm", ctypes.c_void_p),
        *((name, _Linear) for name in ("qkv", "o", "gate_up", "down")),
        ("rope", ctypes.c_int64),
        ("window", ctypes.c_int64),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        ("embed", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("final_norm", _Norm),
        *((name, ctypes.c_int64) for name in ("hidden", "heads", "kv_heads", "mlp", "threads")),
        *((name, ctypes.c_int64) for name in ("activation", "layer_norm", "parallel", "ropes")),
        *((name, ctypes.c_float) for name in ("eps", "scale", "embed_scale", "score_cap")),
    )


_POINTERS = (
    "tokens",
    "places",
    "slots",
    "tables",
    "direct",
    "starts",
    "counts",
    "pages",
    "paths",
    "positions",
    "rotation",
    "cache",
)


class _Batch(ctypes.Structure):
    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("num_layers", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("num_pages", ctypes.c_int64),
        ("out", ctypes.c_void_p),
    )


@functools.cache
def build(compiler: tuple[str, ...], head_dim: int, dtype: torch.dtype, folder: Path) -> ctypes.CDLL:
    """The library for one head size, a multiple of 16, and one dtype, float32 or bfloat16; as `compile_library`."""
    defines = f"-DHEAD_DIM={head_dim}", f"-DBF16={int(dtype == torch.bfloat16)}"
    library = compile_library(compiler, (SOURCE, *PARTS), defines, folder)
    library.treespec_forward.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    library.treespec_linear.argtypes = (
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_int64,
    )
    library.treespec_pack.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    library.treespec_probs.argtypes = library.treespec_linear.argtypes
    library.treespec_best.argtypes = (
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
    )
    for name in ("forward", "linear", "pack", "probs", "best"):
        getattr(library, f"treespec_{name}").restype = None
    return library


def pack(weight: Tensor) -> Tensor:
    """[outputs, inputs] -> [panels, inputs, 64]; bf16 with pairs of inputs together, [panels, inputs / 2, 64, 2]."""
    outputs, inputs = weight.shape
    panels = -(-outputs // _PANEL)
    whole = torch.nn.functional.pad(weight, (0, 0, 0, panels * _PANEL - outputs)).view(panels, _PANEL, inputs)
    if weight.dtype == torch.bfloat16:
        return whole.view(panels, _PANEL, inputs // 2, 2).transpose(1, 2).contiguous()
    return whole.transpose(1, 2).contiguous()


def in_panels(tensor: Tensor) -> Tensor:
    """[outputs, groups] -> fp32 [panels, groups, 64], padded with zeros."""
    outputs, groups = tensor.shape
    padded = torch.nn.functional.pad(tensor.float(), (0, 0, 0, -outputs % _PANEL))
    return padded.view(-1, _PANEL, groups).transpose(1, 2).contiguous()


class PackedLinear:
    """One linear layer in the library's layout. `struct` points into `held`.

    Args:
        library: from `build`.
        weight: [outputs, inputs] in the library's dtype, or quantised with an even number of inputs.
        bias: [outputs] or None.
    """

    def __init__(self, library: ctypes.CDLL, weight: Tensor | QuantizedWeight, bias: Tensor | None):
        self.held: list[Tensor] = []
        self.outputs, self.inputs, bits, group, scale, zero = 0, 0, 0, 0, None, None
        if isinstance(weight, QuantizedWeight):
            weight.check()
            self.outputs, self.inputs, bits, group = (
                weight.out_features,
                weight.in_features,
                weight.bits,
                weight.group,
            )
            panels = -(-self.outputs // _PANEL)
            values = weight.values.contiguous()
            packed = torch.empty(panels * _PANEL * self.inputs * bits // 8, dtype=torch.uint8, device="cpu")
            library.treespec_pack(values.data_ptr(), self.outputs, self.inputs, bits, packed.data_ptr())
            scale = self._hold(in_panels(weight.scale))
            zero = None if weight.zero is None else self._hold(in_panels(weight.zero))
        else:
            self.outputs, self.inputs = weight.shape
            packed = pack(weight)
        padded = None if bias is None else torch.nn.functional.pad(bias.float(), (0, -self.outputs % _PANEL))
        self.struct = _Linear(
            self._hold(packed),
            None if padded is None else self._hold(padded.contiguous().clone()),
            self.inputs,
            self.outputs,
            bits,
            group,
            scale,
            zero,
        )

    def _hold(self, tensor: Tensor) -> int:
        self.held.append(tensor)
        return tensor.data_ptr()


class NormWeights(NamedTuple):
    """Weights of a norm, [hidden_size] each; RMSNorm has no bias."""

    weight: Tensor
    bias: Tensor | None = None


class LayerWeights(NamedTuple):
    """Weights of one layer. Projections are [out_features, in_features] in the model's dtype or quantised.

    Gate and up are stacked; without a gate, only up. `head_norm`, the norm of each head of q and k, is
    [num_heads + num_kv_heads, head_dim]. `rope`: index of the layer's rope. `window`: how many positions a row sees,
    its own included; None for all.
    """

    attn_norm: NormWeights
    mlp_norm: NormWeights
    attn_post_norm: NormWeights | None
    mlp_post_norm: NormWeights | None
    head_norm: Tensor | None
    qkv: Tensor | QuantizedWeight
    qkv_bias: Tensor | None
    o: Tensor | QuantizedWeight
    o_bias: Tensor | None
    gate_up: Tensor | QuantizedWeight
    gate_up_bias: Tensor | None
    down: Tensor | QuantizedWeight
    down_bias: Tensor | None
    rope: int
    window: int | None


class Architecture(NamedTuple):
    """The architecture of a model. Sizes are multiples of 16 (`unsupported_reason`).

    layer_norm: LayerNorm instead of RMSNorm. parallel: attention and MLP of a layer have the same input. activation:
    one of ACTIVATIONS. num_ropes: number of different ropes, 0 for learned positions. query_scale: factor on the
    scores. embed_scale: factor on the embeddings. score_cap: soft cap c: scores x become c tanh(x / c); None for none.
    """

    num_heads: int
    num_kv_heads: int
    norm_eps: float
    query_scale: float
    activation: str = "silu"
    layer_norm: bool = False
    parallel: bool = False
    num_ropes: int = 1
    embed_scale: float = 1.0
    score_cap: float | None = None


class CompiledPlan(NamedTuple):
    """The slots that the rows of a pass see, the same for all layers and models."""

    num_rows: int
    slots: Tensor  # int64 [num_rows], page * PAGE_SIZE + offset of each row's own K and V
    rows: Tensor  # int64 [4, num_rows]: start in pages, positions read through pages, start in paths, path length
    pages: Tensor  # int64, the pages of all requests
    paths: Tensor  # int64, slots of tree nodes, in position order
    positions: Tensor  # int64 [num_rows]


def plan_compiled(requests: Sequence[RequestRows]) -> CompiledPlan:
    """Plans a pass over the rows of all requests, in order.

    A row reads committed positions (and the positions of a chain) through its request's pages, and the path of a tree
    node slot by slot. Scores are stored by position, so a node is computed exactly like the same token decoded alone.
    """
    slots, rows, pages, paths = [], [], [], []
    first_page = first_path = 0
    for request in requests:
        page, offset = request.slots
        slots.append(page * PAGE_SIZE + offset)
        part = np.zeros((4, request.num_rows), dtype=np.int64)
        part[0] = first_page
        if request.is_chain:
            part[1] = request.positions + 1
        else:
            logical = request.context_len + request.ancestors  # [num_rows, max depth + 1], padded
            width = logical.shape[1]
            part[1] = request.context_len
            part[2] = first_path + width * np.arange(request.num_rows)
            part[3] = request.depths + 1
            paths.append((request.pages[logical // PAGE_SIZE] * PAGE_SIZE + logical % PAGE_SIZE).reshape(-1))
            first_path += logical.size
        rows.append(part)
        pages.append(request.pages)
        first_page += len(request.pages)

    def join(parts: list[np.ndarray]) -> Tensor:
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1) if parts else np.zeros(1, np.int64)
        return torch.from_numpy(np.ascontiguousarray(whole, dtype=np.int64))

    positions = join([request.positions for request in requests])
    return CompiledPlan(
        sum(part.shape[1] for part in rows), join(slots), join(rows), join(pages), join(paths), positions
    )


class PassEntries(NamedTuple):
    """Addresses and sizes with which another library runs a model's passes.

    forward, probs: functions. model, head: their first arguments. num_places: rows of learned positions, or 0.
    hidden_bytes: size of one row's hidden state. threads: number of threads of a pass.
    """

    forward: int
    probs: int
    model: int
    head: int
    num_places: int
    hidden_bytes: int
    threads: int


class CompiledModel:
    """A model with packed weights, run by the library.

    Args:
        library: from `build`, for this head size and dtype.
        architecture: of the model.
        embed: [vocab, hidden].
        positions: learned positions [positions, hidden], or None.
        layers: in order.
        final_norm: of [hidden].
        head: [vocab, hidden].
        num_threads: number of threads of a pass; bits do not depend on it.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        architecture: Architecture,
        embed: Tensor,
        positions: Tensor | None,
        layers: Sequence[LayerWeights],
        final_norm: NormWeights,
        head: Tensor,
        num_threads: int,
    ):
        self._library, self._threads, self.num_ropes = library, num_threads, architecture.num_ropes
        self._num_places = 0 if positions is None else len(positions)
        self._held: list[Tensor] = [
            embed,
            *([] if positions is None else [positions]),
        ]  # referenced by pointers in the structs
        self.dtype, self.vocab_size, self.hidden_size = embed.dtype, head.shape[0], embed.shape[1]
        self._layers = (_Layer * len(layers))(
            *(
                _Layer(
                    self._norm(layer.attn_norm),
                    self._norm(layer.mlp_norm),
                    self._norm(layer.attn_post_norm),
                    self._norm(layer.mlp_post_norm),
                    self._floats(layer.head_norm),
                    self._linear(layer.qkv, layer.qkv_bias),
                    self._linear(layer.o, layer.o_bias),
                    self._linear(layer.gate_up, layer.gate_up_bias),
                    self._linear(layer.down, layer.down_bias),
                    layer.rope,
                    layer.window or 0,
                )
                for layer in layers
            )
        )
        a = architecture
        self._model = _Model(
            self._layers,
            embed.data_ptr(),
            None if positions is None else positions.data_ptr(),
            self._norm(final_norm),
            self.hidden_size,
            a.num_heads,
            a.num_kv_heads,
            self._layers[0].down.inputs,
            num_threads,
            ACTIVATIONS.index(a.activation),
            a.layer_norm,
            a.parallel,
            a.num_ropes,
            a.norm_eps,
            a.query_scale,
            a.embed_scale,
            a.score_cap or 0.0,
        )
        self._head = self._linear(head, None)
        self.entries = self._find_entries()  # for passes run by another library; None if `probs` is not a single call

    def keep(self, layers: Sequence[int], windows: Sequence[int | None]) -> "CompiledModel":
        """A model of only these layers, with these windows; it shares the weights."""
        model = copy.copy(self)
        model._layers = (_Layer * len(layers))(*(self._layers[i] for i in layers))
        for layer, window in zip(model._layers, windows, strict=True):
            layer.window = window or 0
        model._model = _Model.from_buffer_copy(self._model)
        model._model.layers = model._layers
        model.entries = model._find_entries()
        return model

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in memory."""
        return sum(tensor.nbytes for tensor in self._held)

    def _hold(self, tensor: Tensor) -> int:
        self._held.append(tensor)
        return tensor.data_ptr()

    def _floats(self, tensor: Tensor | None) -> int | None:
        return None if tensor is None else self._hold(tensor.float().contiguous().clone())

    def _norm(self, norm: NormWeights | None) -> _Norm:
        return _Norm() if norm is None else _Norm(self._floats(norm.weight), self._floats(norm.bias))

    def _linear(self, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> _Linear:
        packed = PackedLinear(self._library, weight, bias)
        self._held += packed.held
        return packed.struct

    def forward(
        self,
        tokens: Tensor,
        plan: CompiledPlan,
        rotation: Tensor,
        kv: Tensor,
        num_layers: int | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [num_rows, hidden_size]. Writes the rows' K/V to their slots.

        Args:
            tokens: int64 [num_rows].
            plan: from `plan_compiled`.
            rotation: fp32 [positions, 2 * num_ropes, head_dim], cos and signed sin of each rope, contiguous.
            kv: [num_layers, 2, num_pages, num_kv_heads, PAGE_SIZE, head_dim] in the model's dtype, contiguous.
            num_layers: how many layers to run; None for all.
            places: int64 [num_rows], indices into the learned positions.
        """
        assert tokens.dtype == torch.int64 and tokens.is_contiguous() and len(tokens) == plan.num_rows
        assert rotation.is_contiguous() and rotation.dtype == torch.float32
        assert rotation.shape[1] == 2 * self.num_ropes
        assert kv.is_contiguous() and kv.dtype == self.dtype
        layers = len(self._layers) if num_layers is None else num_layers
        out = torch.empty(plan.num_rows, self.hidden_size, dtype=self.dtype, device="cpu")
        rows, step = plan.rows.data_ptr(), plan.num_rows * 8
        batch = _Batch(
            plan.num_rows,
            layers,
            tokens.data_ptr(),
            None if places is None else places.data_ptr(),
            plan.slots.data_ptr(),
            rows,
            rows + step,
            rows + 2 * step,
            rows + 3 * step,
            plan.pages.data_ptr(),
            plan.paths.data_ptr(),
            plan.positions.data_ptr(),
            rotation.data_ptr(),
            kv.data_ptr(),
            kv.shape[2],
            out.data_ptr(),
        )
        self._library.treespec_forward(ctypes.byref(self._model), ctypes.byref(batch))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [num_rows, hidden_size] -> [num_rows, vocab_size], both in the model's dtype."""
        out = torch.empty(len(hidden), self.vocab_size, dtype=self.dtype, device="cpu")
        self._run_head(self._library.treespec_linear, hidden, out)
        return out

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The largest logit of each row in fp32 (NaN if any is), and the first token that has it, int64. Logits are
        [num_rows, vocab_size] in the model's dtype."""
        assert logits.is_contiguous() and logits.dtype == self.dtype and logits.shape[1] == self.vocab_size
        values = torch.empty(len(logits), dtype=torch.float32, device="cpu")
        tokens = torch.empty(len(logits), dtype=torch.int64, device="cpu")
        self._library.treespec_best(
            logits.data_ptr(), len(logits), self.vocab_size, values.data_ptr(), tokens.data_ptr(), self._threads
        )
        return values, tokens

    def _find_entries(self) -> PassEntries | None:
        if self.vocab_size % _LANES:
            return None
        library = self._library
        forward, probs = (
            ctypes.cast(entry, ctypes.c_void_p).value for entry in (library.treespec_forward, library.treespec_probs)
        )
        assert forward and probs
        return PassEntries(
            forward,
            probs,
            ctypes.addressof(self._model),
            ctypes.addressof(self._head),
            self._num_places,
            self.hidden_size * self.dtype.itemsize,
            self._threads,
        )

    def probs(self, hidden: Tensor) -> Tensor:
        """hidden: [num_rows, hidden_size] -> fp32 [num_rows, vocab_size], softmax of fp32 logits."""
        if self.vocab_size % _LANES:  # the library writes whole vectors of fp32; here logits are rounded first
            return torch.softmax(self.logits(hidden).float(), -1)
        out = torch.empty(len(hidden), self.vocab_size, dtype=torch.float32, device="cpu")
        self._run_head(self._library.treespec_probs, hidden, out)
        return out

    def _run_head(self, entry: Callable[..., None], hidden: Tensor, out: Tensor) -> None:
        assert hidden.dtype == self.dtype and hidden.shape[1] == self.hidden_size
        hidden = hidden.contiguous()
        entry(ctypes.byref(self._head), hidden.data_ptr(), len(hidden), out.data_ptr(), self._threads)


def unsupported_reason(hidden: int, mlp: int, head_dim: int, dtype: torch.dtype) -> str | None:
    """The reason why a model cannot be compiled, or None."""
    if dtype not in DTYPES:
        return f"dtype {dtype}; valid: float32, bfloat16"
    for name, size in (("hidden size", hidden), ("MLP size", mlp), ("head size", head_dim)):
        if size % _LANES:
            return f"a {name} of {size}, which is not a multiple of {_LANES}"
    return None
