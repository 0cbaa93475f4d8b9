"""Tuned kernel configurations: one file per device model, written by `treespec autotune` and read at startup.

`tuned/<device>.json` is in this package if its folder is writable, else in the user's cache folder. Files are named by
the device rather than its architecture, which an H100 and an H200 share. Each entry records the versions that it was
measured with, and stale entries are skipped. The versions of torch and the driver are informational.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

logger = logging.getLogger("treespec")

ROOT = Path(__file__).parents[1]
FORMAT = "treespec tuned kernels 1"
DECIDING = ("gpu", "triton", "source")  # an entry is stale if one of these differs; for triton, major and minor

ConfigT = TypeVar("ConfigT")
Key = Mapping[str, "int | str | bool | torch.dtype"]


class TunedFileError(ValueError):
    """Raised if an existing file is not a tuned file of the device, because autotune must not overwrite it."""


@dataclass(frozen=True)
class TunedEntry:
    """Best configuration of an op for one shape.

    Args:
        op, key: the op and its problem, such as "row_linear" and dtype, out_features, ...
        config: fields of the op's configuration.
        microseconds, default_microseconds: weighted mean over `loads`, of the best and the default configuration.
        loads: microseconds, default_microseconds and weight of each timed workload, by label.
        versions: `versions_of` the device and op when measured.
        measured: time of the measurement, ISO 8601.
    """

    op: str
    key: dict[str, Any]
    config: dict[str, Any]
    microseconds: float
    default_microseconds: float
    loads: dict[str, dict[str, float]]
    versions: dict[str, str]
    measured: str

    @property
    def label(self) -> str:
        return label_of(self.op, self.key)

    def stale(self, versions: Mapping[str, str]) -> list[str]:
        """Return the versions that differ now, as "triton 3.8.0, now 3.9.0"; empty for a valid entry."""
        return [
            f"{name} {self.versions.get(name)}, now {versions.get(name)}"
            for name in DECIDING
            if _comparable(name, self.versions.get(name)) != _comparable(name, versions.get(name))
        ]


def label_of(op: str, key: Key) -> str:
    """Return an op and its key as text: "row_linear bfloat16, groups 1, in_features 4096, ..."."""
    values = dict(sorted(normalised(key).items()))
    parts = [str(values.pop("dtype"))] if "dtype" in values else []
    return f"{op} " + ", ".join([*parts, *(f"{name} {value}" for name, value in values.items())])


def normalised(key: Key) -> dict[str, Any]:
    """Return a key as stored in JSON: dtypes by name ("bfloat16"), booleans as 0 and 1."""
    return {
        name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype | str) else int(value)
        for name, value in key.items()
    }


class KernelConfigs:
    """Kernel configurations of an engine: tuned ones from files, otherwise defaults.

    Attributes:
        files: files with valid entries for this device, the user's first.
        file: path of the first file, or None.
        tuned: labels for which `get` returned a tuned configuration, in order.
        fallbacks: labels for which `get` returned the default.
        stale: labels of stale entries, with the reason.
    """

    def __init__(self, entries: Sequence[TunedEntry] = (), files: Sequence[Path] = (), stale: Sequence[str] = ()):
        self.files = tuple(files)
        self.file = str(files[0]) if files else None
        self.tuned: list[str] = []
        self.fallbacks: list[str] = []
        self.stale = list(stale)
        self._entries = {_identity(entry.op, entry.key): entry for entry in entries}

    @classmethod
    def load(
        cls, device: torch.device | str, *, name: str | None = None, folders: Sequence[Path] | None = None
    ) -> KernelConfigs:
        """Load the entries for a device. Unreadable files are skipped with a warning; `describe` lists stale entries.

        Args:
            device: where the kernels run; a CPU has no tuned kernels.
            name: name of the device; None for torch's.
            folders: folders to search instead of the user's cache folder and this package. Of several entries for a
                key, the latest is used, and of equally old ones that of the earlier folder.
        """
        if name is None:
            if torch.device(device).type == "cpu":
                return cls()
            name = torch.cuda.get_device_name(device)
        chosen: dict[Any, TunedEntry] = {}
        files, stale = [], []
        for folder in folders or (user_folder(), package_folder()):
            path = folder / f"{slug(name)}.json"
            found = read_entries(path, name)
            has_valid = False
            for entry in found or ():
                reasons = entry.stale(versions_of(name, entry.op))
                if reasons:
                    stale.append(f"{entry.label} ({'; '.join(reasons)})")
                    continue
                has_valid, identity = True, _identity(entry.op, entry.key)
                if identity not in chosen or chosen[identity].measured < entry.measured:
                    chosen[identity] = entry
            if has_valid:
                files.append(path)
        return cls(list(chosen.values()), files, stale)

    def get(self, op: str, key: Key, default: ConfigT) -> ConfigT:
        """Return the tuned configuration of an op for a key, or else record a fallback and return `default`."""
        label, entry = label_of(op, key), self._entries.get(_identity(op, key))
        if entry is not None:
            try:
                config = config_of(entry.config, default)
            except (TypeError, ValueError) as error:
                logger.warning("%s: configuration %s is not valid (%s); using the default", label, entry.config, error)
                del self._entries[_identity(op, key)]
            else:
                if label not in self.tuned:
                    self.tuned.append(label)
                return config
        if label not in self.fallbacks:
            self.fallbacks.append(label)
        return default

    def describe(self) -> str:
        """Return a log line with the number of tuned shapes, their files, the fallbacks, and the stale entries."""
        total = len(self.tuned) + len(self.fallbacks)
        parts = [f"{len(self.tuned)} of {total} kernel shapes tuned"]
        if self.files:
            parts[0] += f" ({', '.join(map(str, self.files))})"
        if self.fallbacks:
            parts.append(f"defaults for {'; '.join(self.fallbacks)}")
        if self.stale:
            parts.append(f"stale: {'; '.join(self.stale)}")
        return ". ".join(parts)


def config_of(values: Mapping[str, Any], like: ConfigT) -> ConfigT:
    """Return a copy of the configuration `like` with the fields in `values` replaced.

    Raises:
        TypeError, ValueError: a field is unknown, or a value invalid.
    """
    given = dict(values)
    for each in dataclasses.fields(like):  # type: ignore[arg-type]
        part = getattr(like, each.name)
        if dataclasses.is_dataclass(part) and isinstance(given.get(each.name), dict):
            given[each.name] = config_of(given[each.name], part)
    return dataclasses.replace(like, **given)  # type: ignore[type-var]


def config_fields(config: Any) -> dict[str, Any] | None:
    """Return the fields of a configuration for JSON; None for an op without configurations."""
    return None if config is None else dataclasses.asdict(config)


def versions_of(device_name: str, op: str) -> dict[str, str]:
    """Return the versions that measurements of an op depend on."""
    return {
        "gpu": device_name,
        "triton": _triton_version(),
        "source": source_hash(op),
        "torch": torch.__version__,
        "driver": _driver_version(),
    }


@cache
def kernel_modules() -> dict[str, tuple[str, ...]]:
    """Return the kernel modules of every op that has Triton kernels, by op name.

    Those of "programmatic_launch" are the modules whose kernels wait for their predecessors.
    """
    found, waiting = {}, []
    for file in sorted(ROOT.glob("*/*_kernels.py"), key=lambda file: file.name):
        name = f"{ROOT.name}.{file.parent.name}.{file.stem}"
        found[file.stem.removesuffix("_kernels")] = (name,)
        if "wait_for_predecessors(PDL)" in file.read_text(encoding="utf-8"):
            waiting.append(name)
    return found | {"programmatic_launch": tuple(waiting)}


def module_file(name: str) -> Path:
    """Return the path of the source file of a module of this package."""
    return ROOT.joinpath(*name.removeprefix(f"{ROOT.name}.").split(".")).with_suffix(".py")


def source_hash(op: str) -> str:
    """Return a hash of the op's kernel modules and the package's modules that they import; "none" without kernels."""
    names = list(kernel_modules().get(op, ()))
    if not names:
        return "none"
    digest = hashlib.sha256()
    for name in names:
        text = module_file(name).read_text(encoding="utf-8")
        digest.update(text.encode())
        for package, member in re.findall(
            r"^from (treespec_kernels\.[\w.]+) import \(?(\w*)", text, flags=re.MULTILINE
        ):
            imported = package if module_file(package).exists() else f"{package}.{member}"
            names += [imported] if imported not in names else []
    return digest.hexdigest()[:16]


def slug(name: str) -> str:
    """Return a device's name as a file name: "NVIDIA H200" becomes "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def package_folder() -> Path:
    return ROOT / "tuned"


