"""vLLM's options of `SamplingParams` that treespec does not support, and the handling of all such options.

Values equivalent to omitting the option are accepted. Hints, which may change speed or memory but no token, are ignored
with one log line per call. Every other value is an error that names the alternative.
"""

import logging
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, NamedTuple, TypedDict, get_origin, get_type_hints

from treespec.errors import ConfigError

logger = logging.getLogger("treespec")


class Absent(NamedTuple):
    """Handling of an option that treespec does not support.

    Attributes:
        nothing: values equivalent to omitting the option, also in lists. None always is.
        instead: alternative, for errors and log lines.
        hints: types of values that are accepted as hints.
    """

    nothing: tuple[Any, ...]
    instead: str
    hints: tuple[type, ...] = ()


GRAMMAR = Absent((None,), "use SamplingParams(structured_outputs={'json': schema}), or another form")


class ParamsOptions(TypedDict, total=False):
    """Options of vLLM's `SamplingParams`."""

    best_of: Annotated[
        int | None, Absent((None, 1), "ask for n outputs with logprobs=0, and choose by cumulative_logprob")
    ]
    extra_args: Annotated[
        dict[str, Any] | None, Absent((None, {}), "give a logits processor its arguments when creating it")
    ]
    flat_logprobs: Annotated[bool, Absent((False,), "logprobs come as a list of dicts: omit it")]
    guided_decoding: Annotated[Any, GRAMMAR]
    logprob_token_ids: Annotated[list[int] | None, Absent((None,), "use logprobs=-1, which returns all tokens")]
    prompt_logprob_start: Annotated[int | None, Absent((None,), "use prompt_logprobs, and slice its result")]
    prompt_logprob_token_ids: Annotated[Any, Absent((None,), "use prompt_logprobs=-1, which returns all tokens")]
    repetition_detection: Annotated[Any, Absent((None,), "use repetition_penalty, or stop reading a stream")]
    skip_clone: Annotated[bool, Absent((False, True), "use True or False")]
    skip_reading_prefix_cache: Annotated[
        bool | None, Absent((False, True), "no prefix is cached between requests: omit it")
    ]
    spaces_between_special_tokens: Annotated[
        bool,
        Absent(
            (True,), "leave it out where special tokens are skipped, or decode token_ids without spaces between them"
        ),
    ]
    stream_interval: Annotated[
        int | None, Absent((None, 1), "each chunk of a stream holds the new tokens of one round: omit it")
    ]
    thinking_token_budget: Annotated[int | None, Absent((None, -1), "use max_tokens")]
    truncate_prompt_tokens: Annotated[
        int | None,
        Absent(
            (None,), "it is an option of the call, as in vLLM 0.17: tokenization_kwargs={'truncate_prompt_tokens': ...}"
        ),
    ]
    watermarking: Annotated[
        bool | None, Absent((None, False), "outputs have no watermark; use a logits processor that adds one")
    ]


def absent_options(options: type) -> dict[str, Absent]:
    """Return the `Absent` of each option that is annotated with one."""
    hints = get_type_hints(options, include_extras=True).items()
    return {name: hint.__metadata__[0] for name, hint in hints if get_origin(hint) is Annotated}


PARAMS = absent_options(ParamsOptions)


def without_absent(kind: str, given: Mapping[str, Any], absent: Mapping[str, Absent]) -> dict[str, Any]:
    """Return the options that are not in `absent`, and log ignored hints.

    Args:
        kind: name of the object or call, for the message.
        given: options by name.
        absent: result of `absent_options`.

    Raises:
        ConfigError: an unsupported value of an option of `absent`.
    """
    hints = []
    for name, option in absent.items():
        value = given.get(name)
        if value is None or _is_neutral(value, option.nothing):
            continue
        if not _is_one_of(value, option.hints):
            raise ConfigError(f"{kind}: {name}={value!r} is not supported; {option.instead}")
        hints.append(f"{name}={value!r} ({option.instead})")
    if hints:
        logger.warning("%s: ignored, as no token depends on them: %s", kind, "; ".join(hints))
    return {name: value for name, value in given.items() if name not in absent}


def _is_one_of(value: Any, types: tuple[type, ...]) -> bool:
    """Return whether a value has one of the types. A bool is not a number."""
    return isinstance(value, types) and (bool in types or not isinstance(value, bool))


def _is_neutral(value: Any, nothing: tuple[Any, ...]) -> bool:
    if isinstance(value, list | tuple):
        return all(each is None or _is_neutral(each, nothing) for each in value)
    value = value.name if isinstance(value, Enum) else value
    return any(type(value) is type(each) and value == each for each in nothing)
