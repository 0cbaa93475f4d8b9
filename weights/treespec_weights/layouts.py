"""Translate config.json to another family with the same parameters, if that family can express the model.

Tensors, sizes and switches follow from the families' rules (`expected_tensors`). All other values of config.json pass
through transformers' config classes, because families have different defaults: without a key, Mistral's window is 4,096
and Llama has none. Every value is written out. A value without a key in the other family is an error, unless it has no
effect.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from treespec_weights.errors import CheckpointConfigError, Problem, UnsupportedModelError
from treespec_weights.rules import FamilyRules, ModelShape

# Fields of FamilyRules that affect only names and configs. All others affect a layer's computation.
_NAMING_FIELDS = (
    "model_type tensors alternatives tied_copy ignored prefix further_layers predictor config_keys defaults constants "
    "requires windows assumed normalize"
).split()
_WITHOUT_EFFECT = (  # config keys that do not affect a decoder's computation
    "architectures attention_dropout auto_map bos_token_id dtype embd_pdrop eos_token_id hidden_dropout "
    "initializer_range model_type pad_token_id pretraining_tp resid_pdrop torch_dtype transformers_version use_cache "
    "original_max_position_embeddings"
).split()
_NOT_OF_A_DECODER = (  # other keys that config classes write
    "chunk_size_feed_forward id2label is_encoder_decoder label2id output_attentions output_hidden_states problem_type "
    "return_dict"
).split()
_ABSENT = (None, False, 0, 0.0)  # values equivalent to a missing key


def translate_config(
    folder: Path, config: Mapping[str, Any], shape: ModelShape, family: FamilyRules, other: FamilyRules
) -> dict[str, Any]:
    """Return the config.json of the same model, whose `config` has this shape, in the family `other`.

    Raises UnsupportedModelError with everything that the other family cannot express, and CheckpointConfigError if
    transformers rejects one of the two configs.
    """
    problems = [
        Problem(
            "config",
            "'model_type'",
            f"{family.model_type} and {other.model_type} compute differently: {field.name} "
            f"is {getattr(family, field.name)!r} and {getattr(other, field.name)!r}",
        )
        for field in fields(FamilyRules)
        if field.name not in _NAMING_FIELDS and getattr(family, field.name) != getattr(other, field.name)
    ]
    problems += _other_switches(shape, other)
    if problems:
        raise UnsupportedModelError(folder, problems)
    values, defaults = with_defaults(folder, config), with_defaults(folder, {"model_type": other.model_type})
    sizes = {key: getattr(shape, name) for name, key in other.config_keys.items()}
    translated = sizes | _translated_values(folder, values, defaults, family, other)
    result = with_defaults(folder, translated | {"model_type": other.model_type})
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    result["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[other.model_type]]
    if changed := [key for key, value in translated.items() if not _values_match(value, result.get(key))]:
        message = (
            f"a {other.model_type} model would have {result.get(changed[0])!r}, this one has {translated[changed[0]]!r}"
        )
        raise UnsupportedModelError.of(folder, "config", changed[0], message)
    if ModelShape.from_hf(result, other, folder) != shape:
        message = f"a {other.model_type} model of these sizes has other parameters than a {family.model_type} one"
        raise UnsupportedModelError.of(folder, "config", "model_type", message)
    return result


def _other_switches(shape: ModelShape, other: FamilyRules) -> list[Problem]:
    """Return problems for sizes and switches that the other family fixes at other values."""
    fixed = {
        field.name: other.constants.get(field.name, field.default)
        for field in fields(ModelShape)
        if field.name not in other.config_keys and field.default is not MISSING
    }
    return [
        Problem("config", repr(name), f"{getattr(shape, name)!r}, but always {value!r} in a {other.model_type} model")
        for name, value in fixed.items()
        if value != getattr(shape, name)
    ]


def _translated_values(
    folder: Path, values: dict[str, Any], defaults: dict[str, Any], family: FamilyRules, other: FamilyRules
) -> dict[str, Any]:
    """Return all values but the sizes. Raises UnsupportedModelError if the other family cannot express them."""
    size_keys = {*family.config_keys.values(), *other.config_keys.values()}
    result: dict[str, Any] = {}
    problems = []
    for key, value in values.items():
        if key in size_keys or key in ("model_type", "architectures", "auto_map"):
            continue
        if key in defaults or key.endswith("_token_id"):
            result[key] = value
        elif key not in _WITHOUT_EFFECT and value not in _ABSENT:
            message = f"{value!r} cannot be expressed in the config of a {other.model_type} model"
            problems.append(Problem("config", repr(key), message))
    rope, other_rope = values.get("rope_parameters"), defaults.get("rope_parameters")
    if isinstance(rope, dict) and isinstance(other_rope, dict):
        if rope.get("partial_rotary_factor", 1.0) != 1.0 and "partial_rotary_factor" not in other_rope:
            message = f"{rope['partial_rotary_factor']!r}, but a {other.model_type} model rotates whole heads"
            problems.append(Problem("config", "'partial_rotary_factor'", message))
        result["rope_parameters"] = {k: v for k, v in rope.items() if k != "partial_rotary_factor" or k in other_rope}
        if rope.get("rope_type", "default") != "default" and "original_max_position_embeddings" in values:
            if "original_max_position_embeddings" not in defaults:
                message = (
                    f"{rope['rope_type']!r} needs original_max_position_embeddings, which a "
                    f"{other.model_type} model does not have"
                )
                problems.append(Problem("config", "'rope_parameters'", message))
    for key, value in defaults.items():  # disable features that only the other family has
        if key not in values and key not in size_keys and key not in _WITHOUT_EFFECT and value not in _ABSENT:
            result[key] = None
    if problems:
        raise UnsupportedModelError(folder, problems)
    return result


def _values_match(expected: object, actual: object) -> bool:
    if isinstance(expected, dict) and isinstance(actual, dict):
        return all(_values_match(value, actual.get(key)) for key, value in expected.items())
    return expected == actual or (expected in _ABSENT and actual in _ABSENT)


def with_defaults(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the defaults of its class. Raises CheckpointConfigError if transformers rejects it."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig  # takes seconds to import

    try:
        values = AutoConfig.for_model(**config).to_dict()
    except (StrictDataclassError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        message = f"transformers refuses it: {error}"
        raise CheckpointConfigError.of(folder, "config", config["model_type"], message) from error
    return {key: value for key, value in values.items() if not key.startswith("_") and key not in _NOT_OF_A_DECODER}
