"""Collection of text from installed Python packages, split by whole packages into training and held-out text."""

import ast
import hashlib
import itertools
import json
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from treespec.utils.files import atomic_write_text, replacing

END_OF_TEXT = "<|endoftext|>"
KINDS = ("code", "prose", "data")
SHARES = {"code": 0.4, "prose": 0.3, "data": 0.3}  # shares of the training windows, normalised over the kinds in use
SUFFIXES = {
    "code": (".py",),
    "prose": (".md", ".rst", ".txt"),
    "data": (".json", ".toml", ".yaml", ".yml", ".csv", ".cfg", ".ini"),
}
# Whole packages installed with torch, transformers and typer, so that anyone can reproduce the evaluation.
HELD_OUT = ("networkx", "jinja2", "rich", "stdlib.asyncio", "stdlib.email")
PERMISSIVE = re.compile(r"\b(MIT|BSD|0BSD|Apache|ISC|PSF|Python|CNRI-Python|Zlib|CC0|Unlicense|HPND)\b", re.IGNORECASE)
COPYLEFT = re.compile(r"\b(A?L?GPL|MPL|EPL|CDDL|GNU|Mozilla)", re.IGNORECASE)
GENERATED = re.compile(r"auto-?\s?(matically)?[ -]?generated|generated (by|from|file)|do not edit", re.IGNORECASE)
# Vendored packages (which could contain a held-out one), fixtures, and lists of licences and file hashes.
SKIPPED_FOLDERS = frozenset(
    {"_vendor", "vendor", "_vendored", "third_party", "site-packages", "__pycache__", "licenses"}
)
SKIPPED_STEMS = ("license", "licence", "copying", "notice", "authors", "record", "top_level", "entry_points")
MAX_FILE_BYTES = 256_000


@dataclass(frozen=True)
class Document:
    """Text of one file. `package` is a distribution's name, `stdlib.<module>`, or a folder below a text root."""

    package: str
    path: str
    kind: str
    license: str
    text: str

    def order(self, seed: int) -> str:
        """Return a key that shuffles documents."""
        return hashlib.sha1(f"{seed}:{self.package}:{self.path}".encode()).hexdigest()


def syntax_tree(document: Document) -> ast.Module:
    """Parse a document's Python source; return an empty module for invalid source."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.parse(document.text)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def kind_of(path: Path) -> str | None:
    """Return the kind of text in a file, judged by its name; None for other files."""
    if path.stem.lower().startswith(SKIPPED_STEMS):
        return None
    if path.name == "METADATA":
        return "prose"
    return next((kind for kind, suffixes in SUFFIXES.items() if path.suffix in suffixes), None)


def read_text(path: Path) -> str | None:
    """Read a file's text with unified line ends; None if it is huge, tiny, generated, minified or not UTF-8."""
    try:
        if not 200 <= path.stat().st_size <= MAX_FILE_BYTES:
            return None
        text = path.read_text("utf-8").replace("\r\n", "\n")
    except (UnicodeDecodeError, OSError):
        return None
    if path.name == "METADATA":  # the long description only
        text = text.partition("\n\n")[2]
    lines = text.count("\n") + 1
    if len(text) < 200 or END_OF_TEXT in text or "\0" in text or len(text) / lines > 160:
        return None
    return None if GENERATED.search(text[:1000]) else text


def license_of(dist: metadata.Distribution) -> str:
    """Return the licence stated in a distribution's metadata: the expression, the field, or else the classifiers."""
    meta = dist.metadata
    license_text = meta.get("License-Expression") or meta.get("License")
    if not license_text or len(license_text) > 200:
        license_text = "; ".join(
            c.split("::")[-1].strip() for c in meta.get_all("Classifier") or [] if c.startswith("License")
        )
    return license_text or "unknown"


def is_permissive(license: str) -> bool:
    """Return whether a stated licence is permissive throughout. `MPL-2.0 AND MIT` is not."""
    return bool(PERMISSIVE.search(license)) and not COPYLEFT.search(license)


def _document(package: str, path: Path, name: str, license: str) -> Document | None:
    kind = kind_of(path)
    if kind is None or SKIPPED_FOLDERS & set(Path(name).parts[:-1]):
        return None
    text = read_text(path)
    return None if text is None else Document(package, name, kind, license, text)


STDLIB = Path(sysconfig.get_paths()["stdlib"])


def installed_documents(
    stdlib: Path = STDLIB, distributions: Iterable[metadata.Distribution] | None = None
) -> Iterator[Document]:
    """Yield documents of the standard library, without its tests, and of permissively licensed distributions."""
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib)
        if relative.parts[0] not in ("site-packages", "dist-packages", "test", "idlelib", "lib2to3"):
            package = "stdlib." + relative.parts[0].removesuffix(".py")
            if document := _document(package, path, str(relative), "PSF-2.0"):
                yield document
    for dist in sorted(distributions or metadata.distributions(), key=lambda d: d.metadata["Name"].lower()):
        license = license_of(dist)
        if not is_permissive(license):
            continue
        for file in sorted(dist.files or [], key=str):
            if ".." not in file.parts:
                path = Path(str(dist.locate_file(file)))
                if document := _document(dist.metadata["Name"].lower(), path, str(file), license):
                    yield document


