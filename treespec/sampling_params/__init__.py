"""`SamplingParams`: sampling options of a request."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Self

from treespec.config.vllm_options import VllmSamplingParams, absent_options, check_absent
from treespec.errors import ConfigError, reject_unknown, short_repr
from treespec.sampling_params.structured_params import StructuredOutputsParams
from treespec.utils.options import checked_value, option, rejects_unknown
from treespec.utils.scalars import as_int, as_number, to_python

logger = logging.getLogger("treespec")

MIN_POSITIVE = 5e-324
MIN_TEMPERATURE = 1e-4  # lower values may overflow logits / temperature
MAX_SEED = 2**64 - 1
MAX_SAMPLES = 16384  # per prompt, as in vLLM


class RequestOutputKind(Enum):
    """vLLM's values of `SamplingParams(output_kind=...)`, which `AsyncLLM` reads."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@rejects_unknown
@dataclass(kw_only=True, unsafe_hash=True)
class SamplingParams(VllmSamplingParams):
    """Sampling options and stop conditions of a request. Names are vLLM's; the defaults differ.

    Defaults: temperature 0 (greedy) and max_tokens 128; vLLM's are 1.0 and 16.

    Fields are mutable. Values are validated when set, combinations of fields when the parameters are used. A request
    keeps a copy. Equality and hash depend on the fields: do not modify parameters used as dict keys.

    Order of logits transforms: allowed_token_ids and structured_outputs, logit_bias, bad_words, min_tokens,
    repetition_, frequency_ and presence_penalty, logits_processors, temperature, top_k, top_p, min_p. Tree nodes run
    the code of plain decoding, with their ancestors as the past.

    Args:
        max_tokens: maximum number of generated tokens; None = as many as the context holds.
        min_tokens: number of tokens before an end token or stop string may end the output.
        stop: stop string or strings; `text` ends before the first match, `token_ids` with the token that completes it.
        include_stop_str_in_output: keep the stop string, stop token or end token in `text`; special tokens only with
            skip_special_tokens=False.
        stop_token_ids: additional end tokens, kept in `token_ids` but not in `text`.
        ignore_eos: continue after end tokens of the model and its tokenizer.
        detokenize: produce `text`; if False, `text` is empty, log-probabilities have no token texts and `stop` is
            rejected.
        skip_special_tokens: omit special tokens from `text`.
        n: number of outputs, which share the prompt's cache; more than 1 requires a temperature.
        temperature: 0 is greedy and ignores top_k, top_p and min_p. Values between 0 and 1e-4 are raised to 1e-4 with a
            warning.
        seed: RNG seed; None or -1 generates one, reported in the metrics. The same seed gives the same tokens for any
            drafts and batch, unless `verification` is "rejection" or "traversal".
        top_k: keep the k most likely tokens; 0 or -1 = all. Ties prefer lower ids.
        top_p: keep the most likely tokens up to this total probability, after top_k.
        min_p: keep tokens with at least this fraction of the largest probability.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output.
        frequency_penalty: subtracted from a token's logit per occurrence in the output.
        presence_penalty: subtracted from the logit of every token in the output.
        bad_words: texts to suppress, in the tokenizer's encoding with and without a leading space. A match may begin in
            the prompt.
        logit_bias: token id to the value added to its logit.
        allowed_token_ids: the only tokens allowed, end tokens included; None = all.
        structured_outputs: output constraint, a `StructuredOutputsParams` or a dict of its keywords.
        logits_processors: Hugging Face processors, called with (input_ids [1, length], scores [1, vocab] float32) once
            per decided token. Calls may come out of order and for tokens that are never emitted, so processors must be
            stateless.
        logprobs: number of most likely tokens to report per position besides the chosen one, -1 = all; computed from
            the untransformed logits.
        prompt_logprobs: the same for prompt tokens except the first, in `RequestOutput.prompt_logprobs`. Bit-identical
            to the `logprobs` of decoding the token, unless `LLM(exact=False)`.
        output_kind: contents of the outputs of `AsyncLLM.generate`: all tokens so far ("CUMULATIVE"), new tokens
            ("DELTA"), or all tokens once at the end ("FINAL_ONLY"). A `RequestOutputKind` or its name.

    NumPy scalars are converted. vLLM's other options are accepted at their default values, otherwise rejected with the
    alternative.

    Raises:
        ConfigError: an unknown keyword, a value out of range, contradictory values, or an unsupported vLLM option.
    """

    max_tokens: int | None = option(128, ge=1, valid="an int of at least 1, or None: all that fit the context")
    min_tokens: int = option(0, ge=0)
    stop: str | Sequence[str] | None = None
    include_stop_str_in_output: bool = option(False, choices=(True, False))
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = option(False, choices=(True, False))
    detokenize: bool = option(True, choices=(True, False))
    skip_special_tokens: bool = option(True, choices=(True, False))
    n: int = option(1, ge=1, le=MAX_SAMPLES)
    temperature: float = option(0.0, ge=0, valid="0 (greedy) or a positive number up to 3.4e38")
    seed: int | None = option(None, ge=-1, le=MAX_SEED, valid="an int from 0 to 2**64 - 1, or -1 for a new one")
    top_k: int = option(0, ge=-1, valid="an int of at least 1, or 0 or -1 for all tokens")
    top_p: float = option(1.0, ge=MIN_POSITIVE, le=1, valid="more than 0, at most 1")
    min_p: float = option(0.0, ge=0, le=1)
    repetition_penalty: float = option(1.0, ge=MIN_POSITIVE, valid="a positive number up to 3.4e38; 1 = none")
    frequency_penalty: float = option(0.0, ge=-2, le=2)
    presence_penalty: float = option(0.0, ge=-2, le=2)
    bad_words: Sequence[str] | None = None
    logit_bias: dict[int, float] | None = field(default=None, hash=False)  # a dict has no hash
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    logits_processors: Sequence[Any] | None = None
    logprobs: int | None = option(None, ge=-1, valid="an int of at least 0, -1 for all tokens")
    prompt_logprobs: int | None = option(None, ge=-1, valid="an int of at least 0, -1 for all tokens")
    # Affects how outputs are read, not their tokens.
    output_kind: RequestOutputKind | str = field(default=RequestOutputKind.CUMULATIVE, compare=False)

    def __post_init__(self) -> None:
        self._check_together()

    if not TYPE_CHECKING:  # with this method, type checkers would accept any attribute

        def __setattr__(self, name: str, value: Any) -> None:
            if name in _ABSENT:
                check_absent("SamplingParams", {name: value}, _ABSENT)
                return
            reject_unknown("SamplingParams", [name], _FIELDS)
            object.__setattr__(self, name, _checked(_FIELDS[name], value))

    def clone(self) -> Self:
        """A copy; logits processors are shared."""
        params = object.__new__(type(self))
        for name in _FIELDS:
            setattr(params, name, getattr(self, name))
        return params

    def snapshot(self) -> Self:
        """A validated copy for a request. Raises ConfigError for contradictory fields."""
        params = self.clone()
        params._check_together()
        return params

    def _check_together(self) -> None:
        """Raise ConfigError for contradictory fields; checked late, since fields may be set one by one."""
        if self.stop and not self.detokenize:
            raise ConfigError(f"stop={self.stop!r} is searched in the text and needs detokenize=True")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(f"n={self.n} with temperature=0: all outputs would be equal; set a temperature, or n=1")
        if self.structured_outputs is not None and self.ignore_eos:
            raise ConfigError("ignore_eos=True: structured outputs stop at an end token; omit ignore_eos")

    @property
    def has_penalties(self) -> bool:
        """Whether scores depend on earlier tokens."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)

    @property
    def transforms_logits(self) -> bool:
        """Whether anything besides temperature and truncation modifies the logits."""
        has_others = self.bad_words or self.logit_bias or self.logits_processors or self.min_tokens
        restricted = self.allowed_token_ids is not None or self.structured_outputs is not None
        return self.has_penalties or restricted or bool(has_others)

    @property
    def truncates(self) -> bool:
        """Whether top_k, top_p or min_p truncate the distribution."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def is_argmax(self) -> bool:
        """Whether the output is the argmax of the untransformed logits."""
        return self.temperature == 0 and not self.transforms_logits


