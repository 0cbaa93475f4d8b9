"""Rendering of chat prompts with the tokenizer's chat template."""

import functools
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from treespec.errors import ConfigError, RequestError, describe_error, short_repr
from treespec.text.prompt_tokenizer import UserTokenizer

logger = logging.getLogger("treespec")

Message = Mapping[str, Any]

_ANSWER = "treespec"  # answer of a conversation rendered to find the tokens that follow an answer
_MARK = "treespec-mark"  # suffix of a message, to find its end in the rendered text


class ChatOptions(NamedTuple):
    """Rendering options of conversations, as in `LLM.chat` and transformers' `apply_chat_template`."""

    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None


class Conversation(NamedTuple):
    """A conversation: messages and rendering options."""

    messages: Sequence[Message]
    options: ChatOptions = ChatOptions()

    def render(self, tokenizer: Any) -> str:
        """Render the prompt text, with the template's special tokens. Raises RequestError."""
        for message in self.messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError(f"message {short_repr(message)}; valid: {{'role': 'user', 'content': '...'}}")
        if not self.messages:
            raise RequestError("the conversation has no messages; give at least one")
        if self.options.continue_final_message and self.messages[-1]["role"] != "assistant":
            role = self.messages[-1]["role"]
            raise RequestError(f"continue_final_message=True: the last message is of role {role!r}; valid: 'assistant'")

        def apply(messages: Sequence[Message], continue_final_message: bool = False) -> Any:
            return tokenizer.apply_chat_template(
                messages,
                tools=self.options.tools,
                chat_template=self.options.chat_template,
                tokenize=False,
                add_generation_prompt=self.options.add_generation_prompt,
                continue_final_message=continue_final_message,
                **(self.options.chat_template_kwargs or {}),
            )

        converted = [_to_template_format(message) for message in self.messages]
        messages = _readable(_with_readable_arguments(converted, apply), apply)
        try:
            text = apply(messages, self.options.continue_final_message)
        except Exception as error:  # templates may raise anything
            raise RequestError(f"the chat template rejects the messages: {describe_error(error)}") from error
        if not isinstance(text, str):
            raise RequestError(f"the chat template returned {type(text).__name__} instead of a string")
        return text

    def warn_unread_tools(self, tokenizer: Any, text: str) -> None:
        """Warn once per template if the rendered `text` does not depend on the tools."""
        if self.options.tools:
            try:
                unread = self._replace(options=self.options._replace(tools=None)).render(tokenizer) == text
            except RequestError:  # the template needs tools
                return
            if unread:
                _warn_unread_tools(str(self.options.chat_template or tokenizer.chat_template))

    def last_turn(self, tokenizer: Any, text: str) -> str:
        """Return the part of the rendered `text` after the messages, including the last message if it is continued."""
        message_index = len(self.messages) - 1 - self.options.continue_final_message
        if message_index < 0:
            return text
        content = self.messages[message_index].get("content")
        marked = [*content, _MARK] if isinstance(content, list | tuple) else f"{content or ''}\n{_MARK}"
        messages = [*self.messages]
        messages[message_index] = {**messages[message_index], "content": marked}
        try:
            return self._replace(messages=messages).render(tokenizer).rpartition(_MARK)[2]
        except RequestError:  # the template accepts only certain contents
            return text

    def turn_end(self, tokenizer: UserTokenizer, end_tokens: Collection[int]) -> tuple[int, ...]:
        """Return the first added token after an answer, which ends the turn, unless it is in `end_tokens`."""
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        options = self.options._replace(add_generation_prompt=False, continue_final_message=False)
        try:
            text = Conversation(turn, options).render(tokenizer.base)
        except RequestError:  # the template accepts only other conversations
            return ()
        added = getattr(tokenizer.base, "added_tokens_decoder", {})
        for word in text.partition(_ANSWER)[2].split():  # a further one may end the text, on another line
            if ends := [token for token in tokenizer.encode(word, special=False) if token in added]:
                return () if not {*ends}.isdisjoint(end_tokens) else (ends[0],)
        return ()


