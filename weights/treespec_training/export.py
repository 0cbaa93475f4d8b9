"""Export of the trained models as Hugging Face folders with tokenizer and model card, plus prompts and report."""

import copy
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from treespec.utils.files import atomic_write_text, write_json
from treespec_training.shapes import MAX_LENGTH
from treespec_training.train_tokenizer import as_pretrained

CARD = """---
license: apache-2.0
language: [en, code]
library_name: transformers
pipeline_tag: text-generation
tags: [speculative-decoding]
---
# treespec default models: {name}

{purpose}

A small language model trained from scratch by `weights/train_default.py` of treespec, so that speculative decoding can
be tried and tested offline. It continues text of the kinds in its training data; it does not answer questions and has
no factual knowledge. `report.json`, beside the model folders, holds the settings and all figures of this build.

## Text and licences

The training text was read from installed packages whose metadata states a permissive licence. Whole packages were
held out: {held_out}. The text consists of Python source; prose (manuals, and docstrings rendered as
pages); and structured data (data files, and the source's signatures, constants and messages rendered as JSON, YAML,
TOML, tables and logs). The text itself is not part of this folder. Packages by licence:

{licenses}

The weights are published under treespec's own licence.
"""
PURPOSES = {
    "target": "The target model, whose output speculative decoding reproduces.",
    "draft": "A draft model (SSM) that predicts the tokens of the target in the neighbouring folder; it was trained by "
    "`treespec train`, and mostly on one kind of text.",
}


def model_card(name: str, report: dict) -> str:
    """Return the README.md of a model folder."""
    by_license: dict[str, list[str]] = {}
    for package, facts in report["packages"].items():
        by_license.setdefault(facts["license"], []).append(package)
    return CARD.format(
        name=name,
        purpose=PURPOSES.get(name, PURPOSES["draft"]),
        held_out=", ".join(report["settings"]["held_out"]),
        licenses="\n".join(f"- {license}: {', '.join(sorted(names))}" for license, names in sorted(by_license.items())),
    )


def rounded(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return a float32 copy with weights rounded to bfloat16, as in the exported file."""
    return copy.deepcopy(model).to(torch.bfloat16).to(torch.float32).eval()


def write_folder(folder: Path, model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    """Write a model in bfloat16 with its tokenizer files."""
    copy.deepcopy(model).to(torch.bfloat16).cpu().save_pretrained(folder)
    as_pretrained(tokenizer, MAX_LENGTH).save_pretrained(folder)


def export(out: Path, folders: dict[str, Path], report: dict, prompts: Sequence[dict]) -> None:
    """Copy all folders next to `out`, then swap them in one by one, so that no folder is ever partially written.

    Args:
        out: `default`; created if missing. Other files in it are kept.
        folders: name -> folder of a model.
        report: document written as `report.json`, also the source of the model cards.
        prompts: document written as `heldout_prompts.json`.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".export-") as temporary:
        staging = Path(temporary)
        for name, folder in folders.items():
            shutil.copytree(folder, staging / name)
            atomic_write_text(staging / name / "README.md", model_card(name, report))
            for file in (staging / name).iterdir():
                file.chmod(0o644)  # safetensors makes the file readable only for its owner
        for name in folders:
            if (out / name).exists():
                (out / name).rename(staging / f"{name}.old")
            (staging / name).rename(out / name)
    write_json(out / "heldout_prompts.json", list(prompts))
    write_json(out / "report.json", report)
