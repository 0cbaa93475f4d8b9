"""Read the weights of quantised checkpoints. A `QuantScheme` is parsed by `quant_config.scheme_of`. Supported formats:

- compressed-tensors (llm-compressor): "pack-quantized" with 4 and 8 bits, "int-quantized", "float-quantized";
- GPTQ with 4 and 8 bits (zero points stored minus one, except in "gptq_v2"), with groups in input order;
- AWQ with 4 bits, "gemm";
- fp8 (E4M3) with a scale per tensor, output or block, as Hugging Face's "fp8";
- MXFP4 of gpt-oss's experts, and GGUF's blocks with 4 and 8 bits (blocks.py).

Integers and their scales are loaded unchanged. fp8 weights are dequantised to the model's dtype, scaled in fp32 and
rounded once. Activation quantisation is ignored.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from treespec_weights.quantize import Quantized

SMALLEST_GROUP = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of a word's i-th nibble
_FLOATS = ("F16", "BF16", "F32")

Method = Literal["compressed-tensors", "gptq", "awq", "fp8", "mxfp4", "gguf"]
METHODS: tuple[Method, ...] = get_args(Method)


class Form(NamedTuple):
    """Form of a quantised weight in memory."""

    bits: int
    group: int | None  # inputs that share a scale; None for all
    has_zero: bool


class StoredTensor(NamedTuple):
    """Valid shapes and dtypes of one of the tensors that store a quantised weight."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    optional: bool = False


