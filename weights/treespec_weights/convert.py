"""Convert a checkpoint's dtype, shards or layout, with one tensor in memory at a time and an atomic result.

A conversion is a list of steps. Each step reads the source tensors of one result tensor and yields that tensor, or
several (a quantised weight and its scales). Steps declare their outputs, so a file's header is known before its first
tensor is computed.
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treespec_weights import staging, writer
from treespec_weights.checkpoint import INDEX, Checkpoint
from treespec_weights.documents import CONFIG, read_config, write_documents
from treespec_weights.dtypes import DTYPES
from treespec_weights.errors import CheckpointError, OptionError, Problem, UnsupportedModelError, WriteError
from treespec_weights.families import FAMILIES, family_of
from treespec_weights.files import is_gguf, read_json, resolve_folder
from treespec_weights.gguf.reader import read_gguf
from treespec_weights.layouts import translate_config
from treespec_weights.load import ModelTensors, Placement, expected_tensors, read_dequantized
from treespec_weights.mtp import open_predictor, predictor_of
from treespec_weights.quant_config import KEY, scheme_of
from treespec_weights.rules import TILED, FamilyRules, ModelShape
from treespec_weights.transform import Transform, quantise_transform

SHARD_BYTES = 2 * 10**9
STATE = "conversion.json"  # identifies an unfinished conversion
PER_LAYER_LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers")  # keys of a config


class ConversionStep(NamedTuple):
    target: Placement  # result tensor
    sources: tuple[Placement, ...]  # checkpoint tensors that hold the target's parameters
    outputs: tuple[writer.Output, ...]  # tensors to write
    transform: Transform

    def tensors(self, checkpoint: Checkpoint) -> Sequence[Tensor]:
        """Return the tensors to write. Raises CheckpointError if a value does not fit the dtype."""
        first = self.sources[0]
        if (first.rule.layout, first.params) == (self.target.rule.layout, self.target.params):
            tensor = read_dequantized(checkpoint, first)
        else:
            params: dict[str, Tensor] = {}
            for source in self.sources:
                unpacked = source.unpack(read_dequantized(checkpoint, source))
                params |= {name: unpacked[name] for name in self.target.params if name in unpacked}
            tensor = self.target.pack(params)
        try:
            return self.transform.apply(self.target, tensor)
        except OverflowError as error:
            raise CheckpointError(
                checkpoint.folder, [Problem("value", repr(source.name), str(error)) for source in self.sources]
            ) from error


def convert_checkpoint(
    source: Path | str,
    destination: Path | str,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    layout: str | None = None,
    resume: bool = False,
    quantization: str | None = None,
    layers: int | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Write a converted checkpoint to another folder, and return a JSON-ready report.

    Writes tensors one by one into `<destination>.partial`, and renames it at the end. If writing fails or the process
    is killed, finished files remain there for `resume`, and `destination` does not exist. An MTP layer is converted
    with the model, but not quantised; it is left out if there are several, and with another layout or fewer layers.

    Args:
        source: a folder or GGUF file that `verify` accepts; not modified.
        destination: a folder that does not exist, or is empty; not inside of the source.
        dtype: dtype of all tensors; None keeps their dtypes, or takes the one of a GGUF file's config. A quantised
            checkpoint needs a dtype, and is dequantised.
        shard_bytes: maximum bytes of tensors per file; a larger tensor gets its own file.
        layout: model_type of another family with the same parameters.
        quantization: "int8", "int4" or "fp8" quantises the layers' matrices, after the cast; "fp8-all" also embedding
            and head.
        layers: number of layers to keep; None keeps all.
        on_bytes: called with the bytes written so far and the total.

    The report's `left_out` are the source's tensors that are not read, such as derived buffers.

    Raises OptionError, CheckpointError, UnsupportedModelError (for the layout), WriteError and OSError.
    """
    root = resolve_folder(source)
    target = staging.resolve_destination(destination, root)
    carried = staging.carried_files(root, CONFIG, INDEX, STATE)
    config = read_config(root)
    rules = family_of(config, root)
    if root.is_file():  # blocks are dequantised, and a GGUF file's tensors have no common dtype
        config.pop(KEY, None)
        dtype = dtype or DTYPES[config["dtype"]]
    elif (scheme := scheme_of(config, root)) is not None:
        if dtype is None or quantization is not None:
            raise OptionError(f"{str(source)!r} is quantised ({scheme.name}); give --dtype alone to dequantise it")
        config.pop(KEY)
    shape = ModelShape.from_hf(config, rules, root)
    if shape.recurrent is not None and shape.recurrent.tiled:
        message = "its order of value heads is llama.cpp's, which safetensors files of this family do not have"
        raise UnsupportedModelError.of(root, "config", TILED, message)
    if layout not in (None, *FAMILIES):
        raise OptionError(f"--layout {layout}: valid are {', '.join(FAMILIES)}")
    written_as = rules if layout in (None, rules.model_type) else FAMILIES[str(layout)]
    if written_as is not rules:
        config = translate_config(root, config, shape, rules, written_as)
    transform = Transform(dtype)
    if quantization is not None:
        transform = quantise_transform(quantization, dtype, shape, written_as)
    with Checkpoint.open(root) as checkpoint:
        tensors = ModelTensors(checkpoint, shape, rules)
        steps = plan_steps(tensors, rules, written_as, transform)
        ignored, module = tensors.ignored, None
        if written_as is rules and layers is None and rules.predictor is not None:
            if predictor_steps := _predictor_steps(checkpoint, shape, rules, dtype):
                steps, module = steps + predictor_steps, rules.predictor.after(shape.num_layers).module
                ignored = {name for name in ignored if not name.startswith(module)}
        if layers is not None and layers < shape.num_layers:
            kept_params = replace(shape, num_layers=layers).parameters()
            steps = [step for step in steps if all(param in kept_params for param in step.target.params)]
            lists = {key: config[key][:layers] for key in PER_LAYER_LISTS if isinstance(config.get(key), list)}
            config = {**config, **lists, rules.config_keys["num_layers"]: layers}
        shards = writer.plan_shards([step.outputs for step in steps], shard_bytes)
        step_of = {step.outputs[0]: step for step in steps}

        def tensors_of(shard: writer.Shard) -> Iterator[Tensor]:
            return chain.from_iterable(
                step_of[output].tensors(checkpoint) for output in shard.outputs if output in step_of
            )

        state = _state(root, written_as, shards, transform)
        partial = staging.partial_of(target)
        if resume:
            _check_state(partial, state)
        else:
            _start(partial, state)
        try:
            resumed = staging.write_shards(partial, shards, tensors_of, on_bytes)
            writer.write_json(partial, CONFIG, transform.config(config, module))
            staging.copy_files(root, carried, partial)
            if root.is_file():
                write_documents(root, partial)
            with Checkpoint.open(partial) as result:
                files = result.files
            staging.publish(partial, target)
            (target / STATE).unlink()
        except BaseException as error:
            source_is_unusable = isinstance(error, CheckpointError) and not isinstance(error, WriteError)
            if source_is_unusable or not any(writer.is_written(partial, shard) for shard in shards):
                shutil.rmtree(partial, ignore_errors=True)
            elif isinstance(error, WriteError):
                note = Problem("file", repr(partial.name), "holds finished files: continue with --resume, or delete it")
                raise WriteError(partial, [*error.problems, note]) from error
            raise
    outputs = [output for shard in shards for output in shard.outputs]
    return {
        "source": str(source),
        "destination": str(destination),
        "family": written_as.model_type,
        "dtypes": sorted({output.dtype for output in outputs}),
        "tensors": len(outputs),
        "bytes": sum(output.nbytes for output in outputs),
        "files": files,
        "resumed": resumed,
        "left_out": sorted(ignored),
    }


