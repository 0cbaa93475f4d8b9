"""The layer for multi-token prediction (MTP, arXiv 2412.19437) in a target's own checkpoint.

Each row combines a token's embedding with the state of the token before it: the target's output state after a
verified token, and the layer's own output after a drafted one. The target's vocabulary head reads its outputs.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from treespec_weights.blocks import Weights
from treespec_weights.checkpoint import Checkpoint
from treespec_weights.documents import read_model
from treespec_weights.draft_tensors import OutputForm
from treespec_weights.errors import CheckpointError, UnsupportedModelError
from treespec_weights.families import FAMILIES
from treespec_weights.load import ModelTensors, load_weights
from treespec_weights.rules import LAYER, FamilyRules, ModelShape, TensorRule

MTP = "mtp"  # name in `drafts` of the target's own layer


@dataclass(frozen=True)
class MtpForm(OutputForm):
    """The MTP layer of a target, with the interface of a draft head's form."""

    folder: Path  # folder of the target
    name = "MTP layer"


def mtp_form(folder: Path, shape: ModelShape, rules: FamilyRules) -> MtpForm:
    """Return the form of the layer in a checkpoint. Raises CheckpointError if it has none, or several."""
    with open_predictor(folder, predictor_of(folder, shape, rules)[1]):
        return MtpForm(folder)


def predictor_of(folder: Path, shape: ModelShape, rules: FamilyRules) -> tuple[ModelShape, FamilyRules]:
    """Return the shape of a target's MTP layer, as a model of one layer, and its family.

    Raises UnsupportedModelError if the target's family has no such layer.
    """
    if rules.predictor is None:
        valid = ", ".join(name for name, family in FAMILIES.items() if family.predictor is not None)
        message = (
            f"no MTP layer of {rules.model_type!r} is supported; families with one: {valid}; a folder of this name is "
            f"'./{MTP}'"
        )
        raise UnsupportedModelError.of(folder, "config", MTP, message)
    predictor, experts = rules.predictor.after(shape.num_layers), shape.experts
    if experts is not None:
        experts = replace(experts, layers=(0,)) if shape.num_layers - 1 in experts.layers else None

    def moved(rule: TensorRule) -> TensorRule:
        return replace(rule, name=rule.name.replace(LAYER, predictor.layer))

    pairs = tuple(TensorRule(name, (param,)) for name, param in predictor.tensors.items())
    layer_rules = (rule for rule in rules.tensors if rule.params != ("final_norm",))
    rules = replace(
        rules,
        tensors=(*map(moved, layer_rules), *pairs),
        alternatives=tuple(map(moved, rules.alternatives)),
        ignored=predictor.copies,
        further_layers=False,
        predictor=predictor,
    )
    return replace(shape, num_layers=1, pairs=True, tied=False, experts=experts, recurrent=None), rules


def load_predictor(
    folder: Path,
    shape: ModelShape,  # shape and rules are results of `predictor_of`
    rules: FamilyRules,
    dtype: torch.dtype | None,
    device: torch.device | str,
    blocks: bool = False,
) -> Weights:
    """Load the layer; arguments, result and errors as in `load_weights`."""
    with open_predictor(folder, rules) as checkpoint:
        return load_weights(checkpoint, shape, rules, dtype, device, blocks=blocks)


def check_predictor(form: MtpForm) -> int:
    """Return the number of parameters of a checkpoint's layer. Raises CheckpointError if it does not fit its config."""
    shape, rules = predictor_of(form.folder, *read_model(form.folder))
    with open_predictor(form.folder, rules) as checkpoint:
        ModelTensors(checkpoint, shape, rules).checked_placements()
    return shape.num_parameters()


def open_predictor(folder: Path, rules: FamilyRules) -> Checkpoint:
    """Open a target's checkpoint with only the tensors of its MTP layer, of a family that `predictor_of` returned.

    Raises CheckpointError if there is none, or several layers.
    """
    checkpoint, predictor = Checkpoint.open(folder), rules.predictor
    assert predictor is not None
    second = predictor.layer_at(1)
    if any(name.startswith(second) for name in checkpoint.tensors):
        raise UnsupportedModelError.of(folder, "config", second, "a second MTP layer; supported: one")
    tensors = {name: info for name, info in checkpoint.tensors.items() if name.startswith(predictor.module)}
    absent = {name: file for name, file in checkpoint.absent.items() if name.startswith(predictor.module)}
    if not (tensors or absent):
        message = (
            "no tensor of an MTP layer; several conversions drop it: use the original checkpoint, or leave out "
            f"drafts=[{MTP!r}]"
        )
        raise CheckpointError.of(folder, "missing", f"{predictor.module}*", message)
    return replace(checkpoint, tensors=tensors, absent=absent)