@functools.cache
def _warn_unread_tools(template: str) -> None:
    """Warn once per template, because applications give the same tools in every call."""
    logger.warning(
        "tools=... has no effect: the chat template %s ignores it; pass a chat_template=... that uses it, or omit "
        "tools",
        short_repr(template[:60]),
    )


def _to_template_format(message: Message) -> Message:
    """Convert an OpenAI-style message: content parts become objects of type "text", and empty fields are removed."""
    changed = {name: value for name, value in message.items() if name in ("role", "content") or not _is_empty(value)}
    if isinstance(content := message.get("content"), list | tuple):
        changed["content"] = [{"type": "text", "text": _text_of(content_part)} for content_part in content] or ""
    return changed


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | tuple | Mapping) and not value)


def _with_arguments(message: Message, convert: Callable[[Any], Any]) -> Message:
    """Convert the arguments of all calls in a message."""

    def converted(call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str | Mapping):
            return call
        return {**call, "function": {**function, "arguments": convert(function["arguments"])}}

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [*map(converted, calls)]} if isinstance(calls, list | tuple) else message


def _with_readable_arguments(messages: list[Message], apply: Callable[[Sequence[Message]], Any]) -> list[Message]:
    """Convert the arguments of calls to the form that the template reads: an object, or its JSON text.

    A template reads a form if a rendered probe shows neither Python syntax nor JSON-encoded JSON. Raises RequestError
    for arguments that are not JSON.
    """
    if not any("tool_calls" in message for message in messages):
        return messages
    objects = [_with_arguments(message, _as_object) for message in messages]
    texts = [
        {**message, "content": _as_text(content)} if isinstance(content := message.get("content"), list) else message
        for message in messages
    ]
    probe = {"argument": "probed"}
    for form in (_as_object, _as_json):
        try:
            text = apply([_with_arguments(message, lambda _: form(probe)) for message in texts])  # noqa: B023
        except Exception:  # templates may raise anything
            continue
        if "probed" in text and "'argument'" not in text and '\\"argument' not in text:
            return [_with_arguments(message, form) for message in messages]
    return objects


def _as_text(content: list[Any]) -> Any:
    return "\n".join(item["text"] for item in content)


def _as_one_part(content: list[Any]) -> Any:
    return [{**content[0], "text": _as_text(content)}]


def _readable(messages: Sequence[Message], apply: Callable[[Sequence[Message]], Any]) -> Sequence[Message]:
    """Convert each content to the form that the template reads: unchanged (text or parts), one text, or one part.

    The form may depend on role and position: text, parts, or the first part. A template reads a form if a rendered
    probe shows the probe's texts, but not an additional key of its parts, which printed lists would show.
    """
    original, contents, probes = {}, {}, {}
    for i, message in enumerate(messages):
        if isinstance(content := message.get("content"), str | list) and content:
            original[i] = _as_text if isinstance(content, str) else list
            contents[i] = [{"type": "text", "text": content}] if isinstance(content, str) else content
            probes[i] = [{**item, "text": f"probe{i}.{j}.", f"key{i}.": ""} for j, item in enumerate(contents[i])]

    def fill(forms: Mapping[int, Any], contents: Mapping[int, list[Any]]) -> list[Message]:
        return [
            {**message, "content": forms[i](contents[i])} if i in forms else message
            for i, message in enumerate(messages)
        ]

    def unread(forms: Mapping[int, Any]) -> set[int]:
        try:
            text = apply(fill(forms, probes))
        except Exception:  # templates may raise anything
            return set(forms)
        rendered = {*re.findall(r"probe\d+\.\d+\.|key\d+\.", text)}
        return {i for i in forms if f"key{i}." in rendered or any(item["text"] not in rendered for item in probes[i])}

    missing = unread(original)
    forms = original | dict.fromkeys(missing, _as_text)
    for i in missing:
        candidates = (original[i], _as_text, _as_one_part)
        forms[i] = next((form for form in candidates if i not in unread({**forms, i: form})), _as_text)
    return fill(forms, contents)


