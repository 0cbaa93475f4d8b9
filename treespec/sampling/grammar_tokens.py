"""Tokenizer adapter for llguidance."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from treespec.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def read_tokenizer(tokenizer: Any, vocab_size: int, end_tokens: Sequence[int]) -> "LLTokenizer":
    """Build llguidance's tokenizer over the tokens that an output may contain."""
    from llguidance import LLTokenizer, TokenizerWrapper
    from tokenizers import Tokenizer

    fast = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(fast, Tokenizer):
        kind = "none" if tokenizer is None else type(tokenizer).__name__
        raise RequestError(
            f"structured_outputs need a fast tokenizer, one with a tokenizer.json; the model's is {kind}"
        )
    if not end_tokens:
        raise RequestError("structured_outputs end with an end token, and the model has none")
    fast = Tokenizer.from_str(fast.to_str())
    fast.no_padding()
    fast.no_truncation()
    size = max(vocab_size, fast.get_vocab_size(with_added_tokens=True))
    try:
        base = LLTokenizer(fast.to_str(), n_vocab=size, eos_token=list(end_tokens))
    except ValueError as error:
        raise RequestError(f"structured_outputs: llguidance cannot read the model's tokenizer: {error}") from None
    wrapper = _PlainTextTokenizer(base, vocab_size, end_tokens)
    wrapper.plain = LLTokenizer(TokenizerWrapper(wrapper), eos_token=list(end_tokens))
    return wrapper.plain


class _PlainTextTokenizer:
    """Tokenizes a constraint's texts without special tokens.

    The model's tokenizer would encode the text "</s>" as the end token.
    """

    bos_token_id = None
    plain: "LLTokenizer"  # llguidance's, restricted to the target's ordinary tokens

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
        """Tokenize by greedy longest match, up to the first byte without a token (llguidance skips such bytes)."""
        data, end = text.encode(), 0
        tokens: list[int] = []
        for token in self.plain.greedy_tokenize(text):
            if not data.startswith(self.tokens[token], end):
                break
            tokens.append(token)
            end += len(self.tokens[token])
        return tokens
