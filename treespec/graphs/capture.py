"""Preparation of an engine's captured rounds for all batch sizes and context lengths, and their measured costs."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from treespec.cache.kv_cache import pages_for
from treespec.config.configs import SpecConfig
from treespec.drafters.ssm.ssm_drafter import SsmDrafter
from treespec.engine.runner import Runner
from treespec.graphs.batch_round import BatchRound
from treespec.graphs.draft_stage import num_tree_slots
from treespec.graphs.round_inputs import RoundLimits
from treespec.graphs.sampling_state import SamplingState
from treespec.graphs.stack_passes import FeaturePool, HeadStack, ModelStack
from treespec.graphs.target_pass import MAX_ROWS, TargetPass
from treespec.graphs.verify_stage import LOGPROB_ROWS
from treespec.models.feature_head import FeatureHead
from treespec.models.group_model import GroupModel
from treespec.models.model_config import ModelConfig
from treespec.models.triton_decoder import TritonDecoder, stacked
from treespec.planning.planner import Planner
from treespec.planning.round_costs import CostCurve, split_drafting
from treespec.sampling.logprobs import BYTES_PER_LOGIT
from treespec.utils.memory import release_cached
from treespec_kernels.attention.tree_attention import SegmentPartition
from treespec_kernels.launch.graph_capture import GraphMemory
from treespec_kernels.launch.triton_launch import is_interpreted
from treespec_kernels.tree.device_trees import MAX_CANDIDATES
from treespec_kernels.tree.growth_limits import CHILDREN, FRONTIER, MAX_DEPTH, SEEDS
from treespec_kernels.tuning.tuned import KernelConfigs

# Slots after a request's context that drafts write to: the root's and those of all frontiers but the last
SLOTS = num_tree_slots(MAX_DEPTH)
NODES = (1, 8, 16, 32, 64)  # target pass rows per request, one graph each
# A graph launches programs for all segments of its longest context, so shorter contexts have their own graphs.
CONTEXTS = (4096, 16384, 65536)
MARGIN = 1 << 30  # bytes for unplanned memory: driver modules, graphs, vendor workspaces
_REPEATS = 5


def stack_sizes(drafts: Sequence[ModelConfig]) -> list[int]:
    """Return the sizes of the stacks: adjacent SSMs of equal architecture run as one model with stacked weights.

    Models with experts, or layers of unequal sizes, run alone.
    """
    keys = [
        (config.compute_key, i if config.shape.experts or config.shape.sizes else 0) for i, config in enumerate(drafts)
    ]
    return [len(list(group)) for _, group in itertools.groupby(keys)]


class Rounds(NamedTuple):
    """Captured rounds of an engine."""

    limits: RoundLimits  # limits of the rounds for the longest context
    by_size: dict[int, list[BatchRound]]  # by maximum batch size, ascending: rounds by ascending context length
    planners: dict[int, Planner]  # by maximum batch size
    nbytes: int  # GPU memory of the buffers and of graphs captured at start
    sampling: SamplingState  # state of running requests' logit transforms
    target_pass: TargetPass | None = None  # captured target passes for rounds of the host executor; None without graphs

    def size_for(self, num_requests: int) -> int:
        """Return the smallest batch size with room for `num_requests` requests."""
        return next(size for size in self.by_size if size >= num_requests)

    def round_for(self, size: int, context: int) -> BatchRound:
        """Return the round of a batch size for requests with up to `context` committed positions."""
        return next(batch for batch in self.by_size[size] if batch.limits.max_context >= context)


def captured_rounds(
    runner: Runner,
    ssms: SsmDrafter | None,
    configs: KernelConfigs,  # tuned for the device
    spec: SpecConfig,  # the engine's default options, which limit depth and nodes
    max_model_len: int,
    scratch: int,  # slots after a request's context, for tree nodes
    max_num_seqs: int,
    cuda_graphs: bool,  # whether to capture CUDA graphs; otherwise kernels are launched individually
) -> Rounds:
    """Prepare captured rounds and measure their costs; other graphs are captured at first use."""
    limits = round_limits(spec, max_model_len, scratch, len(ssms.models) if ssms is not None else 0)
    target, cache = runner.target, runner.cache
    assert isinstance(target, TritonDecoder)
    states = None if cache.states is None else cache.states.with_scratch(max_num_seqs * limits.width)
    model = ModelStack(target.kernels, target.tables, target.triton_attention, cache.pools[0], states=states)
    stacks = _stacks(ssms, cache.stacked[1:], configs)
    features = None if cache.features is None else FeaturePool(cache.features.layers, cache.pools[-1])
    captures = cuda_graphs and target.device.type == "cuda"
    graph_memory = GraphMemory.of(target.device) if captures else None
    release_cached(target.device)
    reserved_before = _reserved(target.device)
    contexts = [context for context in CONTEXTS if context < max_model_len] + [max_model_len]
    sampling = SamplingState(max_num_seqs, target.vocab_size, target.device, limits.width)
    evidence = None if ssms is None else ssms.evidence
    arguments = model, stacks, graph_memory, features, sampling, evidence
    sizes = batch_sizes(max_num_seqs)
    rounds = {
        size: [BatchRound(size, replace(limits, max_context=context), *arguments) for context in contexts]
        for size in sizes
    }
    if not is_interpreted():
        rounds[sizes[-1]][-1].warm_up(limits.nodes[-1:])  # largest first: other graphs fit into its memory
    of_models = [stack.kernels for stack in (model, *stacks)]
    for kernels in of_models:
        kernels.spreads.fill_(1)
    low = _measure_costs(rounds[1][0])
    high = low if len(sizes) == 1 else _measure_costs(rounds[sizes[-1]][0])
    for kernels in of_models:
        kernels.spreads.fill_(0)
    planners = {size: Planner(_between(low, high, (size - 1) / max(sizes[-1] - 1, 1)), limits) for size in sizes}
    passes = None
    if graph_memory is not None:
        passes = TargetPass(model, limits, sizes, contexts, graph_memory, features, target.kernels.exact)
    release_cached(target.device)
    return Rounds(limits, rounds, planners, _reserved(target.device) - reserved_before, sampling, passes)


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def planned_bytes(
    models: Sequence[ModelConfig],  # the target and the SSMs
    limits: RoundLimits,  # limits for the longest context
    max_num_seqs: int,
    prefill_chunk: int,  # rows of a prefill pass
    dtype: torch.dtype,  # dtype of activations
) -> int:
    """Return the memory of the largest round (all share it) and of a prefill pass, without weights and cache."""
    length = limits.max_context + limits.nodes[-1]
    total = MARGIN
    for i, model in enumerate(models):
        shape, head_dim = model.shape, model.shape.widest_head
        inner = max((sizes.intermediate_size for sizes in shape.sizes), default=shape.intermediate_size)
        spans = np.array([min(window or length, length) for _, _, window in model.attentions])
        per_layer = SegmentPartition().segment_of(spans) + 1 + (spans < length)  # a window may start inside a segment
        segments = int(per_layer.sum())
        # Twice the captured rows, because the run before a capture, which compiles the kernels, allocates its own
        # memory.
        captured = 2 * max_num_seqs * (max(limits.width, FRONTIER) if i else limits.nodes[-1])
        rows = captured + (0 if i else prefill_chunk)
        partials = rows * segments * shape.num_heads * (head_dim + 2) * 4
        widths = 4 * shape.hidden_size + 3 * inner + 8 * shape.num_heads * head_dim
        widths += 3 * shape.num_layers * shape.per_layer_size
        if (experts := shape.experts) is not None:
            widths += experts.top_k * (experts.size + shape.hidden_size)
        split = 8 * max(shape.hidden_size, 3 * shape.num_heads * head_dim) * 4  # fp32 sums of split layers
        activations = rows * (widths * dtype.itemsize + split + shape.vocab_size * (dtype.itemsize + 1))
        tables = len(model.ropes) * (limits.max_context + model.short_context) * 2 * head_dim * 4  # RoPE tables
        total += partials + activations + tables + _state_bytes(model, limits.width, rows, max_num_seqs, dtype)
        if not i:  # fp32 transformed scores, logits of the host executor's passes, log-probabilities
            nodes = max_num_seqs * limits.nodes[-1]
            scored = nodes * 4 + min(nodes, MAX_ROWS) * dtype.itemsize + LOGPROB_ROWS * BYTES_PER_LOGIT
            total += scored * shape.vocab_size + SamplingState.nbytes(max_num_seqs, shape.vocab_size)
    return total


def _state_bytes(model: ModelConfig, width: int, rows: int, max_num_seqs: int, dtype: torch.dtype) -> int:
    """Return the memory of one recurrent layer in a captured round and in a prefill pass; 0 without such layers.

    `rows` and the limits count as in `planned_bytes`. The states of the nodes that have several children, one for each
    depth of a request's tree, are the largest part.
    """
    recurrent, hidden = model.shape.recurrent, model.shape.hidden_size
    if recurrent is None:
        return 0
    channels, inner = recurrent.channels(hidden), recurrent.heads * recurrent.value_dim or hidden
    per_row = (channels + 2 * inner + 2 * recurrent.width(hidden)) * dtype.itemsize + (channels + 2 * inner) * 4
    states = recurrent.heads * recurrent.key_dim * recurrent.value_dim * 4
    replayed = max_num_seqs * width
    # A pass that the host launches copies the requests' states.
    return (rows + 2 * replayed) * (per_row + 8 * (recurrent.kernel + 4)) + (replayed + max_num_seqs) * states


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture: the powers of two below `max_num_seqs`, and `max_num_seqs`."""
    sizes = [1 << i for i in range(max_num_seqs.bit_length()) if 1 << i < max_num_seqs]
    return [*sizes, max_num_seqs]


