"""Per-request state of the SSM group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from treespec.drafters.trust import Trust
from treespec.tree import TokenTree
from treespec.verification.oracle import RandomOracle


def open_mass(seed: TokenTree) -> float:
    """The probability that no proposed child of the root is right."""
    return max(1.0 - float(seed.probs[seed.parents == 0].sum()), 0.0) if len(seed) > 1 else 1.0


def grown_masks(masks: np.ndarray, above: np.ndarray) -> np.ndarray:
    """bool [slots + new, slots + new]: who sees whom once a level is expanded.

    Args:
        masks: bool [slots, slots], before it.
        above: int64 [new], the slot of each new node's parent.
    """
    first, count = len(masks), len(above)
    grown = np.zeros((first + count, first + count), dtype=bool)
    grown[:first, :first] = masks
    grown[first:, :first] = masks[above]
    nodes = np.arange(first, first + count)
    grown[nodes, nodes] = True
    return grown


@dataclass
class SsmState:
    """A request's state between rounds. Slots are those of the tree's expanded nodes in the SSMs' pools."""

    trust: Trust
    valid: np.ndarray  # int64 [num_ssms]: positions with K/V in each SSM's pool
    weights: np.ndarray  # float64 [num_ssms], 0 where it rests
    active: list[int] = field(default_factory=list)  # the SSMs that draft in this round
    first_slots: list[int] = field(default_factory=list)  # of each level
    # By level and SSM, the SSM's own probabilities, or its logits where a temperature changed them: [slots, vocab].
    scores: list[dict[int, np.ndarray]] = field(default_factory=list)
    slot_of_node: np.ndarray | None = None  # of the proposed tree
    seed: TokenTree | None = None  # that the tree was grown over, where it was grown
    oracle: RandomOracle | None = None  # of random draws
    settled: tuple[int, np.ndarray] | None = None  # (position of the root, accepted slots): not scored yet

    def begin_tree(self) -> None:
        self.first_slots, self.scores = [0], [{}]

    def begin_level(self, first_slot: int) -> None:
        self.first_slots.append(first_slot)
        self.scores.append({})


def places_of(ssm: int, states: Sequence[SsmState], parts: Mapping[int, slice]) -> dict[int, slice]:
    """Where each tree's rows lie among those that an SSM scores.

    Args:
        states, parts: of the trees, and their rows of the frontier.
    """
    places, first = {}, 0
    for tree, part in parts.items():
        if ssm in states[tree].active:
            places[tree] = slice(first, first := first + part.stop - part.start)
    return places
