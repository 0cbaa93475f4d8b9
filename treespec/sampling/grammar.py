"""Structured outputs: allowed next tokens from llguidance's parser.

The allowed tokens depend only on the text, so a tree node gets the same mask as plain decoding of the same text. The
tests compare with a parser that reads every text from the start.
"""

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from treespec.errors import ParameterError, RequestError
from treespec.sampling.form_limits import check_form, check_lark
from treespec.sampling_params.structured_params import StructuredOutputsParams, closed_schema
from treespec.text.prompt_tokenizer import check_text

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_CACHE_SIZE = 64  # number of compiled constraints cached for later requests (LRU)
_STACK = 256 << 20  # stack bytes, committed on first use; nested rules take 15 KB each
_stack_size = threading.Lock()  # guards the stack size of new threads, a global setting


class Grammars:
    """Creates and caches parsers for requests with structured outputs."""

    seconds: float = 10  # time limit for compiling a constraint, which takes 1 s of CPU time at most in `form_limits`

    def __init__(self, tokenizer: Any, vocab_size: int, end_tokens: Sequence[int], device: torch.device):
        self._user_tokenizer, self._vocab_size, self._device = tokenizer, vocab_size, device
        self._end_tokens = [token for token in end_tokens if token < vocab_size]
        self._tokenizer: LLTokenizer | None = None
        self._parsers: dict[StructuredOutputsParams, LLMatcher] = {}
        self._lock = threading.Lock()  # guards `_parsers`: `AsyncLLM` creates requests while another thread runs rounds

    def grammar(self, form: StructuredOutputsParams, num_prompt: int) -> "Grammar":
        """Create the grammar state of a request with `num_prompt` prompt tokens."""
        with self._lock:
            if (parser := self._parsers.pop(form, None)) is not None:
                self._parsers[form] = parser  # last is most recently used
        if parser is None:
            parser = self._new_parser(form)
        renew = partial(self._new_parser, form)
        return Grammar(parser, renew, num_prompt, self._end_tokens, self._vocab_size, self._device)

    def _new_parser(self, form: StructuredOutputsParams) -> "LLMatcher":
        parser = self.parse(form)
        with self._lock:
            self._parsers.pop(form, None)
            self._parsers[form] = parser
            if len(self._parsers) > _CACHE_SIZE:
                del self._parsers[next(iter(self._parsers))]
        return parser

    def parse(self, form: StructuredOutputsParams) -> "LLMatcher":
        """Compile a constraint. Raises RequestError if it is invalid or takes too long."""
        try:
            import llguidance  # noqa: F401
        except ImportError:
            raise RequestError(
                "structured_outputs need llguidance, which is not installed: pip install llguidance"
            ) from None
        for text in (form.schema, form.regex, *(form.choice or ()), form.grammar, form.whitespace_pattern):
            check_text(text or "")
        if self._tokenizer is None:
            self._tokenizer = _read_tokenizer(self._user_tokenizer, self._vocab_size, self._end_tokens)
        check_form(form)
        try:
            source = _source(form)
        except RequestError:
            raise
        except (ValueError, RecursionError) as error:
            raise ParameterError(f"structured_outputs: {form.form} cannot be compiled: {error}") from None
        parser = run_with_large_stack(partial(self.build, source), form.form, self.seconds)
        if parser.is_error():
            raise ParameterError(f"structured_outputs: {form.form} cannot be compiled: {_reason(parser)}")
        return parser

    def build(self, source: str, **limits: Any) -> "LLMatcher":
        """Build llguidance's parser of a grammar; `limits` replace those of `LLParserLimits`."""
        from llguidance import LLMatcher, LLParserLimits

        assert self._tokenizer is not None
        return LLMatcher(self._tokenizer, source, log_level=0, limits=LLParserLimits(verbose_errors=False, **limits))


