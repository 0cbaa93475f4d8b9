"""Structured outputs: which tokens may follow a text, by llguidance's parser.

What may follow depends on the text alone, so a node of a token tree is treated exactly as plain decoding treats the
same text, however the parser got there. The tests compare it with a parser that reads every text from its beginning.
"""

import json
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from treespec.errors import RequestError
from treespec.sampling.form_limits import check_form, check_lark
from treespec.sampling.grammar_tokens import read_tokenizer
from treespec.sampling.structured_params import StructuredOutputsParams, closed_schema
from treespec.text.prompt_tokenizer import check_text

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_KEPT = 64  # forms whose parsers are kept for requests to come
_SECONDS = 5  # of CPU time that reading a form may take; within its limits it takes less than one
_STACK = 256 << 20  # bytes, of which a thread takes what it needs; 15 KB for each rule inside a rule


class Grammars:
    """Makes the grammar of every request that has one.

    Args:
        tokenizer: of the model, transformers' or `tokenizers.Tokenizer`; None where it has none.
        vocab_size: of the target.
        end_tokens: of the model and its tokenizer. A grammar allows them where its sentence is complete.
        device: of the target's logits.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_tokens: Sequence[int], device: torch.device):
        self._own, self._vocab_size, self._device = tokenizer, vocab_size, device
        self._end_tokens = [token for token in end_tokens if token < vocab_size]
        self._tokenizer: LLTokenizer | None = None
        self._parsers: OrderedDict[StructuredOutputsParams, LLMatcher] = OrderedDict()

    def grammar(self, form: StructuredOutputsParams, num_prompt: int) -> "Grammar":
        """The grammar of a request with `num_prompt` tokens in its prompt.

        Raises:
            RequestError: llguidance is missing or cannot read the form, or the tokenizer is none that it knows.
        """
        parser = self._parsers[form] if form in self._parsers else self._renew(form)
        self._parsers.move_to_end(form)
        renew = partial(self._renew, form)
        return Grammar(parser, renew, num_prompt, self._end_tokens, self._vocab_size, self._device)

    def _renew(self, form: StructuredOutputsParams) -> "LLMatcher":
        """A form's parser that has met no text yet, for this request and those to come."""
        self._parsers[form] = self._parse(form)
        if len(self._parsers) > _KEPT:
            self._parsers.popitem(last=False)
        return self._parsers[form]

    def _parse(self, form: StructuredOutputsParams) -> "LLMatcher":
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise RequestError(
                "structured_outputs need llguidance, which is not installed: pip install llguidance"
            ) from None
        for text in (form.json, form.regex, *(form.choice or ()), form.grammar, form.whitespace_pattern):
            check_text(text or "")
        if self._tokenizer is None:
            self._tokenizer = read_tokenizer(self._own, self._vocab_size, self._end_tokens)
        check_form(form)
        try:
            source = _source(form)
        except RequestError:
            raise
        except (ValueError, RecursionError) as error:
            raise RequestError(f"structured_outputs: {form.form} cannot be read: {error}") from None
        limits = LLParserLimits(verbose_errors=False)
        parser = _in_deep_stack(partial(LLMatcher, self._tokenizer, source, log_level=0, limits=limits), form.form)
        if parser.is_error():
            raise RequestError(f"structured_outputs: {form.form} cannot be read: {_reason(parser)}")
        return parser


def _in_deep_stack(call: Callable[[], "LLMatcher"], form: str) -> "LLMatcher":
    """A call's result, from a thread of its own. In the usual 8 MB of stack a chain of 800 references, `{"$ref": ...}`,
    would end the process.

    `check_form` bounds what is read; a form that takes long all the same is given up. Its thread cannot be stopped and
    runs on by itself.

    Raises:
        RequestError: the call takes more than `_SECONDS` of CPU time.
    """
    result: Future[LLMatcher] = Future()
    clocks: queue.SimpleQueue[Callable[[], float]] = queue.SimpleQueue()

    def run() -> None:
        clocks.put(_clock_of_thread())
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    usual = threading.stack_size(_STACK)
    try:
        threading.Thread(target=run, name="treespec-grammar", daemon=True).start()
    finally:
        threading.stack_size(usual)
    spent = clocks.get()
    while True:
        try:
            return result.result(timeout=0.1)
        except TimeoutError:
            if not result.done() and spent() > _SECONDS:
                raise RequestError(
                    f"structured_outputs: {form} takes more than {_SECONDS} s to read; give a simpler one"
                ) from None


def _clock_of_thread() -> Callable[[], float]:
    """Tells any thread the seconds of CPU time that this one has taken, which a busy machine does not prolong; on
    systems that cannot, the seconds since now."""
    began = time.monotonic()
    if not hasattr(time, "pthread_getcpuclockid"):
        return lambda: time.monotonic() - began
    clock = time.pthread_getcpuclockid(threading.get_ident())

    def spent() -> float:
        try:
            return time.clock_gettime(clock)
        except OSError:  # the thread has just ended
            return 0.0

    return spent


