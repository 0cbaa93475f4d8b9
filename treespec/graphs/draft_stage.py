"""The draft stage of a captured round."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from treespec.graphs.draft_passes import DraftPasses, FeaturePool, HeadPasses, SsmPasses
from treespec.graphs.round_inputs import RoundInputs
from treespec.graphs.stack_passes import HeadStack, ModelStack
from treespec_kernels.linear.lm_head import BlockStats
from treespec_kernels.sampling.row_topk import row_topk_triton
from treespec_kernels.tree.device_trees import DeviceForest
from treespec_kernels.tree.growth_limits import CHILDREN, FRONTIER
from treespec_kernels.tree.tree_merge import tree_merge_triton
from treespec_kernels.tree.tree_root import tree_root_triton


class DraftStage:
    """Grows the trees of a batch, level by level.

    Attributes:
        forest: the growing trees.
        read_probs: float32 [num_ssms, B, D], probabilities that each SSM assigned to the tokens it read in this round.
    """

    def __init__(
        self, inputs: RoundInputs, stacks: Sequence[ModelStack], vocab_size: int, features: FeaturePool | None
    ):
        self.inputs, self.stacks, self.children = inputs, list(stacks), min(CHILDREN, vocab_size)
        b, limits, device, ssms = inputs.num_requests, inputs.limits, inputs.device, inputs.num_ssms
        self.forest = DeviceForest.allocate(
            b, frontier=FRONTIER, num_ssms=ssms, proposals=self.children, max_depth=limits.max_depth, device=device
        )
        shape = (ssms, b, FRONTIER, self.children)
        self._tokens = torch.full(shape, -1, dtype=torch.int32, device=device)
        self._probs = torch.zeros(shape, dtype=torch.float32, device=device)
        self.read_probs = torch.zeros(inputs.num_ssms, b, limits.max_depth, dtype=torch.float32, device=device)
        self._steps = torch.arange(limits.width, dtype=torch.int32, device=device)
        self._passes = [self._passes_of(stack, features) for stack in self.stacks]

    def _passes_of(self, stack: ModelStack, features: FeaturePool | None) -> DraftPasses:
        if not isinstance(stack, HeadStack):
            return SsmPasses(stack, self.inputs)
        assert features is not None
        return HeadPasses(stack, self.inputs, features)

    def root(self) -> None:
        """Start the trees with their roots."""
        tree_root_triton(self.forest, self.inputs["roots"])

    def first_level(self, sampled: bool) -> None:
        """Read the tokens emitted in the last round, up to the roots, and propose below the roots.

        This does not depend on the proposals of other sources, which may still be searched; `merge` does.
        """
        inputs = self.inputs
        b, width = inputs.num_requests, inputs.limits.width
        self.root()
        news, tokens = inputs["new_lens"], inputs["new_tokens"]
        depths = torch.where(self._steps < news[:, None], self._steps, -1)  # [B, D + 1]
        first = inputs["context_lens"] - news + (news > 0)  # position of the first row
        last = (news - 1).clamp(min=0).long()
        following = tokens.roll(-1, 1).long()
        for stack, passes in zip(self.stacks, self._passes, strict=True):
            groups, ssms = stack.groups, slice(stack.first, stack.first + stack.groups)
            scores, stats = stack.logits(passes.read(tokens, first, depths))
            summary = row_topk_triton(scores, 1, stats=stats)
            logits = scores.view(groups, b, width, -1)
            seen = logits.gather(3, following.expand(groups, b, width)[..., None])[..., 0].float()
            self.read_probs[ssms] = (seen - summary.lse.view(groups, b, width))[..., :-1].exp()
            roots = logits.gather(2, last[:, None, None].expand(groups, b, 1, logits.shape[3]))
            self._propose(ssms, roots.view(groups * b, -1), None, 1, sampled)

    def next_level(self, sampled: bool) -> None:
        """Merge the last level, score the new frontier, and propose below it."""
        self.merge()
        for stack, passes in zip(self.stacks, self._passes, strict=True):
            ssms = slice(stack.first, stack.first + stack.groups)
            self._propose(ssms, *stack.logits(passes.score(self.forest)), FRONTIER, sampled)

    def merge(self) -> None:
        """Merge the proposals below the frontier, those of sources without a model included."""
        inputs = self.inputs
        arguments = inputs["weights"], inputs["end_tokens"], inputs.proposed
        tree_merge_triton(self.forest, self._tokens, self._probs, *arguments)

    def _propose(self, ssms: slice, logits: Tensor, stats: BlockStats | None, rows: int, sampled: bool) -> None:
        """Store what these SSMs propose at the first `rows` nodes of each request's frontier.

        The logits are [G * B * rows, vocab], with their block statistics if available.
        """
        inputs, groups = self.inputs, ssms.stop - ssms.start
        b = inputs.num_requests

        def by_row(values: Tensor) -> Tensor:
            expanded = values[None, :, None].expand(groups, b, rows)
            return expanded.reshape(-1).contiguous()  # a copy, except for one request

        positions = inputs["context_lens"].long() + 1 + self.forest.level.long()
        options: dict[str, Any] = {"stats": stats}
        if sampled:
            options = {"noise": inputs.noise(inputs["draft_temperatures"], by_row, by_row(positions))}
        best = row_topk_triton(logits, self.children, **options)
        shape = (groups, b, rows, self.children)
        self._tokens[ssms, :, :rows] = best.tokens.view(shape)
        self._probs[ssms, :, :rows] = (best.values - best.lse[:, None]).exp().view(shape)
