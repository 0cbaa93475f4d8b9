"""Tokenizers made on the spot, and models that speak them: what the tests of other vocabularies share."""

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import (
    AddedToken,
    ByteLevelBPETokenizer,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from tests.helpers.models import change_rows
from treespec_weights.codec import byte_characters

TEXT = Path(argparse.__file__).read_text()


def save_tokenizer(folder: Path, tokenizer: Any) -> Path:
    """Put tokenizer.json, and the config that names its class, into a folder."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend"}))
    return folder


def byte_level(vocab: int, lines: Sequence[str], controls: Sequence[str] = ("<|end|>",), prefix: bool = False) -> Any:
    """Byte-level BPE trained on a few lines, control tokens first."""
    tokenizer = ByteLevelBPETokenizer(add_prefix_space=prefix)
    tokenizer.train_from_iterator(lines, vocab_size=vocab, special_tokens=list(controls), show_progress=False)
    return tokenizer


def letters(tokens: Sequence[str]) -> Tokenizer:
    """Byte-level, of these single characters in this order."""
    chars = {byte: char for char, byte in byte_characters().items()}
    tokenizer = Tokenizer(models.BPE({chars[ord(token)]: id for id, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece_like(words: int, text: str = TEXT) -> Tokenizer:
    """Unigram with byte fallback, a space before every text and `<s>` before that, as Llama's."""
    counts = Counter("\u2581" + word for word in text.split())
    pieces = [(word, math.log(count / 1e5)) for word, count in counts.most_common(words)]
    chars = Counter(text.replace(" ", "\u2581"))
    pieces += [(char, math.log(n / 1e7)) for char, n in chars.most_common() if char not in "\n" and len(char) == 1]
    controls = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    known = dict([*controls, *((f"<0x{byte:02X}>", -30.0) for byte in range(256))])
    known |= {piece: score for piece, score in pieces if piece not in known}
    tokenizer = Tokenizer(models.Unigram(list(known.items()), unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name, _ in controls])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def permuted(source: Path, folder: Path, seed: int = 0) -> Path:
    """A copy of a model whose token ids are shuffled, in its tokenizer, embedding, head and configs alike."""
    new_id = np.random.default_rng(seed).permutation(json.loads((source / "config.json").read_text())["vocab_size"])
    change_rows(source, folder, lambda rows: rows[np.argsort(new_id)].contiguous())
    renumber(folder, new_id)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
            if isinstance(config.get(key), int):
                config[key] = int(new_id[config[key]])
        (folder / name).write_text(json.dumps(config))
    return folder


def renumber(folder: Path, new_id: np.ndarray) -> None:
    """Give the tokens of a folder's tokenizer other ids."""
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["vocab"] = {token: int(new_id[id]) for token, id in raw["model"]["vocab"].items()}
    for added in raw["added_tokens"]:
        added["id"] = int(new_id[added["id"]])
    raw["added_tokens"].sort(key=lambda added: added["id"])
    (folder / "tokenizer.json").write_text(json.dumps(raw))


def resized(source: Path, folder: Path, size: int, seed: int = 0, loud: float = 3.0) -> Path:
    """A copy of a model with fewer or more rows of embedding and head; new ones are random, and so loud."""
    generator = torch.Generator().manual_seed(seed)

    def change(rows: torch.Tensor) -> torch.Tensor:
        new = torch.randn(max(size - len(rows), 0), rows.shape[1], generator=generator) * loud * rows.float().std()
        return torch.cat([rows[:size], new.to(rows.dtype)])

    return change_rows(source, folder, change)