def round_limits(spec: SpecConfig, max_model_len: int, scratch: int, num_ssms: int) -> RoundLimits:
    """Return the limits of captured rounds; its nodes must fit into the `scratch` slots of a request."""
    depth = min(MAX_DEPTH, spec.max_depth if not spec.is_plain else MAX_DEPTH, 1 + (scratch - 1) // FRONTIER)
    depth = max(min(depth, (MAX_CANDIDATES - SEEDS) // (FRONTIER * CHILDREN * (num_ssms + 1))), 1)
    largest_tree = max(spec.max_nodes, NODES[-1] if spec.is_adaptive else 1)
    nodes = sorted({n for n in NODES if n <= largest_tree} | {min(largest_tree, scratch)})
    return RoundLimits(depth, tuple(nodes), pages_for(max_model_len + scratch), max_model_len)


def runs_on_device(model: GroupModel) -> bool:
    """Return whether a draft's levels can be captured: one graph serves all, so weights must not vary by depth.

    Nor may rows read anything but a stack's own K/V.
    """
    if isinstance(model, FeatureHead):
        return model.keeps_kv and isinstance(model.decoder, TritonDecoder)
    return isinstance(model, TritonDecoder)


def _stacks(ssms: SsmDrafter | None, pools: Sequence[torch.Tensor], configs: KernelConfigs) -> list[ModelStack]:
    """Return the SSMs as stacks, one per K/V pool in `pools`."""
    if ssms is None:
        return []
    stacks: list[ModelStack] = []
    first = 0
    for pool in pools:
        count = pool.shape[2] // ssms.cache.pools[1 + first].shape[2]
        drafts = ssms.models[first : first + count]
        head = drafts[0] if isinstance(drafts[0], FeatureHead) else None
        models = [model for model in ([head.decoder] if head else drafts) if isinstance(model, TritonDecoder)]
        assert len(models) == count
        attention, tables = models[0].triton_attention, models[0].tables
        heads = [vocabulary for model in models if (vocabulary := model.head_vocabulary) is not None]
        arguments = stacked(models, configs), tables, attention, pool, first, heads
        if head is None:
            stacks.append(ModelStack(*arguments))
        else:
            assert isinstance(head.vocabulary_head, TritonDecoder)
            stacks.append(HeadStack(*arguments, head.vocabulary_head.kernels, head=head))
        first += count
    return stacks


def _measure_costs(batch: BatchRound) -> CostCurve:
    """Capture and measure the rounds of a batch size on an idle batch, which runs the same kernels.

    In Triton's interpreter, times are meaningless and the costs are constants.
    """
    nodes = batch.limits.nodes
    if is_interpreted():
        return CostCurve(nodes, (1.0,) * len(nodes), 0.1)
    batch.warm_up(nodes)
    verify = {n: _median_seconds(batch, 0, n)[1] for n in nodes}
    several = min(2, batch.limits.max_depth)
    one_level, more_levels = (_median_seconds(batch, levels, 1)[0] for levels in (1, several))
    start, level = split_drafting(one_level, more_levels, several)
    return CostCurve(nodes, tuple(verify.values()), level, draft_start_seconds=start)


def _between(first: CostCurve, last: CostCurve, share: float) -> CostCurve:
    """Interpolate costs at `share` of the way between two batch sizes, until rounds of this size are observed."""

    def mix(a: float, b: float) -> float:
        return a + share * (b - a)

    verify = map(mix, first.verify_seconds, last.verify_seconds)
    start = mix(first.draft_start_seconds, last.draft_start_seconds)
    level = mix(first.draft_seconds, last.draft_seconds)
    return CostCurve(first.rows, tuple(verify), level, draft_start_seconds=start)


def _median_seconds(batch: BatchRound, levels: int, nodes: int) -> tuple[float, float]:
    times = []
    for _ in range(_REPEATS):
        batch.replay(levels, nodes)
        times.append(batch.seconds())
    draft, verify = zip(*times, strict=True)
    return statistics.median(draft), statistics.median(verify)
