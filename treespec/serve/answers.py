"""Responses in OpenAI's format, complete and as chunks of a stream."""

import itertools
import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pydantic_core import to_json

from treespec.outputs import CompletionOutput, RequestMetrics, RequestOutput
from treespec.sampling.logprobs import Logprob
from treespec.serve.errors import ServerError, error_document
from treespec.serve.output_parser import OutputParser
from treespec.serve.output_reader import CallPart, OutputReader, Part
from treespec.serve.protocol import CompletionBody, GenerationBody
from treespec.text.prompt_tokenizer import UserTokenizer


class Answer:
    """Builds the response to one request; `model` is the model name to report."""

    prefix: str  # prefix of ids
    kind: str  # `object` type of the complete response
    chunk_kind: str
    needs_special_tokens = False  # whether the text must keep special tokens to be parsed

    def __init__(self, body: GenerationBody, model: str):
        self._body = body
        self.request_id = self.prefix + uuid.uuid4().hex
        self._head = {"id": self.request_id, "created": int(time.time()), "model": model}
        self._usage: dict[int, tuple[int, int, int]] = {}  # (prompt, generated, cached tokens) by prompt

    def response(self, outputs: Sequence[RequestOutput]) -> str:
        """Return the complete response as JSON, from the finished output of each prompt."""
        choices = []
        for prompt_index, output in enumerate(outputs):
            self._count(prompt_index, output)
            choices += [self._choice(prompt_index, output, completion) for completion in output.outputs]
        return self._json(self.kind, choices, usage=self._total())

    def opening(self) -> Iterator[dict[str, str]]:
        """Yield the events before the first output, as keywords of `sse_starlette.ServerSentEvent`."""
        return iter(())

    def chunks(
        self, prompt_index: int, output: RequestOutput, rounds: list[dict[str, Any]] | None = None
    ) -> Iterator[dict[str, str]]:
        """Yield the events of a prompt's new output. The first event carries the rounds."""
        if output.finished or self._body.continues_usage:
            self._count(prompt_index, output)
        for completion in output.outputs:
            choice = self._choice(prompt_index, output, completion)
            usage_field: dict[str, Any] = {"usage": None} if self._body.includes_usage else {}
            if self._body.continues_usage:
                usage_field["usage"] = self._total()
            if rounds is not None:
                usage_field["rounds"], rounds = rounds, []
            yield {"data": self._json(self.chunk_kind, [choice], **usage_field)}

    def closing(self) -> Iterator[dict[str, str]]:
        """Yield the events after the last output."""
        if self._body.includes_usage:
            yield {"data": self._json(self.chunk_kind, [], usage=self._total())}
        yield {"data": "[DONE]"}

    def failure(self, error: ServerError) -> Iterator[dict[str, str]]:
        """Yield the final events of a failed stream, in the format that OpenAI's clients expect."""
        yield {"data": json.dumps(error_document(str(error), error.status))}
        yield {"data": "[DONE]"}

    def _json(self, kind: str, choices: list[dict[str, Any]], **extra: Any) -> str:
        return self._encode(self._head | {"object": kind, "choices": choices} | extra)

    def _encode(self, document: dict[str, Any]) -> str:
        return to_json(document, inf_nan_mode="null").decode()

    def _count(self, prompt_index: int, output: RequestOutput) -> None:
        metrics = output.metrics
        self._usage[prompt_index] = len(output.prompt_token_ids), metrics.generated_tokens, metrics.cached_tokens

    def _total(self) -> dict[str, Any]:
        prompt, generated, cached = map(sum, zip(*self._usage.values(), strict=True))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _choice(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        index = prompt_index * (self._body.n or 1) + completion.index
        choice: dict[str, Any] = {"index": index, "finish_reason": completion.finish_reason}
        if completion.finish_reason is not None:
            choice["stop_reason"] = completion.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = completion.token_ids
            if not self._body.stream or output.finished:
                choice["prompt_token_ids"] = output.prompt_token_ids
        if self._body.speculative_decoding_stats and completion.metrics is not None:
            choice["speculative_decoding_stats"] = draft_stats(completion.metrics)
        return choice | self._content(index, output, completion)

    def _content(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """Return the endpoint-specific fields of the choice `index`."""
        raise NotImplementedError


class CompletionAnswer(Answer):
    """Response of `/v1/completions`."""

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"
    _body: CompletionBody

    def __init__(self, body: CompletionBody, model: str, tokenizer: UserTokenizer | None):
        super().__init__(body, model)
        self._tokenizer = tokenizer
        self._shown: dict[int, int] = {}  # number of characters in tokens with log-probabilities, by choice

    def _count(self, prompt_index: int, output: RequestOutput) -> None:
        super()._count(prompt_index, output)
        if self._body.only_echoes:
            prompt, _, cached = self._usage[prompt_index]
            self._usage[prompt_index] = prompt, 0, cached

    def _choice(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        if self._body.only_echoes:
            ended = completion.finish_reason and "length"
            logprobs = completion.logprobs and completion.logprobs[:0]
            completion = replace(
                completion, text="", token_ids=[], logprobs=logprobs, finish_reason=ended, stop_reason=None
            )
        choice = super()._choice(prompt_index, output, completion)
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = [
                entry and {token: logprob._asdict() for token, logprob in entry.items()}
                for entry in output.prompt_logprobs or ()
            ]
        return choice

    def _content(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        text, tokens, logprobs = completion.text or "", completion.token_ids, completion.logprobs
        if self._body.echo and index not in self._shown:
            text = self._prompt_text(output) + text
            if logprobs is not None:  # never streamed
                tokens, logprobs = [*output.prompt_token_ids, *tokens], [*(output.prompt_logprobs or ()), *logprobs]
        return {"text": text, "logprobs": self._logprobs(index, tokens, logprobs)}

    def _prompt_text(self, output: RequestOutput) -> str:
        """Return a prompt's text as sent, or decoded from its tokens if these were sent or truncated."""
        if output.prompt is not None and self._body.truncate_prompt_tokens is None:
            return output.prompt
        return "" if self._tokenizer is None else self._tokenizer.decode(output.prompt_token_ids)

    def _logprobs(
        self, index: int, tokens: Sequence[int], logprobs: Sequence[dict[int, Logprob] | None] | None
    ) -> dict[str, Any] | None:
        """Return the `logprobs` fields of tokens. Only the first token of a prompt has no log-probabilities."""
        start = self._shown.setdefault(index, 0)
        if logprobs is None:
            return None
        texts = [self._token_text(token, entry) for token, entry in zip(tokens, logprobs, strict=True)]
        offsets = [*itertools.accumulate(map(len, texts), initial=start)]
        self._shown[index] = offsets.pop()
        return {
            "text_offset": offsets,
            "token_logprobs": [entry and entry[token].logprob for token, entry in zip(tokens, logprobs, strict=True)],
            "tokens": texts,
            "top_logprobs": [entry and _by_text(entry) for entry in logprobs],
        }

    def _token_text(self, token: int, entry: dict[int, Logprob] | None) -> str:
        if entry is None:
            return f"token_id:{token}" if self._tokenizer is None else self._tokenizer.decode([token])
        return _text(token, entry[token])


class ChatAnswer(Answer):
    """Response of `/v1/chat/completions`, split by a parser of its text."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: GenerationBody, model: str, parser: OutputParser):
        super().__init__(body, model)
        self._parser, self.needs_special_tokens = parser, parser.needs_special_tokens
        self._readers: dict[int, OutputReader] = {}  # readers by choice

    def _read(self, index: int, output: RequestOutput, completion: CompletionOutput) -> Part:
        if index not in self._readers:
            self._readers[index] = OutputReader(self._parser, self._parser.begins_with_reasoning(output.prompt))
        return self._readers[index].read(completion.text or "", completion.finish_reason is not None)

    def _content(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        role = {} if index in self._readers else {"role": "assistant"}
        part = self._read(index, output, completion)
        choice: dict[str, Any] = {"logprobs": self._logprobs(completion)}
        num_calls = self._readers[index].num_calls
        if num_calls and completion.finish_reason == "stop" and self._parser.named is None:  # as in OpenAI's API
            choice["finish_reason"] = "tool_calls"
        fields: dict[str, Any] = {}
        if part.reasoning:
            fields["reasoning_content"] = part.reasoning
        if part.calls:
            fields["tool_calls"] = [self._call(call) for call in part.calls]
        if not self._body.stream:
            content = None if part.calls and not part.content else part.content
            return choice | {"message": {**role, "content": content, "refusal": None, **fields}}
        if part.content or not fields:
            fields["content"] = part.content
        return choice | {"delta": role | fields}

    def _call(self, call: CallPart) -> dict[str, Any]:
        """Return a call, or a continuation of its arguments. Ids have nine letters, as Mistral's templates require."""
        index_field = {"index": call.place} if self._body.stream else {}
        if call.name is None:
            return {**index_field, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        return {**index_field, "id": uuid.uuid4().hex[:9], "type": "function", "function": function}

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if completion.logprobs is None:
            return None
        content = []
        for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
            num_top = self._body.num_logprobs or 0
            top_entries = sorted((logprob.rank, t, logprob) for t, logprob in entry.items() if logprob.rank <= num_top)
            top = [_named(t, logprob) for _, t, logprob in top_entries]
            content.append(_named(token, entry[token]) | {"top_logprobs": top})
        return {"content": content}


def draft_stats(metrics: RequestMetrics) -> dict[str, Any]:
    """Return one completion's speculative decoding statistics, as in vLLM."""
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
    """Return the text of a token, or, without a tokenizer, its id in vLLM's format."""
    return f"token_id:{token}" if logprob.decoded_token is None else logprob.decoded_token


def _by_text(entry: dict[int, Logprob]) -> dict[str, float]:
    """Return the log-probability of each text; the largest one if tokens (parts of characters) share a text."""
    texts: dict[str, float] = {}
    for token, logprob in entry.items():
        text = _text(token, logprob)
        texts[text] = max(logprob.logprob, texts.get(text, logprob.logprob))
    return texts


def _named(token: int, logprob: Logprob) -> dict[str, Any]:
    text = _text(token, logprob)
    return {"token": text, "logprob": logprob.logprob, "bytes": list(text.encode())}
