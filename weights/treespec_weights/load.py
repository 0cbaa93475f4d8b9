"""Load decoder parameters strictly: the names, shapes and dtypes of all tensors must match the model's shape."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from treespec_weights.blocks import Blocks, Mxfp4Scheme, Weights
from treespec_weights.checkpoint import Checkpoint
from treespec_weights.documents import CONFIG, has_document, read_document
from treespec_weights.dtypes import LOADABLE, TORCH_DTYPES
from treespec_weights.errors import CheckpointError, Problem
from treespec_weights.families import LLAMA
from treespec_weights.progress import tracked
from treespec_weights.quant_config import scheme_of
from treespec_weights.quant_schemes import Form, QuantScheme, StoredTensor
from treespec_weights.quantize import BITS, Quantized, dequantize, group_of, quantize
from treespec_weights.rules import FamilyRules, ModelShape, TensorRule, TensorShape

CHUNK = 1 << 19  # values cast at a time
UNQUANTISED = (".router", ".shared.scale")  # name suffixes of matrices that no scheme quantises
_EMBEDDINGS = ("embed", "input_embed")
_KV = tuple(f"layers.{{i}}.{name}" for name in ("k", "v", "k_norm"))
DTYPES = tuple(TORCH_DTYPES[name] for name in LOADABLE)


class Placement(NamedTuple):
    """A checkpoint tensor and the decoder parameters stored in it."""

    name: str
    rule: TensorRule
    params: dict[str, TensorShape]  # if the tensor holds all experts: by expert, in the rule's order
    heads: int  # number of groups in a "per_head" tensor
    experts: int | None = None  # number of experts in the tensor; None for a tensor of one or no expert
    scheme: QuantScheme | None = None  # scheme that quantises the tensor

    @property
    def form(self) -> Form | None:
        """Form in memory of a matrix that stays quantised, None for others: fp8 is dequantised."""
        return None if self.scheme is None or self.scheme.floating else self.scheme.form(self.name)

    @property
    def matrix_shape(self) -> TensorShape:
        """Shape of all parameters stacked, including all experts."""
        param_shape = next(iter(self.params.values()))
        return (sum(shape[0] for shape in self.params.values()), *param_shape[1:])

    @property
    def shape(self) -> TensorShape:
        """Expected shape of the tensor in the file."""
        outputs, *inputs = self.matrix_shape
        stacked = (outputs // (self.experts or 1), *inputs)
        stored = stacked[::-1] if self.rule.layout.endswith("transposed") else stacked
        return stored if self.experts is None else (self.experts, *stored)

    def stored_tensors(self, dtypes: tuple[str, ...]) -> dict[str, StoredTensor]:
        """Return the tensors of the file by name; `dtypes` are valid for an unquantised one.

        Raises ValueError if the scheme does not fit the shape or layout.
        """
        if self.scheme is None:
            return {self.name: StoredTensor((self.shape,), dtypes)}
        if self.rule.layout.endswith("transposed"):
            raise ValueError("quantised weights that are stored transposed are not supported")
        if self.experts is not None and self.scheme.method not in ("gguf", "mxfp4"):
            raise ValueError(f"{self.scheme.name} weights of all experts in one tensor are not supported")
        stored, experts = self.scheme.stored_tensors(self.name, *self.shape[-2:]), self.shape[:-2]
        return {
            name: tensor._replace(shapes=tuple((*experts, *size) for size in tensor.shapes))
            for name, tensor in stored.items()
        }

    def unpack(self, tensor: Tensor) -> dict[str, Tensor]:
        """Split a checkpoint tensor, or a matrix of `matrix_shape`, into its parameters, by name.

        Parameters are contiguous, and views of `tensor` if its layout allows.
        """
        if self.experts is None:
            matrices = self._split(tensor, [*self.params.values()])
        else:
            sizes = [*self.params.values()][: len(self.params) // self.experts]  # shapes of one expert
            by_expert = tensor if tensor.dim() > len(sizes[0]) else tensor.unflatten(0, (self.experts, -1))
            matrices = [matrix for expert in by_expert for matrix in self._split(expert, sizes)]
        return dict(zip(self.params, matrices, strict=True))

    def _split(self, tensor: Tensor, sizes: Sequence[TensorShape]) -> list[Tensor]:
        if self.rule.layout.endswith("transposed") and tensor.dim() == 2:
            tensor = tensor.t()
        rows = [shape[0] for shape in sizes]
        heads = {"per_head": self.heads}.get(self.rule.layout, rows[0])
        if self.rule.layout in ("per_head", "interleaved", "interleaved_transposed"):
            per_head = tensor.unflatten(0, (heads, -1)).split([size // heads for size in rows], dim=1)
            return [block.flatten(0, 1).contiguous() for block in per_head]
        return [block.contiguous() for block in tensor.split(rows)]

    def pack(self, params: dict[str, Tensor]) -> Tensor:
        """Stack parameters, the inverse of `unpack`. A single parameter is not copied."""
        assert self.rule.layout == "stacked", f"no conversion packs parameters into layout {self.rule.layout!r}"
        blocks = [params[name] for name in self.params]
        packed = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
        return packed if self.experts is None else packed.unflatten(0, (self.experts, -1))


def load_weights(
    folder: Path | str | Checkpoint,
    shape: ModelShape,
    rules: FamilyRules = LLAMA,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    quantization: str | None = None,
    blocks: bool = False,
) -> Weights:
    """Load a checkpoint into decoder parameters, `shape.parameters()`, contiguous and in that order.

    Names, shapes and dtypes are checked from the headers before any tensor is read. Tensors are then cast one by one,
    in file order, so peak memory exceeds the result by at most one tensor. With `dtype=None`, or if the stored dtype is
    `dtype`, CPU tensors stay memory-mapped (privately: writing never changes the file) and need no extra memory.

    With `quantization`, "int8" or "int4", the layers' matrices are quantised one by one from the stored values. A
    quantised parameter is int8, or uint8 with two 4-bit weights per byte. Together with `<name>_scale` and, if there
    are zero points, `<name>_zero`, it forms a `Quantized`. With `blocks`, the matrices of a GGUF file that have a block
    type of `FORMS`, embedding and head included, are `Blocks` instead, views of the mapped file that are not read yet.

    Raises CheckpointError with all problems, ValueError for an invalid `dtype` or `quantization`, and the errors of
    `Checkpoint.open`.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"weights cannot be loaded as {dtype}; valid: {', '.join(map(str, DTYPES))}")
    if not isinstance(folder, Checkpoint):
        with Checkpoint.open(folder) as checkpoint:
            return load_weights(checkpoint, shape, rules, dtype, device, quantization, blocks)
    if quantization is not None and quantization not in BITS:
        raise ValueError(f"quantization={quantization!r}; valid: None, {', '.join(map(repr, BITS))}")
    checkpoint = folder
    tensors = ModelTensors(checkpoint, shape, rules)
    if tensors.scheme is not None and quantization is not None:
        name = tensors.scheme.name
        raise ValueError(f"{checkpoint.folder} is quantised already ({name}); load it with quantization=None")
    matrices = quantizable(shape)
    bits = None if quantization is None else BITS[quantization]
    group = None if quantization is None else quantized_group(shape, quantization)
    placements = tensors.checked_placements()
    checkpoint.log_absent()
    loaded: Weights = {}
    overflows = []
    order = {name: i for i, name in enumerate(checkpoint.tensors)}  # tensors renamed by the scheme come last
    placements.sort(key=lambda placement: order.get(placement.name, len(order)))
    for placement in tracked(f"reading {checkpoint.folder.name}", placements, lambda read: math.prod(read.shape)):
        if blocks and (matrix := _matrix_in_blocks(checkpoint, placement)) is not None:
            unpacked = placement.unpack(matrix.rows)
            loaded |= {param: matrix._replace(rows=rows) for param, rows in unpacked.items()}
            continue
        if placement.scheme is not None:
            loaded |= _read_quantized(checkpoint, placement, dtype, device)
            continue
        stored = checkpoint.tensor(placement.name)
        if bits is not None and any(param in matrices for param in placement.params):
            for param, values in placement.unpack(stored.to(device)).items():
                try:
                    loaded |= _params_of(param, quantize(values, bits, group))
                except ValueError as error:
                    raise CheckpointError.of(checkpoint.folder, "value", placement.name, str(error)) from error
            continue
        tensor, infinite = cast(stored, torch.float32 if placement.rule.single else dtype, device)
        if infinite:
            overflows.append(Problem("value", repr(placement.name), overflow_message(stored, tensor)))
        loaded |= placement.unpack(tensor)
    if overflows:
        raise CheckpointError(checkpoint.folder, overflows)
    ordered = (name + suffix for name in shape.parameters() for suffix in ("", "_scale", "_zero"))
    return {name: loaded[name] for name in ordered if name in loaded}


