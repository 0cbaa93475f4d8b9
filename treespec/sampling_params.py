"""`SamplingParams`: what a user may ask of a request's tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Self, Unpack

from treespec.errors import ConfigError, reject_unknown
from treespec.frontend.vllm_options import PARAMS, ParamsOptions, without_absent
from treespec.sampling.param_values import LEAST_TEMPERATURE, checked
from treespec.sampling.structured_params import StructuredOutputsParams

__all__ = ["LEAST_TEMPERATURE", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]


@dataclass(init=False, unsafe_hash=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends. Names are vLLM's; the defaults are not.

    Here temperature is 0 (greedy) and max_tokens 128; vLLM's defaults are 1.0 and 16.

    Fields may be set after construction. Each value is checked when it is set; whether the fields agree with one
    another is checked when the parameters are used. A request keeps a copy, so later changes do not reach it. Equality
    and hash follow the fields: do not change parameters that are keys of a dict.

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

    NumPy numbers are converted to Python's. vLLM's other options are accepted with the values that ask for nothing.

    Raises:
        ConfigError: an unknown keyword, a value out of range, a contradiction, an option of vLLM's that is not
            supported.
    """

    max_tokens: int | None
    min_tokens: int
    stop: Sequence[str]
    include_stop_str_in_output: bool
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    detokenize: bool
    skip_special_tokens: bool
    n: int
    temperature: float
    seed: int | None
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    bad_words: Sequence[str]
    logit_bias: dict[int, float] | None = field(hash=False)  # a dict has no hash
    allowed_token_ids: Sequence[int] | None
    structured_outputs: StructuredOutputsParams | None
    logits_processors: Sequence[Any]
    logprobs: int | None
    prompt_logprobs: int | None

    def __init__(
        self,
        *,
        max_tokens: int | None = 128,
        min_tokens: int = 0,
        stop: str | Sequence[str] | None = None,
        include_stop_str_in_output: bool = False,
        stop_token_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
        detokenize: bool = True,
        skip_special_tokens: bool = True,
        n: int = 1,
        temperature: float = 0.0,
        seed: int | None = None,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        bad_words: Sequence[str] | None = None,
        logit_bias: dict[int, float] | None = None,
        allowed_token_ids: Sequence[int] | None = None,
        structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None,
        logits_processors: Sequence[Any] | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        **vllm_options: Unpack[ParamsOptions],
    ) -> None:
        given = locals()
        unknown = without_absent("SamplingParams", vllm_options, PARAMS)
        names = [each.name for each in fields(SamplingParams)]
        reject_unknown("SamplingParams", unknown, names)
        for name in names:
            setattr(self, name, given[name])
        self._check_together()

    if not TYPE_CHECKING:  # a type checker would take any attribute of a class that has this method

        def __setattr__(self, name: str, value: Any) -> None:
            if name in PARAMS:
                without_absent("SamplingParams", {name: value}, PARAMS)
                return
            reject_unknown("SamplingParams", [name], [each.name for each in fields(SamplingParams)])
            object.__setattr__(self, name, checked(name, value))

    def clone(self) -> Self:
        """A copy with fields of its own; logits processors are shared."""
        made = object.__new__(type(self))
        for each in fields(self):
            setattr(made, each.name, getattr(self, each.name))
        return made

    def snapshot(self) -> Self:
        """A checked copy, as a request keeps it.

        Raises:
            ConfigError: a value out of range, or fields that contradict each other.
        """
        made = self.clone()
        made._check_together()
        return made

    def _check_together(self) -> None:
        """Raise ConfigError where fields contradict each other: they may be set one after the other."""
        if self.stop and not self.detokenize:
            raise ConfigError(f"stop={self.stop!r} is looked for in the text: it needs detokenize=True")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(f"n={self.n} with temperature=0: all would be the same; give a temperature, or n=1")
        if self.structured_outputs is not None and self.ignore_eos:
            raise ConfigError("ignore_eos=True: an end token is what ends a structured output; leave ignore_eos out")

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


class RequestOutputKind(Enum):
    """What `SamplingParams(output_kind=...)` may be in vLLM. `generate` returns finished outputs, which the first and
    the last ask for; `DELTA` is refused, as `LLM.stream` gives what each round adds."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2
