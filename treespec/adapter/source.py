"""Model sources of the adapter: a checkpoint folder or a model in memory."""

import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from treespec.errors import ModelError, describe_error
from treespec.models.model_config import end_tokens
from treespec_weights.checkpoint import Checkpoint
from treespec_weights.documents import CONFIG, read_config, read_generation_config
from treespec_weights.dtypes import DTYPES
from treespec_weights.errors import CheckpointError, Problem
from treespec_weights.families import FAMILIES
from treespec_weights.files import resolve_folder
from treespec_weights.hub import is_hub_id

_STATES = ("linear", "mamba", "conv", "recurrent", "rwkv", "ssm", "lstm", "hybrid")  # parts of the names of layer types


@dataclass(frozen=True, eq=False)
class Source:
    """A model that has not been traced yet."""

    folder: Path  # the checkpoint, or a label for a model in memory
    hf_config: Any
    model_ref: "weakref.ref[nn.Module] | None"  # a model in memory; None for a checkpoint
    generation: dict[str, Any]  # non-default values of its generation config
    max_positions: int
    short_context: int  # as in `ModelConfig`
    dtype: torch.dtype  # dtype of the stored weights
    eos_token_ids: tuple[int, ...]  # tokens that end a text
    tokenizer: Any = None  # tokenizer given with a model in memory: an object, or a folder

    @property
    def name(self) -> str:
        """Folder and model type, for messages."""
        return f"{self.folder} ({self.hf_config.model_type})"

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Source":
        """Read the config of a Hugging Face folder with transformers, without weights."""
        folder = resolve_folder(folder)
        if folder.is_file():
            raise ModelError(
                f"{folder}: backend='transformers' does not read GGUF files; convert it first: treespec weights "
                f"convert {folder.name} NEW_FOLDER"
            )
        raw = read_config(folder)
        from transformers import AutoConfig

        if raw.get("quantization_config") is not None:
            raise ModelError(f"{folder}: backend='transformers' does not support quantised checkpoints")
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # config classes raise errors of their own
            if "auto_map" in raw:
                raise ModelError(
                    f"{folder}: model_type={raw.get('model_type')!r} needs code that comes with the checkpoint "
                    "(auto_map), and none of it is ever run"
                ) from error
            reason = str(error).strip().split("\n")[0]
            raise ModelError(
                f"{folder}: transformers rejects config.json, model_type={raw.get('model_type')!r}: {reason}"
            ) from error
        return cls._of(folder, config, None, read_generation_config(folder))

    @classmethod
    def from_model(cls, model: nn.Module, tokenizer: Any = None) -> "Source":
        """Wrap a `PreTrainedModel` in memory, without modifying it; `tokenizer` connects its vocabulary to others."""
        from transformers import PreTrainedModel

        kind = type(model).__name__
        if not isinstance(model, PreTrainedModel):
            raise ModelError(
                f"{kind} is not a transformers model; valid: a causal PreTrainedModel (of peft: merge_and_unload() of "
                "an adapter, no soft prompt)"
            )
        if model.training:
            raise ModelError(f"{kind} is in training mode, where dropout is random; call model.eval() first")
        if getattr(model, "is_quantized", False):
            raise ModelError(f"{kind} is quantised, which the adapter does not support")
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) != 1:
            raise ModelError(f"{kind} is spread over {sorted(map(str, devices))}; the adapter needs one device")
        generation_config = getattr(model, "generation_config", None)
        generation = {} if generation_config is None else generation_config.to_diff_dict()
        return replace(cls._of(Path(f"in-memory {kind}"), model.config, model, generation), tokenizer=tokenizer)

    @classmethod
    def _of(cls, folder: Path, config: Any, model: nn.Module | None, generation: dict[str, Any]) -> "Source":
        _check_kind(folder, config, model is not None)
        text = config.get_text_config(decoder=True)
        keys = ("max_position_embeddings", "max_sequence_length", "max_target_positions")
        positions = next((size for key in keys if (size := getattr(text, key, None))), 2048)
        if isinstance(positions, bool) or not isinstance(positions, int) or positions < 2:
            raise ModelError(f"{folder}: max_position_embeddings={positions!r}; expected an int of at least 2")
        stated = getattr(text, "dtype", None) or config.dtype
        stored: Any = stated if model is None else next(model.parameters()).dtype
        stored = torch.float32 if stored is None else stored
        if stored not in DTYPES.values():
            raise ModelError(f"{folder}: dtype={stored!r}; supported: {', '.join(DTYPES)}")
        ends = end_tokens(folder, generation.get("eos_token_id", getattr(text, "eos_token_id", None)))
        model_ref = None if model is None else weakref.ref(model)
        return cls(folder, config, model_ref, generation, positions, _short_context(text, positions), stored, ends)

    def tokenizer_folder(self, destination: Path) -> Path:
        """Return a folder with the model's tokenizer, or `folder` if there is none.

        For a model in memory, the given tokenizer precedes that of the folder or hub id that it was loaded from. An
        object is saved to `destination`.
        """
        if self.model_ref is None:
            return self.folder
        if isinstance(self.tokenizer, str | os.PathLike):
            return resolve_folder(Path(self.tokenizer))
        if hasattr(self.tokenizer, "save_pretrained"):
            self.tokenizer.save_pretrained(destination)
            return destination
        name = self.hf_config.name_or_path
        if name and Path(name).is_dir():
            return Path(name).resolve()
        from huggingface_hub import try_to_load_from_cache

        commit = getattr(self.hf_config, "_commit_hash", None)
        cached = try_to_load_from_cache(name, CONFIG, revision=commit) if is_hub_id(name) else None
        return Path(cached).parent if isinstance(cached, str) else self.folder

    def load(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """Load the model in eval mode; an in-memory model is returned unchanged."""
        if self.model_ref is not None:
            model = self.model_ref()
            assert model is not None, "the in-memory model was garbage-collected"
            place = next(model.parameters()).device
            if self.dtype != dtype or place.type != device.type:
                raise ModelError(
                    f"{self.folder} is {self.dtype} on {place}, but {dtype} on {device} was requested; convert it first"
                )
            return model
        checkpoint = Checkpoint.open(self.folder)  # rejects pickles and paths outside, which transformers would accept
        checkpoint.close()
        from transformers import AutoModelForCausalLM

        try:
            with torch.inference_mode(False), torch.no_grad(), progress_bars_on_terminals():
                model, report = AutoModelForCausalLM.from_pretrained(
                    self.folder,
                    config=self.hf_config,
                    dtype=dtype,
                    use_safetensors=True,
                    trust_remote_code=False,
                    local_files_only=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # reported, and rejected below
                )
                model.to(device)
        except Exception as error:  # model code may raise anything
            reason = describe_error(error).strip().split("\n")[0]
            raise ModelError(f"{self.name}: transformers cannot load it: {reason}") from error
        problems = [checkpoint.missing(name, "missing") for name in sorted(report["missing_keys"])]
        problems += [Problem("unexpected", repr(name), "unexpected") for name in sorted(report["unexpected_keys"])]
        for name, *shapes in sorted(report["mismatched_keys"]):
            problems.append(Problem("shape", repr(name), " instead of ".join(str(list(shape)) for shape in shapes)))
        problems += [Problem("value", "transformers", str(message)) for message in report.get("error_msgs") or ()]
        if problems:
            raise CheckpointError(self.folder, problems)
        checkpoint.log_absent()
        return model.eval()


def check_inputs(model: nn.Module) -> None:
    """Raise ModelError if code outside of transformers prepares a model's inputs: passes read token ids only.

    peft replaces the method during `generate` with a soft prompt; other adapters leave it as it is.
    """
    method = getattr(model, "prepare_inputs_for_generation", None)
    module = getattr(method, "__module__", None)
    if method is not None and not str(module).startswith("transformers."):
        raise ModelError(
            f"{type(model).__name__}: its prepare_inputs_for_generation is code of {module}, as for soft prompts "
            "(prompt, prefix or p-tuning of peft), but token trees read token ids only; use transformers' own loop: "
            "treespec.hf.restore(model), no custom_generate="
        )


@contextmanager
def progress_bars_on_terminals() -> Iterator[None]:
    from transformers.utils import logging as bars

    hides_bars = bars.is_progress_bar_enabled() and not sys.stderr.isatty()
    if hides_bars:
        bars.disable_progress_bar()
    try:
        yield
    finally:
        if hides_bars:
            bars.enable_progress_bar()


def _check_kind(folder: Path, config: Any, in_memory: bool) -> None:
    """Reject models with state other than K/V, based on their names: the probe would reject them without a reason."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    label = f"{folder}: model_type={config.model_type!r}"
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{label} is an encoder-decoder; the adapter supports decoder-only models")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{label}: transformers has no causal language model for it")
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    kinds = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())
    states = sorted(kind for kind in kinds if any(name in str(kind) for name in _STATES))
    if getattr(architecture, "_is_stateful", False) or states:
        names = f" ({', '.join(states)})" if states else ""
        native = in_memory and config.model_type in FAMILIES
        raise ModelError(
            f"{label}: {architecture.__name__} keeps a recurrent state{names}, which cannot be rolled back when a "
            "branch of a token tree is rejected" + native * "; save the model and open its folder, which runs natively"
        )


def _short_context(config: Any, max_positions: int) -> int:
    """Return the length up to which longrope uses its short factors; 0 without longrope, or if nothing is longer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [section for section in (parameters, *parameters.values()) if isinstance(section, dict)]
    limits = [
        section.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        for section in nested
        if section.get("rope_type") == "longrope"
    ]
    limit = min((int(limit) for limit in limits if limit), default=max_positions)
    return limit if limit < max_positions else 0
