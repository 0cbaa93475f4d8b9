"""Generate the tokenizer.json and tokenizer_config.json of a GGUF file.

Byte-level BPE ("gpt2") splits a text before merging. The file stores only llama.cpp's name of the rule, and unknown
names are refused. transformers uses GPT-2's rule for them instead, which splits the spaces before a number differently
from SmolLM2's own tokenizer ("smollm"). SentencePiece ("llama") becomes BPE with merges ordered by the tokens'
scores, or by the ids of Gemma's tokens.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from treespec_weights.errors import CheckpointError
from treespec_weights.files import file_inside, read_json
from treespec_weights.gguf.reader import GgufFile

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_SEED = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"  # words with combining marks
_QWEN35 = rf"{_CONTRACTIONS}|{_MARKED}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SIGNS}|{_SPACES}"
_GPT4O = rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"


class _Rule(NamedTuple):
    """Rule by which byte-level BPE splits a text before merging."""

    split: str | None = None  # regex of the pieces; None for GPT-2's
    single_digits: bool = False  # split digits into pieces of one
    ignore_merges: bool = False  # a piece that is a token is used without merging
    normalizer: str | None = None
    adds_bos: bool = False  # default if the file has no such key


_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(("gpt-2", "default", "exaone4"), _Rule()),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _Rule(single_digits=True)),
    "command-r": _Rule(single_digits=True, normalizer="NFC"),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon3", "falcon-h1"),
        _Rule(_LLAMA3, ignore_merges=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _Rule(_LLAMA3)),
    "glm4": _Rule(_LLAMA3, ignore_merges=True),
    **dict.fromkeys(("qwen2", "stablelm2"), _Rule(_QWEN2, normalizer="NFC")),
    "deepseek-r1-qwen": _Rule(_QWEN2),
    "seed-coder": _Rule(_SEED),
    "qwen35": _Rule(_QWEN35, normalizer="NFC"),
    "tekken": _Rule(_TEKKEN, ignore_merges=True, adds_bos=True),
    "gpt-4o": _Rule(_GPT4O),
}
"""Rules by `tokenizer.ggml.pre`."""

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # token types; ordinary ones are 1, unknown 2, bytes 6
_ORDINARY = 1
_TURN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<end_of_utterance>"),
    *("<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<EOT>", "_<EOT>", "[EOT]", "[e~[", "[EOS]"),
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
)
_SPACE = "\u2581"
_TEMPLATE = "chat_template.jinja"
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_REMEDY = "put the original model's tokenizer.json beside the file, or give LLM(tokenizer=...)"


def has_tokenizer(file: GgufFile) -> bool:
    """Return whether a GGUF file has a tokenizer, or a tokenizer.json beside it."""
    return "tokenizer.ggml.tokens" in file.metadata or _has_json_beside(file)


def is_stored(file: GgufFile) -> bool:
    """Return whether a GGUF file's tokenizer is the one in its metadata."""
    return has_tokenizer(file) and not _has_json_beside(file)


def tokenizer_json(file: GgufFile) -> dict[str, Any]:
    """Return the parsed tokenizer.json of a GGUF file. Raises as `tokenizer_text`."""
    return dict(json.loads(tokenizer_text(file)))


@functools.lru_cache(maxsize=4)
def tokenizer_text(file: GgufFile) -> str:
    """Return the tokenizer.json of a GGUF file; one beside the file takes precedence over its metadata.

    Raises CheckpointError if it is unusable.
    """
    if _has_json_beside(file):
        document = read_json(file.path.parent, "tokenizer.json", unique_keys=False)
        if not isinstance(document, dict):
            raise _refuse(file, "tokenizer.json", f"a JSON {type(document).__name__}, not an object")
        return json.dumps(document)
    return str(stored_tokenizer(file).to_str())


def _has_json_beside(file: GgufFile) -> bool:
    return (file.path.parent / "tokenizer.json").exists()


