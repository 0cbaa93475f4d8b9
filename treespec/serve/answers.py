"""Responses in OpenAI's form, whole and as chunks of a stream."""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionTokenLogprob,
)
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta, ChoiceDeltaToolCall, ChoiceDeltaToolCallFunction
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.chat.chat_completion_message_function_tool_call import Function
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import PromptTokensDetails
from pydantic import BaseModel

from treespec.outputs import CompletionOutput, RequestMetrics, RequestOutput
from treespec.sampling.logprobs import Logprob
from treespec.serve.output_parser import OutputParser
from treespec.serve.output_reader import OutputReader, Part
from treespec.serve.protocol import GenerationBody

_AnyLogprobs = TypeVar("_AnyLogprobs", ChoiceLogprobs, ChunkLogprobs)


class Answer:
    """Builds the response to one request, in which the model has the name that the client knows.

    Fields of vLLM and treespec are extra ones of the objects of `openai`.
    """

    prefix: str
    whole: type[BaseModel]
    chunk: type[BaseModel]
    whole_object: str
    chunk_object: str

    def __init__(self, body: GenerationBody, model: str):
        self._body = body
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._usage: dict[int, tuple[int, int, int]] = {}  # prompt, generated and cached tokens of each prompt

    @property
    def request_id(self) -> str:
        return str(self._head["id"])

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the text must have special tokens to be understood."""
        return False

    def response(self, outputs: Sequence[RequestOutput]) -> str:
        """Return the whole response as JSON, from the finished output of each prompt."""
        choices = []
        for place, output in enumerate(outputs):
            self._count(place, output)
            choices += [self._whole(*self._parts(place, output, completion)) for completion in output.outputs]
        return _json(self.whole, **self._head, object=self.whole_object, choices=choices, usage=self._total())

    def chunks(self, place: int, output: RequestOutput, rounds: list[dict[str, Any]] | None = None) -> Iterator[str]:
        """Return the events of new output of a prompt, as JSON. The first one carries the rounds."""
        if output.finished or self._body.continues_usage:
            self._count(place, output)
        for completion in output.outputs:
            choice = self._part(*self._parts(place, output, completion))
            extra: dict[str, Any] = {"usage": None} if self._body.includes_usage else {}
            if self._body.continues_usage:
                extra["usage"] = self._total()
            if rounds is not None:
                extra["rounds"], rounds = rounds, []
            yield _json(self.chunk, **self._head, object=self.chunk_object, choices=[choice], **extra)

    def usage_chunk(self) -> str:
        """Return the last event of a stream with usage, as JSON."""
        return _json(self.chunk, **self._head, object=self.chunk_object, choices=[], usage=self._total())

    def _whole(self, index: int, completion: CompletionOutput, extra: dict[str, Any]) -> BaseModel:
        raise NotImplementedError

    def _part(self, index: int, completion: CompletionOutput, extra: dict[str, Any]) -> BaseModel:
        raise NotImplementedError

    def _count(self, place: int, output: RequestOutput) -> None:
        metrics = output.metrics
        self._usage[place] = len(output.prompt_token_ids), metrics.generated_tokens, metrics.cached_tokens

    def _total(self) -> CompletionUsage:
        prompt, generated, cached = map(sum, zip(*self._usage.values(), strict=True))
        return CompletionUsage(
            prompt_tokens=prompt,
            completion_tokens=generated,
            total_tokens=prompt + generated,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )

    def _parts(
        self, place: int, output: RequestOutput, completion: CompletionOutput
    ) -> tuple[int, CompletionOutput, dict[str, Any]]:
        """Return the index of a choice, its completion, and the fields that both endpoints share."""
        extra: dict[str, Any] = {"finish_reason": completion.finish_reason}
        if completion.finish_reason is not None:
            extra["stop_reason"] = completion.stop_reason
        if self._body.return_token_ids:
            extra["token_ids"] = completion.token_ids
            if not self._body.stream or output.finished:
                extra["prompt_token_ids"] = output.prompt_token_ids
        if self._body.speculative_decoding_stats and completion.metrics is not None:
            extra["speculative_decoding_stats"] = draft_stats(completion.metrics)
        return place * (self._body.n or 1) + completion.index, completion, extra


class _StreamedChoice(CompletionChoice):
    """A part of a choice, which has no reason to end yet."""

    finish_reason: Any = None


class CompletionAnswer(Answer):
    """The response of `/v1/completions`."""

    prefix, whole, chunk = "cmpl", Completion, Completion
    whole_object = chunk_object = "text_completion"

    def __init__(self, body: GenerationBody, model: str):
        super().__init__(body, model)
        self._shown: dict[int, int] = {}  # number of characters of tokens, by choice

    def _whole(self, index: int, completion: CompletionOutput, extra: dict[str, Any]) -> BaseModel:
        logprobs = None
        if completion.logprobs is not None:
            logprobs = self._logprobs(index, completion.token_ids, completion.logprobs)
        return _StreamedChoice(index=index, text=completion.text or "", logprobs=logprobs, **extra)

    _part = _whole

    def _logprobs(self, index: int, tokens: list[int], positions: list[dict[int, Logprob]]) -> Logprobs:
        texts = [_text(token, entry[token]) for token, entry in zip(tokens, positions, strict=True)]
        offsets = [self._shown.get(index, 0)]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        self._shown[index] = offsets.pop()
        return Logprobs(
            text_offset=offsets,
            token_logprobs=[entry[token].logprob for token, entry in zip(tokens, positions, strict=True)],
            tokens=texts,
            top_logprobs=[{_text(t, logprob): logprob.logprob for t, logprob in entry.items()} for entry in positions],
        )


class ChatAnswer(Answer):
    """The response of `/v1/chat/completions`. Without a parser, which splits the text, all of it is content."""

    prefix, whole, chunk = "chatcmpl", ChatCompletion, ChatCompletionChunk
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, body: GenerationBody, model: str, parser: OutputParser | None = None):
        super().__init__(body, model)
        self._parser, self._begins_with_reasoning = parser, False
        self._readers: dict[int, OutputReader] = {}  # by choice
        self._ids: dict[tuple[int, int], str] = {}  # of calls, by choice and place

    @property
    def needs_special_tokens(self) -> bool:
        return self._parser is not None and self._parser.needs_special_tokens

    def _parts(
        self, place: int, output: RequestOutput, completion: CompletionOutput
    ) -> tuple[int, CompletionOutput, dict[str, Any]]:
        if self._parser is not None:
            self._begins_with_reasoning = self._parser.begins_with_reasoning(output.prompt)
        return super()._parts(place, output, completion)

    def _whole(self, index: int, completion: CompletionOutput, extra: dict[str, Any]) -> BaseModel:
        part = self._read(index, completion, extra)
        fields: dict[str, Any] = {}
        if part.reasoning:
            fields["reasoning_content"] = part.reasoning
        if part.calls:
            fields["tool_calls"] = [
                ChatCompletionMessageFunctionToolCall(
                    id=self._id(index, call.place),
                    type="function",
                    function=Function(name=call.name or "", arguments=call.arguments),
                )
                for call in part.calls
            ]
        text = None if part.calls and not part.content else part.content
        message = ChatCompletionMessage(role="assistant", content=text, refusal=None, **fields)
        return Choice(index=index, message=message, logprobs=self._logprobs(completion, ChoiceLogprobs), **extra)

    def _part(self, index: int, completion: CompletionOutput, extra: dict[str, Any]) -> BaseModel:
        role: dict[str, Any] = {} if index in self._readers else {"role": "assistant"}
        part = self._read(index, completion, extra)
        if part.reasoning:
            role["reasoning_content"] = part.reasoning
        calls = []
        for call in part.calls:
            begins: dict[str, Any] = {}
            if call.name is not None:
                begins = {"id": self._id(index, call.place), "type": "function"}
            function = ChoiceDeltaToolCallFunction(arguments=call.arguments, **({"name": call.name} if begins else {}))
            calls.append(ChoiceDeltaToolCall(index=call.place, function=function, **begins))
        if calls:
            role["tool_calls"] = calls
        if part.content or role.keys() <= {"role"}:
            role["content"] = part.content
        logprobs = self._logprobs(completion, ChunkLogprobs)
        return ChunkChoice(index=index, delta=ChoiceDelta(**role), logprobs=logprobs, **extra)

    def _read(self, index: int, completion: CompletionOutput, extra: dict[str, Any]) -> Part:
        """Return what is new, and let the reason to end say whether there are calls."""
        reader = self._readers.get(index)
        if reader is None:
            reader = OutputReader(self._parser or OutputParser(), self._begins_with_reasoning)
            self._readers[index] = reader
        part = reader.read(completion.text or "", completion.finish_reason is not None)
        if reader.num_calls and completion.finish_reason == "stop" and reader.parser.named is None:  # as OpenAI's
            extra["finish_reason"] = "tool_calls"
        return part

    def _id(self, index: int, place: int) -> str:
        """Return the id of a call: nine letters, as Mistral's templates require."""
        return self._ids.setdefault((index, place), uuid.uuid4().hex[:9])

    def _logprobs(self, completion: CompletionOutput, kind: type[_AnyLogprobs]) -> _AnyLogprobs | None:
        if completion.logprobs is None:
            return None
        content = []
        for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
            most = self._body.num_logprobs or 0
            best = sorted((logprob.rank, t, logprob) for t, logprob in entry.items() if logprob.rank <= most)
            top = [TopLogprob(**_named(t, logprob)) for _, t, logprob in best]
            content.append(ChatCompletionTokenLogprob(**_named(token, entry[token]), top_logprobs=top))
        return kind(content=content)


def draft_stats(metrics: RequestMetrics) -> dict[str, Any]:
    """Return vLLM's statistics of speculative decoding of one completion."""
    drafted = metrics.nodes_verified - metrics.target_passes
    return {
        "mean_acceptance_length": metrics.acceptance_length,
        "draft_acceptance_rate": metrics.accepted_tokens / drafted if drafted else 0.0,
        "acceptance_histogram": metrics.accepted_lengths,
        "num_spec_steps": metrics.target_passes,
        "num_accepted_draft_tokens": metrics.accepted_tokens,
        "num_draft_tokens": drafted,
        "accepted_by_source": metrics.accepted_by_source,
    }


def _text(token: int, logprob: Logprob) -> str:
    """Return the text of a token, or, without a tokenizer, its id as vLLM writes it."""
    return f"token_id:{token}" if logprob.decoded_token is None else logprob.decoded_token


def _named(token: int, logprob: Logprob) -> dict[str, Any]:
    text = _text(token, logprob)
    return {"token": text, "logprob": logprob.logprob, "bytes": list(text.encode())}


def _json(kind: type[BaseModel], **values: Any) -> str:
    return kind(**values).model_dump_json(exclude_unset=True, warnings=False)
