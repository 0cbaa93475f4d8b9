"""Validation of the fields of `SamplingParams`."""

import logging
from collections.abc import Callable
from dataclasses import Field
from enum import Enum
from typing import Any

from treespec.errors import ConfigError, short_repr
from treespec.sampling_params.structured_params import StructuredOutputsParams
from treespec.utils.options import checked_value
from treespec.utils.scalars import as_int, as_number, to_python

logger = logging.getLogger("treespec")

LEAST_POSITIVE = 5e-324
LEAST_TEMPERATURE = 1e-4  # lower values may overflow logits / temperature
MAX_SEED = 2**64 - 1
MAX_SAMPLES = 16384  # per prompt, as in vLLM


class RequestOutputKind(Enum):
    """vLLM's values of `SamplingParams(output_kind=...)`, which `AsyncLLM` reads."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def checked(stated: Field[Any], value: Any) -> Any:
    """Validate a field and convert it to Python numbers, tuples (from lists) or copies of dicts. Raises ConfigError."""
    if stated.name in _CONVERTED:
        return _CONVERTED[stated.name](stated.name, value)
    value = checked_value(stated, value)
    if stated.name == "seed" and value == -1:
        return None
    if stated.name == "temperature" and 0 < value < LEAST_TEMPERATURE:  # vLLM also has a minimum
        logger.warning("temperature=%r is raised to %r, the minimum above 0", value, LEAST_TEMPERATURE)
        return LEAST_TEMPERATURE
    return value


def _sequence(name: str, value: Any, valid: str, is_valid: Callable[[Any], bool]) -> tuple[Any, ...]:
    """Return the items of a list, each of which must be valid. None is an empty list."""
    items = () if value is None else to_python(value)
    items = tuple(items) if isinstance(items, list) else items
    if not isinstance(items, tuple) or not all(map(is_valid, items)):
        raise ConfigError(f"{name}={short_repr(items)}; valid: {valid}")
    return items


def _stop(name: str, value: Any) -> tuple[str, ...]:
    texts, valid = [value] if isinstance(value, str) else value, "a string or a list of non-empty strings"
    return _sequence(name, texts, valid, lambda text: isinstance(text, str) and text != "")


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    tokens = _sequence(name, value, "a list of token ids", lambda token: as_int(token, 0) is not None)
    return tuple(map(int, tokens))


def _bad_words(name: str, value: Any) -> tuple[str, ...]:
    valid = "a list of non-blank strings"
    return _sequence(name, value, valid, lambda word: isinstance(word, str) and word.strip() != "")


def _logit_bias(name: str, value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ConfigError(f"{name}={value!r}; valid: a dict of token ids to numbers")
    biases = {}
    for token, bias in value.items():
        number, real = as_int(token, 0), as_number(bias)
        if number is None or real is None:
            raise ConfigError(f"{name}={{{token!r}: {bias!r}}}; valid: token ids to finite numbers")
        biases[number] = real
    return biases


def _allowed_token_ids(name: str, value: Any) -> tuple[int, ...] | None:
    if value is not None and not (ids := _token_ids(name, value)):
        raise ConfigError(f"{name}={value!r}; valid: at least one token id, or None for all")
    return None if value is None else ids


def _output_kind(name: str, value: Any) -> RequestOutputKind:
    kinds = RequestOutputKind.__members__
    kind = "CUMULATIVE" if value is None else getattr(value, "name", value)  # vLLM's enum has the same names
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError(f"{name}={short_repr(value)}; valid: {', '.join(map(repr, kinds))}")
    return kinds[kind]


_CONVERTED: dict[str, Callable[[str, Any], Any]] = {
    "stop": _stop,
    "stop_token_ids": _token_ids,
    "bad_words": _bad_words,
    "logit_bias": _logit_bias,
    "allowed_token_ids": _allowed_token_ids,
    "logits_processors": lambda name, value: _sequence(name, value, "a list of callable logits processors", callable),
    "output_kind": _output_kind,
    "structured_outputs": lambda _, value: StructuredOutputsParams.of(value),
}
