"""First step of a start: resolve an engine's options on this machine."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from treespec.adapter.make_decoder import check_adapter_options, read_model
from treespec.adapter.mtp import MtpForm
from treespec.adapter.source import Source, check_inputs
from treespec.adapter.trace import AdapterConfig
from treespec.config import SpecConfig
from treespec.drafters.base import Drafter
from treespec.drafters.foreign.vocabularies import Draft, connect_drafts
from treespec.engine_options import EngineOptions
from treespec.errors import ConfigError
from treespec.models.model_config import ModelConfig
from treespec.startup.device import is_slow, resolve_device, resolve_dtype
from treespec.startup.folders import resolve_drafts, resolve_model
from treespec.startup.head_config import HeadConfig
from treespec.startup.implementations import resolve_attention, resolve_compile, resolve_linear
from treespec.startup.load_models import Loader
from treespec.startup.quantization import resolve_quantization
from treespec_kernels.cpu.decoder_library import DTYPES as COMPILED_DTYPES
from treespec_kernels.tuning.tuned import KernelConfigs
from treespec_weights.heads import DraftForm, read_head

logger = logging.getLogger("treespec")


@dataclass(frozen=True)
class Resolved:
    """Options of an engine with every "auto" replaced and every config read. No native weights are loaded.

    Attributes:
        options: the given options.
        spec: default speculative decoding options.
        loader: loads models with the resolved device, dtype and implementations.
        compile: whether passes run in compiled libraries.
        quantization: quantisation to apply to the target's layers.
        fixed_rows: rows of every pass if exactness needs padding, else None.
        target: config of the target.
        drafts: draft models, connected to the target's vocabulary.
        heads: draft heads by name.
        drafters: the user's own `Drafter` objects.
    """

    options: EngineOptions
    spec: SpecConfig
    loader: Loader
    compile: bool
    quantization: str | None
    fixed_rows: int | None
    target: ModelConfig | AdapterConfig
    drafts: list[Draft]
    heads: list[tuple[str, HeadConfig]]
    drafters: list[Drafter]

    @property
    def device(self) -> torch.device:
        return self.loader.device

    @property
    def ssms(self) -> list[Draft]:
        """Drafts that share the target's token ids."""
        return [draft for draft in self.drafts if not draft.is_foreign]

    @property
    def group(self) -> list[ModelConfig | AdapterConfig]:
        """Configs of the models that grow trees together: the SSMs, then the layers of the heads."""
        return [*(draft.config for draft in self.ssms), *(head.decoder for _, head in self.heads)]

    @property
    def foreign(self) -> list[Draft]:
        """Drafts with another tokenizer than the target's."""
        return [draft for draft in self.drafts if draft.is_foreign]


def resolve(options: EngineOptions) -> Resolved:
    """Check and resolve the options of an engine. Raises the errors of `LLM`."""
    options.check()
    device = resolve_device(options.device)
    spec = SpecConfig.resolve(options.spec, SpecConfig())
    target, drafts, forms, drafters = _read_models(options, spec)
    heads, length = list[tuple[str, HeadConfig]](), options.max_model_len
    if isinstance(target, ModelConfig):
        heads = [(name, HeadConfig.of(form, target, length)) for name, form in forms if not isinstance(form, MtpForm)]
    models = [target, *(model for _, model in drafts)]
    models += [head.decoder for _, head in heads if isinstance(head.decoder, ModelConfig)]
    attention = resolve_attention(options.attention, device)
    check_adapter_options(models, options.linear, device)
    dtype, compiles = _resolve_passes(options, models, target.dtype, device)
    quantization = resolve_quantization(options.quantization, target, dtype)
    adapted = isinstance(target, Source)
    linear, fixed_rows = resolve_linear(
        "torch" if adapted and device.type == "cuda" else options.linear,
        attention,
        dtype,
        device,
        options.exact and not adapted,  # `load_target` finds the padding of an adapter
        spec,
        compiles,
    )
    configs = KernelConfigs.load(device) if linear == "triton" else None
    int8_drafts = _quantises_drafts(options.draft_quantization, compiles)
    integer = _quantises_activations(options.activations, compiles, target, quantization)
    loader = Loader(device, dtype, attention, linear, options.exact, configs, int8_drafts, integer)
    config = loader.open(target)
    connected = connect_drafts(config, [(name, loader.open(model)) for name, model in drafts])
    if isinstance(config, AdapterConfig):
        heads = [
            (name, loader.open_mtp(form, config) if isinstance(form, MtpForm) else HeadConfig.of(form, config, length))
            for name, form in forms
        ]
    for name, head in heads:
        logger.info("draft %s (%s): %s", name, head.folder, head)
    return Resolved(options, spec, loader, compiles, quantization, fixed_rows, config, connected, heads, drafters)


