"""Mistral: Llama with a sliding window, in its first releases."""

from dataclasses import replace

from treespec_weights.families.llama import LLAMA, LLAMA_SIZES

MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    config_keys=LLAMA_SIZES,
    defaults={"tied": False},
    windows=True,
    requires={"layer_types": (None,)},  # one window for all layers; Ministral's layers differ
)