@dataclass(frozen=True)
class QuantScheme:
    """Quantisation scheme of a checkpoint's linear layers."""

    method: Method  # name of the quantisation method
    bits: int  # 4 or 8; 8 for fp8
    group: int | None = None  # number of inputs that share a scale; None for whole rows
    packed: bool = False  # compressed-tensors only: integers are packed in int32 words
    floating: bool = False  # whether the values are fp8
    symmetric: bool = True  # whether zero points are absent
    block: tuple[int, int] | None = None  # fp8 only: numbers of outputs and inputs that share a scale
    zero_minus_one: bool = False  # GPTQ's first format, which stores zero points minus one
    centred: bool = False  # GPTQ only: all stored zero points are the middle value
    embeddings: bool = False  # compressed-tensors' fp8 only: the embedding is quantised, too
    # modules that are not quantised: names, `re:` patterns, or, for fp8 and AWQ, parts of names
    ignore: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Short description, such as "gptq int4, groups of 128"."""
        kind = "fp8" if self.floating else f"int{self.bits}"
        grouped = f", groups of {self.group}" if self.group else f", blocks of {self.block}" if self.block else ""
        return f"{self.method} {kind}{grouped}" if self.method != "fp8" else f"fp8{grouped}"

    def covers(self, name: str, head: str) -> bool:
        """Return whether the matrix `name` ("....weight") is quantised. `head` is the output head's name."""
        module = name.removesuffix(".weight")
        if module == name or (name == head and self.method != "compressed-tensors"):
            return False
        if self.method == "compressed-tensors":
            return not any(
                re.match(entry[3:], module) if entry.startswith("re:") else entry in (module, "Linear")
                for entry in self.ignore
            )
        return not any(entry in module for entry in self.ignore)

    def form(self, name: str) -> Form:
        """Return the form of the weight `name`, which the scheme covers; not for fp8, which is dequantised."""
        return Form(self.bits, self.group, not (self.symmetric or self.centred))

    def stored_tensors(self, name: str, out: int, inputs: int) -> dict[str, StoredTensor]:
        """Return the tensors that store the weight `name` of shape [out, inputs], by name.

        Raises ValueError if the scheme does not fit this shape.
        """
        stem = name.removesuffix("weight")
        group = self.group or inputs
        if inputs % group or (self.group and not self.floating and group % SMALLEST_GROUP):
            raise ValueError(f"{inputs} inputs in groups of {group}; valid: whole ones, multiples of {SMALLEST_GROUP}")
        groups, per_word = inputs // group, 32 // self.bits
        words = (inputs if self.method != "awq" else out) // per_word
        ragged = {"compressed-tensors": inputs if self.packed else 0, "gptq": inputs | out, "awq": out, "fp8": 0}
        if not self.floating and ragged[self.method] % per_word:
            raise ValueError(f"a weight of [{out}, {inputs}] does not fill words of {per_word} integers")
        if self.floating:
            scale = f"{name}_scale_inv" if self.method == "fp8" and self.block else f"{name}_scale"
            if self.block:
                shapes: tuple[tuple[int, ...], ...] = ((-(-out // self.block[0]), -(-inputs // self.block[1])),)
            else:
                shapes = ((), (1,), (out,), (out, 1))
            return {
                name: StoredTensor(((out, inputs),), ("F8_E4M3",)),
                scale: StoredTensor(shapes, (*_FLOATS, "F8_E8M0")),
            }
        if self.method == "gptq":
            return {
                f"{stem}qweight": StoredTensor(((words, out),), ("I32",)),
                f"{stem}qzeros": StoredTensor(((groups, out // per_word),), ("I32",)),
                f"{stem}scales": StoredTensor(((groups, out),), _FLOATS),
                f"{stem}g_idx": StoredTensor(((inputs,),), ("I32",), optional=True),
            }
        if self.method == "awq":
            return {
                f"{stem}qweight": StoredTensor(((inputs, words),), ("I32",)),
                f"{stem}qzeros": StoredTensor(((groups, words),), ("I32",), optional=self.symmetric),
                f"{stem}scales": StoredTensor(((groups, out),), _FLOATS),
            }
        scales = ((out, groups), (out,), (1,), ()) if self.group is None else ((out, groups),)
        if self.packed:
            packed_zeros = (-(-out // per_word), groups)
            return {
                f"{name}_packed": StoredTensor(((out, words),), ("I32",)),
                f"{name}_scale": StoredTensor(scales, _FLOATS),
                f"{name}_shape": StoredTensor(((2,),), ("I64", "I32"), optional=True),
                f"{name}_zero_point": StoredTensor(
                    (packed_zeros, (out, groups)), ("I32", "I8"), optional=self.symmetric
                ),
                f"{name}_g_idx": StoredTensor(((inputs,),), ("I32",), optional=True),
            }
        return {
            name: StoredTensor(((out, inputs),), ("I8",)),
            f"{name}_scale": StoredTensor(scales, _FLOATS),
            f"{name}_zero_point": StoredTensor(scales, ("I8",), optional=self.symmetric),
        }

    def read(
        self, name: str, out: int, inputs: int, get: Callable[[str], Tensor | None], dtype: torch.dtype | None
    ) -> Quantized | Tensor:
        """Read the weight `name` of shape [out, inputs].

        `get` returns a tensor of `stored_tensors` by name, or None if an optional one is missing. `dtype` is that of an
        fp8 weight; None takes the scale's if it is a 16- or 32-bit float, else bfloat16. Raises ValueError for
        unsupported values, such as groups that do not follow the input order.
        """
        tensors = {
            stored_name.removeprefix(name.removesuffix("weight")): get(stored_name)
            for stored_name in self.stored_tensors(name, out, inputs)
        }
        present = {key: tensor for key, tensor in tensors.items() if tensor is not None}
        group = self.group or inputs
        for key in ("g_idx", "weight_g_idx"):
            _check_order(present.get(key), group)
        if self.floating:
            return self._read_fp8(present, out, inputs, dtype)
        if self.method == "gptq":
            q = _words(present["qweight"].t().contiguous(), self.bits)
            zeros = _words(present["qzeros"], self.bits).t().to(torch.int16) + int(self.zero_minus_one)
            return _from_unsigned(q, present["scales"].t().contiguous(), zeros, self.bits)
        if self.method == "awq":
            q = _awq(present["qweight"]).t()
            awq_zeros = _awq(present["qzeros"]).t() if "qzeros" in present else None
            return _from_unsigned(q, present["scales"].t().contiguous(), awq_zeros, self.bits)
        middle = 1 << (self.bits - 1)
        scale = present["weight_scale"].reshape(-1, inputs // group).expand(out, -1).contiguous()
        if "weight_shape" in present and present["weight_shape"].tolist() != [out, inputs]:
            raise ValueError(f"weight_shape says {present['weight_shape'].tolist()}, expected {[out, inputs]}")
        zero = present.get("weight_zero_point")
        in_words = zero is not None and zero.dtype == torch.int32
        if zero is not None and self.packed and len(zero) != (-(-out * self.bits // 32) if in_words else out):
            expected = f"int8 for every output, or int32 words of {32 // self.bits}"
            raise ValueError(f"its zero points are {zero.dtype} {list(zero.shape)}; expected {expected}")
        if zero is not None and in_words:
            zero = _words(zero.t().contiguous(), self.bits).t()[:out]
        elif zero is not None:
            zero = zero.reshape(-1, inputs // group).expand(out, -1).to(torch.int16) + middle
        if not self.packed:
            return _from_unsigned(present["weight"].view(torch.uint8) ^ 128, scale, zero, self.bits)
        words = present["weight_packed"].contiguous().view(torch.uint8)  # rows are whole words
        _, _, shift = _from_unsigned(words[:, :0], scale, zero, self.bits)
        return Quantized(words if self.bits == 4 else (words ^ 128).view(torch.int8), scale, shift)

    def _read_fp8(self, present: Mapping[str, Tensor], out: int, inputs: int, dtype: torch.dtype | None) -> Tensor:
        weight = present["weight"].float()
        [scale] = [tensor for key, tensor in present.items() if key != "weight"]
        if dtype is None:
            dtype = scale.dtype if scale.dtype in (torch.float16, torch.bfloat16, torch.float32) else torch.bfloat16
        factors = scale.float()
        if self.block:
            rows, columns = self.block
            factors = factors.repeat_interleave(rows, 0)[:out].repeat_interleave(columns, 1)[:, :inputs]
        elif factors.numel() > 1:
            factors = factors.reshape(out, 1)
        scaled = weight * factors
        result = scaled.to(dtype)
        if bool((result.isinf() & scaled.isfinite()).any()):
            raise ValueError(f"{scaled.abs().max().item():.4g} is infinite in {dtype}; load it as bfloat16 or float32")
        return result


def _words(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [rows, n] into uint8 [rows, n * 32 / bits], lowest bits first."""
    mask = (1 << bits) - 1
    return torch.stack([(words >> shift & mask).to(torch.uint8) for shift in range(0, 32, bits)], 2).flatten(1)


def _awq(words: Tensor) -> Tensor:
    """Unpack AWQ's int32 [rows, n] into uint8 [rows, 8 n], in the order of the outputs."""
    nibbles = _words(words, 4).unflatten(1, (-1, 8))
    ordered = torch.empty_like(nibbles)
    ordered[:, :, list(_AWQ_ORDER)] = nibbles
    return ordered.flatten(1)


def _from_unsigned(q: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> Quantized:
    """Build a weight from unsigned integers: q uint8 [out, in], zero [out, groups]."""
    middle, shift = 1 << (bits - 1), None
    if zero is not None and bool((zero != middle).any()):
        if int(zero.max()) > 127 + middle:
            raise ValueError(f"a zero point of {int(zero.max())}; valid: up to {127 + middle}")
        shift = (zero.to(torch.int16) - middle).to(torch.int8).contiguous()
    q = q.contiguous()
    return Quantized(q[:, ::2] | q[:, 1::2] << 4 if bits == 4 else (q ^ 128).view(torch.int8), scale, shift)


def _check_order(groups_of: Tensor | None, group: int) -> None:
    if groups_of is None or bool((groups_of < 0).all()):
        return
    if not torch.equal(groups_of.long(), torch.arange(len(groups_of), device="cpu") // group):
        raise ValueError(
            "its groups do not follow the inputs' order (g_idx, act-order), which is not supported; use a checkpoint "
            "quantised with desc_act=false, or actorder null or static"
        )