def _resolve_passes(
    options: EngineOptions, models: Sequence[ModelConfig | Source], stored: torch.dtype, device: torch.device
) -> tuple[torch.dtype, bool]:
    """Return the dtype of passes, and whether they are compiled.

    Compiled passes are fast in bfloat16 on every CPU. Without them, "auto" is float32 where torch is slow otherwise. A
    model in memory keeps its dtype.
    """

    def compiles(dtype: torch.dtype) -> bool:
        return resolve_compile(options.compile, models, options.attention, options.linear, dtype, device)

    dtype = resolve_dtype(options.dtype, stored)
    if options.dtype != "auto" or isinstance(options.model, nn.Module) or not is_slow(dtype, device):
        return dtype, compiles(dtype)
    if dtype in COMPILED_DTYPES and compiles(dtype):
        return dtype, True
    logger.warning("%s has no fast %s here; computing in float32", device, dtype)
    return torch.float32, compiles(torch.float32)


def _quantises_drafts(asked: str | None, compiles: bool) -> bool:
    """Return whether drafts are quantised to int8: compiled passes of few rows are bound by reading weights."""
    if asked == "int8" and not compiles:
        raise ConfigError("draft_quantization='int8' is for compiled passes on a CPU; leave it at 'auto'")
    return asked is not None and compiles


def _quantises_activations(asked: str, compiles: bool, target: ModelConfig | Source, quantization: str | None) -> bool:
    """Return whether the target's activations are quantised to int8."""
    if asked == "model":
        return False
    if not compiles:
        raise ConfigError("activations='int8' is for compiled passes on a CPU; leave it at 'model'")
    stored = None if isinstance(target, Source) else target.quantization
    if quantization is None and (stored is None or stored.floating):
        raise ConfigError("activations='int8' is for quantised weights; set quantization='int8' or 'int4' too")
    return True


def _read_models(
    options: EngineOptions, spec: SpecConfig
) -> tuple[
    ModelConfig | Source, list[tuple[str, ModelConfig | Source]], list[tuple[str, DraftForm | MtpForm]], list[Drafter]
]:
    """Read the configs of the target and of the draft models, and the forms of the heads, allowed by `spec`."""
    model, length, backend = options.model, options.max_model_len, options.backend
    own = model if isinstance(model, nn.Module) else resolve_model(model)
    target = read_model(own, length, backend, options.tokenizer)
    if isinstance(model, nn.Module):
        check_inputs(model)
    places, drafters = resolve_drafts(model, options.drafts)
    names = [name for name, _ in places]
    spec.check_sources(names, bool(options.suffix_tokens), [drafter.name for drafter in drafters])
    drafts: list[tuple[str, ModelConfig | Source]] = []
    heads: list[tuple[str, DraftForm | MtpForm]] = []
    for name, place in places:
        if not spec.allows("ssm", name):
            continue
        if isinstance(place, str):
            heads.append((name, MtpForm.of(target)))
        elif isinstance(place, Path) and (form := read_head(place)) is not None:
            heads.append((name, form))
        else:
            draft, tokenizer = place if isinstance(place, tuple) else (place, None)
            drafts.append((name, read_model(draft, length, backend, tokenizer)))
    return target, drafts, heads, drafters