def quantizable(shape: ModelShape) -> dict[str, TensorShape]:
    """Return the parameters that quantisation applies to: the layers' matrices, except routers."""
    return {
        name: size
        for name, size in shape.parameters().items()
        if name.startswith("layers.") and len(size) == 2 and not name.endswith(UNQUANTISED)
    }


def quantized_group(shape: ModelShape, quantization: str) -> int | None:
    """Return the inputs that share a scale, or None for one scale per row. Raises ValueError if none divides them."""
    return group_of({size[1] for size in quantizable(shape).values()}) if BITS[quantization] == 4 else None


def _matrix_in_blocks(checkpoint: Checkpoint, placement: Placement) -> Blocks | None:
    """Return the matrix of a placement in blocks, or None if it is not stored in blocks."""
    if isinstance(placement.scheme, Mxfp4Scheme):
        return Blocks("MXFP4", placement.scheme.rows(placement.name, checkpoint.tensor), None)
    is_read_as_values = next(iter(placement.params)).endswith(UNQUANTISED)
    return None if is_read_as_values else checkpoint.blocks(placement.name)


def _params_of(param: str, quantized: Quantized) -> dict[str, Tensor]:
    values, scale, zero = quantized
    return {param: values, f"{param}_scale": scale} | ({} if zero is None else {f"{param}_zero": zero})