def _read_tokenizer(tokenizer: Any, vocab_size: int, end_tokens: Sequence[int]) -> "LLTokenizer":
    """Build llguidance's tokenizer over the tokens that an output may contain."""
    from llguidance import LLTokenizer, TokenizerWrapper
    from tokenizers import Tokenizer

    fast = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(fast, Tokenizer):
        kind = "none" if tokenizer is None else type(tokenizer).__name__
        raise RequestError(f"structured_outputs need a fast tokenizer (with a tokenizer.json); the model's is {kind}")
    if not end_tokens:
        raise RequestError("structured_outputs end with an end token, but the model has none")
    fast = Tokenizer.from_str(fast.to_str())
    fast.no_padding()
    fast.no_truncation()
    size = max(vocab_size, fast.get_vocab_size(with_added_tokens=True))
    try:
        base = LLTokenizer(fast.to_str(), n_vocab=size, eos_token=list(end_tokens))
    except ValueError as error:
        raise ParameterError(f"structured_outputs: llguidance cannot read the model's tokenizer: {error}") from None
    wrapper = _PlainTextTokenizer(base, vocab_size, end_tokens)
    wrapper.plain = LLTokenizer(TokenizerWrapper(wrapper), eos_token=list(end_tokens))
    return wrapper.plain


class _PlainTextTokenizer:
    """Tokenizes a constraint's texts without special tokens: the model's own would encode "</s>" as the end token."""

    bos_token_id = None
    plain: "LLTokenizer"  # llguidance's tokenizer, restricted to the target's ordinary tokens

    def __init__(self, base: "LLTokenizer", vocab_size: int, end_tokens: Sequence[int]):
        self.eos_token_id, self._base = end_tokens[0], base
        self.tokens = [base.decode_bytes([token]) for token in range(vocab_size)]
        without_text = [token for token, text in enumerate(self.tokens) if text == b"<[%d]>" % token]
        special = {*filter(base.is_special_token, range(vocab_size)), *without_text, *end_tokens}
        self.special_token_ids = sorted(special)
        self._ordinary = frozenset(range(vocab_size)) - special

    def __call__(self, text: str) -> list[int]:
        tokens = self._base.tokenize_str(text)
        return tokens if self._ordinary.issuperset(tokens) else self._longest(text)

    def _longest(self, text: str) -> list[int]:
        """Tokenize by greedy longest match, up to the first byte without a token (llguidance would skip it)."""
        data, end = text.encode(), 0
        tokens: list[int] = []
        for token in self.plain.greedy_tokenize(text):
            if not data.startswith(self.tokens[token], end):
                break
            tokens.append(token)
            end += len(self.tokens[token])
        return tokens


def run_with_large_stack(call: Callable[[], "LLMatcher"], form: str, seconds: float) -> "LLMatcher":
    """Run a call in a thread with a large stack, for at most `seconds`.

    A chain of 800 references, `{"$ref": ...}`, overflows the usual 8 MB and kills the process. If a constraint passes
    `check_form` but exceeds the time limit, its thread is abandoned; it cannot be stopped and continues to run.
    """
    result: Future[LLMatcher] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    with _stack_size:
        previous = threading.stack_size(_STACK)
        try:
            threading.Thread(target=run, name="treespec-grammar", daemon=True).start()
        finally:
            threading.stack_size(previous)
    try:
        return result.result(timeout=seconds)
    except TimeoutError:
        reason = f"{form} takes more than {seconds} s to compile; simplify it"
        raise ParameterError(f"structured_outputs: {reason}") from None


def _source(form: StructuredOutputsParams) -> str:
    """Convert a constraint to llguidance's grammar format. Raises ValueError if it is invalid."""
    from llguidance import LLMatcher, grammar_from

    if form.regex is not None:
        return LLMatcher.grammar_from_regex(form.regex)
    if form.choice is not None:
        # A single terminal, because the parser follows at most 2,000 rules at a time.
        return LLMatcher.grammar_from_lark("start: TEXT\nTEXT: " + " | ".join(map(json.dumps, form.choice)))
    if form.grammar is not None:
        # llguidance would take Lark without the line "start:" for GBNF, such as "?start: sum".
        source = grammar_from("grammar" if "::=" in form.grammar else "lark", form.grammar)
        check_lark(source)
        return source
    schema = {"type": "object"} if form.schema is None else json.loads(form.schema)
    if form.disable_additional_properties:
        schema = closed_schema(schema)
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema, ensure_ascii=False),
        defaults={
            "whitespace_flexible": not form.disable_any_whitespace,
            "whitespace_pattern": form.whitespace_pattern,
        },
    )


