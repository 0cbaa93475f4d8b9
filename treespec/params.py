"""What a user may ask of a request's tokens: `SamplingParams`, checked where it is made."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from treespec.errors import ConfigError, reject_unknown
from treespec.scalars import as_int, as_number, plain
from treespec.structured import StructuredOutputsParams
from treespec.vllm_options import PARAMS, without_absent

logger = logging.getLogger("treespec")

LEAST_TEMPERATURE = 1e-4  # below it, logits over the temperature may overflow
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, init=False)
class SamplingParams:
    """How a request's tokens are chosen and when it ends. Names are vLLM's; the defaults are not.

    Here temperature is 0 (greedy) and max_tokens 128; vLLM's defaults are 1.0 and 16.

    The target's logits become probabilities in this order: allowed_token_ids and structured_outputs, logit_bias,
    bad_words, min_tokens, repetition_, frequency_ and presence_penalty, logits_processors, temperature, top_k, top_p,
    min_p. Each node of a token tree has its own ancestors for its past, in the very code of plain decoding.

    Args:
        max_tokens: the most tokens to generate; None = as many as the context holds.
        min_tokens: as many are generated before an end token or a stop string may end the output.
        stop: a string or several; `text` ends before the first that appears, `token_ids` with the token that
            completed it.
        include_stop_str_in_output: keep in `text` what ended it: the stop string, or the token of `stop_token_ids` or
            the end token, unless it is a special one and they are skipped.
        stop_token_ids: tokens that end the request like the model's end token: in `token_ids`, not in `text`.
        ignore_eos: go on past the end tokens of the model and of its tokenizer.
        detokenize: make `text`; without it `text` is empty, log-probabilities name no texts, and `stop` is refused.
        skip_special_tokens: leave special tokens out of `text`.
        n: how many outputs; they share the prompt's cache. Several need a temperature.
        temperature: 0 is greedy, and then top_k, top_p and min_p change nothing. Above 0 it is at least 1e-4: a smaller
            one becomes that, as the log says.
        seed: of the noise; without one (None or -1) a request draws one and reports it in its metrics. The same seed
            gives the same tokens, whatever is drafted and whatever else is in the batch, unless `verification` is
            "rejection" or "traversal".
        top_k: only the k likeliest tokens; 0 or -1 = all. Of equal logits the lower ids count as likelier.
        top_p: only the likeliest tokens that together have this probability, after top_k.
        min_p: only tokens with at least this share of the likeliest one's probability.
        repetition_penalty: logits of tokens in prompt or output are divided by it where positive, multiplied where
            negative.
        frequency_penalty: taken from a token's logit for each time it is in the output.
        presence_penalty: taken from the logit of every token in the output.
        bad_words: texts that are not written, as far as the tokenizer spells them in one way, with or without a space
            before them. The prompt's end counts as their beginning, too.
        logit_bias: token id to what is added to its logit.
        allowed_token_ids: no other tokens are chosen, end tokens neither; None = all.
        structured_outputs: the form of the output: `StructuredOutputsParams`, or a dict of its keywords.
        logits_processors: Hugging Face's: called with (input_ids [1, length], scores [1, vocab] float32) and returning
            scores, once per decided token with that token's own past. They may be called for tokens that are not
            emitted in the end, and not in turn, so they must not keep what they saw.
        logprobs: how many of the likeliest tokens to report at each position, beside the chosen one, -1 = all: of the
            model's own logits, before everything above.
        prompt_logprobs: the same for each token of the prompt but the first, in `RequestOutput.prompt_logprobs`. In
            every bit they are the `logprobs` of the token where it is decoded, unless `LLM(exact=False)`.

    Numbers of numpy are taken for Python's. What else vLLM's have may be given where it asks for nothing.

    Raises:
        ConfigError: an unknown keyword, a value out of range, a contradiction, an option of vLLM's that is not
            supported.
    """

    max_tokens: int | None = 128
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    n: int = 1
    temperature: float = 0.0
    seed: int | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bad_words: Sequence[str] = ()
    logit_bias: dict[int, float] | None = field(default=None, hash=False)  # a dict has no hash
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    logits_processors: Sequence[Any] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __init__(self, **options: Any) -> None:
        options = without_absent("SamplingParams", options, PARAMS)
        defaults = {each.name: each.default for each in fields(SamplingParams)}
        reject_unknown("SamplingParams", options, defaults)
        for name, value in (defaults | options).items():
            object.__setattr__(self, name, value)
        stop = (self.stop,) if isinstance(self.stop, str) else self._tuple("stop", "a string or a list of strings")
        object.__setattr__(self, "stop", stop)
        for name, valid in _LISTS.items():
            object.__setattr__(self, name, self._tuple(name, valid))
        self._check_ends()
        self._check_numbers()
        self._check_choices()

    def _tuple(self, name: str, valid: str) -> tuple[Any, ...]:
        value = plain(getattr(self, name))
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{name}={value!r}; valid: {valid}")
        return tuple(value)

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that were written already have other scores."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)

    @property
    def transforms_logits(self) -> bool:
        """Whether anything but a temperature and truncation changes what is chosen."""
        others = self.bad_words or self.logit_bias or self.logits_processors or self.min_tokens
        restricted = self.allowed_token_ids is not None or self.structured_outputs is not None
        return self.has_penalties or restricted or bool(others)

    @property
    def truncates(self) -> bool:
        """Whether tokens of little probability are left out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def is_argmax(self) -> bool:
        """Whether the tokens are the argmax of the model's own logits."""
        return self.temperature == 0 and not self.transforms_logits

    def _check_ends(self) -> None:
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise ConfigError(f"stop={self.stop!r}; valid: non-empty strings")
        ids = tuple(as_int(token, 0) for token in self.stop_token_ids)
        if None in ids:
            raise ConfigError(f"stop_token_ids={self.stop_token_ids!r}; valid: token ids")
        object.__setattr__(self, "stop_token_ids", ids)
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}; valid: True or False")
        if self.stop and not self.detokenize:
            raise ConfigError(f"stop={self.stop!r} is looked for in the text: it needs detokenize=True")

    def _check_numbers(self) -> None:
        for name, least, most, valid in _INTS:
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            number = as_int(value, least)
            if number is None or number > most:
                raise ConfigError(f"{name}={value!r}; valid: {valid}")
            object.__setattr__(self, name, number)
        for name, (low, high), valid in _FLOATS:
            value = getattr(self, name)
            real = as_number(value)
            if real is None or not low <= real <= high:
                raise ConfigError(f"{name}={value!r}; valid: {valid}")
            object.__setattr__(self, name, real)
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0:
                raise ConfigError(f"{name}=0; valid: more than 0")
        if 0 < self.temperature < LEAST_TEMPERATURE:  # vLLM raises one to the least that it can compute with, too
            logger.warning("temperature=%r is raised to %r, the least above 0", self.temperature, LEAST_TEMPERATURE)
            object.__setattr__(self, "temperature", LEAST_TEMPERATURE)
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(f"n={self.n} with temperature=0: all would be the same; give a temperature, or n=1")

    def _check_choices(self) -> None:
        if any(not isinstance(word, str) or not word.strip() for word in self.bad_words):
            raise ConfigError(f"bad_words={self.bad_words!r}; valid: strings that are not blank")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise ConfigError(f"logit_bias={self.logit_bias!r}; valid: a dict of token ids to numbers")
            biases = {}
            for token, value in self.logit_bias.items():
                number, real = as_int(token, 0), as_number(value)
                if number is None or real is None:
                    raise ConfigError(f"logit_bias={{{token!r}: {value!r}}}; valid: token ids to finite numbers")
                biases[number] = real
            object.__setattr__(self, "logit_bias", biases)  # a copy: the caller's may change
        if self.allowed_token_ids is not None:
            given = self._tuple("allowed_token_ids", "None or a list of token ids")
            allowed = tuple(as_int(token, 0) for token in given)
            if not allowed or None in allowed:
                raise ConfigError(
                    f"allowed_token_ids={self.allowed_token_ids!r}; valid: at least one token id, or None for all"
                )
            object.__setattr__(self, "allowed_token_ids", allowed)
        object.__setattr__(self, "structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        if self.structured_outputs is not None and self.ignore_eos:
            raise ConfigError("ignore_eos=True: an end token is what ends a structured output; leave ignore_eos out")
        for processor in self.logits_processors:
            if not callable(processor):
                raise ConfigError(
                    f"logits_processors: {processor!r} cannot be called; valid: Hugging Face's processors"
                )


_LISTS = {
    "stop_token_ids": "a list of token ids",
    "bad_words": "a list of strings",
    "logits_processors": "a list of Hugging Face's processors",
}
_INTS = (
    ("max_tokens", 1, math.inf, "an int of at least 1, or None for as many as the context holds"),
    ("min_tokens", 0, math.inf, "an int of at least 0"),
    ("n", 1, math.inf, "an int of at least 1"),
    ("top_k", -1, math.inf, "an int of at least 1, or 0 or -1 for all tokens"),
    ("seed", -1, MAX_SEED, "an int from 0 to 2**64 - 1, or None or -1 for a new one"),
    ("logprobs", -1, math.inf, "None, an int of at least 0, or -1 for all tokens"),
    ("prompt_logprobs", -1, math.inf, "None, an int of at least 0, or -1 for all tokens"),
)
_MAY_BE_NONE = ("max_tokens", "seed", "logprobs", "prompt_logprobs")
_FLOATS = (
    ("temperature", (0, math.inf), "0 (greedy) or a finite positive number"),
    ("top_p", (0, 1), "more than 0, at most 1"),
    ("min_p", (0, 1), "0 to 1"),
    ("repetition_penalty", (0, math.inf), "a finite positive number; 1 is none"),
    ("frequency_penalty", (-2, 2), "-2 to 2"),
    ("presence_penalty", (-2, 2), "-2 to 2"),
)
