"""Draft models: small models of the target's own family, initialised from its layers and embedding."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from treespec.adapter.source import progress_bars_on_terminals
from treespec.errors import ModelError
from treespec_weights import as_folder, read_config
from treespec_weights.draft_vocabulary import read_draft_vocabulary, write_draft_vocabulary

PER_LAYER_LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers")


@dataclass(frozen=True)
class StudentShape:
    """Size of a draft: its number of layers and the rows of its vocabulary."""

    num_layers: int
    rows: int


def student_config(target: PreTrainedConfig, shape: StudentShape, ends: Sequence[int]) -> PreTrainedConfig:
    """Return the target's config with its first layers only and a reduced vocabulary.

    Args:
        target: config of the target.
        shape: of the student.
        ends: rows of the end tokens.
    """
    config = copy.deepcopy(target)
    for name in PER_LAYER_LISTS:
        if isinstance(values := getattr(config, name, None), list):
            setattr(config, name, values[: shape.num_layers])
    config.num_hidden_layers, config.vocab_size = shape.num_layers, shape.rows
    config.eos_token_id, config.bos_token_id, config.pad_token_id = list(ends), None, None
    return config


def make_student(target: Any, shape: StudentShape, target_ids: np.ndarray, ends: Sequence[int]) -> Any:
    """Return a student with the target's first layers, final norm and embedding rows, in float32.

    From SmolLM2's layers 0 and 1, training reached a higher agreement in the same time than from 0 and 15, 0 and 29,
    or 1 and 20.

    Args:
        target: a transformers model.
        shape: of the student.
        target_ids: int64 [shape.rows], see `treespec_weights.draft_vocabulary`.
        ends: the target's end tokens.

    Raises:
        ModelError: the target's parameters are not those of a decoder with `model.layers`.
    """
    rows = [int(np.searchsorted(target_ids[:-1], token)) for token in ends]
    student: Any = AutoModelForCausalLM.from_config(student_config(target.config, shape, rows), dtype=torch.float32)
    source, own = target.state_dict(), student.state_dict()
    embedding = target.get_input_embeddings().weight
    head = target.get_output_embeddings().weight
    known = torch.from_numpy(target_ids[:-1]).to(embedding.device)
    for name, parameter in own.items():
        if parameter.shape[0] == shape.rows and parameter.shape[1:] == embedding.shape[1:] and "layers" not in name:
            rows_of = head if "head" in name else embedding
            new = torch.cat((rows_of[known], rows_of.mean(0, keepdim=True)))
        elif name in source and source[name].shape == parameter.shape:
            new = source[name]
        else:
            raise ModelError(f"cannot train a draft for {target.config.model_type}: the target has no {name}")
        parameter.copy_(new.float())
    return student


def write_student(model: Any, folder: Path, target_ids: np.ndarray, target_size: int) -> None:
    """Write a student as a folder that `LLM(drafts=[...])` and transformers load, in bfloat16."""
    model = copy.deepcopy(model).to(torch.bfloat16)
    with progress_bars_on_terminals():
        model.save_pretrained(folder)
    write_draft_vocabulary(folder, target_ids, target_size)


def open_model(path: Path, dtype: torch.dtype | None = None) -> Any:
    """Open a model with transformers, in evaluation mode.

    Args:
        path: folder or GGUF file.
        dtype: of the parameters; None keeps theirs, and dequantises a quantised model to bfloat16.
    """
    with as_folder(path, dtype or torch.bfloat16) as folder, progress_bars_on_terminals():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto").eval()


def read_vocabulary(folder: Path, target_size: int) -> np.ndarray:
    """Return the reduced vocabulary of a trained draft, int64 [rows].

    Raises:
        ModelError: it has none. CheckpointError: it is of another target's vocabulary.
    """
    target_ids = read_draft_vocabulary(folder, read_config(folder)["vocab_size"], target_size)
    if target_ids is None:
        raise ModelError(f"{folder} has no reduced vocabulary; start from a draft of `treespec train`")
    return target_ids
