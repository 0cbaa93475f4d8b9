"""Tensors and layers of published draft folders, under a model's names without the prefix `model.`."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec_weights.checkpoint import SINGLE, Checkpoint
from treespec_weights.errors import CheckpointConfigError, CheckpointError, Problem, UnsupportedModelError
from treespec_weights.families import LLAMA, family_of
from treespec_weights.load import cast, expected_tensors
from treespec_weights.rules import FamilyRules, ModelShape

PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")
MEDUSA_SAFETENSORS = "medusa_lm_head.safetensors"
FIRST_LAYER = "layers.0."
_BY_HEAD_ROW = ("lm_head", "head.", "markov_head.markov_w2.")  # name prefixes of vocabulary heads and of a bias
_RENAMED = {  # prefixes of other layouts
    "midlayer.": FIRST_LAYER,
    "transformer.": FIRST_LAYER,
    "fusion_fc.": "fc.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
}


class DraftOptions(NamedTuple):
    """How to load a draft for a target."""

    target_hidden: int  # the target's hidden size
    dtype: torch.dtype | None = None  # None keeps the stored ones, whose tensors stay memory-mapped
    device: torch.device | str = "cpu"
    # int64, ascending, tokens whose rows of a full vocabulary head remain; None for all, and for a head that scores
    # groups of tokens
    kept: np.ndarray | None = None


class OutputForm:
    """Interface of the forms of drafts that read the target's output states."""

    def describe(self, layers: Sequence[int]) -> str:
        """Describe what the draft reads, given the result of `read_layers`."""
        return "reads the target's output states"

    def read_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the target's output after its final norm, numbered as by `HeadForm.read_layers`."""
        return (num_layers + 1,)


def tensor_names(folder: Path) -> Collection[str]:
    """Return the names of a folder's tensors, empty if it has no weights."""
    if (file := _pickle_in(folder)) is not None:
        return _unpickle(file).keys()
    with suppress(CheckpointError), Checkpoint.open(folder) as checkpoint:
        return checkpoint.tensors.keys()
    return ()


def _pickle_in(folder: Path) -> Path | None:
    """Return the folder's file of pickled tensors, or None."""
    return next((folder / name for name in PICKLES if (folder / name).exists()), None)


