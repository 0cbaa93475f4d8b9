"""Prompts as dicts, with vLLM's names."""

from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A text."""

    prompt: str


class TokensPrompt(TypedDict):
    """Token ids, with the text that they stand for where it is known."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