def user_folder() -> Path:
    """Return $XDG_CACHE_HOME/treespec/tuned or ~/.cache/treespec/tuned."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treespec" / "tuned"


def writable_folder() -> Path:
    """Return the folder for new tuned files: this package's if it is writable, else the user's."""
    folder = package_folder()
    nearest = folder if folder.exists() else folder.parent
    return folder if os.access(nearest, os.W_OK) else user_folder()


def read_entries(path: Path, device_name: str) -> list[TunedEntry] | None:
    """Return the valid entries of a file.

    None means that the file is missing, or, with a warning, that it is not a tuned file of this device.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("skipping %s: it cannot be read (%s: %s)", path, type(error).__name__, error)
        return None
    match document:
        case {"format": str(found), "device": str(device), "entries": list(entries)}:
            if (found, device) == (FORMAT, device_name):
                return [entry for entry in map(_entry, entries) if entry is not None]
            logger.warning("skipping %s: it is %r of %r, not %r of %r", path, found, device, FORMAT, device_name)
        case _:
            logger.warning("skipping %s: it is not %r", path, FORMAT)
    return None


def check_writable(path: Path, device_name: str) -> None:
    """Raise TunedFileError if `path` exists and is not a tuned file of this device."""
    if path.exists() and read_entries(path, device_name) is None:
        raise TunedFileError(
            f"{path} exists and is not a tuned file of {device_name}; move it away, or replace it with --force"
        )


