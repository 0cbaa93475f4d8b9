"""The draft stage of a captured round: passes over the tokens that the last round emitted and over frontiers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from treespec.graphs.round_inputs import RoundInputs
from treespec.graphs.stack_passes import FeaturePool, HeadStack, ModelStack, StackPasses
from treespec.models.triton_decoder import TritonPass
from treespec_kernels.linear.lm_head import BlockStats
from treespec_kernels.sampling.row_topk import row_topk_triton
from treespec_kernels.tree.device_trees import DeviceForest
from treespec_kernels.tree.growth_limits import CHILDREN, FRONTIER
from treespec_kernels.tree.tree_merge import tree_merge_triton
from treespec_kernels.tree.tree_root import tree_root_triton


def num_tree_slots(max_depth: int) -> int:
    """Return the number of draft slots of a tree: the root's and those of all frontiers but the last."""
    return 1 + (max_depth - 1) * FRONTIER


class SsmPasses:
    """Passes of a stack of SSMs; they return hidden states for `ModelStack.logits`."""

    def __init__(self, stack: ModelStack, inputs: RoundInputs):
        self._inputs = inputs
        self._chain = StackPasses(stack, inputs, inputs.limits.width, chain=True)
        self._level = StackPasses(stack, inputs, FRONTIER, chain=False)

    def read(self, tokens: Tensor, first: Tensor, depths: Tensor) -> Tensor:
        """Read the tokens emitted in the last round, up to the roots; returns [G * B * (D + 1), hidden_size].

        `tokens` are int32 [B, D + 1], `first`, int32 [B], the position of the first one, and `depths`, int32
        [B, D + 1], the index of each; -1 for padding.
        """
        return self._chain.hidden(tokens, first, depths)

    def score(self, forest: DeviceForest) -> Tensor:
        """Score the frontier; returns [G * B * FRONTIER, hidden_size]."""
        placed = forest.frontier_depths, forest.frontier_slots, forest.frontier_ancestors
        return self._level.hidden(forest.frontier_tokens, self._inputs["context_lens"], *placed)


class HeadPasses(SsmPasses):
    """Passes of a draft head, which also read the feature of the token before each row (see `FeatureHead`).

    The feature is the target's after a verified token, and the head's output after a drafted one.
    """

    def __init__(self, stack: HeadStack, inputs: RoundInputs, features: FeaturePool):
        super().__init__(stack, inputs)
        self._stack, self._features = stack, features
        # The head's outputs by node slot; empty places of the frontier write to the last slot.
        size = inputs.num_requests, num_tree_slots(inputs.limits.max_depth) + 1, stack.head.config.shape.hidden_size
        self._outputs = torch.zeros(size, dtype=stack.head.dtype, device=inputs.device)

    def read(self, tokens: Tensor, first: Tensor, depths: Tensor) -> Tensor:
        # A token's K/V are in the slot of its feature, one before its position. A request without a committed token has
        # no feature; its heads have weight 0, and their K/V in its first slot are overwritten.
        rows = self._chain.place((first - 1).clamp(min=0), depths)
        hidden, outputs = self._forward(tokens, self._stack.head.features_of(self._features.read(rows.slots)), rows)
        roots = (self._inputs["new_lens"] - 1).clamp(min=0).long()
        outputs = outputs.view(*tokens.shape, -1)
        self._outputs[:, 0] = outputs.gather(1, roots[:, None, None].expand(-1, 1, outputs.shape[2]))[:, 0]
        return hidden

    def score(self, forest: DeviceForest) -> Tensor:
        slots, depths, ancestors = forest.frontier_slots, forest.frontier_depths, forest.frontier_ancestors
        rows = self._level.place((self._inputs["context_lens"] - 1).clamp(min=0), depths, slots, ancestors)
        parents = ancestors.gather(2, (depths - 1).clamp(min=0).long()[..., None])[..., 0].long()
        width = self._outputs.shape[2]
        features = self._outputs.gather(1, parents[..., None].expand(-1, -1, width))
        hidden, outputs = self._forward(forest.frontier_tokens, features.flatten(0, 1), rows)
        output_slots = torch.where(depths < 0, self._outputs.shape[1] - 1, slots).long()
        self._outputs.scatter_(1, output_slots[..., None].expand(-1, -1, width), outputs.view(*slots.shape, width))
        return hidden

    def _forward(self, tokens: Tensor, features: Tensor, rows: TritonPass) -> tuple[Tensor, Tensor]:
        return self._stack.head.forward_features(tokens.clamp(min=0).long().flatten(), features, rows, self._stack.pool)


class DraftStage:
    """Grows the trees of a batch, level by level."""

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
        # Probability that each SSM assigned to each token it read in this round.
        self.read_probs = torch.zeros(inputs.num_ssms, b, limits.max_depth, dtype=torch.float32, device=device)
        self._steps = torch.arange(limits.width, dtype=torch.int32, device=device)
        self._passes: list[SsmPasses] = []
        for stack in self.stacks:
            if isinstance(stack, HeadStack):
                assert features is not None
                self._passes.append(HeadPasses(stack, inputs, features))
            else:
                self._passes.append(SsmPasses(stack, inputs))

    def root(self) -> None:
        tree_root_triton(self.forest, self.inputs["roots"])

    def first_level(self, sampled: bool) -> None:
        """Read the tokens emitted in the last round, up to the roots, and propose the roots' children.

        This step needs no proposals of other sources, which may still be searched; `merge` needs them.
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
            read_logits = logits.gather(3, following.expand(groups, b, width)[..., None])[..., 0].float()
            self.read_probs[ssms] = (read_logits - summary.lse.view(groups, b, width))[..., :-1].exp()
            roots = logits.gather(2, last[:, None, None].expand(groups, b, 1, logits.shape[3]))
            self._propose(ssms, roots.view(groups * b, -1), None, 1, sampled)

    def next_level(self, sampled: bool) -> None:
        """Merge the last level, score the new frontier, and propose its children."""
        self.merge()
        for stack, passes in zip(self.stacks, self._passes, strict=True):
            ssms = slice(stack.first, stack.first + stack.groups)
            self._propose(ssms, *stack.logits(passes.score(self.forest)), FRONTIER, sampled)

    def merge(self) -> None:
        """Merge the proposals for the frontier, including those of model-free sources."""
        inputs = self.inputs
        arguments = inputs["weights"], inputs["end_tokens"], inputs.proposed
        tree_merge_triton(self.forest, self._tokens, self._probs, *arguments)

    def _propose(self, ssms: slice, logits: Tensor, stats: BlockStats | None, rows: int, sampled: bool) -> None:
        """Store these SSMs' proposals at each request's first `rows` nodes; `logits` is [G * B * rows, vocab]."""
        inputs, groups = self.inputs, ssms.stop - ssms.start
        b = inputs.num_requests

        def by_row(values: Tensor) -> Tensor:
            expanded = values[None, :, None].expand(groups, b, rows)
            return expanded.reshape(-1).contiguous()  # a copy, except for one request

        positions = inputs["context_lens"].long() + 1 + self.forest.level.long()
        options: dict[str, Any] = {"stats": stats}
        if sampled:
            options = {"noise": inputs.noise(inputs["draft_temperatures"], by_row, by_row(positions))}
        topk = row_topk_triton(logits, self.children, **options)
        shape = (groups, b, rows, self.children)
        self._tokens[ssms, :, :rows] = topk.tokens.view(shape)
        self._probs[ssms, :, :rows] = (topk.values - topk.lse[:, None]).exp().view(shape)
