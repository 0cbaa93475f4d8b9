"""User errors. All derive from `ValueError`; a missing file may also raise `OSError`.

A message names the bad value and the valid ones.
"""

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treespec_weights.errors import CheckpointError

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DraftError",
    "ExactnessError",
    "KernelError",
    "ModelError",
    "ParameterError",
    "RequestError",
    "TreespecError",
    "UnsupportedError",
    "VariantError",
    "describe_error",
    "reject_unknown",
    "short_repr",
]

_SHOWN = 300  # characters of a value or message of others


def __getattr__(name: str) -> Any:
    """Import `CheckpointError` lazily: its package imports torch, which takes seconds."""
    if name != "CheckpointError":
        raise AttributeError(f"module 'treespec.errors' has no attribute {name!r}")
    from treespec_weights.errors import CheckpointError

    return CheckpointError


class TreespecError(ValueError):
    """Base class of the engine's errors, except `CheckpointError` of the weights package."""


class ConfigError(TreespecError):
    """An unknown, out-of-range or contradictory parameter."""


class CacheMemoryError(ConfigError):
    """The KV cache for the requested `max_num_seqs` and `max_model_len` exceeds the free memory."""


class RequestError(TreespecError):
    """An invalid request: an empty prompt, a prompt longer than the context, a token outside the vocabulary."""


class ParameterError(RequestError):
    """Parameters of a request that leave it without a next token or a finite score, such as a grammar's dead end."""


class ModelError(TreespecError):
    """A model that cannot run: its folder, config or architecture is unsupported."""


class VariantError(ModelError):
    """A variant of a native family that the native decoder lacks; transformers' code may support it."""


class DraftError(TreespecError):
    """A draft that does not fit its target, such as one with another vocabulary and no tokenizer, or a failed
    `Drafter`."""


class ExactnessError(TreespecError):
    """Bit equality with plain decoding is not possible with these shapes, dtype and threads."""


class KernelError(TreespecError):
    """The named implementation is unavailable for this machine, build or shape; there is no silent fallback."""


class UnsupportedError(TreespecError, AttributeError):
    """A method of vLLM's `LLM` that treespec lacks. `hasattr` returns False for it."""


def reject_unknown(kind: str, names: Iterable[str], valid: Collection[str]) -> None:
    """Raise `ConfigError` for names that are not in `valid`, suggesting the closest match.

    Args:
        kind: what the names belong to, such as "SpecConfig" or "LLM".
        names: the user's keywords, or a value alone.
        valid: the accepted names.
    """
    descriptions = []
    for name in names:
        if name not in valid:
            nearest = get_close_matches(name, valid, n=1, cutoff=0.5)
            descriptions.append(f"{name!r} (did you mean {nearest[0]!r}?)" if nearest else repr(name))
    if descriptions:
        raise ConfigError(f"{kind}: unknown {', '.join(descriptions)}; valid: {', '.join(sorted(valid))}")


def describe_error(error: BaseException) -> str:
    """Format an exception as `Type: message`, truncated."""
    return _truncated(f"{type(error).__name__}: {error}")


def short_repr(value: object) -> str:
    """Truncated `repr(value)`."""
    return _truncated(repr(value))


def _truncated(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
