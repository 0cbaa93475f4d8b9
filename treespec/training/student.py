"""Draft models: small models of the target's own family, initialised from its layers and embedding."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from treespec.adapter.source import progress_bars_on_terminals
from treespec.errors import ModelError
from treespec_weights import as_folder, read_config
from treespec_weights.convert import PER_LAYER_LISTS
from treespec_weights.draft_vocabulary import read_draft_vocabulary, write_draft_vocabulary

WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
MULTIPLE = 64  # MLP widths are multiples of this


def student_config(
    target: PreTrainedConfig, num_layers: int, hidden: int | None, rows: int, ends: Sequence[int]
) -> PreTrainedConfig:
    """Return the target's config with fewer layers, a reduced vocabulary and these end tokens."""
    config = copy.deepcopy(target)
    if hidden is not None:
        narrow(config, hidden)
    for name in PER_LAYER_LISTS:
        if isinstance(values := getattr(config, name, None), list):
            setattr(config, name, values[:num_layers])
    config.num_hidden_layers, config.vocab_size = num_layers, rows
    config.eos_token_id, config.bos_token_id, config.pad_token_id = list(ends), None, None
    return config


def narrow(config: PreTrainedConfig, hidden: int) -> None:
    """Set the width of a config; scale MLP width and head counts in proportion, and keep the head size."""
    if hidden >= config.hidden_size:
        raise ModelError(f"hidden={hidden}: the target's width is {config.hidden_size}; choose less, or omit hidden")
    if missing := [name for name in WIDTHS if not isinstance(getattr(config, name, None), int)]:
        raise ModelError(f"hidden={hidden}: a {config.model_type} config has no {missing[0]}; omit hidden")
    ratio = hidden / config.hidden_size
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = max(round(ratio * config.num_key_value_heads), 1)
    config.num_attention_heads = kv_heads * max(round(ratio * config.num_attention_heads / kv_heads), 1)
    config.num_key_value_heads, config.hidden_size = kv_heads, hidden
    config.intermediate_size = max(round(ratio * config.intermediate_size / MULTIPLE), 1) * MULTIPLE


def make_student(target: Any, num_layers: int, hidden: int | None, target_ids: np.ndarray, ends: Sequence[int]) -> Any:
    """Return a student with the target's first layers, final norm and embedding rows, in float32.

    From SmolLM2's layers 0 and 1, training reached a higher agreement in the same time than from 0 and 15, 0 and 29, or
    1 and 20. A student of another width `hidden` has the principal components of the embedding rows, and random layers.
    `target_ids`, int64 [rows]: see `treespec_weights.draft_vocabulary`. Raises ModelError if the target's parameters
    are not those of a decoder with `model.layers`.
    """
    rows = [int(np.searchsorted(target_ids[:-1], token)) for token in ends]
    config = student_config(target.config, num_layers, hidden, len(target_ids), rows)
    student: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    source = target.state_dict()
    embedding = target.get_input_embeddings().weight
    head = target.get_output_embeddings().weight
    token_ids = torch.from_numpy(target_ids[:-1]).to(embedding.device)
    ends_of = {id(student.get_output_embeddings().weight): head, id(student.get_input_embeddings().weight): embedding}
    for name, parameter in student.named_parameters():
        if (rows_of := ends_of.get(id(parameter))) is not None:
            embedding_rows = torch.cat((rows_of[token_ids], rows_of.mean(0, keepdim=True))).float()
            if embedding_rows.shape[1] > parameter.shape[1]:
                exact = embedding_rows.double()
                components = torch.linalg.eigh(exact.T @ exact)[1].flip(1)  # largest first
                embedding_rows = exact @ components[:, : parameter.shape[1]]
        elif hidden is not None:
            continue  # keeps the random initialisation
        elif name in source and source[name].shape == parameter.shape:
            embedding_rows = source[name]
        else:
            raise ModelError(f"cannot train a draft for {target.config.model_type}: the target has no {name}")
        with torch.no_grad():
            parameter.copy_(embedding_rows)
    return student


def open_student(folder: Path, target_ids: np.ndarray, target: Any) -> Any:
    """Open a trained draft of this target with another vocabulary, in float32.

    The rows of unknown tokens are the target's, mapped by the linear map that best fits the rows of known tokens.
    `target_ids`, int64 [rows], includes all tokens of the draft.
    """
    student = open_model(folder, torch.float32)
    draft_ids = read_vocabulary(folder, target.config.vocab_size)
    if np.array_equal(draft_ids, target_ids):
        return student
    known_rows = torch.from_numpy(np.searchsorted(target_ids[:-1], draft_ids[:-1]))
    ends = "get_input_embeddings", "get_output_embeddings"
    trained = [getattr(student, end)().weight.detach().clone() for end in ends]
    student.resize_token_embeddings(len(target_ids))
    for end, rows in zip(ends, trained, strict=True):
        weight = getattr(student, end)().weight
        source = getattr(target, end)().weight.detach()[torch.from_numpy(target_ids[:-1])].float()
        linear_map = torch.linalg.lstsq(source[known_rows], rows[:-1]).solution
        with torch.no_grad():
            weight.copy_(torch.cat((source @ linear_map, rows[-1:])))
            weight[known_rows] = rows[:-1]
    return student


def write_student(model: Any, folder: Path, target_ids: np.ndarray, target_size: int) -> None:
    """Write a student as a folder that `LLM(drafts=[...])` and transformers load, in bfloat16.

    A student that knows all target tokens is written as an ordinary model, without the row for other tokens.
    """
    model = copy.deepcopy(model).to(torch.bfloat16)
    reduced = len(target_ids) <= target_size
    if not reduced:
        model.resize_token_embeddings(target_size)
    with progress_bars_on_terminals():
        model.save_pretrained(folder)
    if reduced:
        write_draft_vocabulary(folder, target_ids, target_size)


def open_model(path: Path, dtype: torch.dtype | None = None, layers: int | None = None) -> Any:
    """Open a folder or GGUF file, or only its first `layers`, with transformers in evaluation mode.

    dtype=None keeps the parameters' dtype, and dequantises a quantised model to bfloat16.
    """
    with as_folder(path, dtype or torch.bfloat16, layers) as folder, progress_bars_on_terminals():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto").eval()


def read_vocabulary(folder: Path, target_size: int) -> np.ndarray:
    """Return the reduced vocabulary of a trained draft, int64 [rows]. Raises ModelError if it has none."""
    target_ids = read_draft_vocabulary(folder, read_config(folder)["vocab_size"], target_size)
    if target_ids is None:
        raise ModelError(f"{folder} has no reduced vocabulary; start from a draft of `treespec train`")
    return target_ids
