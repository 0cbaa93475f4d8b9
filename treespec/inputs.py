"""Dict prompts, named as in vLLM."""

from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A text prompt."""

    prompt: str


class TokensPrompt(TypedDict):
    """A token-id prompt, optionally with its text."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