def _read_quantized(
    checkpoint: Checkpoint, placement: Placement, dtype: torch.dtype | None, device: object
) -> dict[str, Tensor]:
    """Return the parameters of a quantised tensor.

    Scales and zero points are per row, so they unpack like the weights.
    """
    matrix = _stored_matrix(checkpoint, placement, dtype)
    tensors = {"": matrix} if isinstance(matrix, Tensor) else _params_of("", matrix)
    return {
        param + suffix: rows.to(device)  # type: ignore[call-overload]
        for suffix, tensor in tensors.items()
        for param, rows in placement.unpack(tensor).items()
    }


def read_dequantized(checkpoint: Checkpoint, placement: Placement) -> Tensor:
    """Read a tensor; a quantised matrix as fp32 [out, in]. Raises CheckpointError for unsupported values."""
    if placement.scheme is None:
        return checkpoint.tensor(placement.name)
    matrix = _stored_matrix(checkpoint, placement, torch.float32)
    return matrix if isinstance(matrix, Tensor) else dequantize(matrix)


def _stored_matrix(checkpoint: Checkpoint, placement: Placement, dtype: torch.dtype | None) -> Quantized | Tensor:
    """Read a quantised matrix; `dtype` is the result's dtype for fp8."""

    def get(name: str) -> Tensor | None:
        if name not in checkpoint.tensors:
            return None
        stored = checkpoint.stored(name)
        return stored if placement.experts is None else stored.flatten(0, 1)

    assert placement.scheme is not None
    try:
        out, inputs = placement.matrix_shape
        return placement.scheme.read(placement.name, out, inputs, get, dtype)
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError.of(checkpoint.folder, "value", placement.name, str(error)) from error