def _reason(parser: "LLMatcher") -> str:
    """Return the parser's error message on one line, without most of a long line of the grammar that it repeats."""
    message = " ".join(parser.get_error().removesuffix("<non-verbose/>").split())
    return "no token of the model can continue the text" if message == "NoExtensionBias" else message[:300]


class Grammar:
    """Grammar state of one request."""

    def __init__(
        self,
        parser: "LLMatcher",  # parser before the first token; not modified
        renew: Callable[[], "LLMatcher"],  # compiles a fresh parser
        num_prompt: int,  # number of prompt tokens, which are unconstrained
        end_tokens: Sequence[int],  # tokens allowed once the output is complete
        vocab_size: int,  # size of the target's logits
        device: torch.device,
    ):
        self._vocab_size, self._device, self._end_tokens = vocab_size, device, frozenset(end_tokens)
        self._new_parser, self._num_prompt = renew, num_prompt
        # The parser has consumed tokens[num_prompt:read]. Queries run on copies (1 us each), because an error on a
        # drafted text is permanent and `rollback` may not restore the state (llguidance 1.9).
        self._parser, self._read = parser.deep_copy(), num_prompt
        self._excluded: dict[tuple[int, ...], Tensor] = {}  # masks by path after the consumed tokens

    def excluded(self, tokens: Sequence[int], ancestors: Sequence[int] = ()) -> Tensor:
        """Return a mask of the tokens that are not allowed next, bool [vocab] on the logits' device.

        Raises RequestError if the text violates the grammar or exceeds llguidance's limits.
        """
        path = tuple(ancestors)
        if not self._end_tokens.isdisjoint(path):  # llguidance accepts an end token, but cannot recover from it
            raise ParameterError("structured_outputs: no text may follow an end token")
        self._follow(tokens)
        if path not in self._excluded:
            try:
                self._excluded[path] = self._exclude(path)
            except RequestError:
                if path:
                    raise
                self._reparse(tokens)
                self._excluded[path] = self._exclude(path)
        return self._excluded[path]

    def fitting(self, tokens: Sequence[int], path: Sequence[int]) -> int:
        """Return the number of leading path tokens whose bytes the grammar accepts.

        Forced text also counts in a tokenization that `excluded` masks.
        """
        self._follow(tokens)
        ends = [count for count, token in enumerate(path, start=1) if token in self._end_tokens]
        return self._parser.deep_copy().validate_tokens(list(path[: ends[0]] if ends else path))

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """Return the next tokens that the grammar forces, without end tokens."""
        self._follow(tokens)
        return list(self._parser.deep_copy().compute_ff_tokens())

    def _follow(self, tokens: Sequence[int]) -> None:
        """Consume the tokens added since the last call."""
        if self._read == len(tokens):
            return
        new_tokens = list(tokens[self._read :])
        self._excluded.clear()
        self._read = len(tokens)
        self._parser.consume_tokens(new_tokens)  # `_exclude` reports failures

    def _reparse(self, tokens: Sequence[int]) -> None:
        """Reparse a text with a fresh parser, as plain decoding alone would.

        Copies share a lexer and its limits (llguidance 1.9), which a draft or another request may have exhausted.
        """
        self._parser = self._new_parser().deep_copy()
        for token in tokens[self._num_prompt :]:
            self._parser.compute_bitmask()
            self._parser.consume_token(token)

    def _exclude(self, path: tuple[int, ...]) -> Tensor:
        parser = self._parser.deep_copy()
        count = parser.try_consume_tokens(list(path))
        if count < len(path) and not parser.is_error():
            raise ParameterError(f"structured_outputs: token {path[count]} does not fit the text before it")
        bits = np.frombuffer(parser.compute_bitmask(), dtype=np.uint8)
        if parser.is_error():
            raise ParameterError(f"structured_outputs: {_reason(parser)}")
        return torch.from_numpy(np.unpackbits(bits, count=self._vocab_size, bitorder="little") == 0).to(self._device)