def _text_of(content: Any) -> str:
    text = content.get("text") if isinstance(content, Mapping) and content.get("type") == "text" else content
    if not isinstance(text, str):
        raise RequestError(f"content part {short_repr(content)}; valid: a string or {{'type': 'text', 'text': '...'}}")
    return text


def _as_object(arguments: str | Mapping[str, Any]) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError as error:
        raise RequestError(f"arguments of a tool call: {arguments[:80]!r} is not JSON: {error}") from error
    # A model may have written half of a surrogate pair, which the tokenizer would reject.
    return json.loads(json.dumps(parsed, ensure_ascii=False).encode(errors="replace")) if "\\u" in arguments else parsed


def _as_json(arguments: str | Mapping[str, Any]) -> str:
    return (arguments or "{}") if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def conversations(tokenizer: Any, messages: Any, options: ChatOptions) -> list[Conversation]:
    """Validate one conversation (a list of messages) or several. Raises ConfigError."""
    if tokenizer is None:
        raise ConfigError("chat needs a tokenizer, and the model's folder has none; pass LLM(tokenizer=...)")
    if not hasattr(tokenizer, "apply_chat_template"):
        raise ConfigError(f"chat needs a tokenizer with apply_chat_template; {type(tokenizer).__name__} has none")
    if options.chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "the model's tokenizer has no chat template (not a chat model); pass chat_template=..., or use generate"
        )
    if options.add_generation_prompt and options.continue_final_message:
        raise ConfigError("continue_final_message=True continues the last message; set add_generation_prompt=False")
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise ConfigError(f"messages={short_repr(messages)}; valid: a list of messages, or a list of such lists")
    several = bool(messages) and not isinstance(messages[0], Mapping)
    chats = list(messages) if several else [messages]
    for chat in chats:
        if not isinstance(chat, Sequence) or isinstance(chat, str | bytes):
            raise ConfigError(f"messages: {short_repr(chat)} is not a list of messages")
    return [Conversation(chat, options) for chat in chats]


def check_syntax(tokenizer: Any, chat_template: str | None) -> None:
    """Raise ConfigError if a chat template (by default, any of the tokenizer's) is not valid Jinja."""
    from jinja2 import TemplateSyntaxError

    stored = getattr(tokenizer, "chat_template", None) or {}
    templates = [chat_template] if chat_template else stored.values() if isinstance(stored, dict) else [stored]
    for template in templates:
        try:
            Conversation([{"role": "user", "content": "?"}], ChatOptions(template)).render(tokenizer)
        except RequestError as error:  # a template may reject this conversation
            if isinstance(cause := error.__cause__, TemplateSyntaxError):
                whose = "" if chat_template else f" of {tokenizer.name_or_path}"
                raise ConfigError(f"the chat template{whose}, line {cause.lineno}: {cause.message}") from error


def streamed(tokenizer: Any, prompt: Any, options: ChatOptions) -> Any:
    """Resolve the prompt of `LLM.stream`: a conversation, or any other prompt unchanged. Raises ConfigError."""
    if _holds_messages(prompt):
        chats = conversations(tokenizer, prompt, options)
        if len(chats) > 1:
            raise ConfigError(f"stream takes one conversation, not {len(chats)}; stream each one alone, or use chat")
        return chats[0]
    unset = ChatOptions._field_defaults
    if names := [name for name, value in options._asdict().items() if value != unset[name]]:
        raise ConfigError(f"stream: {', '.join(names)} without a conversation; pass messages, or omit it")
    if isinstance(prompt, list | tuple) and any(isinstance(item, str | Mapping) for item in prompt):
        raise ConfigError(f"stream takes one prompt, not {str(prompt)[:60]}; stream each one alone, or use generate")
    return prompt


def _holds_messages(prompt: Any) -> bool:
    """Return whether a prompt is a list of messages, well-formed or not, or a list of such lists."""
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    first = prompt[0]
    if isinstance(first, Mapping):
        return not any(isinstance(entry, Mapping) and entry.keys() & {"prompt", "prompt_token_ids"} for entry in prompt)
    return isinstance(first, list | tuple) and any(isinstance(entry, Mapping) for entry in first)
