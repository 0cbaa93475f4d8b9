"""Read tensors of GGUF files under their Hugging Face names, and their blocks as quantised weights.

Two changes of llama.cpp's converter are undone: it permutes the rows of q and k of the architecture "llama" for
interleaved rotation, and adds 1 to Gemma's norms.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from treespec_weights.checkpoint import TORCH_DTYPES, Checkpoint, TensorInfo
from treespec_weights.errors import CheckpointError, Problem
from treespec_weights.gguf.config import FACTORS, rules_of
from treespec_weights.gguf.reader import GgufFile, gguf_package, read_gguf
from treespec_weights.quant_schemes import Form, QuantScheme, StoredTensor
from treespec_weights.quantize import Quantized

_PARAMETERS: Mapping[str, tuple[tuple[str, ...], ...]] = {  # GGUF name to decoder parameters; families differ in ffn_up
    "token_embd": (("embed",),),
    "output_norm": (("final_norm",),),
    "output": (("lm_head",),),
    "attn_norm": (("attn_norm",),),
    "attn_q": (("q",),),
    "attn_k": (("k",),),
    "attn_v": (("v",),),
    "attn_qkv": (("q", "k", "v"),),
    "attn_q_norm": (("q_norm",),),
    "attn_k_norm": (("k_norm",),),
    "attn_output": (("o",),),
    "post_attention_norm": (("attn_post_norm",),),
    "ffn_norm": (("mlp_norm",),),
    "ffn_gate": (("gate",),),
    "ffn_up": (("up",), ("gate", "up")),
    "ffn_down": (("down",),),
    "post_ffw_norm": (("mlp_post_norm",),),
}
_PRODUCTS = {"k": "q", "v": "q", "up": "gate"}  # parameters that are computed in one product with another
_NAME = re.compile(r"(blk\.(?P<layer>\d+)\.)?(?P<stem>\w+)\.(?P<kind>weight|bias)")

BLOCK = 32  # values that share a scale
FORMS: Mapping[str, Form] = {
    "Q8_0": Form(8, BLOCK, False),
    "Q4_0": Form(4, BLOCK, False),
    "Q4_1": Form(4, BLOCK, True),
    "Q4_K": Form(4, BLOCK, True),
}
"""Forms of the block types that fit the kernels' layouts. Q6_K does not: it has a scale per 16 values."""


def hf_names(file: GgufFile) -> dict[str, str]:
    """Return the GGUF name of every tensor by Hugging Face name. Tensors unknown to the family keep their names."""
    rules = {rule.params: rule.name for rule in rules_of(file).tensors}
    names = {}
    for name in file.tensors:
        if name not in FACTORS:
            matches = [rules[params] for params in _parameters(name) if params in rules]
            layer = _layer(name)
            names[matches[0].replace("{i}", layer) if matches else name] = name
    return names


def _layer(name: str) -> str:
    """Return the layer of a GGUF tensor, or "" if it belongs to none."""
    match = _NAME.fullmatch(name)
    return "" if match is None or match["layer"] is None else match["layer"]


def _parameters(name: str) -> list[tuple[str, ...]]:
    """Return the decoder parameters that a GGUF tensor may hold, with "{i}" for the layer."""
    match = _NAME.fullmatch(name)
    if match is None:
        return []
    prefix = "" if match["layer"] is None else "layers.{i}."
    suffix = "_bias" if match["kind"] == "bias" else ""
    return [tuple(f"{prefix}{param}{suffix}" for param in params) for params in _PARAMETERS.get(match["stem"], ())]


def block_types(file: GgufFile) -> dict[str, str]:
    """Return the block type of every matrix that stays in blocks, by Hugging Face name.

    Matrices of one fused product stay in blocks only if all have the same number of bits. Embeddings are dequantised;
    `GgufCheckpoint.head_blocks` has the head's blocks.
    """
    products: dict[tuple[str, str], dict[str, str]] = {}
    for hf_name, name in hf_names(file).items():
        layer, tensor = _layer(name), file.tensors[name]
        if layer and len(tensor.shape) == 2 and (params := _parameters(name)):
            param = params[-1][0].rpartition(".")[2]
            products.setdefault((layer, _PRODUCTS.get(param, param)), {})[hf_name] = tensor.type
    matrix_types: dict[str, str] = {}
    for types in products.values():
        bits = {FORMS[kind].bits if kind in FORMS else None for kind in types.values()}
        if len(bits) == 1 and None not in bits:
            matrix_types |= types
    return matrix_types


def head_type(file: GgufFile) -> tuple[str, str] | None:
    """Return the Hugging Face name and block type of the head, or of the embedding that it is tied to.

    None if its blocks do not fit the kernels' layouts.
    """
    stored = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
    kind = file.tensors[stored].type
    return next((name, kind) for name, tensor in hf_names(file).items() if tensor == stored) if kind in FORMS else None