def save_entries(path: Path, device_name: str, entries: Iterable[TunedEntry], force: bool = False) -> None:
    """Merge entries into a file atomically, replacing existing entries of the same op and key.

    Raises:
        TunedFileError: the file is not a tuned file of this device, and `force` is not set.
    """
    if not force:
        check_writable(path, device_name)
    kept = {_identity(entry.op, entry.key): entry for entry in read_entries(path, device_name) or ()}
    kept |= {_identity(entry.op, entry.key): entry for entry in entries}
    path.parent.mkdir(parents=True, exist_ok=True)
    listed = sorted(kept.values(), key=lambda entry: (entry.op, json.dumps(entry.key, sort_keys=True)))
    lines = ",\n".join(f"  {json.dumps(dataclasses.asdict(entry))}" for entry in listed)
    head = f' "format": {json.dumps(FORMAT)},\n "device": {json.dumps(device_name)},\n'
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_text(f'{{\n{head} "entries": [\n{lines}\n ]\n}}\n', encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _entry(raw: Any) -> TunedEntry | None:
    match raw:
        case {
            "op": str(op),
            "key": dict(key),
            "config": dict(config),
            "microseconds": int() | float() as best,
            "default_microseconds": int() | float() as default,
            "loads": dict(loads),
            "versions": dict(versions),
            "measured": str(measured),
        }:
            if all(isinstance(value, str | int) for value in key.values()):
                return TunedEntry(op, key, config, best, default, loads, versions, measured)
    return None


def _identity(op: str, key: Key) -> tuple[str, tuple[tuple[str, Any], ...]]:
    return op, tuple(sorted(normalised(key).items()))


def _comparable(name: str, version: str | None) -> str | None:
    return ".".join(version.split(".")[:2]) if name == "triton" and version else version


def _triton_version() -> str:
    for package in ("triton", "pytorch-triton", "pytorch-triton-rocm"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"


def _driver_version() -> str:
    try:
        found = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        found = None
    return found[1] if found else str(torch.version.hip or "none")