def _checked(info: Field[Any], value: Any) -> Any:
    """Validate a field and convert it to Python numbers, tuples (from lists) or copies of dicts. Raises ConfigError."""
    if info.name in _CONVERTED:
        return _CONVERTED[info.name](info.name, value)
    value = checked_value(info, value)
    if info.name == "seed" and value == -1:
        return None
    if info.name == "temperature" and 0 < value < MIN_TEMPERATURE:  # vLLM also has a minimum
        logger.warning("temperature=%r is raised to %r, the minimum above 0", value, MIN_TEMPERATURE)
        return MIN_TEMPERATURE
    return value


def _sequence(name: str, value: Any, valid: str, is_valid: Callable[[Any], bool]) -> tuple[Any, ...]:
    """Return the items of a list, each of which must be valid. None is an empty list."""
    items = () if value is None else to_python(value)
    items = tuple(items) if isinstance(items, list) else items
    if not isinstance(items, tuple) or not all(map(is_valid, items)):
        raise ConfigError(f"{name}={short_repr(items)}; valid: {valid}")
    return items


def _stop(name: str, value: Any) -> tuple[str, ...]:
    texts, valid = [value] if isinstance(value, str) else value, "a string or a list of non-empty strings"
    return _sequence(name, texts, valid, lambda text: isinstance(text, str) and text != "")


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    tokens = _sequence(name, value, "a list of token ids", lambda token: as_int(token, 0) is not None)
    return tuple(map(int, tokens))


