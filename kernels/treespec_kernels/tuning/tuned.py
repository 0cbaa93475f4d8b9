"""Tuned kernel configurations: one file per device model, written by `treespec autotune` and read at startup.

Files are named by the device rather than its architecture, which an H100 and an H200 share. Each entry records the
versions that it was measured with; stale entries are skipped. The version of torch is informational.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

logger = logging.getLogger("treespec")

ROOT = Path(__file__).parents[1]
FORMAT = "treespec tuned kernels 1"
DECIDING = ("gpu", "triton", "source")  # an entry is stale if any of these differ

ConfigT = TypeVar("ConfigT")
Key = Mapping[str, "int | str | bool | torch.dtype"]


@dataclass(frozen=True)
class TunedEntry:
    """Best configuration of an op for one shape."""

    op: str  # the op and its problem, such as "row_linear" and dtype, out_features, ...
    key: dict[str, Any]
    config: dict[str, Any]  # fields of the op's configuration
    microseconds: float  # weighted mean over `loads` for the best and the default configuration
    default_microseconds: float
    # microseconds, default_microseconds, share_of_copy and weight of each timed case, by its load
    loads: dict[str, dict[str, float]]
    versions: dict[str, str]  # `versions_of` the device and op when measured
    measured: str  # time of the measurement, ISO 8601

    @property
    def label(self) -> str:
        return label_of(self.op, self.key)

    def has_same_times(self, other: Self) -> bool:
        """Return whether both entries have equal times and versions, that is, the same measurements."""
        names = "microseconds", "default_microseconds", "versions"
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def stale(self, versions: Mapping[str, str]) -> list[str]:
        """Return the outdated versions, such as "triton 3.8, now 3.9"; empty for a valid entry."""
        pairs = [(name, self.versions.get(name), versions[name]) for name in DECIDING]
        return [f"{name} {before}, now {now}" for name, before, now in pairs if before != now]


def label_of(op: str, key: Key) -> str:
    """Return an op and its key as text: "row_linear bfloat16, groups 1, in_features 4096, ..."."""
    values = {
        name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype | str) else int(value)
        for name, value in sorted(key.items())
    }
    words = [str(values.pop("dtype"))] if "dtype" in values else []
    return f"{op} " + ", ".join([*words, *(f"{name} {value}" for name, value in values.items())])


class KernelConfigs:
    """Kernel configurations of an engine: tuned ones from a file, otherwise defaults."""

    def __init__(self, entries: Iterable[TunedEntry] = (), file: Path | None = None, stale: Sequence[str] = ()):
        self.file = str(file) if file else None
        self.tuned: list[str] = []  # labels for which `get` returned a tuned configuration, in order
        self.fallbacks: list[str] = []  # labels for which `get` returned the default
        self.stale = list(stale)  # labels of stale entries, with the reason
        self._entries = {entry.label: entry for entry in entries}

    @classmethod
    def load(cls, device: torch.device | str, *, name: str | None = None, folder: Path | None = None) -> Self:
        """Load the entries of a device's file, which is skipped with a warning if it is unreadable."""
        if name is None:
            if torch.device(device).type == "cpu":
                return cls()
            name = torch.cuda.get_device_name(device)
        path, valid, stale = tuned_file(name, folder), [], []
        for entry in read_entries(path, name):
            if reasons := entry.stale(versions_of(name, entry.op)):
                stale.append(f"{entry.label} ({'; '.join(reasons)})")
            else:
                valid.append(entry)
        return cls(valid, path if valid else None, stale)

    def get(self, op: str, key: Key, default: ConfigT) -> ConfigT:
        """Return the tuned configuration of an op for a key; otherwise record a fallback and return `default`."""
        label, config = label_of(op, key), default
        if entry := self._entries.get(label):
            try:
                config = config_of(entry.config, default)
            except (TypeError, ValueError) as error:
                logger.warning("%s: configuration %s is not valid (%s); using the default", label, entry.config, error)
                del self._entries[label]
        labels = self.tuned if label in self._entries else self.fallbacks
        if label not in labels:
            labels.append(label)
        return config

    def describe(self) -> str:
        """Return a log line with the number of tuned shapes, their file, the fallbacks, and the stale entries."""
        total = len(self.tuned) + len(self.fallbacks)
        sentences = [f"{len(self.tuned)} of {total} kernel shapes tuned" + (f" ({self.file})" if self.file else "")]
        if self.fallbacks:
            sentences.append(f"defaults for {'; '.join(self.fallbacks)}")
        if self.stale:
            sentences.append(f"stale: {'; '.join(self.stale)}")
        return ". ".join(sentences)