def describe_storage(path: Path, dtype: torch.dtype, head_blocks: bool = False) -> str:
    """Return a log line with the number of matrices by type and by the form in memory of a model in `dtype`.

    `head_blocks`: as in `load_weights`.
    """
    file = read_gguf(path)
    blocks = block_types(file)
    head = head_type(file) if head_blocks else None
    if head is not None and "output.weight" in file.tensors:
        blocks[head[0]] = head[1]
    counts: Counter[tuple[str, str]] = Counter()
    for hf_name, name in hf_names(file).items():
        kind, shape, *_ = (tensor := file.tensors[name]).type, tensor.shape
        if len(shape) == 2:
            form = f"int{FORMS[kind].bits} in groups of {BLOCK}" if hf_name in blocks else str(dtype)[len("torch.") :]
            counts[kind, form] += 1
    descriptions = [
        f"{count} {kind} {'matrix' if count == 1 else 'matrices'} as {form}" for (kind, form), count in counts.items()
    ]
    if head is not None and head[0] not in blocks:
        descriptions.append(f"the tied head beside its embedding as int{FORMS[head[1]].bits} in groups of {BLOCK}")
    return f"{path.name}: holding {', '.join(descriptions)}"


class GgufCheckpoint(Checkpoint):
    """Tensors of a GGUF file by Hugging Face name. `folder` is the path of the file.

    `tensor` dequantises blocks to float32; `stored` returns them as bytes.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.names_in_file = hf_names(file)
        entries = {name: file.tensors[stored] for name, stored in self.names_in_file.items()}
        tensors = {name: TensorInfo(entry.file, entry.type, entry.shape) for name, entry in entries.items()}
        handles = {name: np.memmap(file.path.parent / name, np.uint8, "c") for name in file.files}
        super().__init__(file.path, tensors, dict(file.files), handles, {})
        self._ggml = gguf_package(file.path)
        self._entries = entries
        self._adds_one = rules_of(file).norm == "rms_plus_one"
        heads, kv_heads = file.value("attention.head_count"), file.value("attention.head_count_kv")
        self._permuted = {"attn_q": heads, "attn_k": kv_heads or heads} if file.architecture == "llama" else {}
        blocks = {entry.type for entry in entries.values() if entry.type not in TORCH_DTYPES}
        self.loadable = (*self.loadable, *sorted(blocks))
        self._check_types()

    @classmethod
    def open(cls, folder: Path | str) -> "GgufCheckpoint":
        """Open a GGUF file (a result of `resolve_folder`).

        Raises CheckpointError for a malformed file, an unsupported architecture, and tensors of types that cannot be
        dequantised.
        """
        return cls(read_gguf(Path(folder)))

    def dtype(self, name: str) -> torch.dtype:
        return TORCH_DTYPES.get(self.info(name).dtype, torch.float32)

    def stored(self, name: str) -> Tensor:
        """Return a tensor as stored: values, or uint8 [rows, bytes] with the blocks of each row."""
        info, entry = self.info(name), self._entries[name]
        data = torch.from_numpy(self._handle(name)[entry.offset : entry.offset + entry.nbytes])
        if info.dtype in TORCH_DTYPES:
            data = data.view(TORCH_DTYPES[info.dtype]).reshape(info.shape)
        else:
            data = data.reshape(*info.shape[:-1], -1)
        match = _NAME.fullmatch(self.names_in_file[name])
        heads = self._permuted.get(match["stem"]) if match else None
        if type(heads) is int and heads > 0 and len(data) % (2 * heads) == 0:  # otherwise `match` reports the shape
            # The converter moved rows [2, head_dim / 2] of a head to [head_dim / 2, 2]. A row's blocks stay together.
            data = data.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return data

    def head_blocks(self) -> Quantized | None:
        if (head := head_type(self._file)) is None:
            return None
        name, kind = head
        return read_blocks(kind, self.stored(name))

    def stored_bytes(self, info: TensorInfo) -> int:
        if info.dtype in TORCH_DTYPES:
            return super().stored_bytes(info)
        values, nbytes = self._ggml.GGML_QUANT_SIZES[self._ggml.GGMLQuantizationType[info.dtype]]
        return int(info.size // values * nbytes)

    def _read(self, name: str) -> Tensor:
        info, data = self.info(name), self.stored(name)
        if info.dtype not in TORCH_DTYPES:
            kind = self._ggml.GGMLQuantizationType[info.dtype]
            data = torch.from_numpy(self._ggml.quants.dequantize(data.numpy(), kind))
        return data.float() - 1.0 if self._adds_one and name.endswith("norm.weight") else data

    def _check_types(self) -> None:
        """Raise CheckpointError with all tensors that the package gguf cannot dequantise."""
        problems = []
        for name, entry in self._entries.items():
            if entry.type not in TORCH_DTYPES and not _can_dequantize(self._ggml, entry.type):
                message = (
                    f"has type {entry.type}, which the package gguf cannot dequantise; requantise the file, such as "
                    "with llama-quantize to Q8_0, or update the package"
                )
                problems.append(Problem("dtype", repr(self.names_in_file[name]), message))
        if problems:
            raise CheckpointError(self.folder, problems)


@functools.cache
def _can_dequantize(ggml: ModuleType, kind: str) -> bool:
    """Return whether the package gguf can dequantise a block type."""
    try:
        quant_type = ggml.GGMLQuantizationType[kind]
        ggml.quants.dequantize(np.zeros(ggml.GGML_QUANT_SIZES[quant_type][1], np.uint8), quant_type)
    except (KeyError, NotImplementedError):
        return False
    return True


@dataclass(frozen=True)
class GgufScheme(QuantScheme):
    """Quantisation scheme of a GGUF file's matrices.

    Args:
        types: pairs of tensor name and block type (a key of `FORMS`).
    """

    types: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, types: Mapping[str, str]) -> "GgufScheme":
        """Return the scheme of matrices with these block types, by tensor name."""
        return cls("gguf", max(FORMS[kind].bits for kind in types.values()), BLOCK, types=tuple(types.items()))

    @functools.cached_property
    def _type_of(self) -> dict[str, str]:
        return dict(self.types)

    @property
    def name(self) -> str:
        return f"gguf {', '.join(sorted({*self._type_of.values()}))}"

    def covers(self, name: str, head: str) -> bool:
        return name in self._type_of

    def form(self, name: str) -> Form:
        return FORMS[self._type_of[name]]

    def stored_tensors(self, name: str, out: int, inputs: int) -> dict[str, StoredTensor]:
        return {name: StoredTensor(((out, inputs),), (self._type_of[name],))}

    def read(
        self, name: str, out: int, inputs: int, get: Callable[[str], Tensor | None], dtype: torch.dtype | None
    ) -> Quantized:
        rows = get(name)
        assert rows is not None
        return read_blocks(self._type_of[name], rows)


def read_blocks(kind: str, rows: Tensor) -> Quantized:
    """Convert blocks, uint8 [out, bytes] of a type of `FORMS`, to a quantised weight.

    Q8_0 and Q4_0 are d * q. Q4_1 is d * q + m, and so is Q4_K, where d and m are products of a super-block's scales and
    6-bit integers. Their zero points are -m / d, in float32.
    """
    if kind == "Q4_K":
        return _read_q4_k(rows.unflatten(1, (-1, 144)))
    if kind == "Q8_0":
        blocks = rows.unflatten(1, (-1, 2 + BLOCK))
        return Quantized(blocks[..., 2:].flatten(1).view(torch.int8), _halves(blocks[..., :2]))
    header = 4 if kind == "Q4_1" else 2
    blocks = rows.unflatten(1, (-1, header + BLOCK // 2))
    values, scale = _repacked(blocks[..., header:]).flatten(1), _halves(blocks[..., :2])
    if kind == "Q4_0":
        return Quantized(values, scale)
    result = _with_minimum(values, scale.float(), _halves(blocks[..., 2:4]).float())
    return result._replace(scale=result.scale.half())


def _read_q4_k(blocks: Tensor) -> Quantized:
    """Convert super-blocks, uint8 [out, n, 144]: two float16 scales, eight 6-bit scales and minima, 256 integers."""
    # Twelve bytes hold 6 bits of the scales and minima of groups 0 .. 3 in their low bits; those of groups 4 .. 7 have
    # 4 bits in the last four bytes and 2 in the high bits of the others.
    scales, minima, nibbles = blocks[..., 4:16].split(4, 2)
    scales = torch.cat((scales & 63, nibbles & 15 | scales >> 6 << 4), 2)
    minima = torch.cat((minima & 63, nibbles >> 4 | minima >> 6 << 4), 2)
    scale = (_halves(blocks[..., :2]).float().unsqueeze(2) * scales).flatten(1)
    minimum = (_halves(blocks[..., 2:4]).float().unsqueeze(2) * minima).flatten(1)
    return _with_minimum(_repacked(blocks[..., 16:].unflatten(2, (4, BLOCK))).flatten(1), scale, -minimum)


def _repacked(pairs: Tensor) -> Tensor:
    """Repack 4-bit integers, uint8 [..., n]: bytes of integers i and n + i become bytes of 2 i and 2 i + 1."""
    even, odd = pairs[..., ::2], pairs[..., 1::2]
    return torch.stack((even & 15 | odd << 4, even >> 4 | odd & 0xF0), -2).flatten(-2)


def _with_minimum(values: Tensor, scale: Tensor, minimum: Tensor) -> Quantized:
    """Return the weight scale * q + minimum: values uint8 [out, inputs / 2] of q, the others float32 [out, groups]."""
    constant = scale == 0
    zero = -minimum / scale - 8
    if bool(constant.any()):  # such a group is (0 - -1) * minimum
        values = torch.where(constant.unsqueeze(2), 0x88, values.unflatten(1, (-1, BLOCK // 2))).flatten(1)
        zero, scale = torch.where(constant, -1.0, zero), torch.where(constant, minimum, scale)
    return Quantized(values, scale, zero)


def _halves(data: Tensor) -> Tensor:
    """Reinterpret uint8 [..., 2] as float16 [...]."""
    return data.contiguous().view(torch.float16).squeeze(-1)
