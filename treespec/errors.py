"""Every error that a user can cause. All derive from `ValueError`; a missing file may also raise `OSError`.

A message carries the bad value and what would be valid in its place.
"""

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any

from treespec_weights.errors import CheckpointError

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DraftError",
    "ExactnessError",
    "KernelError",
    "ModelError",
    "RequestError",
    "TreespecError",
    "UnsupportedError",
    "VariantError",
    "describe_error",
    "reject_unknown",
    "safe_repr",
]

_SHOWN = 300  # characters of a foreign object's text that a message repeats


class TreespecError(ValueError):
    """Base of the errors of the engine. `CheckpointError` stands beside it: the weights package is a leaf."""


class ConfigError(TreespecError):
    """A parameter that is unknown, out of range or contradicts another one."""


class CacheMemoryError(ConfigError):
    """The cache of so many requests of such a length does not fit into the free memory."""


class RequestError(TreespecError):
    """A request that cannot be served: an empty prompt, one longer than the context, a token outside the vocabulary."""


class ModelError(TreespecError):
    """A model that cannot be run as asked: its folder, its config, its architecture."""


class VariantError(ModelError):
    """A variant of a native family that the decoder does not have; transformers' own code may."""


class DraftError(TreespecError):
    """A draft that does not fit its target, such as one of other size and without a tokenizer to translate by, or a
    `Drafter` object that failed."""


class ExactnessError(TreespecError):
    """Bit equality with plain decoding was asked for and cannot be given with these shapes, dtype and threads."""


class KernelError(TreespecError):
    """An implementation was named that this machine, build or shape does not offer. It is never replaced silently."""


class UnsupportedError(TreespecError, AttributeError):
    """A method of vLLM's `LLM` that treespec does not have. `hasattr` is False for it, as for any missing attribute."""


def reject_unknown(kind: str, given: Iterable[str], valid: Collection[str]) -> None:
    """Raise `ConfigError` where `given` holds a name that is not in `valid`, naming the nearest valid one.

    Args:
        kind: what is being set, for the message: "SpecConfig", "LLM", "policy".
        given: the keywords, or the one-element list of a choice, that the user wrote.
        valid: all that would be accepted.
    """
    unknown = [name if isinstance(name, str) else repr(name) for name in given if name not in valid]
    if not unknown:
        return
    parts = []
    for name in unknown:
        nearest = get_close_matches(name, valid, n=1, cutoff=0.5)
        parts.append(f"{name!r} (did you mean {nearest[0]!r}?)" if nearest else repr(name))
    raise ConfigError(f"{kind}: unknown {', '.join(parts)}; valid: {', '.join(sorted(valid))}")


def describe_error(error: BaseException) -> str:
    """An exception of outside code as `Type: message`, bounded, even where its own `__str__` fails."""
    try:
        message = str(error)
    except Exception as failure:
        message = f"(its message cannot be shown: __str__ raises {type(failure).__name__})"
    return f"{type(error).__name__}: {_truncated(message)}"


def safe_repr(value: Any) -> str:
    """`repr(value)` for a message, bounded, even where `__repr__` fails."""
    try:
        text = repr(value)
    except Exception as failure:
        text = f"<{type(value).__name__} whose __repr__ raises {type(failure).__name__}>"
    return _truncated(text)


def _truncated(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
