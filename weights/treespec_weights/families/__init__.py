"""Model families of the native decoder, one declaration each.

To add one, write a `FamilyRules`, list it here, and add a model of odd sizes to
tests/helpers/families.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treespec_weights.errors import Problem, UnsupportedModelError
from treespec_weights.families import llama_like
from treespec_weights.families.experts import GLM4_MOE, GPT_OSS, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from treespec_weights.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA4, GEMMA4_UNIFIED, VAULTGEMMA
from treespec_weights.families.gpt import GPT2, GPT_NEOX, OPT
from treespec_weights.families.lfm2 import LFM2, LFM2_MOE
from treespec_weights.families.llama import LLAMA, MISTRAL, PHI3, QWEN2, QWEN3
from treespec_weights.families.mamba import BAMBA, FALCON_H1, GRANITE_HYBRID, MAMBA2, NEMOTRON_H
from treespec_weights.families.olmo_hybrid import OLMO_HYBRID
from treespec_weights.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from treespec_weights.quant_config import scheme_of
from treespec_weights.rules import FamilyRules

_DECLARED: tuple[FamilyRules, ...]
_DECLARED = (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_5, LFM2, GEMMA, GEMMA2, GEMMA3, VAULTGEMMA, PHI3, GPT_NEOX, OPT, GPT2)
_DECLARED += (MIXTRAL, QWEN2_MOE, QWEN3_MOE, QWEN3_5_MOE, QWEN3_NEXT, LFM2_MOE, OLMOE, GLM4_MOE, GPT_OSS)
_DECLARED += (GRANITE_HYBRID, NEMOTRON_H, BAMBA, FALCON_H1, MAMBA2, OLMO_HYBRID)
_DECLARED += (GEMMA4, GEMMA4_UNIFIED)
_DECLARED += tuple(rules for rules in vars(llama_like).values() if isinstance(rules, FamilyRules))

FAMILIES = {rules.model_type: rules for rules in _DECLARED}


def family_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a parsed config.json with the keys of its family's rules."""
    rules = FAMILIES.get(str(config.get("model_type")))
    return config if rules is None or rules.normalize is None else rules.normalize(config)


def family_of(config: Mapping[str, Any], folder: Path | str = ".") -> FamilyRules:
    """Return the rules for a parsed config.json. Raises UnsupportedModelError."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        message = f"{model_type!r} is not supported; supported: {', '.join(FAMILIES)}"
        raise UnsupportedModelError.of(folder, "config", "model_type", message)
    scheme_of(config, folder)
    rules = FAMILIES[model_type]
    problems = [
        Problem("config", repr(key), f"{config[key]!r} is not supported for {model_type}; supported: {list(values)}")
        for key, values in rules.requires.items()
        if key in config and config[key] not in values
    ]
    problems += [
        Problem("config", repr(key), f"{config[key]!r}, which is not the {other} {config[other]!r}: not supported")
        for key, other in rules.equal_sizes.items()
        if key in config and other in config and config[key] != config[other]
    ]
    if problems:
        raise UnsupportedModelError(folder, problems)
    return rules
