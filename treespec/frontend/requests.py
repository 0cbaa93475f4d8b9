"""Create requests from prompts and parameters, and outputs from requests."""

import logging
from collections.abc import Callable, Sequence
from ctypes import CDLL
from dataclasses import dataclass, replace
from functools import cache, partial
from numbers import Integral
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from treespec.config.configs import SpecConfig
from treespec.errors import ConfigError, RequestError, short_repr
from treespec.inputs import TextPrompt, TokensPrompt
from treespec.outputs import CompletionOutput, RequestMetrics, RequestOutput
from treespec.request import PromptGroup, Request, new_request_id
from treespec.sampling.grammar import Grammars
from treespec.sampling.logprobs import Logprob
from treespec.sampling.sampler import Sampler
from treespec.sampling.transforms import Transforms
from treespec.sampling_params import SamplingParams, StructuredOutputsParams
from treespec.text.chat import Conversation
from treespec.text.detokenizer import Detokenizer
from treespec.text.prompt_tokenizer import Tokenization, UserTokenizer, check_text
from treespec.utils.scalars import as_int, to_python

logger = logging.getLogger("treespec")

_Position = TypeVar("_Position", dict[int, Logprob], dict[int, Logprob] | None)
Prompt = str | Sequence[int] | np.ndarray | torch.Tensor | TextPrompt | TokensPrompt | dict[str, Any]

# Maximum number of texts and of their characters together: every stop string is searched for after every token, and
# every bad word is tokenized twice.
_MOST_TEXTS = {"stop": (1000, 100_000), "bad_words": (5000, 200_000)}
_PROMPT_KEYS = ("prompt", "prompt_token_ids")


class NewTokens(NamedTuple):
    """What a request has generated since it was last read."""

    start: int  # number of output tokens before these
    token_ids: list[int]  # may be empty; text also lags behind the tokens
    text: str | None


class UnreadSamples:
    """The samples of a prompt that a stream has not read to their end.

    Holds positions in the requests' outputs, not copies, so that what a slow reader misses takes no memory.
    """

    def __init__(self, samples: Sequence[Request]):
        self._read = dict.fromkeys(samples, 0)  # number of tokens taken

    def __bool__(self) -> bool:
        return bool(self._read)

    def __contains__(self, request: Request) -> bool:
        return request in self._read

    def changed(self) -> list[Request]:
        """Return the samples with new tokens, and those that have ended."""
        return [request for request, read in self._read.items() if request.finished or request.num_generated > read]

    def take(self, request: Request) -> NewTokens:
        """Take what is new of a request between rounds. Raises the error of a request that has failed."""
        if request.error is not None:
            raise request.exception
        start = self._read[request]
        tokens = request.tokens[request.num_prompt + start :]
        self._read[request] += len(tokens)
        text = no_text(request.params)
        if request.detokenizer is not None:
            if request.finished:
                request.detokenizer.flush()
            text = request.detokenizer.release(request.finished)
        if request.finished:
            del self._read[request]
        return NewTokens(start, tokens, text)