class ModelTensors:
    """The tensors that a model of some shape needs, and those that its checkpoint has.

    Attributes: `rules`, adapted to the checkpoint's names; `scheme`, its quantisation, or None; `placements` of all
    parameters, valid only without `problems`; `ignored`, the names of tensors that are not loaded.
    """

    def __init__(self, checkpoint: Checkpoint, shape: ModelShape, rules: FamilyRules):
        self.checkpoint, self.shape = checkpoint, shape
        self.rules = rules = rules.for_names(checkpoint.tensors)
        self._embedding = embed = next(rule for rule in rules.tensors if rule.params == ("embed",))
        if shape.tied and embed.name not in checkpoint.tensors and rules.tied_copy in checkpoint.tensors:
            self._embedding = replace(embed, name=rules.tied_copy)  # stored as the head
            tensors = tuple(self._embedding if rule is embed else rule for rule in rules.tensors)
            self.rules = replace(rules, tensors=tensors)
        config = read_document(checkpoint.folder, CONFIG) if has_document(checkpoint.folder, CONFIG) else None
        self.scheme = scheme_of(config, checkpoint.folder) if isinstance(config, dict) else None
        self.placements = expected_tensors(shape, self.rules, self.scheme)
        self.ignored = ignored_names(checkpoint.tensors, shape, self.rules)

    def problems(self) -> list[Problem]:
        """Return all differences in names, shapes and dtypes, from the headers."""
        checkpoint, shape, rules = self.checkpoint, self.shape, self.rules
        expected: dict[str, StoredTensor] = {}
        problems = []
        for placement in self.placements:
            try:
                expected |= placement.stored_tensors(checkpoint.loadable)
            except ValueError as error:
                problems.append(Problem("shape", repr(placement.name), str(error)))
        if shape.tied and rules.tied_copy in checkpoint.tensors:
            head = (shape.vocab_size, shape.hidden_size)
            expected[rules.tied_copy] = StoredTensor((head,), checkpoint.loadable, optional=True)
        for name, rows in self._extra_biases().items():
            expected[name] = StoredTensor(((rows,),), LOADABLE, optional=True)
        problems += [
            checkpoint.missing(name, f"missing; expected {list(tensor.shapes[0])}")
            for name, tensor in expected.items()
            if name not in checkpoint.tensors and (not tensor.optional or name in checkpoint.absent)
        ]
        for name, info in checkpoint.tensors.items():
            if name in self.ignored:
                continue
            if name not in expected:
                reason = unexpected_reason(name, shape, rules)
                problems.append(Problem("unexpected", repr(name), f"unexpected: {reason}"))
                continue
            shapes, dtypes, _ = expected[name]
            if info.shape not in shapes:
                message = f"has shape {list(info.shape)}, expected {' or '.join(str(list(size)) for size in shapes)}"
                problems.append(Problem("shape", repr(name), message))
            if info.dtype not in dtypes:
                problems.append(Problem("dtype", repr(name), f"has dtype {info.dtype}, expected {', '.join(dtypes)}"))
        return problems

    def value_problems(self) -> list[Problem]:
        """Return the problems of values, which `problems` does not read: untied heads and non-zero biases."""
        checkpoint, head, embed = self.checkpoint, self.rules.tied_copy, self._embedding.name
        if self.shape.tied and head in checkpoint.tensors:
            infos = [checkpoint.info(name) for name in (head, embed)]
            is_comparable = (infos[0].dtype, infos[0].shape) == (infos[1].dtype, infos[1].shape)
            # Compare bytes, so that equal NaNs are equal.
            copy, tied = (checkpoint.tensor(name).view(torch.uint8) for name in (head, embed))
            if not is_comparable or not torch.equal(copy, tied):
                key = self.rules.config_keys["tied"]
                message = f"{key!r} is true, but it differs from {embed!r}; untie it or drop it"
                return [Problem("tied", repr(head), message)]
        message = "the config says that the model has no such bias, and it is not zero"
        biases = [name for name in self._extra_biases() if bool(checkpoint.tensor(name).count_nonzero())]
        return [Problem("value", repr(name), message) for name in biases]

    def checked_placements(self) -> list[Placement]:
        """Return the placements of all parameters. Raises CheckpointError if the checkpoint does not match."""
        if problems := self.problems() or self.value_problems():
            raise CheckpointError(self.checkpoint.folder, problems)
        return self.placements

    def _extra_biases(self) -> dict[str, int]:
        """Return the sizes of biases that the config rules out. AutoGPTQ wrote a zero bias for every weight."""
        if self.scheme is None or self.scheme.method != "gptq":
            return {}
        weight_names = {placement.name for placement in self.placements}
        matrices = [placement for placement in self.placements if placement.scheme is not None]
        names = {f"{placement.name.removesuffix('weight')}bias": placement.shape[0] for placement in matrices}
        stored = self.checkpoint.tensors
        return {name: rows for name, rows in names.items() if name not in weight_names and name in stored}


def ignored_names(names: Iterable[str], shape: ModelShape, rules: FamilyRules) -> set[str]:
    """Return the names of a checkpoint's tensors that are not loaded.

    These are derived buffers, K/V projections of layers that read other layers' K/V, and MTP layers.
    """
    ignored = {pattern.replace("{i}", str(i)) for pattern in rules.ignored for i in range(shape.num_layers)}
    own_kv = [rule.name for rule in rules.tensors if rule.params[0] in _KV]
    readers = [i for i in range(shape.num_layers) if shape.layer(i).kv_of != i]  # layers that read another layer's K/V
    ignored |= {name.replace("{i}", str(i)) for name in own_kv for i in readers}
    modules = tuple(name for name in rules.ignored if name.endswith("."))
    return {
        name
        for name in names
        if name in ignored or name.startswith(modules) or (rules.further_layers and _layer_of(name) >= shape.num_layers)
    }