def folder_documents(roots: Sequence[Path]) -> Iterator[Document]:
    """Yield the documents below given folders. The first folder below a root is the package."""
    for root in roots:
        for path in sorted(p for p in root.rglob("*") if p.is_file()):
            relative = path.relative_to(root)
            if document := _document(relative.parts[0], path, str(relative), "as given"):
                yield document


def select(
    documents: Iterable[Document], kinds: Sequence[str], held_out: Sequence[str], package_cap: int, seed: int
) -> tuple[list[Document], list[Document]]:
    """Split documents by package into (training, held-out), without duplicates, limited per package and kind.

    Args:
        documents: candidates; of duplicate texts one is kept, in the held-out half if any occurs there.
        kinds: kinds to keep.
        held_out: packages (or their sub-modules `package.x`) excluded from the training text.
        package_cap: maximum characters per package and kind, so that no project dominates.
        seed: seed of the documents' order.
    """
    documents = [document for document in documents if document.kind in kinds]

    def is_held_out(document: Document) -> bool:
        return any(document.package == name or document.package.startswith(name + ".") for name in held_out)

    seen, num_used = set[str](), Counter[tuple[str, str]]()
    halves: tuple[list[Document], list[Document]] = ([], [])
    for document in sorted(documents, key=lambda d: (not is_held_out(d), d.order(seed))):
        digest = hashlib.sha1(document.text.encode()).hexdigest()
        key = (document.package.split(".")[0] if is_held_out(document) else document.package, document.kind)
        if digest in seen or num_used[key] + len(document.text) > package_cap:
            continue
        seen.add(digest)
        num_used[key] += len(document.text)
        halves[is_held_out(document)].append(document)
    return halves


def write_lines(path: Path, entries: Iterable[dict[str, str]]) -> None:
    atomic_write_text(path, "".join(json.dumps(entry) + "\n" for entry in entries))


def read_documents(path: Path) -> Iterator[Document]:
    """Read documents written as lines of JSON."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield Document(**json.loads(line))


def summary(documents: Iterable[Document]) -> dict[str, dict[str, object]]:
    """Return the licence and the characters per kind of each package. Standard library modules are counted together."""
    table: dict[str, dict] = {}
    for document in documents:
        entry = table.setdefault(document.package.split(".")[0], {"license": document.license, "characters": {}})
        entry["characters"][document.kind] = entry["characters"].get(document.kind, 0) + len(document.text)
    return table


def tokenize(documents: Iterable[Document], tokenizer: Tokenizer, path: Path) -> int:
    """Write the documents' tokens as uint16, each preceded by the end-of-text token (id 0).

    Returns the number of tokens.
    """
    count, texts = 0, (document.text for document in documents)
    with replacing(path) as temporary, temporary.open("wb") as file:
        while batch := list(itertools.islice(texts, 256)):
            for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                count += file.write(np.array([0, *encoding.ids], np.uint16)) // 2
    return count


class Stream:
    def __init__(self, path: Path) -> None:
        self.tokens = np.memmap(path, np.uint16, "r") if path.stat().st_size else np.zeros(0, np.uint16)

    def windows(self, starts: Iterable[int], length: int) -> np.ndarray:
        """Cut windows at the given positions. Returns int64 [len(starts), length]."""
        return np.stack([self.tokens[start : start + length] for start in starts]).astype(np.int64)

    def evenly_spaced(self, count: int, length: int) -> np.ndarray:
        """Return evaluation windows spread over the whole stream, int64 [<= count, length]."""
        count = min(count, len(self.tokens) // length)
        return self.windows(np.linspace(0, len(self.tokens) - length, count).astype(int), length)


class Mixture:
    """Random windows of several streams, sampled with given shares.

    The windows of a step depend only on (seed, step), so a resumed run needs no stored data position.
    """

    def __init__(self, streams: dict[str, Stream], shares: dict[str, float], seed: int) -> None:
        self.streams = list(streams.values())
        self.shares = np.array([shares[kind] for kind in streams])
        self.shares /= self.shares.sum()
        self.seed = seed

    def windows(self, step: int, count: int, length: int) -> np.ndarray:
        """Cut random windows, int64 [count, length]. Raises ValueError if a stream is shorter than a window."""
        rng = np.random.default_rng((self.seed, step))
        rows = []
        for choice in rng.choice(len(self.streams), count, p=self.shares):
            tokens = self.streams[choice].tokens
            if len(tokens) <= length:
                raise ValueError(f"a kind of text has {len(tokens)} tokens; windows of {length} need more")
            rows.append(self.streams[choice].windows([rng.integers(0, len(tokens) - length)], length))
        return np.concatenate(rows)