@dataclass(frozen=True)
class RequestFactory:
    """Creates requests, and outputs from requests."""

    tokenizer: UserTokenizer | None  # tokenizer of prompts and outputs; None for token ids only
    vocab_size: int
    eos_token_ids: tuple[int, ...]  # end tokens of the target and of the tokenizer
    max_model_len: int  # maximum positions of a request
    max_positions: int  # the model's maximum positions, an upper bound of `max_model_len`
    device: torch.device  # device of the target's logits
    grammars: Grammars
    kernel_noise: bool  # whether a kernel computes the noise (see `Sampler`)
    library: CDLL | None  # that of a compiled target (see `Sampler`)
    draw_seed: Callable[[], int]  # returns a seed for a sampled request without one

    def requests(
        self, prompt: Any, params: SamplingParams, spec: SpecConfig, stream: bool, tokenization: Tokenization
    ) -> list[Request] | RequestOutput:
        """Return the samples of a prompt. For an invalid prompt, return its finished output with the error."""
        prompt_text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        text, tokens = prompt_text if isinstance(prompt_text, str) else None, []
        request_id, ends = new_request_id(), self.eos_token_ids
        try:
            if isinstance(prompt, Conversation):
                assert self.tokenizer is not None, "conversations are made for a tokenizer"
                text = prompt.render(self.tokenizer.base)
                prompt.warn_unread_tools(self.tokenizer.base, text)
                ends += prompt.turn_end(self.tokenizer, ends)
                prompt = self._tokenize(text, tokenization, special=False)
            tokens = self._encode(prompt, tokenization)
            self._check_length(len(tokens), tokenization)
            self._check(params)
            seed = params.seed if params.seed is not None or params.temperature == 0 else self.draw_seed()
            samples = [
                self._prepare(Request(tokens, params, spec, text, eos_token_ids=ends, seed=seed, sample=i), request_id)
                for i in range(params.n)
            ]
            if stream or params.stop:
                for sample in samples:
                    sample.detokenizer = self.detokenizer(tokens, params)
        except RequestError as error:
            failed = Request(tokens, params, spec, text, error=str(error), finish_reason="error")
            failed.request_id, failed.seed = request_id, params.seed
            return self.output([failed])
        if len(samples) > 1:
            group = PromptGroup()
            for sample in samples:
                sample.group = group
        return samples

    def _prepare(self, request: Request, output_id: str) -> Request:
        """Set what a sample takes from the engine: its ids, limits and sampler."""
        tokens, params, sample = request.prompt_token_ids, request.params, request.sample
        if -1 in (params.logprobs, params.prompt_logprobs):
            counts = [self.vocab_size if count == -1 else count for count in (params.logprobs, params.prompt_logprobs)]
            request.params = params = replace(params, logprobs=counts[0], prompt_logprobs=counts[1])
        request.output_id = output_id
        request.request_id = output_id if params.n == 1 else f"{output_id}.{sample}"
        room = self.max_model_len - len(tokens)
        request.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.max_tokens is not None and params.max_tokens > room:
            _warn_cut(params.max_tokens, self.max_model_len)
        if not params.is_argmax:
            spellings = self._tokenize_words(params.bad_words or ())
            form = StructuredOutputsParams.of(params.structured_outputs)
            grammar = None if form is None else self.grammars.grammar(form, len(tokens))
            ends, logits_of = request.end_tokens, (self.vocab_size, self.device)
            transforms = Transforms(params, len(tokens), ends, spellings, *logits_of, grammar, self.kernel_noise)
            request.sampler = Sampler(
                params, transforms, ends, *logits_of, request.seed or 0, sample, self.kernel_noise, self.library
            )
        return request

    def _encode(self, prompt: Any, tokenization: Tokenization) -> list[int]:
        """Return the token ids of a prompt after truncation. Raises RequestError if it is invalid."""
        if isinstance(prompt, dict):
            prompt = {key: value for key, value in prompt.items() if value is not None or key in _PROMPT_KEYS}
            if not prompt or any(key not in _PROMPT_KEYS for key in prompt):
                raise RequestError(
                    f"prompt {short_repr(prompt)}; keys of a dict: {' and '.join(map(repr, _PROMPT_KEYS))}"
                )
            prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(f"a text prompt {prompt[:40]!r}, but the model has no tokenizer; give token ids")
            prompt = self._tokenize(prompt, tokenization, special=True)
        prompt = to_python(prompt)
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise RequestError(f"prompt {short_repr(prompt)}; valid: text, a list of token ids, or a dict of either")
        if not len(prompt):
            raise RequestError("an empty prompt; give at least one token")
        tokens, are_ints = list(prompt), {*map(type, prompt)} == {int}  # without a call for each of a million tokens
        if not are_ints or min(tokens) < 0 or max(tokens) >= self.vocab_size:
            for place, item in enumerate(prompt):
                token = as_int(item, 0)
                if token is None or token >= self.vocab_size:
                    raise RequestError(f"prompt token {short_repr(item)}; valid: ints from 0 to {self.vocab_size - 1}")
                tokens[place] = token
        return tokens[-tokenization.truncate :] if tokenization.truncate else tokens

    def _tokenize(self, text: str, tokenization: Tokenization, special: bool) -> list[int]:
        """Encode a text. Raises RequestError, without tokenizing a text that cannot fit the context."""
        assert self.tokenizer is not None, "checked"
        if len(text) >= self.max_model_len:
            self._check_length(self.tokenizer.least_tokens(text), tokenization, "at least ")
        return tokenization.encode(self.tokenizer, text, special)

    def _check_length(self, count: int, tokenization: Tokenization, least: str = "") -> None:
        """Raise RequestError if a prompt does not fit the context. `least` says that it may have more tokens."""
        limit, most, room = self.max_model_len, self.max_positions, tokenization.room
        count = min(count, tokenization.truncate or count)
        if count + room <= limit:
            return
        # Clients recognise these words, which are OpenAI's.
        what = f"This model's maximum context length is {limit} tokens, which"
        remedy = f", raise max_model_len (the model has {most})" if limit < most else ""
        if count < limit:
            raise RequestError(
                f"{what} a prompt of {least}{count} tokens and max_tokens={room} exceed; ask for at most "
                f"{limit - count}, omit max_tokens{remedy}, or shorten the prompt"
            )
        raise RequestError(
            f"{what} leaves room for at most {limit - 1} of a prompt of {least}{count} tokens; shorten it{remedy}, "
            "or keep its end: tokenization_kwargs={'truncate_prompt_tokens': -1}"
        )

    def _check(self, params: SamplingParams) -> None:
        """Raise RequestError if the parameters do not fit the model or its tokenizer."""
        if self.tokenizer is None:
            if params.stop:
                raise RequestError(f"stop={params.stop!r} needs a tokenizer; use stop_token_ids")
            if params.bad_words:
                raise RequestError(f"bad_words={params.bad_words!r} needs a tokenizer; use logit_bias")
        for name, (count, characters) in _MOST_TEXTS.items():
            texts = getattr(params, name)
            if len(texts) > count or sum(map(len, texts)) > characters:
                raise RequestError(
                    f"{name}: {len(texts)} texts of {sum(map(len, texts))} characters; valid: at most {count} of "
                    f"{characters} together"
                )
        for text in params.stop or ():
            check_text(text)
        if (count := len(params.stop_token_ids or ())) > self.vocab_size:
            raise RequestError(f"stop_token_ids: {count} ids; the vocabulary has {self.vocab_size} tokens")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.vocab_size:
                raise RequestError(f"{name}={getattr(params, name)}; the vocabulary has {self.vocab_size} tokens")
        for name in ("logit_bias", "allowed_token_ids"):
            for token in getattr(params, name) or ():
                if token >= self.vocab_size:
                    raise RequestError(f"{name}: token {token}; valid: 0 to {self.vocab_size - 1}")

    def _tokenize_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the token ids of each word, with and without a leading space, if the vocabulary has them."""
        spellings: dict[tuple[int, ...], None] = {}
        for word in words:
            assert self.tokenizer is not None, "checked with the parameters"
            for text in (word.lstrip(), " " + word.lstrip()):
                ids = self.tokenizer.encode(text, special=False)
                if not ids:
                    raise RequestError(f"bad_words: {word!r} has no tokens")
                if max(ids) < self.vocab_size:
                    spellings.setdefault(tuple(ids))
        return list(spellings)

    def detokenizer(self, prompt: Sequence[int], params: SamplingParams) -> Detokenizer | None:
        """Return a detokenizer for an output, or None if it has no text."""
        if self.tokenizer is None or not params.detokenize:
            return None
        decode = partial(self.tokenizer.decode, skip_special=params.skip_special_tokens)
        return Detokenizer(decode, prompt, params.stop or (), params.include_stop_str_in_output)

    def output(
        self, samples: Sequence[Request], finished: bool = True, deltas: list[CompletionOutput] | None = None
    ) -> RequestOutput:
        """Return the output of a prompt's samples, finished or not. `deltas` replace the whole completions."""
        first, prompt_logprobs = samples[0], None
        try:
            if deltas is None or finished:
                computed = [sample for sample in samples if len(sample.prompt_logprobs) == sample.num_prompt]
                prompt_logprobs = self._named(computed[0].prompt_logprobs, first.params) if computed else None
        except RequestError as error:
            _fail(first, error)
        completions = [self._completion(sample) for sample in samples] if deltas is None else deltas
        return RequestOutput(
            first.output_id,
            first.prompt,
            first.prompt_token_ids,
            completions,
            finished,
            RequestMetrics.of(samples),
            next((sample.error for sample in samples if sample.error), None),
            prompt_logprobs,
        )

    def _completion(self, request: Request) -> CompletionOutput:
        """Return the whole completion of a sample; without its text if the tokenizer cannot decode the tokens."""
        tokens, detokenizer = request.output_token_ids, request.detokenizer
        try:
            if detokenizer is None and (detokenizer := self.detokenizer(request.prompt_token_ids, request.params)):
                keeps_end = request.ended != "stop" or request.params.include_stop_str_in_output
                for token in tokens if keeps_end else tokens[:-1]:
                    detokenizer.push(token)
            if detokenizer is not None and request.finished:
                detokenizer.flush()
            text = no_text(request.params) if detokenizer is None else detokenizer.shown(request.finished)
            return self.delta(request, NewTokens(0, tokens, text))
        except RequestError as error:
            _fail(request, error)
            return self.delta(request, NewTokens(0, tokens, None), has_logprobs=False)

    def delta(self, request: Request, new: NewTokens, has_logprobs: bool = True) -> CompletionOutput:
        """Return a part of a sample's completion. `cumulative_logprob` is that of its tokens."""
        logprobs = total = None
        if has_logprobs and request.params.logprobs is not None:
            logprobs = self._named(request.logprobs[new.start : new.start + len(new.token_ids)], request.params)
            total = sum(entry[token].logprob for entry, token in zip(logprobs, new.token_ids, strict=True))
        return CompletionOutput(
            request.sample,
            new.text,
            new.token_ids,
            request.finish_reason,
            request.stop_reason,
            logprobs,
            total,
            RequestMetrics.of([request]) if request.finished else None,
        )

    def _named(self, positions: Sequence[_Position], params: SamplingParams) -> list[_Position]:
        """Add the texts of tokens if the output has text."""
        if self.tokenizer is None or not params.detokenize:
            return list(positions)
        tokenizer = self.tokenizer
        text = cache(lambda token: tokenizer.decode([token]))  # with logprobs=-1, each token occurs at every position
        return [
            entries and {token: entry._replace(decoded_token=text(token)) for token, entry in entries.items()}
            for entries in positions
        ]