def expected_tensors(shape: ModelShape, rules: FamilyRules, scheme: QuantScheme | None = None) -> list[Placement]:
    """Return the placements of all tensors that a checkpoint of this shape and quantisation must have."""
    parameters = shape.parameters()
    placements = []
    count = 0 if shape.experts is None else shape.experts.count
    for rule in rules.tensors:
        of_expert, of_experts = "{e}" in rule.name, "{e}" in rule.params[0] and "{e}" not in rule.name
        for i in range(shape.num_layers) if "{i}" in rule.name else [0]:
            rule_params = [param.replace("{i}", str(i)) for param in rule.params]
            for e in range(count) if of_expert else [0]:
                experts_of_tensor = range(count) if of_experts else [e]
                params = [param.replace("{e}", str(expert)) for expert in experts_of_tensor for param in rule_params]
                if params and all(param in parameters for param in params):
                    shapes = {param: parameters[param] for param in params}
                    name = rule.name.replace("{i}", str(i)).replace("{e}", str(e))
                    experts = count if of_experts else None
                    heads = getattr(shape.recurrent if rule.heads == "key_heads" else shape, rule.heads)
                    placement = Placement(name, rule, shapes, heads, experts)
                    if scheme is not None and _quantizes(scheme, placement, rules):
                        placement = placement._replace(scheme=scheme)
                    placements.append(placement)
    covered = [param for placement in placements for param in placement.params]
    assert sorted(covered) == sorted(parameters), f"rules of {rules.model_type!r} do not cover the decoder"
    return placements


def _quantizes(scheme: QuantScheme, placement: Placement, rules: FamilyRules) -> bool:
    if len(placement.matrix_shape) != 2 or next(iter(placement.params)).endswith(UNQUANTISED):
        return False
    is_embedding = not placement.params.keys().isdisjoint(_EMBEDDINGS)
    return (scheme.embeddings or not is_embedding) and scheme.covers(placement.name, rules.tied_copy)


def _layer_of(name: str) -> int:
    """Return the layer of a checkpoint's tensor, or -1 if it belongs to none."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)


def unexpected_reason(name: str, shape: ModelShape, rules: FamilyRules) -> str:
    """Return why a tensor does not belong to a model."""
    rule_names = {rule.name for rule in rules.tensors} | set(rules.ignored)
    components = re.sub(r"\.experts\.\d+\.", ".experts.{e}.", name).split(".")
    for i, component in enumerate(components):
        if component.isdecimal() and ".".join([*components[:i], "{i}", *components[i + 1 :]]) in rule_names:
            is_beyond = len(component) > 5 or component != str(int(component)) or int(component) >= shape.num_layers
            num_layers = f"{rules.config_keys['num_layers']!r} is {shape.num_layers}"
            kind = "bias" if name.endswith("bias") else "tensor"
            return num_layers if is_beyond else f"the config says that the model has no such {kind}"
    return f"no tensor of the family {rules.model_type!r} has this name"


def cast(stored: Tensor, dtype: torch.dtype | None, device: torch.device | str = "cpu") -> tuple[Tensor, bool]:
    """Return the tensor in another dtype and on another device, and whether a finite value became infinite."""
    dtype = dtype or stored.dtype
    # float32 to bfloat16 is not checked: the largest finite values differ by 0.4 %, and no weight lies between them.
    limit = torch.finfo(dtype).max
    if limit >= 0.5 * torch.finfo(stored.dtype).max or stored.numel() == 0:
        return stored.to(device=device, dtype=dtype), False
    if torch.device(device).type == "cpu":
        result = torch.empty_like(stored, dtype=dtype, memory_format=torch.contiguous_format)
        extremes = []  # per chunk, while it is in cache: over the whole tensor this took a quarter of the cast's time
        for chunk, target in zip(stored.flatten().split(CHUNK), result.flatten().split(CHUNK), strict=True):
            extremes += chunk.aminmax()
            target.copy_(chunk)
        least, greatest = (value.item() for value in torch.stack(extremes).aminmax())
    else:
        result = stored.to(device=device, dtype=dtype)
        least, greatest = (value.item() for value in result.aminmax())
    if -limit <= least and greatest <= limit:  # False if there is a NaN
        return result, False
    return result, bool((result.isinf().cpu() & stored.isfinite()).any())


def overflow_message(stored: Tensor, result: Tensor) -> str:
    """Return the error message for a value that `cast` made infinite."""
    return f"{stored.abs().max().item():.4g} is infinite in {result.dtype}; load it as bfloat16 or float32"
