"""Kinds of draft heads that can be trained, by the value of `--head`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedConfig

from treespec.training.dflash import dflash_agreement, dflash_loss, make_dflash, write_dflash
from treespec.training.distillation import Curriculum
from treespec.training.eagle3 import head_agreement, head_loss, make_head, write_head
from treespec.training.loop import StepLoss
from treespec.training.target_states import TargetStates


class HeadKind(NamedTuple):
    """Functions that make, train and write a kind of head."""

    # returns an untrained head for a transformers model, a vocabulary and a number of states
    make: Callable[[Any, np.ndarray, int], Any]
    loss: Callable[[Any, Curriculum, TargetStates, int], StepLoss]  # returns the loss of a step's lessons
    # returns the share of the target's tokens that a head predicts first
    agreement: Callable[[Any, Curriculum, TargetStates], float]
    write: Callable[[Any, Path, np.ndarray, PreTrainedConfig], None]  # writes a head to a folder


HEAD_KINDS = {
    "eagle3": HeadKind(make_head, head_loss, head_agreement, write_head),
    "dflash": HeadKind(make_dflash, dflash_loss, dflash_agreement, write_dflash),
}