def log_rejected(prompts: Sequence[Any], entries: Sequence[list[Request] | RequestOutput]) -> None:
    """Log the invalid prompts of a call that also has valid ones. If all are invalid, the call raises an error."""
    if all(isinstance(entry, RequestOutput) for entry in entries):
        return
    for i, (prompt, entry) in enumerate(zip(prompts, entries, strict=True)):
        if isinstance(entry, RequestOutput):
            logger.warning("prompt %d (%s) was refused: %s", i, short_repr(prompt)[:40], entry.error)


def _fail(request: Request, error: RequestError) -> None:
    """Mark a finished request as failed and keep its first error. A running request is marked when it ends."""
    if request.finished:
        request.finish_reason, request.error = "error", request.error or str(error)


@cache
def _warn_cut(max_tokens: int, max_model_len: int) -> None:
    """Warn once per value, because applications give the same one in every call."""
    logger.warning(
        "max_tokens=%d: an output ends earlier, because max_model_len=%d has no room for it behind the prompt",
        max_tokens,
        max_model_len,
    )


def no_text(params: SamplingParams) -> str | None:
    """Return the text of an output without a detokenizer: "" with detokenize=False, as in vLLM, else None."""
    return None if params.detokenize else ""


def as_list(prompts: Any) -> list[Any]:
    """Return one prompt or several as a list of prompts."""
    if isinstance(prompts, str | dict):
        return [prompts]
    prompts = to_python(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise ConfigError(f"prompts={short_repr(prompts)}; valid: text, token ids, or a list of those")
    if len(prompts) and all(isinstance(item, Integral) for item in prompts):
        return [list(prompts)]
    return list(prompts)