def have_equal_tokenizers(*files: GgufFile) -> bool:
    """Return whether all files store the same tokenizer. Takes 10 ms; building two takes a second."""
    stored = [{key: v for key, v in file.metadata.items() if key.startswith("tokenizer.ggml.")} for file in files]
    return all(map(is_stored, files)) and all(values == stored[0] for values in stored)


def stored_tokenizer(file: GgufFile) -> Any:
    """Return the tokenizers.Tokenizer of a GGUF file's metadata. Raises CheckpointError if they are unusable."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama", "gemma4"):
        names = "'gpt2' (byte-level BPE), 'llama' (SentencePiece), 'gemma4'"
        raise _refuse(file, "tokenizer.ggml.model", f"{kind!r} is not supported; supported: {names}; {_REMEDY}")
    tokens, types = _strings(file, "tokens"), file.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        types = [_ORDINARY] * len(tokens)
    make = _byte_level if kind == "gpt2" else _sentencepiece
    try:
        tokenizer = make(file, tokens, types)
        _add_special_tokens(tokenizer, file, tokens, types)
        return tokenizer
    except CheckpointError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise _refuse(file, "tokenizer.ggml", f"refused by the tokenizers library: {error}") from error


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """Return the tokenizer_config.json of a GGUF file, with its chat templates; files beside it take precedence."""
    tokens = file.metadata.get("tokenizer.ggml.tokens") or []
    config: dict[str, Any] = {"tokenizer_class": "TokenizersBackend", "clean_up_tokenization_spaces": False}
    for name, key in _SPECIAL.items():
        token = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(token) is int and 0 <= token < len(tokens):
            config[name] = tokens[token]
    templates = {
        name.lstrip(".") or "default": template
        for key, template in file.metadata.items()
        if (name := key.removeprefix("tokenizer.chat_template")) != key and name[:1] in ("", ".")
    }
    if templates.keys() == {"default"}:
        config["chat_template"] = templates["default"]
    elif templates:  # transformers' format for several templates
        config["chat_template"] = [{"name": name, "template": template} for name, template in templates.items()]
    parent = file.path.parent
    if _has_json_beside(file):
        if (parent / "tokenizer_config.json").exists():
            beside = read_json(parent, "tokenizer_config.json", unique_keys=False)
            config |= beside if isinstance(beside, dict) else {}
        if (parent / _TEMPLATE).exists():
            config["chat_template"] = file_inside(parent, _TEMPLATE).read_text(encoding="utf-8")
    return config


def turn_ends(file: GgufFile) -> list[int]:
    """Return the ids of control tokens whose name ends a turn or text; many files declare only one of them.

    llama.cpp also ends at tokens with these names that are not control tokens, such as the "</s>" of HTML.
    """
    tokens, types = (file.metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not isinstance(types, list):
        return []
    controls = {id: token for id, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == _CONTROL}
    has_parts = any(name in controls.values() for name in ("<|return|>", "<|flush|>"))  # parts, which "<|end|>" ends
    return [id for id, token in controls.items() if token in _TURN_ENDS and not (has_parts and token == "<|end|>")]


def _byte_level(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    rule = _rule(file)
    merges: Any = [tuple(merge.split(" ")) for merge in _strings(file, "merges")]
    # Names of unused ids that pad the embedding are not part of the vocabulary.
    padding = re.compile(r"\[PAD\d+\]")
    vocab = {
        token: id
        for id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != _UNUSED or not padding.fullmatch(token)
    }
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=rule.ignore_merges))
    if rule.normalizer == "NFC":
        tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.split is None)
    first: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if rule.single_digits else []
    if rule.split is not None:
        first = [pre_tokenizers.Split(Regex(rule.split), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _rule(file: GgufFile) -> _Rule:
    """Return the pre-tokenizer's rule. Raises CheckpointError for an unknown name."""
    name = file.metadata.get("tokenizer.ggml.pre")
    rule = _RULES.get(str(name))
    if rule is None:
        problem = "missing" if name is None else f"{name!r} is not supported"
        raise _refuse(file, "tokenizer.ggml.pre", f"{problem}; supported: {', '.join(_RULES)}; {_REMEDY}")
    return rule


