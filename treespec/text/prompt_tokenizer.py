"""Loading of tokenizers, and tokenization of prompts with truncation."""

import inspect
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from treespec.errors import ConfigError, RequestError, describe_error, reject_unknown, short_repr
from treespec.utils.scalars import as_int, to_python
from treespec_weights.codec import byte_characters
from treespec_weights.documents import write_tokenizer
from treespec_weights.files import is_gguf, resolve_folder
from treespec_weights.sentencepiece import missing_packages, sentencepiece_error

logger = logging.getLogger("treespec")

_WORKERS = 4  # threads for tokenizing short prompts
_LONG = 1 << 16  # minimum characters of a long prompt; shorter ones take less than 0.1 s

_Result = TypeVar("_Result")


def load_tokenizer(tokenizer: Any, folder: str | os.PathLike[str]) -> Any:
    """Load a tokenizer (None: the model's) from a folder or GGUF file; return objects unchanged. Raises ConfigError."""
    if tokenizer is not None and not isinstance(tokenizer, str | os.PathLike):
        return tokenizer
    source = os.fspath(tokenizer if tokenizer is not None else folder)
    if is_gguf(source):
        with TemporaryDirectory(prefix="treespec-gguf-") as folder_name:
            built = write_tokenizer(resolve_folder(source), Path(folder_name))
            return _load_folder(
                tokenizer, folder_name, source, {} if built is None else {"tokenizer_object": _Built(built)}
            )
    return _load_folder(tokenizer, source, source)