@contextlib.contextmanager
def as_folder(path: Path, dtype: torch.dtype, layers: int | None = None) -> Iterator[Path]:
    """Yield an unquantised Hugging Face folder of a checkpoint, or of its first `layers`.

    The folder is the checkpoint's own, or a temporary one, dequantised to `dtype`.
    """
    is_plain = not is_gguf(path) and scheme_of(read_config(path), path) is None
    if is_plain and layers is None:
        yield path
        return
    with TemporaryDirectory(prefix="treespec-dequantised-") as scratch:
        folder = Path(scratch) / "model"
        convert_checkpoint(path, folder, dtype=None if is_plain else dtype, layers=layers)
        yield folder


def plan_steps(
    tensors: ModelTensors, rules: FamilyRules, written_as: FamilyRules, transform: Transform
) -> list[ConversionStep]:
    """Return the steps of a conversion, layer by layer. Raises CheckpointError if several dtypes would be fused."""
    checkpoint, shape, problems = tensors.checkpoint, tensors.shape, list[Problem]()
    placements, is_gguf = tensors.checked_placements(), checkpoint.folder.is_file()
    if is_gguf:
        placements = [placement._replace(scheme=None) for placement in placements]  # `tensor` dequantises
    if any(placement.experts is not None for placement in placements):
        if written_as is not rules or is_gguf or tensors.scheme is not None:
            raise OptionError("all experts of a layer are in one tensor, for which no conversion has another layout")
        if transform.params:
            raise OptionError("--quantize: all experts of a layer are in one tensor; use LLM(quantization=...)")
    order = {param: index for index, param in enumerate(shape.parameters())}
    holder = {param: placement for placement in placements for param in placement.params}
    keeps_tensors = written_as is rules and not (is_gguf and rules.alternatives)
    targets = placements if keeps_tensors else expected_tensors(shape, written_as)
    steps = []
    for target in sorted(targets, key=lambda placement: min(order[param] for param in placement.params)):
        sources = tuple({holder[param].name: holder[param] for param in target.params}.values())
        dtypes = {
            checkpoint.dtype(source.name) if source.scheme is None else torch.float32: source.name for source in sources
        }
        outputs = [tuple(transform.outputs(target, dtype)) for dtype in dtypes]
        if len(set(outputs)) > 1:
            listing = ", ".join(f"{name!r} is {str(dtype).removeprefix('torch.')}" for dtype, name in dtypes.items())
            problems.append(Problem("dtype", repr(target.name), f"of several dtypes ({listing}); pass --dtype"))
        steps.append(ConversionStep(target, sources, outputs[0], transform))
    if problems:
        raise CheckpointError(checkpoint.folder, problems)
    return steps


