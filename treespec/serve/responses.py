"""OpenAI's Responses API without stored responses: a body becomes a chat, and its answer becomes items and events."""

import itertools
import time
import uuid
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Annotated, Any, ClassVar, NamedTuple

from fastapi.exceptions import RequestValidationError
from openai.types.responses.response_create_params import ResponseCreateParamsBase as OpenAIResponses
from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import PydanticSerializationError, to_json

from treespec.errors import ConfigError, short_repr
from treespec.outputs import CompletionOutput, RequestOutput
from treespec.serve.answers import ChatAnswer, draft_stats
from treespec.serve.errors import ServerError, error_document
from treespec.serve.messages import MAX_MESSAGES, Strict
from treespec.serve.output_parser import OutputParser
from treespec.serve.output_reader import CallPart
from treespec.serve.protocol import ChatBody, GenerationBody, Texts

_STATELESS = "responses are not stored; repeat the conversation in input"
_TEXTS = ("input_text", "output_text", "reasoning_text", "summary_text")  # types of content parts
_DEFAULTS = {"tools": [], "tool_choice": "auto", "metadata": {}, "parallel_tool_calls": True}
_ECHOED = {"instructions", "max_output_tokens", "reasoning", "temperature", "text", "top_logprobs", "top_p", *_DEFAULTS}

_Document = dict[str, Any]
_Documents = Annotated[list[_Document], Field(max_length=MAX_MESSAGES - 1)]  # leaves room for the instructions
_CHAT_FIELDS = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format"}


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class TextOptions(Strict):
    """OpenAI's `text`; `verbosity` is ignored."""

    format: _Document | None = None
    verbosity: str | None = None


class ResponsesBody(GenerationBody):
    """Body of `/v1/responses`. `chat` checks the fields shared with chats."""

    endpoint, openai = "/v1/responses", OpenAIResponses
    unsupported: ClassVar = {
        "previous_response_id": ((None,), _STATELESS),
        "conversation": ((None,), _STATELESS),
        "background": ((None, False), "use stream"),
        "prompt": ((None,), "put its text into instructions and input"),
        "truncation": ((None, "disabled"), "send fewer items"),
        "context_management": ((None, []), "send fewer items"),
        "moderation": ((None,), "omit it"),
        "n": ((None, 1), "send several requests"),
        "max_tokens": ((None,), "use max_output_tokens"),
        "response_format": ((None,), "use text.format"),
        "rounds": ((None, False), "use /v1/chat/completions"),
        "return_token_ids": ((None, False), "use /v1/chat/completions"),
    }
    input: Annotated[_Documents, BeforeValidator(_as_items)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: _Documents | None = None
    tool_choice: str | _Document | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: _Document | None = None
    include: Texts | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: _Document | None = None  # field of vLLM

    def chat(self) -> ChatBody:
        """Return the equivalent request to `/v1/chat/completions`. Raises RequestValidationError and ConfigError."""
        shared_fields = self.model_fields_set & ChatBody.model_fields.keys() - self.unsupported.keys()
        fields: _Document = {name: getattr(self, name) for name in shared_fields} | {
            "messages": _messages(self.instructions, self.input),
            "max_completion_tokens": self.max_output_tokens,
            "tools": self.tools and [*map(_nested, self.tools)],
            "tool_choice": _nested(self.tool_choice),
            "response_format": _nested(self.text and self.text.format),
            "logprobs": self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ()),
        }
        try:
            body = ChatBody.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            name, *path = map(str, first["loc"])
            raise RequestValidationError([{**first, "loc": (_CHAT_FIELDS.get(name, name), *path)}]) from error
        if body.must_call:  # if so, the format applies to text only
            body = body.model_copy(update={"response_format": None})
        body.check()
        return body

    def echo(self) -> _Document:
        """Return the request's fields to repeat in the response. Raises ConfigError for values that are not JSON."""
        fields = self.model_dump(include=_ECHOED)
        try:
            to_json({"event": {"response": fields}})
        except PydanticSerializationError as error:  # lone surrogates, or more than 255 levels
            raise ConfigError(f"{self.endpoint}: the response could not repeat the request: {error}") from error
        return fields | {name: value for name, value in _DEFAULTS.items() if fields[name] is None}