def _source(form: StructuredOutputsParams) -> str:
    """A form in llguidance's own notation. Raises ValueError where it is none."""
    from llguidance import LLMatcher, grammar_from

    if form.regex is not None:
        return LLMatcher.grammar_from_regex(form.regex)
    if form.choice is not None:
        # A terminal: of rules the parser follows no more than 2,000 at a time.
        return LLMatcher.grammar_from_lark("start: TEXT\nTEXT: " + " | ".join(map(json.dumps, form.choice)))
    if form.grammar is not None:
        source = grammar_from("grammar", form.grammar)
        check_lark(source)
        return source
    schema = {"type": "object"} if form.json is None else json.loads(form.json)
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
    """Why a parser has failed, in a line: llguidance's messages show the spot on lines of their own."""
    message = " ".join(parser.get_error().removesuffix("<non-verbose/>").split())
    return "no token of the model's continues the text" if message == "NoExtensionBias" else message


class Grammar:
    """What a request may write.

    Args:
        parser: before the first token; left as it is.
        renew: makes another one.
        num_prompt: tokens of the prompt, of which the grammar says nothing.
        end_tokens: that the grammar allows where its sentence is complete.
        vocab_size, device: of the target's logits.
    """

    def __init__(
        self,
        parser: "LLMatcher",
        renew: Callable[[], "LLMatcher"],
        num_prompt: int,
        end_tokens: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ):
        self._vocab_size, self._device, self._end_tokens = vocab_size, device, frozenset(end_tokens)
        self._renew, self._num_prompt = renew, num_prompt
        # It has read tokens[num_prompt:read]. Copies of it are asked, a microsecond each: what fails at a drafted text
        # has failed for good, and `rollback` may leave another state than there was (llguidance 1.9).
        self._parser, self._read = parser.deep_copy(), num_prompt
        self._excluded: dict[tuple[int, ...], Tensor] = {}  # of paths behind them

    def excluded(self, tokens: Sequence[int], ancestors: Sequence[int] = ()) -> Tensor:
        """bool [vocab], on the logits' device: the tokens that may not come next.

        Args:
            tokens: prompt and output so far.
            ancestors: what a path of the tree adds to them.

        Raises:
            RequestError: the text is none of the grammar's, or takes more than llguidance's limits.
        """
        path = tuple(ancestors)
        if not self._end_tokens.isdisjoint(path):  # llguidance takes one, but does not find back from it
            raise RequestError("structured_outputs: nothing follows an end token")
        self._follow(tokens)
        if path not in self._excluded:
            try:
                self._excluded[path] = self._exclude(path)
            except RequestError:
                if path:
                    raise
                self._read_anew(tokens)
                self._excluded[path] = self._exclude(path)
        return self._excluded[path]

    def fitting(self, tokens: Sequence[int], path: Sequence[int]) -> int:
        """How many of a path's tokens continue the grammar's text, counted from the first, as far as its bytes go: a
        spelling that `excluded` leaves out, where there is only one way on, counts as fitting.

        Args:
            tokens: prompt and output so far.
            path: what may follow them.
        """
        self._follow(tokens)
        ends = [place for place, token in enumerate(path, start=1) if token in self._end_tokens]
        return self._parser.deep_copy().validate_tokens(list(path[: ends[0]] if ends else path))

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """What must come next, as far as there is only one way on; no end tokens.

        Args:
            tokens: prompt and output so far.
        """
        self._follow(tokens)
        return list(self._parser.deep_copy().compute_ff_tokens())

    def _follow(self, tokens: Sequence[int]) -> None:
        """Read what is new of a text that only ever grows."""
        if self._read == len(tokens):
            return
        new = list(tokens[self._read :])
        self._excluded.clear()
        self._read = len(tokens)
        self._parser.consume_tokens(new)  # where that fails, `_exclude` says so

    def _read_anew(self, tokens: Sequence[int]) -> None:
        """Read a text as plain decoding alone would. Copies share their lexer and its limits (llguidance 1.9): where
        one has come to them, all have, and it may have been a draft's or another request's."""
        self._parser = self._renew().deep_copy()
        for token in tokens[self._num_prompt :]:
            self._parser.compute_bitmask()
            self._parser.consume_token(token)

    def _exclude(self, path: tuple[int, ...]) -> Tensor:
        parser = self._parser.deep_copy()
        count = parser.try_consume_tokens(list(path))
        if count < len(path) and not parser.is_error():
            raise RequestError(f"structured_outputs: token {path[count]} does not fit the text before it")
        bits = np.frombuffer(parser.compute_bitmask(), dtype=np.uint8)
        if parser.is_error():
            raise RequestError(f"structured_outputs: {_reason(parser)}")
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        return torch.from_numpy(allowed == 0).to(self._device)
