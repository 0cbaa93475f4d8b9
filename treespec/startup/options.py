"""Resolves an engine's options on this machine: models, device, dtype and implementations."""

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from treespec.adapter.mtp import adapter_mtp_form
from treespec.adapter.source import Source, check_inputs
from treespec.adapter.trace import AdapterConfig
from treespec.config.configs import QUANTIZATIONS, SpecConfig
from treespec.config.engine_options import EngineOptions
from treespec.drafters.base import Drafter, check_drafter, check_names
from treespec.drafters.table.stored_table import is_table
from treespec.drafters.table.table_drafter import NAME as TABLE
from treespec.errors import ConfigError, KernelError, ModelError, VariantError
from treespec.models.adapter_slots import MAX_RANK, SlotLimits
from treespec.models.compiled import check_compiled
from treespec.models.model_config import ModelConfig
from treespec.startup import smollm2
from treespec.startup.load import HeadConfig, Loader, libraries_folder
from treespec.startup.vocabularies import Draft, HeadLimit, connect_drafts
from treespec_kernels.cpu.decoder_library import DTYPES as COMPILED_DTYPES
from treespec_kernels.linear.linear import LinearImpl, onednn_available
from treespec_kernels.tuning.tuned import KernelConfigs
from treespec_weights import HubError, default_folder, default_names, fetch, is_hub_id
from treespec_weights.assistants import AssistantForm
from treespec_weights.dtypes import DTYPES
from treespec_weights.errors import Problem, UnsupportedModelError
from treespec_weights.heads import DraftForm, read_head
from treespec_weights.load import quantized_group
from treespec_weights.mtp import MTP, MtpForm, mtp_form
from treespec_weights.quant_schemes import METHODS

logger = logging.getLogger("treespec")

_DTYPE_NAMES = DTYPES | {"half": torch.float16, "float": torch.float32}  # names in vLLM and torch
EMBEDDED = "embedded"
# SSM group (see `default_names`) of each target known by name.
_GROUPS: dict[object, str] = {None: "default", EMBEDDED: "default", smollm2.NAME: smollm2.NAME}
FIXED_ROWS = 64  # rows of every pass if the linear layers are not row-invariant


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the device with its index. "auto" is this thread's current GPU, or else the CPU. Raises ConfigError."""
    has_gpu = torch.cuda.is_available()
    try:
        resolved = torch.device(("cuda" if has_gpu else "cpu") if device == "auto" else device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f'device={device!r}; valid: "auto", "cpu", "cuda", "cuda:1"') from error
    if resolved.type == "cpu":
        return resolved
    if resolved.type != "cuda":
        raise ConfigError(f'device={device!r} is not supported; valid: "auto", "cpu", "cuda"')
    if not has_gpu:
        raise ConfigError(f'device={device!r}, but torch sees no GPU here; use device="cpu" or "auto"')
    index = torch.cuda.current_device() if resolved.index is None else resolved.index
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"device={device!r}, but the last of the {count} that torch sees here is cuda:{count - 1}; "
            "CUDA_VISIBLE_DEVICES selects them"
        )
    return torch.device("cuda", index)


def resolve_dtype(dtype: str | torch.dtype, stored: torch.dtype) -> torch.dtype:
    """Return the dtype of passes; "auto" is the stored one. Raises ConfigError."""
    resolved = dtype if isinstance(dtype, torch.dtype) else stored if dtype == "auto" else _DTYPE_NAMES.get(dtype)
    if resolved is None or resolved not in DTYPES.values():
        raise ConfigError(f'dtype={dtype!r}; valid: "auto", {", ".join(map(repr, DTYPES))} or such a torch dtype')
    return resolved


