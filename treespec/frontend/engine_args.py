"""The options of `LLM` as one object or from a command line."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Self, TypeVar

from treespec.config.engine_options import EngineOptions
from treespec.utils.options import VLLM, help_texts

_Parser = TypeVar("_Parser", bound="argparse.ArgumentParser | argparse._ArgumentGroup")


class EngineArgs(EngineOptions):
    """The options of `LLM`. Fields may be set after construction; `LLM` checks them again.

    `LLM(**dataclasses.asdict(args))` and `LLM.from_engine_args(args)` build the engine.
    """

    __setattr__ = object.__setattr__  # vLLM's users modify it in place
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def add_cli_args(cls, parser: _Parser) -> _Parser:
        """Add flags such as `--max-model-len` to a parser or one of its groups, and return it.

        The namespace holds vLLM's own names only if the command line sets them, so that `LLM(**vars(args))` works.
        """
        texts = help_texts(EngineOptions)
        for option in fields(cls):
            default = argparse.SUPPRESS if VLLM in option.metadata else option.default
            text = texts.get(option.name, "").replace("%", "%%")
            flag = f"--{option.name.replace('_', '-')}"
            parser.add_argument(flag, dest=option.name, default=default, help=text, **_flag_options(str(option.type)))
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Create an instance from a parsed command line, which may also contain options of other parsers."""
        return cls(**{option.name: getattr(args, option.name) for option in fields(cls) if hasattr(args, option.name)})


AsyncEngineArgs = EngineArgs  # vLLM's name for `AsyncLLM`


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An argument parser that accepts `--max_model_len` for `--max-model-len`."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._dashed(word) for word in words], namespace)

    def _dashed(self, word: str) -> str:
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return word
        return name.replace("_", "-") + equals + value


def _flag_options(annotation: str) -> dict[str, Any]:
    """Return the arguments of `add_argument` for an option of this type."""
    kinds = set(annotation.split(" | ")) - {"None"}
    if kinds == {"bool"}:
        return {"action": argparse.BooleanOptionalAction}
    if "Sequence[Any]" in kinds:
        return {"nargs": "*"}
    for number in (float, int):
        if number.__name__ in kinds and "str" not in kinds:
            return {"type": number}
    return {"type": str if "str" in kinds and not kinds & {"bool", "dict[str, Any]"} else _value}


def _value(text: str) -> Any:
    """Parse JSON (a number, true, a dict). Returns the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text
