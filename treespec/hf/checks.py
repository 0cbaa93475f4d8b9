"""Validate `generate` arguments: unsupported features raise an error instead of being ignored."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from treespec.errors import ConfigError, RequestError

# Processors that run the model, keep state or watermark tokens.
_STATEFUL = (
    "ClassifierFreeGuidanceLogitsProcessor UnbatchedClassifierFreeGuidanceLogitsProcessor WatermarkLogitsProcessor "
    "SynthIDTextWatermarkLogitsProcessor AlternatingCodebooksLogitsProcessor WhisperTimeStampLogitsProcessor "
    "WhisperNoSpeechDetection BarkEosPrioritizerLogitsProcessor DiaClassifierFreeGuidanceLogitsProcessor "
    "DiaEOSChannelFilterLogitsProcessor DiaEOSDelayPatternLogitsProcessor"
).split()
_SINGLE_ROW = ("EncoderRepetitionPenaltyLogitsProcessor", "EncoderNoRepeatNGramLogitsProcessor")

# Arguments prepared for transformers' loop that trees do not need.
_PREPARED = frozenset({"use_cache", "logits_to_keep", "num_logits_to_keep", "cache_position", "return_dict"})


def check_drafts(drafts: Sequence[Any] | None) -> None:
    """Raise ConfigError if `drafts` is not a list."""
    if drafts is not None and (isinstance(drafts, str) or not isinstance(drafts, Sequence)):
        raise ConfigError(f"drafts={drafts!r}; valid: a list of folders, hub ids, models, Drafter objects or 'lookup'")


def check_dropped_arguments(model: Any) -> None:
    """Reject arguments that transformers' `generate` received but does not pass to a custom loop.

    transformers drops them silently; a dropped streamer is ended here, since its reader would wait forever. The
    arguments are read from the frame of transformers' function, the caller's caller.
    """
    frame = sys._getframe(2)
    if frame.f_code.co_name != "generate" or frame.f_globals.get("__name__") != "transformers.generation.utils":
        return
    arguments = frame.f_locals
    if arguments.get("self") is not model:
        return
    instead = "use treespec.hf.accelerate(model), whose generate accepts it, or"
    streamer = arguments.get("streamer")
    if streamer is not None:
        streamer.end()
        raise ConfigError(f"streamer=: not passed to custom_generate; {instead} pass token_streamer=")
    if arguments.get("assistant_model") is not None:
        raise ConfigError(f"assistant_model=: not passed to custom_generate; {instead} pass drafts=[...]")


def check_config(config: Any, processors: list[Any], criteria: list[Any], rows: int) -> None:
    """Reject unsupported generation configs, processors and criteria. Raises ConfigError."""
    if config is None or not hasattr(config, "_pad_token_tensor"):
        raise ConfigError(
            "treespec.hf.generate is called by transformers, which prepares its arguments: "
            "model.generate(**inputs, custom_generate=treespec.hf.generate, drafts=[...])"
        )
    lookup = getattr(config, "prompt_lookup_num_tokens", None)
    if lookup is not None:
        raise ConfigError(f"prompt_lookup_num_tokens={lookup!r}: prompt lookup is always on; omit it")
    mode = config.get_generation_mode().value
    if mode not in ("greedy_search", "sample"):
        raise ConfigError(f"generation mode {mode!r}; valid: greedy search and sampling, with num_beams=1")
    unsupported = "guidance_scale watermarking_config constraints force_words_ids assistant_ensemble_weight"
    for name in unsupported.split():
        value = getattr(config, name, None)
        if value is not None and not (name == "guidance_scale" and value == 1):
            raise ConfigError(f"{name}={value!r} is not supported with token trees; omit it")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise ConfigError(f"{name}=True: not supported with token trees; omit it")
    if config.cache_implementation not in (None, "dynamic", "dynamic_full", "static", "hybrid"):
        raise ConfigError(
            f"cache_implementation={config.cache_implementation!r}; the engine uses its own cache; omit it"
        )
    kinds = [type(processor).__name__ for processor in processors]
    for kind in kinds:
        if kind in _STATEFUL or (rows > 1 and kind in _SINGLE_ROW):
            raise ConfigError(f"{kind} cannot be evaluated per node of a token tree; omit it")
    ends_alone = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    custom = [type(criterion).__name__ for criterion in criteria if type(criterion).__name__ != "MaxLengthCriteria"]
    if rows > 1 and custom and not ends_alone:
        raise ConfigError(f"{', '.join(custom)} with {rows} rows: pass an eos_token_id and a pad_token_id, or one row")


def read_padding(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> list[int]:
    """Return the number of padding tokens of each row. Raises ConfigError or RequestError for unsupported inputs."""
    remaining = dict(model_kwargs)
    mask, positions = remaining.pop("attention_mask", None), remaining.pop("position_ids", None)
    for name in ("past_key_values", "cache"):  # transformers 5.24 renamed it
        cache = remaining.pop(name, None)
        if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length()):
            raise ConfigError("past_key_values: the engine uses its own cache; pass the whole prompt as input_ids")
    if remaining.get("mm_encoder_outputs") == {}:  # what transformers prepares if a model for images gets only text
        del remaining["mm_encoder_outputs"]
    unsupported = sorted(name for name, value in remaining.items() if value is not None and name not in _PREPARED)
    if unsupported:
        valid = "input_ids, attention_mask, drafts, spec, token_streamer, exact, and fields of GenerationConfig"
        raise ConfigError(f"{', '.join(unsupported)}: not supported by treespec.hf.generate; valid: {valid}")
    rows, width = input_ids.shape
    if not rows or not width:
        raise RequestError(f"input_ids of shape {list(input_ids.shape)}; pass at least one row and one token")
    if mask is None:
        mask = torch.ones_like(input_ids)
    mask = mask.to(input_ids.device).long()
    if mask.shape != input_ids.shape or not bool(((mask == 0) | (mask == 1)).all()):
        raise RequestError(f"attention_mask of shape {list(mask.shape)}; expected 0 and 1 in {list(input_ids.shape)}")
    if bool((mask.diff(dim=1) < 0).any()) or not bool(mask[:, -1].all()):
        raise RequestError("attention_mask masks tokens after the first visible one; pad on the left")
    expected = (mask.cumsum(1) - 1).clamp(min=0)
    if positions is not None and not torch.equal(positions.to(expected).expand_as(expected) * mask, expected * mask):
        raise ConfigError("position_ids: must count the prompt's unpadded tokens; omit them")
    padding: list[int] = (width - mask.sum(1)).tolist()
    return padding