def is_slow(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch is slower in a dtype than in float32, as bfloat16 and float16 are on some CPUs."""
    return device.type == "cpu" and dtype != torch.float32 and not onednn_available(dtype)


def resolve_model(model: str | os.PathLike[str] | None) -> Path:
    """Return the path of a model: one known by name, a folder or GGUF file, or a hub id (cached or downloaded).

    None and "embedded" are the embedded target, "smollm2" is the installed SmolLM2-135M-Instruct. These names take
    precedence over folders in the working directory.
    """
    if model is None or model == EMBEDDED:
        return default_folder("target")
    if model == smollm2.NAME:
        if (file := smollm2.model_file()) is None:
            raise ModelError(
                f"{smollm2.NAME!r} is {smollm2.TITLE}, which is not installed: {smollm2.install_command()} (a folder "
                f"of this name is './{smollm2.NAME}')"
            )
        return file
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(f"model={model!r}; valid: a folder, a hub id, a model, or None for the embedded target")
    return local_folder(model)


def local_folder(model: str | os.PathLike[str]) -> Path:
    """Return the path of a folder or file, or the folder of a hub id (cached or downloaded)."""
    folder = Path(os.path.expanduser(model))  # leaves "~nobody" unchanged
    if folder.exists() or "/" not in str(model) or not is_hub_id(str(model)) or folder.suffix.lower() == ".gguf":
        return folder  # the loader reports a missing path
    try:
        return fetch(str(model))
    except HubError as error:
        raise ModelError(f"{str(model)!r} is no folder here, and {error}") from error


def resolve_drafts(
    target: object, drafts: Sequence[Any] | None
) -> tuple[list[tuple[str, Path | tuple[nn.Module, Any] | str]], list[Drafter]]:
    """Split `drafts` into uniquely named draft models (in-memory ones with tokenizer or None) and drafters."""
    if drafts is not None and (isinstance(drafts, str) or not isinstance(drafts, Sequence)):
        raise ConfigError(f"drafts={drafts!r}; valid: a list of folders, hub ids, models or Drafter objects, or None")
    group = _GROUPS.get(target)
    if drafts is None:
        return [] if group is None else [(name, default_folder(name, group)) for name in _ssm_names(group)], []
    models: list[tuple[str, Path | tuple[nn.Module, Any] | str]] = []
    objects: list[Drafter] = []

    def add(name: str, model: Path | tuple[nn.Module, Any] | str) -> None:
        count = sum(1 for other_name, _ in models if other_name == name or other_name.startswith(f"{name}#"))
        models.append((name if not count else f"{name}#{count + 1}", model))

    for draft in drafts:
        if draft == MTP:
            if MTP in (model for _, model in models):
                raise ConfigError(f"drafts={list(drafts)!r}: {MTP!r} twice; the target has one MTP layer")
            add(MTP, MTP)
        elif draft == TABLE:
            add(TABLE, TABLE)
        elif isinstance(draft, str | os.PathLike):
            for folder in _resolve_draft(draft, group or "default"):
                add(folder.resolve().name.removesuffix(".gguf"), folder)
        elif isinstance(draft, nn.Module):
            add(type(draft).__name__, (draft, None))
        elif isinstance(draft, tuple) and len(draft) == 2 and isinstance(draft[0], nn.Module):
            add(type(draft[0]).__name__, draft)
        else:
            check_drafter(draft)
            objects.append(draft)
    check_names(objects, [name for name, _ in models])
    return models, objects


def _resolve_draft(draft: str | os.PathLike[str], group: str) -> list[Path]:
    """Return the folders of a draft: an SSM of the group by name, otherwise as in `resolve_model`.

    The output folder of `treespec train` stands for all drafts in it.
    """
    name = os.fspath(draft)
    if not Path(name).exists():
        if name in default_names(group):
            return [default_folder(name, group)]
        if re.fullmatch(r"ssm[-_ ]?\d*", name, re.IGNORECASE):
            valid = map(repr, _ssm_names(group))
            raise FileNotFoundError(
                f"no embedded draft {name!r}; valid: {', '.join(valid) or 'none, none is installed'}"
            )
    folder = resolve_model(draft)
    trained = [config_file.parent for name in ("ssm-*", TABLE) for config_file in folder.glob(f"{name}/config.json")]
    return sorted(trained) if trained and not (folder / "config.json").exists() else [folder]


def _ssm_names(group: str) -> list[str]:
    return [name for name in default_names(group) if name.startswith("ssm-")]


def resolve_folders(model: object, drafts: Sequence[Any] | None) -> list[tuple[str, Path]]:
    """Return the draft models of `resolve_drafts` that are on disk."""
    resolved = resolve_drafts(model, drafts)[0]
    return [(name, folder) for name, folder in resolved if isinstance(folder, Path) and not is_table(folder)]


def resolve_compile(
    options: EngineOptions, models: Sequence[ModelConfig | Source], dtype: torch.dtype, device: torch.device
) -> bool:
    """Build the libraries of compiled passes; return whether to use them. On failure, True raises and "auto" logs."""
    if options.compile is False or (options.compile == "auto" and device.type != "cpu"):
        return False
    try:
        for name in ("attention", "linear"):
            if (value := getattr(options, name)) != "auto":
                raise KernelError(f"{name}={value!r}, but compile=True has its own implementation; leave it at 'auto'")
        for model in models:
            if isinstance(model, Source):
                raise KernelError(f"compile=True is for native families; {model.name} runs through transformers' code")
        check_compiled([model for model in models if isinstance(model, ModelConfig)], dtype, device, libraries_folder())
    except (KernelError, OSError) as error:
        if options.compile is True or "TREESPEC_CPU" in os.environ:
            raise
        logger.info("passes are not compiled: %s", error)
        return False
    return True


def resolve_linear(
    linear: str, attention: str, dtype: torch.dtype, device: torch.device, exact: bool, spec: SpecConfig
) -> tuple[LinearImpl | Literal["compiled", "triton"], int | None]:
    """Return the implementation of linear layers, and the rows to which exactness pads every pass, or None."""
    is_fast = device.type == "cpu" and onednn_available(dtype)
    if linear == "onednn" and not is_fast:
        raise KernelError(f"linear='onednn' needs a CPU with fast {dtype}, the device is {device}; use linear='auto'")
    if linear == "triton" and attention != "triton":
        raise KernelError(f"linear='triton' requires attention='triton', not {attention!r}")
    if linear == "triton" or (linear == "auto" and device.type == "cuda"):
        return "triton", None
    if linear != "torch" and is_fast:
        return "onednn", None
    if not exact:
        return "torch", None
    rows = max(FIXED_ROWS, spec.max_nodes)
    logger.warning("%s on %s has no row-invariant linear layers: every pass is padded to %d rows", dtype, device, rows)
    return "torch", rows


def resolve_quantization(quantization: str | None, target: ModelConfig | Source, dtype: torch.dtype) -> str | None:
    """Return the quantisation to apply when loading, or None for the checkpoint's format. Raises ConfigError."""
    stored = None if isinstance(target, Source) else target.quantization
    method = str(quantization).removesuffix("_marlin")
    if (
        quantization is None
        or (quantization == "gguf" and target.folder.is_file())
        or (stored and stored.method == method)
    ):
        if stored is not None and stored.floating:
            logger.warning("%s: %s weights are held as %s", target.folder, stored.name, dtype)
        return None
    if method in METHODS:
        raise ConfigError(
            f"quantization={quantization!r}: leave it out; a checkpoint's own quantisation is read from its config "
            f"(this one is {stored.name if stored else 'not quantised'}), and 'int8' or 'int4' quantises while loading"
        )
    if isinstance(target, Source):
        raise ConfigError(f"quantization={quantization!r} is for native families; transformers runs {target.name}")
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization={quantization!r}; valid: None, {', '.join(map(repr, QUANTIZATIONS))}")
    if stored is not None:
        raise ConfigError(
            f"quantization={quantization!r}, but {target.folder} is quantised already ({stored.name}); leave it at None"
        )
    try:
        quantized_group(target.shape, quantization)
    except ValueError as error:
        raise ConfigError(f"quantization={quantization!r}: {target.folder}: {error}") from error
    return quantization


@dataclass(frozen=True)
class Resolved:
    """Options of an engine with every "auto" replaced and every config read. No native weights are loaded."""

    options: EngineOptions  # options as given by the user
    spec: SpecConfig
    loader: Loader  # loads models with the resolved device, dtype and implementations
    compile: bool  # whether passes run in compiled libraries
    quantization: str | None  # quantisation to apply to the target's layers
    fixed_rows: int | None  # rows of every pass if exactness needs padding, else None
    target: ModelConfig | AdapterConfig
    drafts: list[Draft]  # draft models, connected to the target's vocabulary
    heads: list[tuple[str, HeadConfig]]
    table: Path | str | None  # folder of the n-gram table; `TABLE` for an empty one that learns while serving
    drafters: list[Drafter]  # custom drafters

    @property
    def ssms(self) -> list[Draft]:
        """Drafts that share the target's token ids."""
        return [draft for draft in self.drafts if not draft.is_cross_tokenizer]

    @property
    def group(self) -> list[ModelConfig | AdapterConfig]:
        """Configs of the models that draft in lockstep: the SSMs, then the layers of the heads."""
        return [*(draft.config for draft in self.ssms), *(head.decoder for _, head in self.heads)]

    @property
    def shared_tokens(self) -> np.ndarray | None:
        """Tokens that draft heads score with the target's head, int64 ascending; None for all or if no head uses it."""
        return next((head.kept for _, head in self.heads if head.kept is not None and head.shares_head), None)

    @property
    def cross_tokenizer(self) -> list[Draft]:
        """Drafts whose tokenizer differs from the target's."""
        return [draft for draft in self.drafts if draft.is_cross_tokenizer]


def resolve(options: EngineOptions) -> Resolved:
    """Resolve the options of an engine. Raises the errors of `LLM`."""
    device, limit = resolve_device(options.device), HeadLimit.resolve(options.draft_vocabulary)
    spec = SpecConfig.resolve(options.spec, SpecConfig())
    on_triton = device.type == "cuda" or "triton" in (options.attention, options.linear)
    target, drafts, forms, table, drafters = _read_models(options, spec, on_triton)
    heads, length = list[tuple[str, HeadConfig]](), options.max_model_len
    if isinstance(target, ModelConfig):
        heads = [(name, HeadConfig.of(form, target, length).cut(limit, name, target)) for name, form in forms]
    models = [target, *(model for _, model in drafts)]
    others = [head for _, head in heads if not isinstance(head.form, AssistantForm)]  # assistants run eagerly on a CPU
    models += [head.decoder for head in others if isinstance(head.decoder, ModelConfig)]
    attention = options.attention
    if attention == "auto":
        attention = "cpu-packed" if device.type == "cpu" else "triton"
    _check_adapters(models, options.linear, device)
    _check_layers(models, device, options.linear, on_triton)
    dtype, compiles = _resolve_passes(options, models, target.dtype, device)
    quantization = resolve_quantization(options.quantization, target, dtype)
    linear: LinearImpl | Literal["compiled", "triton"] = "compiled"
    fixed_rows = None
    if not compiles:
        is_adapted = isinstance(target, Source)
        requested = "torch" if is_adapted and device.type == "cuda" else options.linear
        needs_padding = options.exact and not is_adapted  # `load_target` finds the padding of an adapter
        linear, fixed_rows = resolve_linear(requested, attention, dtype, device, needs_padding, spec)
    unequal = [model.folder for model in models if isinstance(model, ModelConfig) and model.shape.sizes]
    if unequal and attention == "triton" and linear != "triton":
        raise KernelError(
            f"{unequal[0]}: its layers are of unequal sizes, for which attention='triton' needs linear='triton', not "
            f"{linear!r}; leave linear at 'auto' on a GPU, or use backend='transformers'"
        )
    if options.enable_lora and (isinstance(target, Source) or (device.type != "cpu" and linear != "triton")):
        raise KernelError(
            "enable_lora=True is for native families in passes on a CPU, or on a GPU with linear='triton'; "
            + (
                f"transformers' code runs {target.name}: give it with the adapter in it (a model of peft) as the model"
                if isinstance(target, Source)
                else f"linear={linear!r} has no low-rank products on a GPU: leave it at 'auto'"
            )
        )
    configs = KernelConfigs.load(device) if linear == "triton" else None
    if options.draft_quantization == "int8" and not compiles:
        raise ConfigError("draft_quantization='int8' is for compiled passes on a CPU; leave it at 'auto'")
    # Compiled passes over few rows are memory-bound.
    int8_drafts = options.draft_quantization is not None and compiles
    int8_target = _quantises_activations(options.activations, compiles, target, quantization)
    adapters = None
    if options.enable_lora and configs is not None:
        adapters = SlotLimits(options.max_loras, options.max_lora_rank or MAX_RANK)
    loader = Loader(device, dtype, attention, linear, options.exact, configs, int8_drafts, int8_target, adapters)
    config = loader.open(target)
    connected = connect_drafts(config, [(name, loader.open(model)) for name, model in drafts], limit)
    if isinstance(config, AdapterConfig):
        heads = [
            (name, loader.open_mtp(form, config) if isinstance(form, MtpForm) else HeadConfig.of(form, config, length))
            for name, form in forms
        ]
    for name, head in heads:
        logger.info("draft %s (%s): %s", name, head.form.folder, head)
    return Resolved(
        options, spec, loader, compiles, quantization, fixed_rows, config, connected, heads, table, drafters
    )


def _resolve_passes(
    options: EngineOptions, models: Sequence[ModelConfig | Source], stored: torch.dtype, device: torch.device
) -> tuple[torch.dtype, bool]:
    """Return the dtype of passes and whether they are compiled, which makes bfloat16 fast on every CPU."""
    dtype = resolve_dtype(options.dtype, stored)
    if options.dtype != "auto" or isinstance(options.model, nn.Module) or not is_slow(dtype, device):
        return dtype, resolve_compile(options, models, dtype, device)
    if dtype in COMPILED_DTYPES and resolve_compile(options, models, dtype, device):
        return dtype, True
    logger.warning("%s has no fast %s here; computing in float32", device, dtype)
    return torch.float32, resolve_compile(options, models, torch.float32, device)


def _quantises_activations(value: str, compiles: bool, target: ModelConfig | Source, quantization: str | None) -> bool:
    """Return whether the target's activations are quantised to int8."""
    if value == "model":
        return False
    if not compiles:
        raise ConfigError("activations='int8' is for compiled passes on a CPU; leave it at 'model'")
    stored = None if isinstance(target, Source) else target.quantization
    if quantization is None and (stored is None or stored.floating):
        raise ConfigError("activations='int8' is for quantised weights; set quantization='int8' or 'int4' too")
    return True


def _read_models(
    options: EngineOptions, spec: SpecConfig, on_triton: bool
) -> tuple[
    ModelConfig | Source,
    list[tuple[str, ModelConfig | Source]],
    list[tuple[str, DraftForm]],
    Path | str | None,
    list[Drafter],
]:
    """Read the configs of the target and of the draft models, and the forms of the heads, that `spec` allows.

    `on_triton` tells whether native models run on Triton kernels. Also returns `Resolved.table` and the drafters.
    """
    model, length, backend = options.model, options.max_model_len, options.backend
    source = model if isinstance(model, nn.Module) else resolve_model(model)
    target = _read_model(source, length, backend, on_triton, options.tokenizer)
    if isinstance(model, nn.Module):
        check_inputs(model)
    models, drafters = resolve_drafts(model, options.drafts)
    tables = [draft for _, draft in models if draft == TABLE or (isinstance(draft, Path) and is_table(draft))]
    if len(tables) > 1:
        raise ConfigError(f"drafts={options.drafts!r}: {len(tables)} tables; give one of them")
    if tables == [TABLE] and not options.suffix_tokens:
        raise ConfigError(
            f"drafts={options.drafts!r}: the table is filled with the outputs that the engine remembers; add "
            "suffix_tokens=262144, or give a folder that `treespec train --table` wrote"
        )
    models = [(name, draft) for name, draft in models if draft not in tables]
    names = [name for name, _ in models]
    sources = [*(TABLE for _ in tables), *(drafter.name for drafter in drafters)]
    spec.check_sources(names, bool(options.suffix_tokens), sources)
    table = tables[0] if tables and spec.allows(TABLE, TABLE) else None
    drafts: list[tuple[str, ModelConfig | Source]] = []
    heads: list[tuple[str, DraftForm]] = []
    for name, draft in models:
        if not spec.allows("ssm", name):
            continue
        if isinstance(draft, str):
            if isinstance(target, Source):
                heads.append((name, adapter_mtp_form(target)))
            else:
                heads.append((name, mtp_form(target.folder, target.shape, target.rules)))
        elif isinstance(draft, Path) and (form := read_head(draft)) is not None:
            heads.append((name, form))
        else:
            module, tokenizer = draft if isinstance(draft, tuple) else (draft, None)
            drafts.append((name, _read_model(module, length, backend, on_triton, tokenizer)))
    return target, drafts, heads, table, drafters


def _read_model(
    model: Path | nn.Module, max_model_len: int | None, backend: str, on_triton: bool, tokenizer: Any = None
) -> ModelConfig | Source:
    """Read a model's config for the native decoder, or its source for transformers."""
    if isinstance(model, nn.Module):
        if backend == "native":
            raise ConfigError("backend='native' reads a folder; a model in memory runs with backend='transformers'")
        return Source.from_model(model, tokenizer)
    if backend == "transformers":
        return Source.from_folder(model)
    try:
        config = ModelConfig.from_hf(model, max_model_len)
        if on_triton and (unsupported := config.without_kernel):
            raise VariantError(f"{config.folder}: there is no Triton kernel for its {unsupported}")
        return config
    except (UnsupportedModelError, VariantError) as error:
        if backend == "native":
            raise
        try:
            source = Source.from_folder(model)
        except ModelError as refusal:
            if isinstance(error, VariantError):
                raise VariantError(f"{error}; and backend='transformers' cannot run it: {refusal}") from refusal
            also = Problem("config", "backend='transformers'", f"cannot run it either: {refusal}")
            raise UnsupportedModelError(error.folder, [*error.problems, also]) from refusal
        logger.info("no native family for %s (%s): backend=transformers", os.fspath(model), error)
        return source


def _check_layers(models: Sequence[ModelConfig | Source], device: torch.device, linear: str, on_triton: bool) -> None:
    """Raise an error for recurrent layers without kernels. The target is the first model."""
    for i, model in enumerate(models):
        if not isinstance(model, ModelConfig):
            continue
        if (recurrent := model.shape.recurrent) is not None:
            reason = f"{model.folder}: {len(recurrent.layers)} of {model.shape.num_layers} layers are recurrent"
            if i > 0 and on_triton:
                raise ModelError(f"{reason}; on a GPU such a model can be the target, but no draft")
            if device.type != "cpu" and linear not in ("auto", "triton"):
                raise KernelError(f"{reason}, for which linear={linear!r} has no kernels on a GPU; leave it at 'auto'")


def _check_adapters(models: Sequence[ModelConfig | Source], linear: str, device: torch.device) -> None:
    """Raise KernelError for options that the transformers backend does not support."""
    adapted = [model for model in models if isinstance(model, Source)]
    if not adapted:
        return
    if isinstance(models[0], Source) and linear != "auto":
        raise KernelError(
            f"linear={linear!r} is for native families; {adapted[0].name} runs transformers' code with "
            "its own choice of linear layers; use 'auto'"
        )
    if isinstance(models[0], ModelConfig) and device.type == "cuda" and linear != "torch":
        raise KernelError(
            f"{adapted[0].name} runs transformers' code and cannot draft in captured rounds; use "
            "linear='torch', or a draft of a native family"
        )