def _nested(value: Any) -> Any:
    """Move the fields of a tool, a choice or a format below its type, as in chats."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("function", "json_schema", "allowed_tools"):
        return value
    fields = {name: field for name, field in value.items() if name != "type"}
    if isinstance(tools := fields.get("tools"), list):
        fields["tools"] = [*map(_nested, tools)]
    return {"type": kind, kind: fields}


def _messages(instructions: str | None, items: list[_Document]) -> list[_Document]:
    """Return the messages of a chat, with one message per assistant turn. Raises ConfigError."""
    messages: list[_Document] = [] if instructions is None else [{"role": "system", "content": instructions}]
    for item in items:
        kind, role = item.get("type") or "message", item.get("role")
        if kind == "message" and role == "assistant":
            _add_to_turn(messages, "content", "".join(_texts(item.get("content"))))
        elif kind == "message":
            messages.append({"role": role, "content": _content(item.get("content"))})
        elif kind == "reasoning":
            texts = _texts(item.get("content") or item.get("summary") or [])
            _add_to_turn(messages, "reasoning_content", "".join(texts))
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _add_to_turn(messages, "tool_calls", [call])
        elif kind == "function_call_output":
            output = _content(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        else:
            raise ConfigError(
                f"input: an item of type {short_repr(kind)}; valid: message, reasoning, function_call, "
                "function_call_output (items are not stored; with store=false, clients send them whole)"
            )
    return messages


def _add_to_turn(messages: list[_Document], field: str, value: Any) -> None:
    """Append to a field of the assistant's message, or of a new one: reasoning or a second text begins a turn."""
    turn = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    has_text, has_calls = bool(turn and turn["content"]), bool(turn and "tool_calls" in turn)
    is_over = {"reasoning_content": has_text or has_calls, "content": has_text and not has_calls, "tool_calls": False}
    if turn is None or is_over[field]:
        turn = {"role": "assistant", "content": ""}
        messages.append(turn)
    turn[field] = turn.get(field, type(value)()) + value


def _content(content: Any) -> Any:
    """Return a content in the form of chats: the template joins several texts."""
    texts = _texts(content)
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) and part.get("type") in _TEXTS else None
        if not isinstance(text, str):
            raise ConfigError(f"input: content part {short_repr(part)}; valid: a string, or objects of type input_text")
        texts.append(text)
    return texts


class ItemKind(NamedTuple):
    """A kind of item in its initial state: its part or field that holds the text, and the names of its events."""

    item: _Document
    text: str  # name of the text's events
    field: str = "text"
    part: _Document | None = None
    part_event: str = "content_part"
    parts: str = "content"  # item field with the parts


_MESSAGE = ItemKind(
    {"id": "msg_", "type": "message", "role": "assistant", "content": []},
    "output_text",
    part={"type": "output_text", "text": "", "annotations": [], "logprobs": []},
)
_REASONING = ItemKind(
    {"id": "rs_", "type": "reasoning", "summary": [], "content": []},
    "reasoning_text",
    part={"type": "reasoning_text", "text": ""},
)
_SUMMARY = ItemKind(
    {"id": "rs_", "type": "reasoning", "summary": []},
    "reasoning_summary_text",
    part={"type": "summary_text", "text": ""},
    part_event="reasoning_summary_part",
    parts="summary",
)
_CALL = ItemKind({"id": "fc_", "type": "function_call", "arguments": ""}, "function_call_arguments", "arguments")


