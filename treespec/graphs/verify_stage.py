"""The verify stage of a captured round."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec.graphs.draft_stage import DraftStage
from treespec.graphs.round_inputs import RoundInput, RoundInputs
from treespec.graphs.sampling_state import SamplingState
from treespec.graphs.stack_passes import FeaturePool, ModelStack, TreePass
from treespec.sampling.logprobs import LogprobRows
from treespec.tree import TokenTree, add_seed_draws
from treespec_kernels.attention.kv_commit import kv_commit_triton
from treespec_kernels.recurrent.round_states import keep_path_triton
from treespec_kernels.sampling.logit_transforms import TransformInputs, logit_transforms_triton
from treespec_kernels.sampling.row_topk import row_topk_triton
from treespec_kernels.tree.device_trees import SEED_BIT, DeviceTrees
from treespec_kernels.tree.tree_select import tree_select_triton
from treespec_kernels.tree.tree_walk import Walk, tree_walk_triton


class RoundResult(NamedTuple):
    """Result of a captured round for one request."""

    # int32 [5, num_rows], the verified tree: tokens; parents (-1 for the root); depths (-1 after the last node); source
    # bit masks as in `DeviceTrees`; bits of the float32 values
    rows: np.ndarray
    # int64 [1 + accepted], accepted nodes, root first; empty if the target computed NaN or infinity, so that nothing is
    # committed
    path: np.ndarray
    tokens: list[int]  # accepted drafted tokens, then the target's token
    read_probs: np.ndarray  # float32 [num_ssms, len(new_tokens) - 1], each SSM's probabilities of the tokens it read
    logprobs: np.ndarray | None = None  # `LogprobRows.packed` of the path's nodes, or None

    @property
    def num_nodes(self) -> int:
        return int(np.count_nonzero(self.rows[2] >= 0))

    def tree(self, names: Sequence[str], seed_tree: TokenTree | None) -> TokenTree:
        """Return the verified tree. SSMs have NaN probabilities, since the device does not keep them per source.

        The device does not distinguish the model-free sources of the seed tree.
        """
        tokens, parents, depths, masks = self.rows[:4, : self.num_nodes].astype(np.int64)
        values = self.rows[4, : len(tokens)].view(np.float32).astype(np.float64)
        above = values[parents[1:]]
        probs = np.append(1.0, np.minimum(np.divide(values[1:], above, where=above > 0, out=0 * above), 1.0))
        nodes, sources = np.nonzero(masks[:, None] >> np.arange(len(names)) & 1)
        draws = nodes, sources, np.full(len(nodes), np.nan)
        tree = TokenTree(tokens, parents, depths, probs, *draws, tuple(names)).with_values(values)
        if seed_tree is None:
            return tree
        edges = zip(seed_tree.parents.tolist(), seed_tree.tokens.tolist(), strict=True)
        seeds = {edge: seed for seed, edge in enumerate(edges)}
        seed_of_node = np.full(len(tree), -1)
        seed_of_node[0] = 0
        for node in np.flatnonzero(masks >> SEED_BIT & 1).tolist():  # its parent is the root or another seed
            seed_of_node[node] = seeds.get((int(seed_of_node[parents[node]]), int(tokens[node])), -1)
        return add_seed_draws(tree, seed_tree, seed_of_node)


class RoundKind(NamedTuple):
    """The optional computations of a round; each kind has its own graphs."""

    sampled: bool = False  # whether a request is sampled; otherwise no noise is computed
    transforms: bool = False  # whether a request transforms its logits beyond the temperature
    truncates: bool = False  # whether a request has top-k, top-p or min-p
    logprobs: bool = False  # whether a request asks for log-probabilities
    adapted: bool = False  # whether a request has an adapter


GREEDY = RoundKind()
MAX_LOGPROBS = 20  # maximum number of top tokens per position; requests for more use the host executor
LOGPROB_ROWS = 32  # rows per log-probability computation, to limit its memory


class VerifyStage:
    """Selects the trees' nodes, scores them in one target pass, walks the trees, and commits the accepted K/V."""

    def __init__(
        self,
        inputs: RoundInputs,
        target: ModelStack,
        drafts: DraftStage,
        features: FeaturePool | None,
        sampling: SamplingState,
    ):
        self.inputs, self.target, self.drafts, self.features = inputs, target, drafts, features
        self.sampling = sampling
        b, limits, device = inputs.num_requests, inputs.limits, inputs.device
        self._trees = {
            n: DeviceTrees.allocate(b, nodes=n, max_depth=limits.max_depth, device=device) for n in limits.nodes
        }
        self._passes = {n: TreePass(target, inputs, n, features) for n in limits.nodes}
        pinned = device.type == "cuda"
        # One row per request: path length, tokens after the root, path; then for all nodes tokens, parents, depths,
        # masks and value bits. There is one buffer per number of nodes, because captured graphs can only copy to
        # contiguous memory, and a second one for plain rounds, since two of them may be in flight.
        self._rows = {
            (n, side): torch.zeros(b, 1 + 2 * limits.width + 5 * n, dtype=torch.int32, pin_memory=pinned, device="cpu")
            for n in limits.nodes
            for side in range(2 if n == 1 else 1)
        }
        self._host_rows = {key: rows.numpy() for key, rows in self._rows.items()}
        self._walk = Walk.allocate(b, max_depth=limits.max_depth, device=device)
        read_probs, pinned = (inputs.num_ssms, b, limits.max_depth), pinned and inputs.num_ssms > 0
        self._read_probs = torch.zeros(read_probs, dtype=torch.float32, device="cpu", pin_memory=pinned)
        self._host_read_probs = self._read_probs.numpy()
        count = min(MAX_LOGPROBS, target.kernels.weights.head.shape[1])
        logprobs = b, limits.width, 2 + 2 * count
        self._logprobs = torch.zeros(logprobs, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")

    def advance(self) -> None:
        """Write the last round's results to the inputs, like the host for the next round of the same requests.

        Idle requests and requests with a non-finite logit keep their inputs.
        """
        inputs, walk = self.inputs, self._walk
        bonus = walk.tokens.gather(1, (walk.path_lens - 1).clamp(min=0).long()[:, None])[:, 0]
        inputs["context_lens"].add_(walk.path_lens)
        inputs["replayed"].copy_(walk.path_lens)
        inputs["roots"].copy_(torch.where(walk.path_lens > 0, bonus, inputs["roots"]))
        inputs["new_lens"].copy_(walk.path_lens)
        inputs["new_tokens"].copy_(walk.tokens.clamp(min=0))

    def run(self, nodes: int, kind: RoundKind, side: int = 0) -> None:
        """Merge the last level, and verify trees of at most `nodes` nodes; only the roots if 1.

        `side` is the index of the host's result buffer; only plain rounds have two.
        """
        inputs, trees, target = self.inputs, self._trees[nodes], self._passes[nodes]
        b = inputs.num_requests
        if nodes == 1:
            self.drafts.root()
        else:
            self.drafts.merge()
        tree_select_triton(
            self.drafts.forest,
            inputs.proposed,
            inputs["roots"],
            inputs["max_nodes"],
            inputs["least_values"],
            inputs["max_depths"],
            out=trees,
        )
        head = target.logits(trees.tokens, trees.depths, trees.ancestors, kind.adapted)

        def by_row(values: Tensor) -> Tensor:
            return values[:, None].expand(b, nodes).reshape(-1).contiguous()  # a copy, except for one request

        logits, temperatures = head.logits, inputs["temperatures"]
        options: dict[str, Any] = {"stats": head.stats}
        if kind.transforms:
            logits, options = self._transformed(head.logits, trees, target.positions, kind.truncates), {}
            temperatures = (temperatures > 0).float()  # the scores are already divided by the temperatures
        if kind.sampled:
            options = {"noise": inputs.noise(temperatures, by_row, target.positions.long() + 1)}
        choices = row_topk_triton(logits, 1, **options)
        walk = self._walk
        tree_walk_triton(trees, choices.tokens.view(b, nodes), choices.finite.view(b, nodes), out=walk)
        for pool in (self.target.pool, *(() if self.features is None else (self.features.pool,))):
            kv_commit_triton(pool, inputs["pages"], inputs["context_lens"], walk.paths, walk.path_lens)
        if (states := self.target.states) is not None:
            keep_path_triton(states.inputs, inputs["state_slots"], walk.paths, walk.path_lens, states.history)
        if kind.logprobs:
            first_rows = nodes * torch.arange(b, dtype=torch.int64, device=inputs.device)[:, None]
            paths, tokens = (walk.paths.long() + first_rows).flatten(), walk.tokens.long().clamp(min=0).flatten()
            chunks = zip(paths.split(LOGPROB_ROWS), tokens.split(LOGPROB_ROWS), strict=True)
            count = min(MAX_LOGPROBS, head.logits.shape[1])
            packed = torch.cat(
                [LogprobRows.of(head.logits[rows], chunk_tokens, count).packed() for rows, chunk_tokens in chunks]
            )
            self._logprobs.copy_(packed.view(self._logprobs.shape), non_blocking=True)
        tree = trees.tokens, trees.parents, trees.depths, trees.masks, trees.values.view(torch.int32)
        rows = torch.cat((walk.path_lens[:, None], walk.tokens, walk.paths, *tree), 1)
        self._rows[nodes, side].copy_(rows, non_blocking=True)
        self._read_probs.copy_(self.drafts.read_probs, non_blocking=True)

    def _transformed(self, logits: Tensor, trees: DeviceTrees, positions: Tensor, truncates: bool) -> Tensor:
        """Return the scores of the nodes, float32 [B * nodes, vocab]."""
        inputs, sampling = self.inputs, self.sampling
        sampling.count(inputs["transform_options"][:, 0], inputs["counted_tokens"])
        steps = torch.arange(trees.ancestors.shape[2], dtype=torch.int32, device=logits.device)
        tokens = trees.tokens.gather(1, trees.ancestors.flatten(1).long()).view(trees.ancestors.shape)
        below_root = (steps > 0) & (steps <= trees.depths[:, :, None])
        return logit_transforms_triton(
            logits,
            TransformInputs(
                inputs["transform_numbers"],
                inputs["transform_options"],
                inputs["end_tokens"],
                positions.long() + 1,
                torch.where(below_root, tokens, -1).flatten(0, 1),
                sampling.biases,
                sampling.counts,
            ),
            truncates,
        )

    def results(
        self, requests: Sequence[RoundInput], nodes: int, drafted: bool, logprobs: bool = False, side: int = 0
    ) -> list[RoundResult]:
        """Return the last round's results from the host; arguments as in that round. `drafted`: SSMs read tokens."""
        width, count = self.inputs.limits.width, len(requests)
        rows = self._host_rows[nodes, side][:count].copy()  # the next round overwrites both buffers
        read_probs = self._host_read_probs[:, :count].copy()
        packed = self._logprobs[:count].numpy().copy() if logprobs else None
        results = []
        for i, (request, row) in enumerate(zip(requests, rows[:, : 1 + 2 * width].tolist(), strict=True)):
            length, num_read = row[0], len(request.new_tokens) - 1 if drafted else 0
            results.append(
                RoundResult(
                    rows[i, 1 + 2 * width :].reshape(5, nodes),
                    np.array(row[1 + width : 1 + width + length], dtype=np.int64),
                    row[1 : 1 + length],
                    read_probs[:, i, :num_read],
                    None if packed is None else packed[i, :length],
                )
            )
        return results
