"""`SamplingParams`: sampling options of a request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self, Unpack

from treespec.errors import ConfigError, reject_unknown
from treespec.sampling_params.param_values import LEAST_TEMPERATURE, RequestOutputKind, checked
from treespec.sampling_params.structured_params import StructuredOutputsParams
from treespec.sampling_params.vllm_options import PARAMS, ParamsOptions, without_absent

__all__ = ["LEAST_TEMPERATURE", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]


@dataclass(init=False, unsafe_hash=True)
class SamplingParams:
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
        output_kind: what the outputs of `AsyncLLM.generate` hold: everything so far ("CUMULATIVE"), what is new
            ("DELTA"), or everything, once, at the end ("FINAL_ONLY"). A `RequestOutputKind` or its name.

    NumPy scalars are converted. vLLM's other options are accepted at their default values, otherwise rejected with the
    alternative.

    Raises:
        ConfigError: an unknown keyword, a value out of range, contradictory values, or an unsupported vLLM option.
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
    output_kind: RequestOutputKind = field(compare=False)  # how outputs are read, not what they are

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
        output_kind: RequestOutputKind | str = RequestOutputKind.CUMULATIVE,
        **vllm_options: Unpack[ParamsOptions],
    ) -> None:
        values = locals()
        unknown = without_absent("SamplingParams", vllm_options, PARAMS)
        names = [parameter.name for parameter in fields(SamplingParams)]
        reject_unknown("SamplingParams", unknown, names)
        for name in names:
            setattr(self, name, values[name])
        self._check_together()

    if not TYPE_CHECKING:  # with this method a type checker would accept any attribute

        def __setattr__(self, name: str, value: Any) -> None:
            if name in PARAMS:
                without_absent("SamplingParams", {name: value}, PARAMS)
                return
            reject_unknown("SamplingParams", [name], [parameter.name for parameter in fields(SamplingParams)])
            object.__setattr__(self, name, checked(name, value))

    def clone(self) -> Self:
        """A copy; logits processors are shared."""
        params = object.__new__(type(self))
        for parameter in fields(self):
            setattr(params, parameter.name, getattr(self, parameter.name))
        return params

    def snapshot(self) -> Self:
        """A validated copy for a request.

        Raises:
            ConfigError: contradictory fields.
        """
        params = self.clone()
        params._check_together()
        return params

    def _check_together(self) -> None:
        """Raise ConfigError for contradictory fields; checked late, as fields may be set one by one."""
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
        others = self.bad_words or self.logit_bias or self.logits_processors or self.min_tokens
        restricted = self.allowed_token_ids is not None or self.structured_outputs is not None
        return self.has_penalties or restricted or bool(others)

    @property
    def truncates(self) -> bool:
        """Whether top_k, top_p or min_p truncate the distribution."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def is_argmax(self) -> bool:
        """Whether the output is the argmax of the untransformed logits."""
        return self.temperature == 0 and not self.transforms_logits
