"""Load tokenizers, and tokenize prompts with truncation."""

import inspect
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from treespec.errors import ConfigError, RequestError, describe_error, reject_unknown, short_repr
from treespec.utils.scalars import as_int, to_python
from treespec_weights.documents import write_documents
from treespec_weights.files import is_gguf, resolve_folder
from treespec_weights.sentencepiece import missing_packages, sentencepiece_error

logger = logging.getLogger("treespec")


def load_tokenizer(tokenizer: Any, folder: str | os.PathLike[str]) -> Any:
    """Load a tokenizer, that of the model for None, from a folder or GGUF file; objects stay. Raises ConfigError."""
    if tokenizer is not None and not isinstance(tokenizer, str | os.PathLike):
        return tokenizer
    source = os.fspath(tokenizer if tokenizer is not None else folder)
    if is_gguf(source):
        with TemporaryDirectory(prefix="treespec-gguf-") as written:
            write_documents(resolve_folder(source), Path(written))
            return _load_folder(tokenizer, written, source)
    return _load_folder(tokenizer, source, source)


def _load_folder(tokenizer: Any, source: str, shown: str) -> Any:
    """Load a tokenizer from the folder `source`, which error messages call `shown`."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    if not any(os.path.isfile(os.path.join(source, name)) for name in names):
        if tokenizer is not None:
            raise ConfigError(f"tokenizer={tokenizer!r} is not a folder with tokenizer files ({', '.join(names)})")
        logger.info("%s has no tokenizer: prompts and outputs are token ids", shown)
        return None
    check_sentencepiece(source)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer imports the model's config first, which takes 3 s.
    kind = PreTrainedTokenizerFast if _is_fast_only(source) else AutoTokenizer
    try:
        loaded = kind.from_pretrained(source, local_files_only=True)
    except Exception as error:  # parsers may raise anything for damaged files: KeyError, TypeError, a plain Exception
        reason = f"the tokenizer files of {shown} cannot be read ({describe_error(error)})"
        raise ConfigError(f"{reason}; repair or remove them, or give LLM(tokenizer=...)") from error
    if isinstance(warned := getattr(loaded, "deprecation_warnings", None), dict):
        # treespec raises an error for such prompts
        warned["sequence-length-is-longer-than-the-specified-maximum"] = True
    return loaded


def check_sentencepiece(folder: str | os.PathLike[str]) -> None:
    """Raise ConfigError if a folder's tokenizer is a sentencepiece model and the packages to read it are missing."""
    if missing := missing_packages(Path(folder)):
        raise ConfigError(sentencepiece_error(os.fspath(folder), missing))


def _is_fast_only(folder: str) -> bool:
    """Return whether tokenizer_config.json states that tokenizer.json is sufficient."""
    try:
        with open(os.path.join(folder, "tokenizer_config.json"), encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError):
        return False  # AutoTokenizer reports the error
    return isinstance(config, dict) and config.get("tokenizer_class") == "TokenizersBackend"


