"""Token-level intersection: drafts with another tokenizer through the tokens that both have (TLI, arXiv 2502.05202).

The draft reads the text in its own tokens. What it says of the next one is restricted to the intersection: all other
tokens are masked *before* anything is chosen or drawn, and the rest is a distribution over the target's ids. So noise,
draws and verification are those of any other source. A guess is one token of the draft's and one of the target's, and
the tree grows in the draft's own cache as an SSM's does.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from treespec.cache import KVCache
from treespec.drafters.evidence import SeedEvidence
from treespec.drafters.foreign.foreign_drafter import DrawsFor, ForeignDrafter, Reading, roots
from treespec.drafters.foreign.retokenize import Translation
from treespec.drafters.ssm.drawn_forest import DrawnForest
from treespec.drafters.ssm.forest import Forest, Shape, SsmProbs
from treespec.drafters.ssm.ssm_state import grown_masks
from treespec.models.decoder import Decoder
from treespec.planning.planner import Planner
from treespec.request import Request
from treespec.tree import TokenTree
from treespec.verification.oracle import RandomOracle
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_kernels.tree.growth_limits import FRONTIER, MAX_EXPANDED
from treespec_kernels.tree.tree_levels import Frontier

_ONE = np.ones(1)


class TranslatedDrafter(ForeignDrafter):
    """Grows trees of tokens that target and draft share.

    Where verification counts on random draws, its children are drawn from its distribution where `draws_for` says so,
    and that must follow from the request alone: to choose by what was drawn would spoil it. Elsewhere they are the
    likeliest ones, chosen without chance, and stand after what others draw.

    Args:
        name, model, cache, translation, capacity, scratch, planner: as `ForeignDrafter`.
        draws_for: whether this source draws at random for a request whose rule allows it: one may, for a tree of more
            draws than nodes could not be cut.
    """

    def __init__(
        self,
        name: str,
        model: Decoder,
        cache: KVCache,
        translation: Translation,
        capacity: int,
        scratch: int,
        planner: Planner,
        draws_for: DrawsFor = lambda request: True,
    ):
        super().__init__(name, model, cache, translation, capacity, scratch, planner)
        self._draws_for = draws_for
        to_draft = torch.from_numpy(translation.to_draft).to(model.device)
        self._columns, self._masked = to_draft.clamp(min=0), to_draft < 0
        self._oracles: dict[str, RandomOracle] = {}
        self._reach = 0.7  # running mean: share of its open mass that a first level holds

    def propose(self, requests: Sequence[Request], max_depths: Sequence[int]) -> list[TokenTree]:
        """One tree per request over its last token, of tokens that the target has too."""
        trees, places = roots(requests), self._serve(requests, max_depths)
        random = [requests[i].draws_at_random and self._draws_for(requests[i]) for i in places]
        for kind in (False, True):
            group = [i for i, own in zip(places, random, strict=True) if own == kind]
            own, readings = [requests[i] for i in group], self._of(requests, group)
            if not own or not self._worth_beginning(own):
                continue
            forest = self._forest(own, [max_depths[i] for i in group], kind)
            self._grow(own, forest)
            for i, reading, (tree, slot_of_node) in zip(group, readings, forest.finish((self.name,)), strict=True):
                reading.proposed, reading.slot_of_node, trees[i] = tree, slot_of_node, tree
        return trees

    def commit(self, requests: Sequence[Request], paths: Sequence[np.ndarray]) -> None:
        """Keep the K/V of accepted nodes. `paths[i]`: accepted nodes of the proposed tree, from the root on."""
        pages, lengths, moved = [], [], []
        for request, path in zip(requests, paths, strict=True):
            reading = self._readings.get(request.request_id)
            if reading is None or reading.proposed is None or reading.slot_of_node is None:
                continue
            kept = reading.slot_of_node[path]
            kept = kept[np.logical_and.accumulate(kept >= 0)]
            reading.ahead = self.translation.to_draft[reading.proposed.tokens[path[1 : len(kept)]]].tolist()
            self._learn(request, reading)
            pages.append(reading.pages)
            lengths.append(len(reading.context.tokens) - 1)
            moved.append(kept)
        self.cache.commit(0, pages, lengths, moved)

    def release(self, request: Request) -> None:
        super().release(request)
        self._oracles.pop(request.request_id, None)

    def _worth_beginning(self, requests: Sequence[Request]) -> bool:
        """Whether a first level pays."""
        adaptive = sum(request.spec.is_adaptive for request in requests)
        worth = adaptive < len(requests) or self.pays.worth(self._reach * adaptive)
        if not worth:
            self.pays.rested()
        return worth

    def _forest(self, requests: Sequence[Request], depths: Sequence[int], random: bool) -> Forest | DrawnForest:
        """The trees before their first level."""
        shapes = [
            Shape(depth, request.spec.max_nodes, request.spec.branching, request.end_tokens)
            for request, depth in zip(requests, depths, strict=True)
        ]
        if not random:
            return Forest(roots(requests), shapes, 1, SeedEvidence())
        oracles = [self._oracle(request) for request in requests]
        fills = [not request.spec.is_adaptive for request in requests]
        least = self.planner.least_value
        leasts = [1 / r.spec.max_nodes if fill else least for r, fill in zip(requests, fills, strict=True)]
        modes = [request.spec.draws for request in requests]
        return DrawnForest(roots(requests), shapes, oracles, modes, leasts, fills, FRONTIER, MAX_EXPANDED)

    def _oracle(self, request: Request) -> RandomOracle:
        if request.request_id not in self._oracles:
            assert request.sampler is not None
            self._oracles[request.request_id] = RandomOracle(request.sampler.draft_generator())
        return self._oracles[request.request_id]

    def _grow(self, requests: Sequence[Request], forest: Forest | DrawnForest) -> None:
        """Score and extend level by level."""
        adaptive = np.array([request.spec.is_adaptive for request in requests], dtype=bool)
        readings = [self._readings[request.request_id] for request in requests]
        before = forest.open_mass()
        while len(forest.frontier.nodes):
            if forest.depth:
                before = self._stop_where_nothing_pays(forest, adaptive, before)
                if not len(forest.frontier.nodes):
                    break
            owners = forest.frontier.owners
            with self.pays.timed(forest.depth > 0 or all(each.is_near for each in readings)):
                logits = self._score(readings, forest) if forest.depth else self._score_roots(readings)
                probs = self._probs(logits, requests, forest)
            scored = SsmProbs(0, np.arange(len(probs)), probs.numpy())
            broken = forest.extend([scored], [_ONE] * len(requests))
            for owner in owners[broken]:
                readings[owner].poisoned = True
            # A fixed tree has children of probability 0 as well, and the draft cannot read those that it lacks.
            known = self.translation.to_draft[forest.frontier.tokens] >= 0
            forest.frontier = Frontier(*(part[known] for part in forest.frontier))

    def _stop_where_nothing_pays(
        self, forest: Forest | DrawnForest, adaptive: np.ndarray, before: np.ndarray
    ) -> np.ndarray:
        """Before a further level; `before`: the open masses of the last one. Returns this one's."""
        opened = forest.open_mass()
        growing = np.unique(forest.frontier.owners)
        if not adaptive[growing].all():
            return opened
        held = forest.level_mass(0.0)[growing]
        reached = np.minimum(held / np.maximum(before[growing], 1e-9), 1.0)
        if forest.depth == 1:
            self._reach += 0.1 * (float(reached.mean()) - self._reach)
        if not self.pays.worth(float((opened[growing] * reached).sum())):
            forest.stop(np.ones(len(adaptive), dtype=bool))
        return opened

    def _score(self, readings: Sequence[Reading], forest: Forest | DrawnForest) -> Tensor:
        """float32 [frontier, draft's vocabulary]: logits after its nodes."""
        at, rows = forest.frontier, []
        owners, starts = np.unique(at.owners, return_index=True)
        for owner, (begin, end) in zip(owners.tolist(), pairwise([*starts.tolist(), len(at.owners)]), strict=True):
            reading = readings[owner]
            first = len(reading.masks)
            reading.masks = grown_masks(reading.masks, at.above[begin:end])
            depths = reading.masks.sum(1) - 1
            nodes = np.arange(first, len(reading.masks))
            root = len(reading.context.tokens) - 1
            rows.append(RequestRows(root, nodes, depths[first:], reading.masks[first:], depths, reading.pages))
        return self._forward(rows, self.translation.to_draft[at.tokens].tolist(), None)

    def _probs(self, logits: Tensor, requests: Sequence[Request], forest: Forest | DrawnForest) -> Tensor:
        """float32 [frontier, target's vocabulary], on the host: probabilities of the next token among those that both
        have, with each request's restrictions, temperature and noise."""
        logits = logits.index_select(1, self._columns).masked_fill_(self._masked, -torch.inf)
        owners = forest.frontier.owners
        paths = forest.paths() if any(request.restriction for request in requests) else []
        for owner in np.unique(owners).tolist():
            request = requests[owner]
            part = slice(*np.searchsorted(owners, [owner, owner + 1]).tolist())
            if request.restriction is not None:
                request.restriction.narrow(logits[part], request.tokens, paths[part])
            if request.is_sampled:
                assert request.sampler is not None
                position = request.context_len + 1 + forest.depth
                request.sampler.temper(logits[part], position, request.spec.verification)
        return torch.softmax(logits, -1).cpu()
