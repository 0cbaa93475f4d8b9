"""Load safetensors checkpoints strictly, convert, grow and inspect them, and locate the embedded models."""

from importlib import resources
from pathlib import Path

from treespec_weights.checkpoint import Checkpoint
from treespec_weights.convert import as_folder, convert_checkpoint
from treespec_weights.documents import read_config
from treespec_weights.errors import (
    CheckpointConfigError,
    CheckpointError,
    HubError,
    OptionError,
    UnsupportedModelError,
    WriteError,
)
from treespec_weights.families import FAMILIES, LLAMA, family_of
from treespec_weights.grow import grow_checkpoint, grown_shape
from treespec_weights.hub import fetch, is_hub_id
from treespec_weights.inspection import compare_draft, inspect_checkpoint
from treespec_weights.load import load_weights
from treespec_weights.rules import FamilyRules, ModelShape, TensorRule
from treespec_weights.sizes import parse_bytes, parse_size
from treespec_weights.timing import time_loading
from treespec_weights.tokenizer import read_vocabulary
from treespec_weights.verify import verify_checkpoint

__all__ = [
    "FAMILIES",
    "LLAMA",
    "Checkpoint",
    "CheckpointConfigError",
    "CheckpointError",
    "FamilyRules",
    "HubError",
    "ModelShape",
    "OptionError",
    "TensorRule",
    "UnsupportedModelError",
    "WriteError",
    "as_folder",
    "compare_draft",
    "convert_checkpoint",
    "default_folder",
    "default_names",
    "family_of",
    "fetch",
    "grow_checkpoint",
    "grown_shape",
    "inspect_checkpoint",
    "is_hub_id",
    "load_weights",
    "parse_bytes",
    "parse_size",
    "read_config",
    "read_vocabulary",
    "time_loading",
    "verify_checkpoint",
]


def default_names(group: str = "default") -> tuple[str, ...]:
    """Return the sorted names of the installed models of a group.

    Groups are `default`, the embedded models `ssm-1` ..., `target`, and `smollm2`, the SSMs of that target.
    """
    return tuple(sorted(path.parent.name for path in models_folder(group).glob("*/config.json")))


def default_folder(name: str, group: str = "default") -> Path:
    """Return the folder of a model of a group: `target` or one of the SSMs. Raises FileNotFoundError."""
    names = default_names(group)
    if name not in names:
        raise FileNotFoundError(
            f"no embedded model {name!r}; there are: {', '.join(names)}"
            if names
            else f"no embedded model {name!r}: the weights are missing; install treespec from a complete checkout"
        )
    return models_folder(group) / name


def models_folder(group: str = "default") -> Path:
    """Return the folder that contains the models of a group, which may not exist."""
    # Resolve symlinks: an editable install links to the package, and `file_inside` rejects files outside the folder.
    return Path(str(resources.files(__name__))).resolve() / group
