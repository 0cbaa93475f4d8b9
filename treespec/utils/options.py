"""Options declared once as dataclass fields, with ranges and help texts; functions take them as keywords.

The command line reads them before importing torch, so this module and those that declare options do not import it.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, field, fields
from inspect import Parameter, Signature
from typing import Any, Concatenate, ParamSpec, TypeVar

from treespec.errors import ConfigError, reject_unknown
from treespec.utils.scalars import as_int, as_number

# Metadata keys of fields: valid values, and the treatment of an option that only vLLM has.
LIMITS, VLLM = "limits", "vllm"

_Fields = ParamSpec("_Fields")
_Options = TypeVar("_Options")
_Self = TypeVar("_Self")
_Result = TypeVar("_Result")
_Class = TypeVar("_Class", bound=type)


def option(
    default: Any, *, ge: float | None = None, le: float | None = None, choices: Sequence[Any] = (), valid: str = ""
) -> Any:
    """Return a field that `checked_value` can check. None is valid if it is the default or `valid` mentions it.

    Args:
        default: the default value.
        ge, le: minimum and maximum of an int, or of a number if `default` or `ge` is a float.
        choices: the valid values.
        valid: description of the range for errors, if the other arguments do not suffice.
    """
    return field(default=default, metadata={LIMITS: {"ge": ge, "le": le, "choices": choices, "valid": valid}})


def checked_value(info: Field[Any], value: Any) -> Any:
    """Check the value of a field; return it as a Python number, or unchanged. Raises ConfigError if it is invalid."""
    limits = info.metadata.get(LIMITS)
    if limits is None or (value is None and (info.default is None or "None" in limits["valid"])):
        return value
    choices, minimum, maximum, valid = limits["choices"], limits["ge"], limits["le"], limits["valid"]
    if choices:
        if any(type(value) is type(choice) and value == choice for choice in choices):
            return value
        valid = valid or ", ".join(map(repr, choices))
    else:
        is_float = isinstance(info.default, float) or isinstance(minimum, float)
        number = as_number(value) if is_float else as_int(value, minimum)
        if number is not None and minimum <= number <= (math.inf if maximum is None else maximum):
            return number
        kind = "a number" if is_float else "an int"
        maximum = 3.4e38 if maximum is None and is_float else maximum  # limit of `as_number`: float32's maximum
        valid = valid or (f"{kind} of at least {minimum}" if maximum is None else f"{kind} from {minimum} to {maximum}")
    raise ConfigError(f"{info.name}={value!r}; valid: {valid}{', or None' if info.default is None else ''}")


def check_values(options: Any) -> None:
    """Check the values of a frozen dataclass, and convert its numbers to Python numbers. Raises ConfigError."""
    for info in fields(options):
        object.__setattr__(options, info.name, checked_value(info, getattr(options, info.name)))


def help_texts(options: type) -> dict[str, str]:
    """Return each option's documentation, from the "Args:" of the dataclass's docstring."""
    section = inspect.cleandoc(options.__doc__ or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries = [" ".join(entry.split()).partition(": ") for entry in re.split(r"\n(?=\S)", textwrap.dedent(section))]
    return {name: text for names, _, text in entries for name in names.split(", ")}


def takes_options(
    options: Callable[_Fields, _Options],
) -> Callable[[Callable[[_Options], _Result]], Callable[_Fields, _Result]]:
    """Let a function take the fields of the dataclass `options` as keywords instead of an instance as last argument.

    Type checkers and `inspect.signature` see the fields. An unknown keyword raises ConfigError.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        leading = [*signature.parameters.values()][:-1]

        @functools.wraps(function)
        def call(*values: Any, **keywords: Any) -> Any:
            _reject_unknown(function.__qualname__.partition(".")[0], keywords, options)
            return function(*values[: len(leading)], options(*values[len(leading) :], **keywords))

        signature_with_options = _signature(options, leading).replace(return_annotation=signature.return_annotation)
        call.__signature__ = signature_with_options  # type: ignore[attr-defined]
        return call

    return decorate


def built_from(
    options: Callable[_Fields, _Options],
) -> Callable[[Callable[[_Self, _Options], None]], Callable[Concatenate[_Self, _Fields], None]]:
    """As `takes_options`, for a constructor."""
    return takes_options(options)  # type: ignore[arg-type, return-value]


def rejects_unknown(options: _Class) -> _Class:
    """Make a dataclass raise ConfigError for unknown keywords."""
    construct = options.__init__  # type: ignore[misc]

    @functools.wraps(construct)
    def __init__(self: Any, *values: Any, **keywords: Any) -> None:
        _reject_unknown(options.__name__, keywords, options)
        construct(self, *values, **keywords)

    __init__.__signature__ = _signature(options, [Parameter("self", Parameter.POSITIONAL_ONLY)])  # type: ignore[attr-defined]
    options.__init__ = __init__  # type: ignore[misc]
    return options


def _reject_unknown(kind: str, keywords: Iterable[str], options: Any) -> None:
    """Raise ConfigError for keywords that are not fields of `options`, suggesting the closest names."""
    names = {info.name: VLLM in info.metadata for info in fields(options)}
    unknown = [name for name in keywords if name not in names]
    reject_unknown(kind, unknown, [name for name, is_vllms in names.items() if not is_vllms])


def _signature(options: Any, leading: Sequence[Parameter] = ()) -> Signature:
    """Return a signature of `leading` and a dataclass's parameters. `**vllm_options` stands for vLLM's names."""
    vllm_names = [info.name for info in fields(options) if VLLM in info.metadata]
    parameters = [p for p in inspect.signature(options).parameters.values() if p.name not in vllm_names]
    vllm_parameter = [Parameter("vllm_options", Parameter.VAR_KEYWORD)] if vllm_names else []
    return Signature([*leading, *parameters, *vllm_parameter])