def config_of(values: Mapping[str, Any], like: ConfigT) -> ConfigT:
    """Return a copy of the configuration `like` with the fields in `values` replaced."""
    changes = dict(values)
    for field in dataclasses.fields(like):  # type: ignore[arg-type]
        current = getattr(like, field.name)
        if dataclasses.is_dataclass(current) and isinstance(changes.get(field.name), dict):
            changes[field.name] = config_of(changes[field.name], current)
    return dataclasses.replace(like, **changes)  # type: ignore[type-var]


def versions_of(device_name: str, op: str) -> dict[str, str]:
    """Return the versions that measurements of an op depend on (major and minor for Triton)."""
    triton = "none"
    for package in ("pytorch-triton-rocm", "pytorch-triton", "triton"):
        with suppress(importlib.metadata.PackageNotFoundError):
            triton = ".".join(importlib.metadata.version(package).split(".")[:2])
    return {"gpu": device_name, "triton": triton, "source": source_hash(op), "torch": torch.__version__}


@cache
def kernel_files(root: Path = ROOT) -> dict[str, tuple[Path, ...]]:
    """Return the files with the kernels of every op that has Triton kernels, by op name, in the package's folder.

    The files of "programmatic_launch" are those with kernels that wait for their predecessors.
    """
    files = {file.stem.removesuffix("_kernels"): (file,) for file in sorted(root.glob("*/*_kernels.py"))}
    waiting = [file for (file,) in files.values() if "wait_for_predecessors(PDL)" in file.read_text(encoding="utf-8")]
    return files | {"programmatic_launch": tuple(waiting)}


def source_hash(op: str, root: Path = ROOT) -> str:
    """Return a hash of the files with the op's kernels and the package's modules that they import."""
    files, digest = list(kernel_files(root).get(op, ())), hashlib.sha256()
    for file in files:  # the list grows
        text = file.read_text(encoding="utf-8")
        digest.update(text.encode())
        for module, member in re.findall(r"^from treespec_kernels\.([\w.]+) import \(?(\w*)", text, flags=re.MULTILINE):
            path = root.joinpath(*module.split("."))
            imported = path / f"{member}.py" if path.is_dir() else path.with_suffix(".py")
            files += [imported] if imported not in files else []
    return digest.hexdigest()[:16]


def slug(name: str) -> str:
    """Return a device's name as a file name: "NVIDIA H200" becomes "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def user_folder() -> Path:
    """Return $XDG_CACHE_HOME/treespec/tuned or ~/.cache/treespec/tuned."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treespec" / "tuned"


def tuned_file(device_name: str, folder: Path | None = None) -> Path:
    """Return the path of a device's file: "NVIDIA H200" has nvidia-h200.json."""
    return (folder or user_folder()) / f"{slug(device_name)}.json"


def read_entries(path: Path, device_name: str | None = None) -> list[TunedEntry]:
    """Return the entries of a file; none, with a warning, if it is not a tuned file of this device."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT or document["device"] != (device_name or document["device"]):
            raise ValueError(f"it is {document['format']!r} of {document['device']!r}")
        return [TunedEntry(**entry) for entry in document["entries"]]
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("skipping %s, which is not a tuned file here: %s: %s", path, type(error).__name__, error)
    return []


def save_entries(path: Path, device_name: str, entries: Iterable[TunedEntry]) -> None:
    """Merge entries into a file atomically, replacing existing entries of the same op and key, or a foreign file."""
    merged = {entry.label: dataclasses.asdict(entry) for entry in (*read_entries(path, device_name), *entries)}
    document = {"format": FORMAT, "device": device_name, "entries": [merged[label] for label in sorted(merged)]}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(document, indent=1), encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
