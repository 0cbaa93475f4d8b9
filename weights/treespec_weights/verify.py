"""Verify a checkpoint and report all its problems at once."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treespec_weights.checkpoint import Checkpoint
from treespec_weights.documents import CONFIG, GENERATION_CONFIG, read_config, read_generation_config
from treespec_weights.errors import CheckpointError, Problem
from treespec_weights.families import family_of
from treespec_weights.files import resolve_folder
from treespec_weights.load import ModelTensors
from treespec_weights.rules import FamilyRules, ModelShape
from treespec_weights.tokenizer import read_vocabulary

CHUNK = 1 << 20  # values scanned at a time: 4 MiB as float32 stays in cache


class Check(NamedTuple):
    name: str  # "files", "config", "tokenizer", "tensors", "values"
    done: bool  # False if an earlier problem prevented the check
    detail: str  # what was checked, or why the check was skipped
    problems: tuple[Problem, ...]


class Verification(NamedTuple):
    checks: tuple[Check, ...]

    @property
    def problems(self) -> list[Problem]:
        return [problem for check in self.checks for problem in check.problems]

    @property
    def ok(self) -> bool:
        return not self.problems and all(check.done for check in self.checks)


def verify_checkpoint(
    folder: Path | str, on_values: Callable[[int, int], None] | None = None, chunk: int = CHUNK
) -> Verification:
    """Check files, index, config, tokenizer, names, shapes and the tied head, and scan all values for NaN and Inf.

    Scans memory-mapped files, `chunk` values at a time. Calls `on_values` after every tensor with the number of values
    scanned so far and the total. Raises only for a missing folder (FileNotFoundError, NotADirectoryError).
    """
    root = resolve_folder(folder)
    config, rules, shape, config_check = _check_config(root)
    checks = [config_check, _check_tokenizer(root, config, shape)]
    try:
        checkpoint = Checkpoint.open(root)
    except CheckpointError as error:
        skipped = [Check(name, False, "not reached: the files cannot be opened", ()) for name in ("tensors", "values")]
        return Verification((Check("files", True, "", error.problems), *checks, *skipped))
    with checkpoint:
        kind = "GGUF" if root.is_file() else "safetensors"
        files = Check("files", True, f"{len(checkpoint.files)} {kind}, {len(checkpoint.tensors):,} tensors", ())
        checks += [_check_tensors(checkpoint, rules, shape), _check_values(checkpoint, on_values, chunk)]
        return Verification((files, *checks))


def _check_config(root: Path) -> tuple[dict[str, Any], FamilyRules | None, ModelShape | None, Check]:
    config: dict[str, Any] = {}
    rules = None
    try:
        config = read_config(root)
        rules = family_of(config, root)
        shape = ModelShape.from_hf(config, rules, root)
    except CheckpointError as error:
        return config, rules, None, Check("config", True, "", error.problems)
    detail = f"{rules.model_type}, {shape.num_layers} layers, hidden size {shape.hidden_size:,}"
    return config, rules, shape, Check("config", True, detail, ())


def _check_tokenizer(root: Path, config: dict[str, Any], shape: ModelShape | None) -> Check:
    if shape is None:
        return Check("tokenizer", False, "not reached: the config is not usable", ())
    try:
        vocabulary = read_vocabulary(root)
        generation = read_generation_config(root)
    except CheckpointError as error:
        return Check("tokenizer", True, "", error.problems)
    problems = []
    if vocabulary and vocabulary.max_id is not None and vocabulary.max_id >= shape.vocab_size:
        message = f"its largest token id is {vocabulary.max_id}, but vocab_size is {shape.vocab_size}"
        problems.append(Problem("tokenizer", "'tokenizer.json'", message))
    for file, values in ((CONFIG, config), (GENERATION_CONFIG, generation)):
        end = values.get("eos_token_id")
        for token in end if isinstance(end, list) else [] if end is None else [end]:
            if type(token) is not int or not 0 <= token < shape.vocab_size:
                message = f"{token!r} is not a token id from 0 to {shape.vocab_size - 1}"
                problems.append(Problem("config", f"'eos_token_id' of {file!r}", message))
    tokens = f"{vocabulary.tokens:,} tokens" if vocabulary and vocabulary.tokens is not None else "SentencePiece"
    return Check("tokenizer", True, tokens if vocabulary else "none in the folder", tuple(problems))


def _check_tensors(checkpoint: Checkpoint, rules: FamilyRules | None, shape: ModelShape | None) -> Check:
    if rules is None or shape is None:
        return Check("tensors", False, "not reached: the config is not usable", ())
    tensors = ModelTensors(checkpoint, shape, rules)
    detail = f"all {len(tensors.placements):,} names and shapes as expected, {'tied' if shape.tied else 'untied'} head"
    return Check("tensors", True, detail, tuple(tensors.problems() or tensors.value_problems()))


def _check_values(checkpoint: Checkpoint, on_values: Callable[[int, int], None] | None, chunk: int) -> Check:
    problems: list[Problem] = []
    scanned, total = 0, sum(info.size for info in checkpoint.tensors.values())
    for name in checkpoint.tensors:
        try:
            if checkpoint.dtype(name).is_floating_point:
                problems += _non_finite(name, checkpoint.tensor(name), chunk)
        except CheckpointError as error:
            problems += error.problems
        scanned += checkpoint.info(name).size
        if on_values:
            on_values(scanned, total)
    return Check("values", True, f"no NaN or Inf in {total:,} values", tuple(problems))


def _non_finite(name: str, tensor: Tensor, size: int) -> Iterator[Problem]:
    nans = infs = 0
    first = None
    for chunk_index, chunk in enumerate(tensor.flatten().split(size)):
        if chunk.element_size() == 1:
            chunk = chunk.float()  # float8 has no reductions
        # aminmax propagates NaN, and takes 0.05 ms instead of isfinite().all()'s 7.6 (1 Mi bfloat16 values, two cores).
        if chunk.numel() == 0 or torch.isfinite(torch.stack(chunk.aminmax())).all():
            continue
        nans += int(chunk.isnan().sum())
        infs += int(chunk.isinf().sum())
        if first is None:
            first = chunk_index * size + int(chunk.isfinite().logical_not().nonzero()[0])
    if first is not None:
        flat = torch.tensor(first, dtype=torch.int64, device="cpu")
        index = [int(i) for i in torch.unravel_index(flat, tensor.shape)]
        yield Problem("value", repr(name), f"{nans:,} NaN and {infs:,} Inf; the first at {index}")
