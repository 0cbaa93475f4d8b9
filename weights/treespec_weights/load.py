"""Strict loading: every tensor named, shaped and typed as the model's shape says, or nothing."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from treespec_weights.checkpoint import TORCH_DTYPES, Checkpoint
from treespec_weights.errors import CheckpointError, Problem
from treespec_weights.rules import LLAMA, FamilyRules, ModelShape, Shape, TensorRule

LOADABLE = ("F64", "F32", "F16", "BF16")
DTYPES = tuple(TORCH_DTYPES[name] for name in LOADABLE)


class Placement(NamedTuple):
    """One checkpoint tensor, and the decoder parameters to take out of it."""

    name: str
    rule: TensorRule
    params: dict[str, Shape]
    heads: int  # groups of a "per_head" tensor

    @property
    def shape(self) -> Shape:
        """The shape that the tensor must have in the file."""
        first = next(iter(self.params.values()))
        stacked = (sum(shape[0] for shape in self.params.values()), *first[1:])
        return stacked[::-1] if self.rule.layout == "transposed" else stacked

    def unpack(self, tensor: Tensor) -> dict[str, Tensor]:
        """Parameter name to tensor, contiguous; views of `tensor` where its layout allows."""
        if self.rule.layout == "transposed":
            tensor = tensor.t() if tensor.dim() == 2 else tensor
        sizes = [shape[0] for shape in self.params.values()]
        if self.rule.layout == "per_head":
            per_head = tensor.unflatten(0, (self.heads, -1)).split([size // self.heads for size in sizes], dim=1)
            parts = [part.flatten(0, 1) for part in per_head]
        else:
            parts = list(tensor.split(sizes))
        return {name: part.contiguous() for name, part in zip(self.params, parts, strict=True)}


def load_weights(
    folder: Path | str | Checkpoint,
    shape: ModelShape,
    rules: FamilyRules = LLAMA,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Loads a checkpoint into decoder parameters, `shape.parameters()`, contiguous and in that order.

    Names, shapes and dtypes are checked from the headers before any tensor is read. Tensors are then cast one by
    one, so that memory stays within one tensor over the result. With `dtype=None`, or where the stored dtype is
    `dtype` already, CPU tensors stay mapped to the file (private: writing never reaches it) and cost no memory of
    their own; the mapping ends with the last tensor that uses it.

    Raises CheckpointError with the whole list: missing, unexpected or misshaped tensors, dtypes other than float64,
    float32, float16 and bfloat16; a tied model whose stored head differs from its embedding; values that a cast to
    `dtype` would turn into infinity. ValueError for a `dtype` that is none of these four. Otherwise as
    `Checkpoint.open`.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"weights cannot be loaded as {dtype}; valid: {', '.join(map(str, DTYPES))}")
    if not isinstance(folder, Checkpoint):
        with Checkpoint.open(folder) as checkpoint:
            return load_weights(checkpoint, shape, rules, dtype, device)
    checkpoint = folder
    placements, problems = match(checkpoint, shape, rules)
    if problems:
        raise CheckpointError(checkpoint.folder, problems)
    if problem := tied_head_problem(checkpoint, shape, rules):
        raise CheckpointError(checkpoint.folder, [problem])
    loaded: dict[str, Tensor] = {}
    overflows = []
    for placement in placements:
        stored = checkpoint.tensor(placement.name)
        tensor = stored.to(device=device, dtype=dtype)
        if _narrows(stored.dtype, tensor.dtype) and _overflows(stored, tensor):
            message = f"{stored.abs().max().item():.4g} is infinite in {tensor.dtype}; load it as bfloat16 or float32"
            overflows.append(Problem("value", repr(placement.name), message))
        loaded |= placement.unpack(tensor)
    if overflows:
        raise CheckpointError(checkpoint.folder, overflows)
    return {name: loaded[name] for name in shape.parameters()}


def match(checkpoint: Checkpoint, shape: ModelShape, rules: FamilyRules) -> tuple[list[Placement], list[Problem]]:
    """Lays the checkpoint's headers beside what the rules expect of a model of this shape; reads no tensor.

    Returns where to take every parameter from, and all problems; the first is usable only without the second.
    """
    placements = _expected(shape, rules)
    expected: dict[str, Shape] = {placement.name: placement.shape for placement in placements}
    required = set(expected)
    if shape.tied:
        expected[rules.tied_copy] = (shape.vocab_size, shape.hidden_size)
    ignored = ignored_names(shape, rules)
    problems = [
        Problem("missing", repr(name), f"missing; expected {list(expected[name])}")
        for name in expected
        if name in required and name not in checkpoint.tensors
    ]
    for name, info in checkpoint.tensors.items():
        if name in ignored:
            continue
        if name not in expected:
            problems.append(Problem("unexpected", repr(name), f"unexpected: {_why_unexpected(name, shape, rules)}"))
            continue
        if info.shape != expected[name]:
            message = f"has shape {list(info.shape)}, expected {list(expected[name])}"
            problems.append(Problem("shape", repr(name), message))
        if info.dtype not in LOADABLE:
            problems.append(Problem("dtype", repr(name), f"has dtype {info.dtype}, expected {', '.join(LOADABLE)}"))
    return placements, problems


def ignored_names(shape: ModelShape, rules: FamilyRules) -> set[str]:
    """Names of derived buffers that a checkpoint may hold and that are not loaded."""
    return {pattern.replace("{i}", str(i)) for pattern in rules.ignored for i in range(shape.num_layers)}


def tied_head_problem(checkpoint: Checkpoint, shape: ModelShape, rules: FamilyRules) -> Problem | None:
    """What is wrong with the stored head of a tied model, if one is stored: it must equal the embedding."""
    if not shape.tied or rules.tied_copy not in checkpoint.tensors:
        return None
    embed = next(rule.name for rule in rules.tensors if rule.params == ("embed",))
    head_info, embed_info = checkpoint.info(rules.tied_copy), checkpoint.info(embed)
    alike = (head_info.dtype, head_info.shape) == (embed_info.dtype, embed_info.shape)
    if alike and torch.equal(_bits(checkpoint.tensor(rules.tied_copy)), _bits(checkpoint.tensor(embed))):
        return None
    message = f"{rules.config_keys['tied']!r} is true, but it differs from {embed!r}; untie it or drop it"
    return Problem("tied", repr(rules.tied_copy), message)


def _bits(tensor: Tensor) -> Tensor:
    """As bytes, so that equal NaN count as equal."""
    return tensor.view(torch.uint8)


def _expected(shape: ModelShape, rules: FamilyRules) -> list[Placement]:
    parameters = shape.parameters()
    placements = []
    for rule in rules.tensors:
        for i in range(shape.num_layers) if "{i}" in rule.name else [0]:
            params = [param.replace("{i}", str(i)) for param in rule.params]
            if all(param in parameters for param in params):
                held = {param: parameters[param] for param in params}
                placements.append(Placement(rule.name.replace("{i}", str(i)), rule, held, shape.num_kv_heads))
    covered = [param for placement in placements for param in placement.params]
    assert sorted(covered) == sorted(parameters), f"rules of {rules.model_type!r} do not cover the decoder"
    return placements


def _why_unexpected(name: str, shape: ModelShape, rules: FamilyRules) -> str:
    known = {rule.name for rule in rules.tensors} | set(rules.ignored)
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isdecimal() and ".".join([*parts[:at], "{i}", *parts[at + 1 :]]) in known:
            beyond = len(part) > 5 or part != str(int(part)) or int(part) >= shape.num_layers
            num_layers = f"{rules.config_keys['num_layers']!r} is {shape.num_layers}"
            return num_layers if beyond else "the config says that the model has no such bias"
    return f"no tensor of the family {rules.model_type!r} has this name"


def _narrows(stored: torch.dtype, result: torch.dtype) -> bool:
    # float32 to bfloat16 does not count: the largest values differ by 0.4 %, no weight lies between.
    return torch.finfo(result).max < 0.5 * torch.finfo(stored).max


def _overflows(stored: Tensor, result: Tensor) -> bool:
    if result.numel() == 0 or not torch.isinf(torch.stack(result.aminmax())).any():
        return False
    return bool((result.isinf().cpu() & stored.isfinite()).any())