class ResponsesAnswer(ChatAnswer):
    """Response of `/v1/responses`: items of reasoning, text and calls, one after another.

    Reasoning is the content of its item, or its summary if the request includes one.
    """

    prefix, kind = "resp_", "response"

    def __init__(self, body: ResponsesBody, chat: ChatBody, model: str, parser: OutputParser):
        super().__init__(chat, model, parser)
        self._reasoning = _SUMMARY if (body.reasoning or {}).get("summary") else _REASONING
        self._numbers = itertools.count()  # sequence numbers of events
        self._items: list[_Document] = []
        self._growing: ItemKind | None = None  # kind of the last item, or None if it has ended
        self._place: _Document = {}  # location of its text in events
        self._holder: _Document = {}  # object that contains its text
        self._logprobs_due: list[_Document] = []  # log-probabilities of tokens without text yet
        self._document = {"id": self.request_id, "object": self.kind, "created_at": self._head["created"]}
        self._document |= {"status": "in_progress", "model": model, "output": self._items, **body.echo()}
        self._document |= {"error": None, "incomplete_details": None, "usage": None}

    def response(self, outputs: Sequence[RequestOutput]) -> str:
        for _ in self._read_output(outputs[0]):
            pass
        return self._encode(self._document)

    def opening(self) -> Iterator[dict[str, str]]:
        yield self._event({"type": "response.created", "response": self._document})
        yield self._event({"type": "response.in_progress", "response": self._document})

    def chunks(self, prompt_index: int, output: RequestOutput, rounds: Any = None) -> Iterator[dict[str, str]]:
        return map(self._event, self._read_output(output))

    def closing(self) -> Iterator[dict[str, str]]:
        return iter(())

    def failure(self, error: ServerError) -> Iterator[dict[str, str]]:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        message = error_document(str(error), error.status)["error"]["message"]
        self._document |= {"status": "failed", "error": {"code": code, "message": message}}
        yield self._event({"type": "response.failed", "response": self._document})

    def _event(self, event: _Document) -> dict[str, str]:
        return {"event": event["type"], "data": self._encode({**event, "sequence_number": next(self._numbers)})}

    def _read_output(self, output: RequestOutput) -> Iterator[_Document]:
        """Yield the events of new output. They share items, so encode each event before requesting the next."""
        (completion,) = output.outputs
        pieces = self._read(0, output, completion).pieces
        self._logprobs_due += (self._logprobs(completion) or {"content": []})["content"]
        for piece in pieces:
            if isinstance(piece, CallPart):
                if piece.name is not None:
                    yield from self._begin(_CALL, call_id=uuid.uuid4().hex[:9], name=piece.name)
                yield from self._grow(piece.arguments)
            elif piece[1]:
                kind = _MESSAGE if piece[0] == "content" else self._reasoning
                if self._growing is not kind:
                    yield from self._begin(kind)
                yield from self._grow(piece[1])
        if output.finished:
            yield from self._finish(output, completion)

    def _finish(self, output: RequestOutput, completion: CompletionOutput) -> Iterator[_Document]:
        is_cut = completion.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        if not is_cut and all(item["type"] == "reasoning" for item in self._items):
            yield from self._begin(_MESSAGE)  # empty, because clients expect a message or a call
        yield from self._end(status)
        self._count(0, output)
        usage = self._total()
        usage = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},  # reasoning tokens are not counted separately
            "total_tokens": usage["total_tokens"],
        }
        details = {"reason": "max_output_tokens"} if is_cut else None
        self._document |= {"status": status, "incomplete_details": details, "usage": usage}
        if not is_cut:
            self._document["completed_at"] = int(time.time())
        if self._body.speculative_decoding_stats and completion.metrics is not None:
            self._document["speculative_decoding_stats"] = draft_stats(completion.metrics)
        yield {"type": f"response.{status}", "response": self._document}

    def _begin(self, kind: ItemKind, **fields: Any) -> Iterator[_Document]:
        """End the last item, and begin the next one."""
        yield from self._end("completed")
        item = self._holder = {**deepcopy(kind.item), "status": "in_progress", **fields}
        item["id"] += uuid.uuid4().hex
        self._growing, self._place = kind, {"output_index": len(self._items), "item_id": item["id"]}
        self._items.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": item}
        if kind.part is not None:
            self._place[f"{kind.parts}_index"] = 0
            self._holder = deepcopy(kind.part)
            item[kind.parts].append(self._holder)
            yield {"type": f"response.{kind.part_event}.added", **self._place, "part": self._holder}

    def _grow(self, text: str) -> Iterator[_Document]:
        if text:
            assert self._growing is not None, "begun"
            self._holder[self._growing.field] += text
            yield {"type": f"response.{self._growing.text}.delta", **self._place, "delta": text, **self._add_logprobs()}

    def _add_logprobs(self) -> dict[str, Any]:
        """Move pending log-probabilities into the message, and return the field of its event."""
        if "logprobs" not in self._holder:
            return {}
        logprobs, self._logprobs_due = self._logprobs_due, []
        self._holder["logprobs"] += logprobs
        return {"logprobs": logprobs}

    def _end(self, status: str) -> Iterator[_Document]:
        """End the last item, unless it has ended."""
        if (kind := self._growing) is None:
            return
        self._growing, item = None, self._items[-1]
        item["status"] = status
        self._add_logprobs()  # log-probabilities of the end token
        text = {name: value for name, value in self._holder.items() if name in (kind.field, "name", "logprobs")}
        yield {"type": f"response.{kind.text}.done", **self._place, **text}
        if kind.part is not None:
            yield {"type": f"response.{kind.part_event}.done", **self._place, "part": self._holder}
        yield {"type": "response.output_item.done", "output_index": self._place["output_index"], "item": item}
