"""Locate the models of `LLM(model, drafts)`: folders, hub ids, names of known models and models in memory."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from treespec.adapter.mtp import MTP
from treespec.drafters.base import Drafter, check_drafter, check_names
from treespec.errors import ConfigError, ModelError
from treespec.startup import smollm2
from treespec_weights import HubError, default_folder, default_names, fetch, is_hub_id

EMBEDDED = "embedded"
# The group of SSMs (see `default_names`) of each target that is known by name.
_GROUPS: dict[object, str] = {None: "default", EMBEDDED: "default", smollm2.NAME: smollm2.NAME}


def resolve_model(model: str | os.PathLike[str] | None) -> Path:
    """Return the path of a model: one known by name, a folder or GGUF file, or a hub id (cached or downloaded).

    None and "embedded" are the embedded target, "smollm2" is the installed SmolLM2-135M-Instruct. A name has precedence
    over a folder of the same name in the working directory.

    Raises:
        ModelError: the named model is not installed, or the hub id cannot be fetched.
    """
    if model is None or model == EMBEDDED:
        return default_folder("target")
    if model == smollm2.NAME:
        if (file := smollm2.model_file()) is None:
            raise ModelError(
                f"{smollm2.NAME!r} is {smollm2.TITLE}, which is not installed: {smollm2.install_command()} (a folder "
                f"of this name is './{smollm2.NAME}')"
            )
        return file
    folder = Path(os.path.expanduser(model))  # leaves "~nobody" unchanged
    if folder.exists() or "/" not in str(model) or not is_hub_id(str(model)) or folder.suffix.lower() == ".gguf":
        return folder  # the loader reports a missing path
    try:
        return fetch(str(model))
    except HubError as error:
        raise ModelError(f"{str(model)!r} is no folder here, and {error}") from error


def resolve_drafts(
    model: object, drafts: Sequence[Any] | None
) -> tuple[list[tuple[str, Path | tuple[nn.Module, Any] | str]], list[Drafter]]:
    """Split `drafts` into draft models with unique names, the name `MTP` among them, and `Drafter` objects.

    Models in memory are paired with their tokenizer, or None.
    """
    if isinstance(drafts, str | os.PathLike):
        raise ConfigError(f"drafts={drafts!r}; valid: a list, such as [{str(drafts)!r}]")
    if drafts is not None and not isinstance(drafts, Sequence):
        raise ConfigError(f"drafts={drafts!r}; valid: None, or a list of folders, hub ids, models or Drafter objects")
    group = _GROUPS.get(model)
    if drafts is None:
        return [] if group is None else [(name, default_folder(name, group)) for name in _ssm_names(group)], []
    places: list[tuple[str, Path | tuple[nn.Module, Any] | str]] = []
    objects: list[Drafter] = []

    def add(name: str, place: Path | tuple[nn.Module, Any] | str) -> None:
        taken = sum(1 for known, _ in places if known == name or known.startswith(f"{name}#"))
        places.append((name if not taken else f"{name}#{taken + 1}", place))

    for draft in drafts:
        if draft == MTP:
            if MTP in (place for _, place in places):
                raise ConfigError(f"drafts={list(drafts)!r}: {MTP!r} twice; the target has one MTP layer")
            add(MTP, MTP)
        elif isinstance(draft, str | os.PathLike):
            folder = _resolve_draft(draft, group or "default")
            add(folder.resolve().name, folder)
        elif isinstance(draft, nn.Module):
            add(type(draft).__name__, (draft, None))
        elif isinstance(draft, tuple) and len(draft) == 2 and isinstance(draft[0], nn.Module):
            add(type(draft[0]).__name__, draft)
        else:
            check_drafter(draft)
            objects.append(draft)
    check_names(objects, [name for name, _ in places])
    return places, objects


def _resolve_draft(draft: str | os.PathLike[str], group: str) -> Path:
    """Return the folder of a draft: an SSM of the group by name, otherwise as `resolve_model`."""
    name = os.fspath(draft)
    if not Path(name).exists():
        if name in default_names(group):
            return default_folder(name, group)
        if re.fullmatch(r"ssm[-_ ]?\d*", name, re.IGNORECASE):
            valid = map(repr, _ssm_names(group))
            raise FileNotFoundError(
                f"no embedded draft {name!r}; valid: {', '.join(valid) or 'none, none is installed'}"
            )
    return resolve_model(draft)


def _ssm_names(group: str) -> list[str]:
    return [name for name in default_names(group) if name.startswith("ssm-")]


def resolve_folders(model: object, drafts: Sequence[Any] | None) -> list[tuple[str, Path]]:
    """Return the draft models of `resolve_drafts` that are on disk."""
    return [(name, place) for name, place in resolve_drafts(model, drafts)[0] if isinstance(place, Path)]
