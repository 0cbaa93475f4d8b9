"""Compare a draft's vocabulary with the target's, to choose how the draft proposes tokens.

With the same tokenizer, ids are equal, whatever the padding of the embeddings. With different tokenizers, the draft's
proposals are restricted to shared tokens and translated (token-level intersection, TLI, arXiv 2502.05202). If too few
tokens are shared, the draft generates text, which the target's tokenizer encodes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from treespec_weights.codec import Codec, has_tokenizer
from treespec_weights.gguf.reader import read_gguf
from treespec_weights.gguf.tokenizer import have_equal_tokenizers
from treespec_weights.tokenizer import read_vocabulary

Kind = Literal["same", "padded", "reduced", "translated", "text", "none"]

LEAST_SHARE = 0.5
"""Minimum fraction of the draft's tokens in `SAMPLE` that the target must have for translation; below it, the draft
generates text. A proposal of depth d survives the intersection with probability share ** d, so text is more reliable
below one half."""
PADDING = 1024  # bound on an embedding's padding: sizes are rounded up to multiples of up to 1,024

SAMPLE = """\
def nearest(points, origin=(0.0, 0.0)):
    \"\"\"Return the point with the smallest distance, or None for an empty list.\"\"\"
    best = None
    for index, (x, y) in enumerate(points):
        distance = math.hypot(x - origin[0], y - origin[1])
        if best is None or distance < best[1]:
            best = (index, distance)
    return points[best[0]] if best else None

In the early morning the harbour was quiet, and the two brothers who had promised to mend the nets before noon were
still asleep. "We should have gone yesterday," she said, although nobody had asked her. The committee will meet again in
September to decide whether the proposal can be financed; until then, most of its members expect little to change.

{"name": "example", "version": "1.4.2", "tags": ["fast", "local"], "size": 2048, "enabled": true, "parent": null}
SELECT id, created_at FROM orders WHERE total > 100 ORDER BY created_at DESC LIMIT 20;
1. Install the package. 2. Open https://example.org/docs and follow the steps. 3. Restart the service.
L'été dernier, nous avons visité plusieurs villes. Die Straße war gesperrt. El niño pequeño corrió a casa.
"""


@dataclass(frozen=True, eq=False)
class Connection:
    """How a draft proposes tokens for a target."""

    # "same" (equal ids and sizes), "padded" (equal ids, different sizes), "translated" (through the intersection),
    # "text", or "none" (the draft cannot be used)
    kind: Kind
    share: float = 1.0  # fraction of the draft's tokens in `SAMPLE` that the target has; 1 for equal ids
    reason: str | None = None  # why the kind is "none"
    codecs: tuple[Codec, Codec] | None = None  # codecs of target and draft, if the vocabularies differ

    def __str__(self) -> str:
        match self.kind:
            case "same":
                return "same vocabulary"
            case "padded" | "reduced":
                return self.kind
            case "translated":
                return f"translated (TLI, {self.share:.0%} of tokens)"
            case "text":
                return f"by text ({self.share:.0%} of tokens are the target's)"
            case _:
                return f"not at all: {self.reason}"


REDUCED = Connection("reduced")  # connection of a draft with `draft_vocab.safetensors`


def connect(target: Path, target_size: int, draft: Path, draft_size: int) -> Connection:
    """Determine how a draft can propose tokens for a target, given the folders and the rows of their embeddings.

    If one side has no tokenizer files, vocabularies of equal sizes count as equal. So do different sizes that both hold
    the tokens of the only tokenizer with less than `PADDING` ids of padding. If both sides have files, the vocabularies
    differ if some id has two different meanings. An id known to only one side does not make them differ.
    """
    kind: Kind = "same" if target_size == draft_size else "padded"
    folders = [folder for folder in (target, draft) if has_tokenizer(folder)]
    if len(folders) < 2:
        return _without_files(kind, folders, target_size, draft_size)
    if target.is_file() and draft.is_file() and have_equal_tokenizers(read_gguf(target), read_gguf(draft)):
        return Connection(kind)
    if (vocabulary := read_vocabulary(target)) is not None and vocabulary == read_vocabulary(draft):
        return Connection(kind)
    codecs = Codec.read(target), Codec.read(draft)
    if not _conflicts(*codecs):
        return Connection(kind)
    share = share_of_tokens(*codecs)
    return Connection("translated" if share >= LEAST_SHARE else "text", share, codecs=codecs)


def _without_files(kind: Kind, folders: list[Path], target_size: int, draft_size: int) -> Connection:
    if kind == "same":
        return Connection(kind)
    if not folders:
        return Connection("none", reason="neither has a tokenizer, and the sizes differ")
    codec = Codec.read(folders[0])
    num_extra = [size - len(codec.tokens) for size in (target_size, draft_size)]
    if all(0 <= ids < PADDING for ids in num_extra):
        return Connection(kind)
    return Connection(
        "none",
        reason=f"the sizes differ by more than padding of the {len(codec.tokens):,} tokens of {folders[0]}, and only "
        "one of the two has a tokenizer",
    )


def _conflicts(target: Codec, draft: Codec) -> bool:
    """Return whether some id has different meanings for target and draft."""
    names = [{id: name.encode() for name, id in codec.controls.items()} for codec in (target, draft)]
    for id, tokens in enumerate(zip(target.tokens, draft.tokens, strict=False)):
        meanings = [data if data is not None else name.get(id) for data, name in zip(tokens, names, strict=True)]
        if None not in meanings and meanings[0] != meanings[1]:
            return True
    return False


def intersection(target: Codec, draft: Codec, target_size: int, draft_size: int) -> np.ndarray:
    """Return the draft's id of each of the target's tokens, or -1: int64 [target_size]."""
    draft_ids = draft.ids_of_bytes()
    ids = np.full(target_size, -1, dtype=np.int64)
    for data, id in target.ids_of_bytes().items():
        if id < target_size:
            ids[id] = draft_ids.get(data, -1)
    for name, id in target.controls.items():
        if id < target_size:
            ids[id] = draft.controls.get(name, -1)
    ids[ids >= draft_size] = -1
    return ids


def share_of_tokens(target: Codec, draft: Codec) -> float:
    """Return the fraction of the draft's tokens of `SAMPLE` that the target also has."""
    draft_tokens = [draft.tokens[id] for id in draft.encode(SAMPLE)]
    target_ids = target.ids_of_bytes()
    return sum(data in target_ids for data in draft_tokens) / max(len(draft_tokens), 1)