class UserTokenizer:
    """Wraps a user's tokenizer behind one interface, whatever options its methods accept.

    It is an object with `encode(text)`, returning token ids or (like `tokenizers.Tokenizer`) an object with `ids`, and
    `decode(ids)`, returning text. `add_special_tokens` and `skip_special_tokens` are passed if supported;
    `clean_up_tokenization_spaces` is turned off, because it removes spaces that a stream has shown already.

    Raises ConfigError if it fails to encode and decode a test letter.
    """

    def __init__(self, base: Any):
        self.base = base
        if not all(callable(getattr(base, name, None)) for name in ("encode", "decode")):
            raise ConfigError(
                f"tokenizer={short_repr(base)}; valid: a folder, or an object with encode(text) and decode(token_ids)"
            )
        self._encode, self._decode = base.encode, base.decode
        self._adds = _takes(self._encode, "add_special_tokens")
        self._skips = _takes(self._decode, "skip_special_tokens")
        if getattr(base, "clean_up_tokenization_spaces", False) and _takes(base.decode, "clean_up_tokenization_spaces"):
            self._decode = partial(base.decode, clean_up_tokenization_spaces=False)
        eos = as_int(getattr(base, "eos_token_id", None), 0)
        self.eos_token_ids = () if eos is None else (eos,)
        ids = None
        try:
            ids = self.encode("a", False)
            self.decode(ids)
        except RequestError as error:
            if ids is None and error.__cause__ is not None and not isinstance(error.__cause__, TypeError):
                return  # it may reject the letter itself
            valid = "valid: an object with encode(text) and decode(token_ids)"
            raise ConfigError(f"tokenizer={short_repr(self.base)}: {error}; {valid}") from error

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Encode a text. Raises RequestError for invalid Unicode, or if the tokenizer fails."""
        check_text(text)
        try:
            encoding = self._encode(text, **({"add_special_tokens": special} if self._adds else {}))
            ids = to_python(getattr(encoding, "ids", encoding))
            tokens = [as_int(token, 0) for token in ids] if isinstance(ids, list | tuple) else [None]
        except Exception as error:  # user tokenizers may raise anything
            raise RequestError(f"the tokenizer rejects {text[:40]!r}: {describe_error(error)}") from error
        if None in tokens:
            raise RequestError(
                f"the tokenizer made {short_repr(encoding)} of {text[:40]!r}; valid: a list of token ids"
            )
        return [token for token in tokens if token is not None]

    def decode(self, tokens: list[int], skip_special: bool = False) -> str:
        """Decode token ids. Special tokens are skipped if requested and supported. Raises RequestError."""
        try:
            text = self._decode(tokens, **({"skip_special_tokens": skip_special} if self._skips else {}))
        except Exception as error:  # as above
            raise RequestError(f"the tokenizer cannot decode {short_repr(tokens)}: {describe_error(error)}") from error
        if not isinstance(text, str):
            raise RequestError(f"the tokenizer decodes {short_repr(tokens)} to {type(text).__name__}; valid: a text")
        return text


@dataclass(frozen=True)
class Tokenization:
    """Tokenization options of a call."""

    # number of last tokens to keep; None = all. Special tokens around a text are kept, as in transformers.
    truncate: int | None = None
    # whether to add special tokens around a text; None adds them except to conversations, whose template adds them
    special: bool | None = None

    @classmethod
    def resolve(cls, options: Mapping[str, Any] | None, max_model_len: int) -> "Tokenization":
        """Parse vLLM's `tokenization_kwargs` (0.17): `truncate_prompt_tokens` and `add_special_tokens`.

        -1 keeps max_model_len - 1 tokens, which leaves room for one output token.
        """
        if options is None:
            return cls()
        if not isinstance(options, Mapping):
            raise ConfigError(f"tokenization_kwargs={options!r}; valid: None or a dict")
        reject_unknown("tokenization_kwargs", options, ("add_special_tokens", "truncate_prompt_tokens"))
        limit, special = options.get("truncate_prompt_tokens"), options.get("add_special_tokens")
        count = None if limit is None else as_int(limit, -1)
        if limit is not None and (count is None or count == 0 or count > max_model_len):
            raise ConfigError(
                f"truncate_prompt_tokens={limit!r}; valid: None, 1 to max_model_len={max_model_len}, or -1"
            )
        if special is not None and not isinstance(special, bool):
            raise ConfigError(f"add_special_tokens={special!r}; valid: None, True or False")
        return cls(max_model_len - 1 if count == -1 else count, special)

    def encode(self, tokenizer: UserTokenizer, text: str, special: bool) -> list[int]:
        """Encode a text. `special` is the default if the call does not set it. Raises RequestError."""
        special = special if self.special is None else self.special
        tokens = tokenizer.encode(text, special)
        if self.truncate is None or len(tokens) <= self.truncate:
            return tokens
        bare = tokenizer.encode(text, False) if special else tokens
        added = len(tokens) - len(bare)
        starts = [i for i in range(added + 1) if tokens[i : i + len(bare)] == bare] if added >= 0 else []
        if not starts or self.truncate <= added:
            return tokens[-self.truncate :]
        start, end = starts[0], starts[0] + len(bare)
        return [*tokens[:start], *tokens[end - (self.truncate - added) : end], *tokens[end:]]


def check_text(text: str) -> None:
    """Raise RequestError if a text has a lone surrogate, which no token can represent."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"the lone surrogate {text[error.start]!r} at {error.start}"
        raise RequestError(f"text {text[:40]!r} has {where}, which is no valid character; remove it") from None


def _takes(function: Callable[..., Any], option: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without signature
        return False
    return any(parameter.name == option or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
