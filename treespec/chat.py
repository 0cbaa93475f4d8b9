"""Conversations as prompts: a tokenizer's chat template turns messages into the text that the model was trained on."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from treespec.errors import ConfigError, RequestError

Message = Mapping[str, Any]


class Conversation(NamedTuple):
    """Messages, and how they are rendered. Names are those of transformers' `apply_chat_template`."""

    messages: Sequence[Message]
    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    template_kwargs: Mapping[str, Any]

    def render(self, tokenizer: Any) -> str:
        """The prompt's text, with all special tokens that the template writes.

        Raises:
            RequestError: the messages are malformed, or the template refuses them.
        """
        for message in self.messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError(f"message {message!r}; valid: {{'role': 'user', 'content': '...'}}")
        if not self.messages:
            raise RequestError("a conversation without messages; give at least one")
        if self.continue_final_message and self.messages[-1]["role"] != "assistant":
            raise RequestError(
                f"continue_final_message=True, but the last message is of role {self.messages[-1]['role']!r}; end with "
                "the assistant's, or leave it out"
            )
        try:
            text = tokenizer.apply_chat_template(
                list(self.messages), tools=self.tools, chat_template=self.chat_template, tokenize=False,
                add_generation_prompt=self.add_generation_prompt, continue_final_message=self.continue_final_message,
                **self.template_kwargs,
            )  # fmt: skip
        except Exception as error:  # templates are programs: they raise what they like
            raise RequestError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error
        if not isinstance(text, str):
            raise RequestError(f"the chat template made {type(text).__name__}, not one text")
        return text


def conversations(
    tokenizer: Any,
    messages: Any,
    chat_template: str | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, Any] | None,
) -> list[Conversation]:
    """One conversation (a list of messages) or several.

    Raises:
        ConfigError: no tokenizer, no template, or options that contradict each other.
    """
    if tokenizer is None:
        raise ConfigError("chat needs a tokenizer, and the model's folder has none; give LLM(tokenizer=...)")
    if not hasattr(tokenizer, "apply_chat_template"):
        raise ConfigError(f"chat needs a tokenizer with apply_chat_template; {type(tokenizer).__name__} has none")
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "the model's tokenizer has no chat template (it was not trained to chat); give chat_template=..., or use "
            "generate"
        )
    if add_generation_prompt and continue_final_message:
        raise ConfigError(
            "continue_final_message=True goes on with the last message, add_generation_prompt=True begins another; "
            "set add_generation_prompt=False"
        )
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise ConfigError(f"messages={messages!r}; valid: a list of messages, or a list of such lists")
    several = bool(messages) and not isinstance(messages[0], Mapping)
    each = list(messages) if several else [messages]
    for one in each:
        if not isinstance(one, Sequence) or isinstance(one, str | bytes):
            raise ConfigError(f"messages: {one!r} is no list of messages")
    return [
        Conversation(
            one, chat_template, add_generation_prompt, continue_final_message, tools, dict(template_kwargs or {})
        )
        for one in each
    ]