def _predictor_steps(
    checkpoint: Checkpoint, shape: ModelShape, rules: FamilyRules, dtype: torch.dtype | None
) -> list[ConversionStep]:
    """Return the steps of the model's MTP layer; none if there is none, or one that treespec cannot run."""
    try:
        own_shape, own_rules = predictor_of(checkpoint.folder, shape, rules)
        with open_predictor(checkpoint.folder, own_rules) as predictor:
            return plan_steps(ModelTensors(predictor, own_shape, own_rules), own_rules, own_rules, Transform(dtype))
    except CheckpointError:
        return []


def _state(root: Path, written_as: FamilyRules, shards: Sequence[writer.Shard], transform: Transform) -> dict[str, Any]:
    """Return the identity of a conversion: sizes and times of the source's files, and a hash of the plan."""
    plan = hashlib.sha256(repr((written_as.model_type, shards, transform)).encode())
    entries = [root.parent / name for name in read_gguf(root).files] if root.is_file() else sorted(root.iterdir())
    files = {entry.name: entry.stat() for entry in entries if entry.is_file()}
    return {
        "source": str(root),
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in files.items()},
        "plan": plan.hexdigest(),
    }


def _start(partial: Path, state: dict[str, Any]) -> None:
    staging.create_partial(partial, ", from an interrupted or running conversion; continue with --resume, or delete it")
    try:
        writer.write_json(partial, STATE, state)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _check_state(partial: Path, state: dict[str, Any]) -> None:
    """Raise OptionError if there is no conversion to resume, or a different one."""
    if partial.is_symlink() or not partial.is_dir():
        raise OptionError(f"--resume: no interrupted conversion at {str(partial)!r}; omit the option")
    try:
        saved = read_json(resolve_folder(partial), STATE)
    except CheckpointError as error:
        raise OptionError(f"--resume: {error}; delete the folder") from error
    if not isinstance(saved, dict) or saved.keys() != state.keys():
        raise OptionError(f"--resume: {str(partial / STATE)!r} is not from a conversion; delete the folder")
    for key, reason in (("source", "another source"), ("files", "changed source files"), ("plan", "other options")):
        if saved[key] != json.loads(json.dumps(state[key])):
            raise OptionError(f"--resume: the conversion in {str(partial)!r} has {reason}; delete the folder")