def _sentencepiece(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> Any:
    """Build the tokenizers.Tokenizer of SentencePiece's BPE with byte fallback."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    spelled = [_spelled(file, token) for token in tokens]
    vocab = {token: id for id, token in enumerate(spelled)}
    if file.metadata["tokenizer.ggml.model"] == "gemma4":  # gemma4 files store the merges
        merges: Any = [tuple(merge.split(" ")) for merge in _strings(file, "merges")]
    else:
        merges = _merges(file, vocab, types)
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            merges,
            unk_token=spelled[unknown] if type(unknown) is int and 0 <= unknown < len(spelled) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = _adds_space(file)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(file: GgufFile, vocab: Mapping[str, int], types: Sequence[int]) -> list[tuple[str, str]]:
    """Return the merges of SentencePiece's tokens, in the order in which they apply."""
    if file.architecture.startswith("gemma"):  # its scores do not follow the order of merges
        ranks: Sequence[float] = range(len(types))
    else:
        scores = file.metadata.get("tokenizer.ggml.scores")
        if not isinstance(scores, list) or len(scores) != len(types):
            raise _refuse(file, "tokenizer.ggml.scores", f"missing, or not one for each of {len(types):,} tokens")
        ranks = [-score for score in scores]
    merges = list[tuple[float, tuple[str, str]]]()
    for token, id in vocab.items():
        if types[id] in (_ORDINARY, _USER_DEFINED):
            cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
            merges += [(ranks[id], pair) for pair in cuts if pair[0] in vocab and pair[1] in vocab]
    merges.sort(key=lambda merge: merge[0])
    return [pair for _, pair in merges]


def _adds_space(file: GgufFile) -> bool:
    """Return whether SentencePiece prepends a space to a text."""
    return bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))


def _spelled(file: GgufFile, token: str) -> str:
    """Return a token in SentencePiece's spelling; llama.cpp's converter writes Gemma's runs of "\u2581" as spaces."""
    return token if token.strip(" ") or _adds_space(file) else token.replace(" ", _SPACE)


def _add_special_tokens(tokenizer: Any, file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Add control and user-defined tokens, and the start and end tokens that are added to an encoded text."""
    from tokenizers import AddedToken, processors

    is_bpe = file.metadata["tokenizer.ggml.model"] == "gpt2"
    kinds = list(zip(tokens, types, strict=True))
    user_defined = [token for token, kind in kinds if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in kinds if k == _CONTROL])
    spelled = user_defined if is_bpe else [_spelled(file, token) for token in user_defined]
    # Respelled tokens must be matched after the normalizer has replaced spaces.
    tokenizer.add_tokens([AddedToken(s, normalized=s != token) for s, token in zip(spelled, user_defined, strict=True)])
    defaults = {"bos": _rule(file).adds_bos if is_bpe else True, "eos": False}
    ends = {}
    for name, default in defaults.items():
        id = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if file.metadata.get(f"tokenizer.ggml.add_{name}_token", default) and type(id) is int and 0 <= id < len(tokens):
            ends[name] = (tokens[id], id)
    if ends:
        start, end = (ends[name][0] if name in ends else None for name in ("bos", "eos"))
        templates = [[*([start] if start else []), f"${sequence}", *([end] if end else [])] for sequence in "AB"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=templates[0],
            pair=[*templates[0], *(f"{piece}:1" for piece in templates[1])],
            special_tokens=list(dict.fromkeys(ends.values())),
        )


def _strings(file: GgufFile, name: str) -> list[str]:
    """Return a list of strings of the tokenizer's metadata. Raises CheckpointError if it is missing or malformed."""
    value = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        message = f"{'missing' if value is None else 'not a list of strings'}: the file is incomplete; {_REMEDY}"
        raise _refuse(file, f"tokenizer.ggml.{name}", message)
    return value


def _refuse(file: GgufFile, key: str, message: str) -> CheckpointError:
    return CheckpointError.of(file.path, "tokenizer", key, message)
