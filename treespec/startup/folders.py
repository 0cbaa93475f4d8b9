"""Locate the models of `LLM(model, drafts)`: folders, hub ids, embedded names and models in memory."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from treespec.drafters.base import Drafter, check_drafter, check_names
from treespec.errors import ConfigError, ModelError
from treespec_weights import HubError, default_folder, default_names, fetch, is_hub_id


def resolve_model(model: str | os.PathLike[str] | None) -> Path:
    """Return the path of a model: the embedded target, a folder or GGUF file, or a hub id (cached or downloaded)."""
    if model is None:
        return default_folder("target")
    folder = Path(os.path.expanduser(model))  # leaves "~nobody" unchanged
    if folder.exists() or "/" not in str(model) or not is_hub_id(str(model)) or folder.suffix.lower() == ".gguf":
        return folder  # the loader reports a missing path
    try:
        return fetch(str(model))
    except HubError as error:
        raise ModelError(f"{str(model)!r} is no folder here, and {error}") from error


def resolve_drafts(
    model: object, drafts: Sequence[Any] | None
) -> tuple[list[tuple[str, Path | nn.Module]], list[Drafter]]:
    """Split `drafts` into draft models with unique names and `Drafter` objects."""
    if isinstance(drafts, str | os.PathLike):
        raise ConfigError(f"drafts={drafts!r}; valid: a list, such as [{str(drafts)!r}]")
    if drafts is not None and not isinstance(drafts, Sequence):
        raise ConfigError(f"drafts={drafts!r}; valid: None, or a list of folders, hub ids, models or Drafter objects")
    if drafts is None:
        names = [name for name in default_names() if name.startswith("ssm-")] if model is None else []
        return [(name, default_folder(name)) for name in names], []
    places: list[tuple[str, Path | nn.Module]] = []
    objects: list[Drafter] = []

    def add(name: str, place: Path | nn.Module) -> None:
        taken = sum(1 for known, _ in places if known == name or known.startswith(f"{name}#"))
        places.append((name if not taken else f"{name}#{taken + 1}", place))

    for draft in drafts:
        if isinstance(draft, str | os.PathLike):
            folder = _resolve_draft(draft)
            add(folder.resolve().name, folder)
        elif isinstance(draft, nn.Module):
            add(type(draft).__name__, draft)
        else:
            check_drafter(draft)
            objects.append(draft)
    check_names(objects, [name for name, _ in places])
    return places, objects


def _resolve_draft(draft: str | os.PathLike[str]) -> Path:
    """Return the folder of a draft: an embedded SSM by name, otherwise as `resolve_model`."""
    name = os.fspath(draft)
    if not Path(name).exists():
        if name in default_names():
            return default_folder(name)
        if re.fullmatch(r"ssm[-_ ]?\d*", name, re.IGNORECASE):
            valid = [repr(each) for each in default_names() if each.startswith("ssm-")]
            raise FileNotFoundError(
                f"no embedded draft {name!r}; valid: {', '.join(valid) or 'none, none is installed'}"
            )
    return resolve_model(draft)


def resolve_folders(model: object, drafts: Sequence[Any] | None) -> list[tuple[str, Path]]:
    """Return the draft models of `resolve_drafts` that are on disk."""
    return [(name, place) for name, place in resolve_drafts(model, drafts)[0] if isinstance(place, Path)]
