"""Download models from the Hugging Face hub."""

import os
import re
from pathlib import Path
from typing import Any

from treespec_weights.checkpoint import Checkpoint
from treespec_weights.documents import read_config
from treespec_weights.errors import CheckpointError, HubError, OptionError

# Safetensors, config, tokenizer and templates; no pickles, no code, no subfolders.
ALLOWED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "LICENSE*")
IGNORED = ("*/*", "consolidated*")
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


def is_hub_id(name: str) -> bool:
    """Return whether a name is a valid hub id: `owner/model`, or a legacy `model`."""
    return bool(_ID.fullmatch(name)) and ".." not in name and "--" not in name


def fetch(hub_id: str, revision: str | None = None, to: Path | str | None = None) -> Path:
    """Return the local folder of a hub model, downloaded unless it is cached, and checked.

    Downloads only config, tokenizer, templates and safetensors, of a branch, tag or commit, into the cache or the
    folder `to`. Cache, token and mirror follow `huggingface_hub` (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE).
    Raises OptionError, HubError (offline, unknown, gated, interrupted, or without safetensors) and CheckpointError.
    """
    if not is_hub_id(hub_id):
        raise OptionError(f"{hub_id!r} is not a hub id; valid are names such as owner/model")
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    location: dict[str, Any] = {"local_dir": os.fspath(to)} if to is not None else {}
    # This includes errors of the HTTP library, such as proxy errors, and the RuntimeError for a missing home folder.
    failures: tuple[type[BaseException], ...] = (*HfHubHTTPError.__bases__, OSError, ValueError, RuntimeError)
    try:
        folder = Path(
            snapshot_download(
                hub_id, revision=revision, allow_patterns=list(ALLOWED), ignore_patterns=list(IGNORED), **location
            )
        )
    except LocalEntryNotFoundError as error:
        offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        raise HubError(
            f"{_named(hub_id, revision)} is not in the cache {constants.HF_HUB_CACHE!r}, and the hub cannot be reached"
            f"{offline}; run `treespec weights fetch {hub_id}` where there is a network, and copy that folder, or "
            "name a local folder with config.json and *.safetensors"
        ) from error
    except failures as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        raise HubError(
            f"the hub did not give {_named(hub_id, revision)} ({type(error).__name__}: {reason}); check the name and "
            "the revision, and HF_TOKEN for a gated model, or name a local folder with config.json and *.safetensors"
        ) from error
    if (folder / "adapter_config.json").exists():  # a LoRA adapter, which `load_lora` checks
        return folder
    try:
        read_config(folder.resolve())
        Checkpoint.open(folder).close()
    except CheckpointError as error:
        if any(folder.glob("*.safetensors")):
            raise
        raise HubError(
            f"{_named(hub_id, revision)} has no complete safetensors (pickles and GGUF files are not fetched): {error}"
        ) from error
    return folder


def _named(hub_id: str, revision: str | None) -> str:
    return repr(hub_id) if revision is None else f"{hub_id!r} at {revision!r}"
