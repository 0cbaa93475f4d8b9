"""Verification's half of a captured round."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec.graphs.draft_stage import DraftHalf
from treespec.graphs.round_inputs import RoundInput, RoundInputs
from treespec.graphs.round_tree import RoundTree
from treespec.graphs.stack_passes import ModelStack, StackPasses
from treespec_kernels.attention.kv_commit import kv_commit_triton
from treespec_kernels.sampling.row_topk import row_topk_triton
from treespec_kernels.tree.device_trees import DeviceTrees
from treespec_kernels.tree.tree_select import tree_select_triton
from treespec_kernels.tree.tree_walk import Walk, tree_walk_triton


class RoundResult(NamedTuple):
    """What a round made of one request.

    Attributes:
        tokens: emitted, at least one; empty where the target computed NaN or infinity and nothing was committed.
        sources: by accepted drafted token, bits of the SSMs that proposed it, and behind them that of the seeds.
        values: float32 [num_nodes], the chance that each node of the tree was thought to have, root first.
        depths: int32 [num_nodes].
        foretold: float32 [num_ssms, len(new_tokens) - 1], each SSM's probabilities of the tokens that it read.
    """

    tokens: list[int]
    sources: list[int]
    values: np.ndarray
    depths: np.ndarray
    foretold: np.ndarray


class VerifyHalf:
    """Cuts the trees, scores them in one target pass, walks them and commits.

    Args:
        inputs: of the round.
        target: the target, a stack of one.
        drafts: the other half.
    """

    def __init__(self, inputs: RoundInputs, target: ModelStack, drafts: DraftHalf):
        self.inputs, self.target, self.drafts = inputs, target, drafts
        b, limits, device = inputs.num_requests, inputs.limits, inputs.device
        self._trees = {
            n: DeviceTrees.allocate(b, nodes=n, max_depth=limits.max_depth, device=device) for n in limits.nodes
        }
        self._passes = {n: StackPasses(target, inputs, n, None if n == 1 else n) for n in limits.nodes}
        self._slots = torch.arange(limits.nodes[-1], dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        # By request: path length, tokens, path; then by node values (their bits), depths and masks.
        # A buffer for each number of nodes: only into contiguous memory can a captured graph copy.
        self._rows = {
            n: torch.zeros(b, 1 + 2 * limits.width + 3 * n, dtype=torch.int32, pin_memory=pinned, device="cpu")
            for n in limits.nodes
        }
        self._walk = Walk.allocate(b, max_depth=limits.max_depth, device=device)
        foretold, pinned = (inputs.num_ssms, b, limits.max_depth), pinned and inputs.num_ssms > 0
        self._foretold = torch.zeros(foretold, dtype=torch.float32, device="cpu", pin_memory=pinned)

    def run(self, nodes: int, sampled: bool) -> None:
        """Verify trees of at most `nodes` nodes, 1: the roots alone; `sampled`: whether choices take noise."""
        inputs, trees, passes = self.inputs, self._trees[nodes], self._passes[nodes]
        b, kernels = inputs.num_requests, self.target.kernels
        if nodes == 1:
            self.drafts.root()
        tree_select_triton(
            self.drafts.forest,
            inputs["roots"],
            inputs["max_nodes"],
            inputs["least_values"],
            inputs["max_depths"],
            out=trees,
        )
        own = () if nodes == 1 else (self._slots[:nodes].expand(b, nodes), trees.ancestors)
        hidden = passes.hidden(trees.tokens, inputs["context_lens"], trees.depths, *own)
        head = kernels.logits(hidden)

        def by_row(values: Tensor) -> Tensor:
            return values[:, None].expand(b, nodes).reshape(-1).contiguous()  # of one request a view

        noise: dict[str, Any] = {"stats": head.stats}
        if sampled:
            noise = inputs.noise("temperatures", by_row, passes.positions.long() + 1)
        chosen = row_topk_triton(head.logits, 1, **noise)
        walk = self._walk
        tree_walk_triton(trees, chosen.tokens.view(b, nodes), chosen.finite.view(b, nodes), out=walk)
        kv_commit_triton(self.target.pool, inputs["pages"], inputs["context_lens"], walk.paths, walk.path_lens)
        values = trees.values.view(torch.int32)
        rows = torch.cat((walk.path_lens[:, None], walk.tokens, walk.paths, values, trees.depths, trees.masks), 1)
        self._rows[nodes].copy_(rows, non_blocking=True)
        self._foretold.copy_(self.drafts.foretold, non_blocking=True)

    def results(self, requests: Sequence[RoundInput], nodes: int, drafted: bool) -> list[RoundResult]:
        """What the last round of that many nodes has copied to the host."""
        width, rows = self.inputs.limits.width, self._rows[nodes].numpy()
        bounds = np.cumsum([1, width, width, nodes, nodes])
        results = []
        for i, request in enumerate(requests):
            tokens, path, values, depths, masks = np.split(rows[i], bounds)[1:]
            count, size = int(rows[i, 0]), int((depths >= 0).sum())
            read = len(request.new_tokens) - 1 if drafted else 0
            results.append(
                RoundResult(
                    tokens[:count].tolist(),
                    masks[path[1:count]].tolist(),
                    values[:size].view(np.float32).copy(),
                    depths[:size].copy(),
                    self._foretold[:, i, :read].numpy().copy(),
                )
            )
        return results

    def trees(self, num_requests: int, nodes: int) -> list[RoundTree]:
        """The trees of the last round of that many nodes, with one more copy to the host than `results` needs."""
        width, rows, on_device = self.inputs.limits.width, self._rows[nodes].numpy(), self._trees[nodes]
        copied = torch.stack((on_device.tokens, on_device.parents)).cpu().numpy().astype(np.int64)
        bounds = np.cumsum([1, width, width, nodes, nodes])
        found = []
        for i in range(num_requests):
            _, _, path, values, depths, masks = np.split(rows[i], bounds)
            count, size = int(rows[i, 0]), int((depths >= 0).sum())
            found.append(
                RoundTree(
                    copied[0, i, :size],
                    copied[1, i, :size],
                    depths[:size].astype(np.int64),
                    values[:size].view(np.float32).astype(np.float64),
                    masks[:size].tolist(),
                    path[:count].astype(np.int64),
                )
            )
        return found