def _unpickle(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a pickled file, memory-mapped. Code in the file is never run."""
    try:
        stored = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # pickle, zipfile and torch raise many types
        raise CheckpointError.of(file.parent, "file", file.name, f"not a file of tensors: {error}") from error
    return {name: tensor for name, tensor in stored.items() if isinstance(tensor, Tensor)}


def config_error(folder: Path, key: str, message: str) -> CheckpointConfigError:
    """Return the error of an invalid value in a draft's config.json."""
    return CheckpointConfigError.of(folder, "config", key, message)


def layers_of(
    folder: Path, raw: Mapping[str, Any], num_layers: int | None = None
) -> tuple[dict[str, Any], FamilyRules]:
    """Return the config of a draft's layers, in the form of a model's, and their family.

    `num_layers` replaces the config's number, which may be the target's.
    """
    if isinstance(inner := raw.get("transformer_layer_config"), dict):  # speculators
        config = {"dtype": raw.get("dtype") or raw.get("torch_dtype"), **inner}
    else:
        config = {**raw}
    if num_layers is not None:
        config["num_hidden_layers"] = num_layers
    config["tie_word_embeddings"] = False
    rules = family_of(config, folder) if config.get("model_type") else LLAMA
    if rules.model_type not in ("llama", "qwen3"):
        message = f"a draft of {rules.model_type!r} layers; supported: llama, qwen3"
        raise UnsupportedModelError.of(folder, "config", "model_type", message)
    return config, rules


class DraftTensors:
    """The tensors of a draft's folder by name."""

    def __init__(self, folder: Path, dtype: torch.dtype | None, device: torch.device | str):
        self.folder, self.dtype, self.device, self.problems = folder, dtype, device, list[Problem]()
        pickled = _pickle_in(folder)
        if pickled is not None and not any(folder.glob("*.safetensors")):
            stored = _unpickle(pickled)
        else:
            single = MEDUSA_SAFETENSORS if (folder / MEDUSA_SAFETENSORS).exists() else SINGLE
            with Checkpoint.open(folder, single) as checkpoint:
                stored = {name: checkpoint.tensor(name) for name in checkpoint.tensors}
                # A missing tensor could otherwise be replaced silently by the target's.
                self.problems += [checkpoint.missing(name, "missing") for name in checkpoint.absent]
        self._stored = {canonical(name): tensor for name, tensor in stored.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def raw(self, name: str) -> Tensor | None:
        return self._stored.get(name)

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor in the compute dtype; records a problem if it is missing or has another shape."""
        stored = self._stored.get(name)
        if stored is None:
            self.problems.append(Problem("missing", repr(name), f"expected a tensor of shape {list(shape)}"))
        elif tuple(stored.shape) != shape:
            self.problems.append(Problem("shape", repr(name), f"{list(stored.shape)}, expected {list(shape)}"))
        else:
            return cast(stored, self.dtype, self.device)[0].contiguous()
        return torch.empty(0, dtype=torch.float32, device="cpu")

    def take_if_stored(self, name: str, *shape: int) -> Tensor | None:
        return self.take(name, *shape) if name in self else None

    def check(self) -> None:
        """Raise CheckpointError if any tensor was missing or misshaped."""
        if self.problems:
            raise CheckpointError(self.folder, self.problems)

    def head_tokens(self, rows: int, target_size: int, kept: np.ndarray | None = None) -> np.ndarray | None:
        """Return the target's token of each row of the head, int64 [rows], ascending; None for equal ids.

        Rows in another order are sorted, so that ties break as over the full vocabulary. A head over the full
        vocabulary keeps the rows `kept`. Raises CheckpointError.
        """
        d2t, t2d = self.raw("d2t"), self.raw("t2d")

        def problem(name: str, text: str) -> CheckpointError:
            return CheckpointError.of(self.folder, "value", name, text)

        if t2d is not None and len(t2d) != target_size:
            raise problem("t2d", f"the head is for a vocabulary of {len(t2d)} tokens, the target has {target_size}")
        if d2t is None:
            if rows != target_size:
                raise problem("d2t", f"missing: the head has {rows} rows, the target {target_size} tokens")
            return self.narrowed(kept, rows)
        tokens: np.ndarray = np.arange(len(d2t)) + d2t.to(torch.int64).numpy()
        if len(tokens) != rows or len(np.unique(tokens)) != rows or tokens.min() < 0 or tokens.max() >= target_size:
            counts = f"{len(tokens)} tokens from {tokens.min()} to {tokens.max()} for {rows} rows of the head"
            raise problem("d2t", f"{counts}; expected one of the target's {target_size} for each row")
        if (np.diff(tokens) < 0).any():
            order = np.argsort(tokens)
            tokens = tokens[order]
            self.narrowed(order, rows)
        return tokens if kept is None or rows < target_size else self.narrowed(kept, rows)

    def narrowed(self, kept: np.ndarray | None, rows: int) -> np.ndarray | None:
        """Keep only these rows, int64, of vocabulary heads with `rows` rows, and return them; None for all."""
        for name, tensor in self._stored.items():
            if kept is not None and name.startswith(_BY_HEAD_ROW) and tensor.shape[:1] == (rows,):
                self._stored[name] = tensor[torch.from_numpy(kept)]
        return kept

    def take_layers(self, shape: ModelShape, rules: FamilyRules, skip: Collection[str]) -> dict[str, Tensor]:
        """Return the parameters of layers and final norm, except those to skip, and one row of `embed`."""
        decoder = {"embed": torch.zeros(1, shape.hidden_size, dtype=self.dtype, device=self.device)}
        for placement in expected_tensors(shape, rules):
            [(param, size)] = placement.params.items()
            if param not in ("embed", "lm_head", *skip):
                decoder[param] = self.take(canonical(placement.name), *size)
        return decoder

    def check_states(self, count: int, target_hidden: int) -> None:
        """Raise CheckpointError if the projection does not read the states of `count` layers of this target."""
        fc = self.raw("fc.weight")
        if fc is not None and fc.shape[1] != count * target_hidden:
            reason = f"{fc.shape[1]} values per token, {count} layers of the target have {target_hidden} each"
            raise CheckpointError.of(self.folder, "shape", "fc.weight", f"{reason}; use a draft of this target")

    def own_embedding(self, shape: ModelShape) -> Tensor | None:
        return self.take_if_stored("embed_tokens.weight", shape.vocab_size, shape.hidden_size)


def canonical(name: str) -> str:
    """Translate a tensor name of any layout to a model's, without the prefix `model.`."""
    name = name.removeprefix("model.")
    return next((new + name.removeprefix(old) for old, new in _RENAMED.items() if name.startswith(old)), name)