def _bad_words(name: str, value: Any) -> tuple[str, ...]:
    valid = "a list of non-blank strings"
    return _sequence(name, value, valid, lambda word: isinstance(word, str) and word.strip() != "")


def _logit_bias(name: str, value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ConfigError(f"{name}={value!r}; valid: a dict of token ids to numbers")
    biases = {}
    for token, bias in value.items():
        number, real = as_int(token, 0), as_number(bias)
        if number is None or real is None:
            raise ConfigError(f"{name}={{{token!r}: {bias!r}}}; valid: token ids to numbers from -3.4e38 to 3.4e38")
        biases[number] = real
    return biases


def _allowed_token_ids(name: str, value: Any) -> tuple[int, ...] | None:
    if value is not None and not (ids := _token_ids(name, value)):
        raise ConfigError(f"{name}={value!r}; valid: at least one token id, or None for all")
    return None if value is None else ids


def _output_kind(name: str, value: Any) -> RequestOutputKind:
    kinds = RequestOutputKind.__members__
    kind = "CUMULATIVE" if value is None else getattr(value, "name", value)  # vLLM's enum has the same names
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError(f"{name}={short_repr(value)}; valid: {', '.join(map(repr, kinds))}")
    return kinds[kind]


_CONVERTED: dict[str, Callable[[str, Any], Any]] = {
    "stop": _stop,
    "stop_token_ids": _token_ids,
    "bad_words": _bad_words,
    "logit_bias": _logit_bias,
    "allowed_token_ids": _allowed_token_ids,
    "logits_processors": lambda name, value: _sequence(name, value, "a list of callable logits processors", callable),
    "output_kind": _output_kind,
    "structured_outputs": lambda _, value: StructuredOutputsParams.of(value),
}
_ABSENT = absent_options(SamplingParams)
_FIELDS = {stated.name: stated for stated in fields(SamplingParams) if stated.name not in _ABSENT}