class _Built:
    """Wraps a tokenizers.Tokenizer so that transformers does not copy it, which takes as long as reading its file."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def __deepcopy__(self, memo: Any) -> Any:
        return self.tokenizer


def _load_folder(tokenizer: Any, source: str, label: str, options: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Load a tokenizer from the folder `source`, named `label` in error messages, with transformers' options."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    if not any(os.path.isfile(os.path.join(source, name)) for name in names):
        if tokenizer is not None:
            raise ConfigError(f"tokenizer={tokenizer!r} is not a folder with tokenizer files ({', '.join(names)})")
        logger.info("%s has no tokenizer: prompts and outputs are token ids", label)
        return None
    check_sentencepiece(source)
    import transformers

    # AutoTokenizer first imports the model's config, which takes 3 s.
    kind = transformers.PreTrainedTokenizerFast if _is_fast_only(source) else transformers.AutoTokenizer
    try:
        loaded = kind.from_pretrained(source, local_files_only=True, **options)
    except Exception as error:  # damaged files may raise anything: KeyError, TypeError, a plain Exception
        reason = f"the tokenizer files of {label} cannot be read ({describe_error(error)})"
        raise ConfigError(f"{reason}; repair or remove them, or pass LLM(tokenizer=...)") from error
    loaded.name_or_path = label  # the GGUF file instead of its temporary folder
    if isinstance(warned := getattr(loaded, "deprecation_warnings", None), dict):
        # treespec raises an error for such prompts
        warned["sequence-length-is-longer-than-the-specified-maximum"] = True
    return loaded


def check_sentencepiece(folder: str | os.PathLike[str]) -> None:
    """Raise ConfigError if a folder's tokenizer needs the sentencepiece package and it is missing."""
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
    """Common interface to user tokenizers with different options.

    The tokenizer has `encode(text)`, returning token ids or (like `tokenizers.Tokenizer`) an object with `ids`, and
    `decode(ids)`, returning text. `add_special_tokens` and `skip_special_tokens` are passed if supported;
    `clean_up_tokenization_spaces` is turned off, because it removes spaces that a stream may have emitted already.

    Raises ConfigError if the tokenizer fails to encode and decode a test letter.
    """

    def __init__(self, base: Any):
        self.base = base
        if not all(callable(getattr(base, name, None)) for name in ("encode", "decode")):
            raise ConfigError(
                f"tokenizer={short_repr(base)}; valid: a folder, or an object with encode(text) and decode(token_ids)"
            )
        self._encode, self._decode = base.encode, base.decode
        # Only transformers' Rust tokenizers are known to encode in several threads at once.
        self._lock = nullcontext() if getattr(base, "is_fast", False) else threading.Lock()
        self._adds = _takes(self._encode, "add_special_tokens")
        self._skips = _takes(self._decode, "skip_special_tokens")
        if getattr(base, "clean_up_tokenization_spaces", False) and _takes(base.decode, "clean_up_tokenization_spaces"):
            self._decode = partial(base.decode, clean_up_tokenization_spaces=False)
        if self._skips and _decodes_natively(base):  # transformers' code takes half of the time
            self._decode = base.backend_tokenizer.decode
        eos = as_int(getattr(base, "eos_token_id", None), 0)
        self.eos_token_ids = () if eos is None else (eos,)
        ids = None
        try:
            ids = self.encode("a", False)
            self.decode(ids)
        except RequestError as error:
            if ids is None and error.__cause__ is not None and not isinstance(error.__cause__, TypeError):
                return  # it may reject only this letter
            valid = "valid: an object with encode(text) and decode(token_ids)"
            raise ConfigError(f"tokenizer={short_repr(self.base)}: {error}; {valid}") from error

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Encode a text. Raises RequestError for invalid Unicode, or if the tokenizer fails."""
        check_text(text)
        try:
            with self._lock:
                encoding = self._encode(text, **({"add_special_tokens": special} if self._adds else {}))
            ids = to_python(getattr(encoding, "ids", encoding))
            if isinstance(ids, list) and {*map(type, ids)} == {int} and min(ids) >= 0:
                return [*ids]  # checks a million tokens much faster than the line below
            tokens = [as_int(token, 0) for token in ids] if isinstance(ids, list | tuple) else [None]
        except Exception as error:  # user tokenizers may raise anything
            raise RequestError(f"the tokenizer rejects {text[:40]!r}: {describe_error(error)}") from error
        if None in tokens:
            raise RequestError(
                f"the tokenizer returned {short_repr(encoding)} for {text[:40]!r}; valid: a list of token ids"
            )
        return [token for token in tokens if token is not None]

    def token_lower_bound(self, text: str) -> int:
        """Return a lower bound on a text's number of tokens, without tokenizing it; 0 if unknown."""
        if (longest := self._longest) is None:
            return 0
        covered = "".join(text.split()) if longest.skips_spaces else text
        return -(-len(covered) // longest.characters)

    @cached_property
    def _longest(self) -> "_LongestToken | None":
        if type(self.base).__module__.partition(".")[0] not in ("tokenizers", "transformers"):
            return None  # it may change texts before tokenizing them
        return longest_token(getattr(self.base, "backend_tokenizer", self.base))

    def decode(self, tokens: list[int], skip_special: bool = False) -> str:
        """Decode token ids. Special tokens are skipped if requested and supported. Raises RequestError."""
        try:
            text = self._decode(tokens, **({"skip_special_tokens": skip_special} if self._skips else {}))
        except Exception as error:  # user tokenizers may raise anything
            raise RequestError(f"the tokenizer cannot decode {short_repr(tokens)}: {describe_error(error)}") from error
        if not isinstance(text, str):
            raise RequestError(f"the tokenizer decodes {short_repr(tokens)} to {type(text).__name__}; valid: a string")
        return text


def _decodes_natively(tokenizer: Any) -> bool:
    """Return whether a tokenizer has transformers' own `decode`, which only calls its `backend_tokenizer`."""
    transformers = sys.modules.get("transformers")  # not imported: it takes seconds
    fast = None if transformers is None else transformers.PreTrainedTokenizerFast
    return fast is not None and all(
        getattr(type(tokenizer), name, None) is getattr(fast, name) for name in ("decode", "_decode")
    )


@dataclass(frozen=True)
class Tokenization:
    """Tokenization options of a call."""

    # number of last tokens to keep; None for all. Special tokens around a text are kept, as in transformers
    truncate: int | None = None
    # whether to add special tokens around a text; None adds them except to conversations, whose template adds them
    special: bool | None = None
    room: int = 1  # number of output tokens that must fit into the context after the prompt

    @classmethod
    def resolve(cls, options: Mapping[str, Any] | None, max_model_len: int) -> "Tokenization":
        """Parse `tokenization_kwargs`: vLLM's `truncate_prompt_tokens` and `add_special_tokens`, `max_output_tokens`.

        truncate_prompt_tokens=-1 leaves room for max_output_tokens output tokens, one by default.
        """
        if options is None:
            return cls()
        if not isinstance(options, Mapping):
            raise ConfigError(f"tokenization_kwargs={options!r}; valid: None or a dict")
        names = ("add_special_tokens", "max_output_tokens", "truncate_prompt_tokens")
        reject_unknown("tokenization_kwargs", options, names)
        limit, special = options.get("truncate_prompt_tokens"), options.get("add_special_tokens")
        output = options.get("max_output_tokens")
        room = 1 if output is None else as_int(output, 1)
        if room is None:
            raise ConfigError(f"max_output_tokens={output!r}; valid: None, or an int of at least 1")
        count = None if limit is None else as_int(limit, -1)
        if limit is not None and (count is None or count == 0 or count > max_model_len):
            raise ConfigError(
                f"truncate_prompt_tokens={limit!r}; valid: None, 1 to max_model_len={max_model_len}, or -1"
            )
        if special is not None and not isinstance(special, bool):
            raise ConfigError(f"add_special_tokens={special!r}; valid: None, True or False")
        return cls(max(max_model_len - room, 1) if count == -1 else count, special, room)

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


class TokenizerThreads:
    """Threads that tokenize prompts. Long prompts share one thread, so that short ones do not wait for them."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(_WORKERS, "treespec-requests")
        self._long = ThreadPoolExecutor(1, "treespec-long-requests")

    def submit(self, prompt: Any, call: Callable[[], _Result]) -> Future[_Result]:
        """Submit a call that tokenizes a prompt: text, token ids, or a conversation with its options."""
        length, pending = 0, [prompt]
        while pending:
            item = pending.pop()
            if isinstance(item, Mapping):
                pending.extend(item.values())
            elif isinstance(item, list | tuple) and not (item and isinstance(item[0], int)):
                pending.extend(item)
            elif isinstance(item, str | list | tuple):
                length += len(item)
        return (self._short if length < _LONG else self._long).submit(call)

    def shutdown(self) -> None:
        """Stop the threads after all submitted calls."""
        for threads in (self._short, self._long):
            threads.shutdown()


class _LongestToken(NamedTuple):
    """The maximum number of characters that one token can represent."""

    characters: int
    skips_spaces: bool  # whether whitespace is not counted, because a token may contain any amount of it


# Parts of a tokenizer that remove no characters.
_KEEPING = {"ByteLevel", "Digits", "FixedLength", "Lowercase", "Metaspace", "NFD", "NFKD", "Prepend", "UnicodeScripts"}


def longest_token(tokenizer: Any) -> _LongestToken | None:
    """Return the longest token of a `tokenizers.Tokenizer`, or None if a token can represent unlimited characters.

    That is possible if a normalizer or pre-tokenizer removes characters, or if the model drops unknown characters or
    fuses them into one token.
    """
    from tokenizers import Tokenizer, models

    if not isinstance(tokenizer, Tokenizer) or tokenizer.truncation is not None:
        return None
    shrinking, kinds, skips_spaces = 1, set(), False
    for settings in (*_parts(tokenizer.normalizer, "normalizers"), *_parts(tokenizer.pre_tokenizer, "pretokenizers")):
        kind = settings["type"]
        kinds.add(kind)
        if kind in ("NFC", "NFKC"):
            shrinking *= 4  # maximum number of characters that compose into one
        elif kind == "Strip":
            skips_spaces = True
        elif kind == "Replace" and "String" in settings["pattern"] and settings["content"]:
            shrinking *= -(-len(settings["pattern"]["String"]) // len(settings["content"]))
        elif kind not in _KEEPING and not (kind in ("Split", "Punctuation") and settings["behavior"] != "Removed"):
            return None
    model, vocabulary = tokenizer.model, tokenizer.get_vocab()
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if "ByteLevel" in kinds:
        all_bytes = {*byte_characters()}
    elif model.byte_fallback:
        all_bytes = {f"<0x{byte:02X}>" for byte in range(256)}
    else:
        return None
    if not vocabulary.keys() >= all_bytes:
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    skips_spaces = skips_spaces or any(token.lstrip or token.rstrip for token in added)
    return _LongestToken(shrinking * max(map(len, vocabulary)), skips_spaces)


def _parts(component: Any, several: str) -> list[dict[str, Any]]:
    """Return the settings of a normalizer or pre-tokenizer, or of all members of a sequence."""
    if component is None:
        return []
    pending, parts = [json.loads(component.__getstate__())], []
    while pending:
        settings = pending.pop(0)
        if settings["type"] == "Sequence":
            pending.extend(settings[several])
        else:
            parts.append(settings)
    return parts


def check_text(text: str) -> None:
    """Raise RequestError if a text has a lone surrogate, which no token can represent."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"the lone surrogate {text[error.start]!r} at {error.start}"
        raise RequestError(f"text {text[:40]!r} has {where}, which is not a valid character; remove it") from None


def _takes(function: Callable[..., Any], option: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtin function without a signature
        return False
    return any(parameter.name == option or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
