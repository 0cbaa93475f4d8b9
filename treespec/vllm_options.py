"""Options of vLLM's calls that treespec has not: taken where they ask for nothing, refused with what to do instead."""

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from treespec.errors import ConfigError


class Absent(NamedTuple):
    """An option: the values that ask for nothing, as lists of them do, and what to do in place of asking."""

    nothing: tuple[Any, ...]
    instead: str


_GRAMMAR = Absent((None,), "use SamplingParams(structured_outputs={'json': schema}), or another form")
_LORA = Absent((None,), "merge the adapter into the model (merge_and_unload of peft) and open the result as an LLM")
_TEXT_ONLY = Absent((None, {}), "prompts are text or token ids: leave it out")

PARAMS = {
    "best_of": Absent((None, 1), "ask for n outputs with logprobs=0, and choose by cumulative_logprob"),
    "extra_args": Absent((None, {}), "give a logits processor its arguments where it is made"),
    "flat_logprobs": Absent((False,), "logprobs come as a list of dicts: leave it out"),
    "guided_decoding": _GRAMMAR,
    "logprob_token_ids": Absent((None,), "use logprobs=-1, which has all tokens"),
    "output_kind": Absent(
        (None, "CUMULATIVE", "FINAL_ONLY"), "generate returns finished outputs; use stream for what each round adds"
    ),
    "prompt_logprob_start": Absent((None,), "use prompt_logprobs, and the end of what it gives"),
    "prompt_logprob_token_ids": Absent((None,), "use prompt_logprobs=-1, which has all tokens"),
    "repetition_detection": Absent((None,), "use repetition_penalty, or stop reading a stream"),
    "spaces_between_special_tokens": Absent(
        (True,), "leave it out where special tokens are skipped, or decode token_ids with what writes no spaces"
    ),
    "thinking_token_budget": Absent((None, -1), "use max_tokens"),
    "truncate_prompt_tokens": Absent(
        (None,), "it is an option of the call, as in vLLM 0.17: tokenization_kwargs={'truncate_prompt_tokens': ...}"
    ),
}
CALLS = {
    "chat_template_content_format": Absent(("auto",), "a content may be a text or a list of parts as it is"),
    "guided_options_request": _GRAMMAR,
    "lora_request": _LORA,
    "mm_processor_kwargs": _TEXT_ONLY,
    "priority": Absent((None, 0), "requests enter in the order of the prompts: put the urgent ones first"),
    "prompt_adapter_request": _LORA,
}


def without_absent(kind: str, given: Mapping[str, Any], absent: Mapping[str, Absent]) -> dict[str, Any]:
    """The options but those of `absent`.

    Args:
        kind: what is being set, for the message.
        given: options by name.
        absent: `PARAMS` or `CALLS`.

    Raises:
        ConfigError: one of them asks for something.
    """
    for name, option in absent.items():
        if name in given and not _asks_nothing(given[name], option.nothing):
            raise ConfigError(f"{kind}: {name}={given[name]!r} is not supported; {option.instead}")
    return {name: value for name, value in given.items() if name not in absent}


def _asks_nothing(value: Any, nothing: tuple[Any, ...]) -> bool:
    if isinstance(value, list | tuple):
        return all(_asks_nothing(each, nothing) for each in value)
    value = value.name if isinstance(value, Enum) else value  # vLLM's RequestOutputKind, which cannot be imported here
    return any(type(value) is type(each) and value == each for each in nothing)
