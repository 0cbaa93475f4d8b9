"""Model passes of fixed shape for captured rounds: stacked models' passes, and target passes over token trees."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from treespec.cache.kv_cache import load_features, store_features
from treespec.graphs.round_inputs import DeviceInputs
from treespec.models.attention import TritonAttention
from treespec.models.feature_head import FeatureHead
from treespec.models.head_vocabulary import HeadVocabulary
from treespec.models.hidden_states import record_states
from treespec.models.state_pass import RoundStates
from treespec.models.triton_decoder import PassKernels, RopeTables, TritonPass
from treespec_kernels.attention.pass_layout import DeviceLayout
from treespec_kernels.attention.tree_batch import PAGE_SIZE
from treespec_kernels.linear.lm_head import BlockStats, LmHead
from treespec_kernels.recurrent.request_state import StateTensors


class FeaturePool(NamedTuple):
    """Pool of the target's hidden states that draft heads read."""

    layers: tuple[int, ...]  # target layers, as in `Decoder.forward_with_states`
    pool: Tensor  # [num layers, 2, num_pages, heads, PAGE_SIZE, width], as in `KVCache`

    def write(self, slots: Tensor, states: Tensor) -> None:
        """Write states [num_rows, num layers, hidden_size] to physical slots, int64 [num_rows]."""
        store_features(self.pool, slots // PAGE_SIZE, slots % PAGE_SIZE, states)

    def read(self, slots: Tensor) -> Tensor:
        """Return the states at physical slots, [num_rows, num layers, hidden_size]."""
        return load_features(self.pool, slots // PAGE_SIZE, slots % PAGE_SIZE)


@dataclass(frozen=True, eq=False)
class ModelStack:
    """G models of equal shape with stacked weights, and their K/V pool."""

    kernels: PassKernels
    tables: RopeTables
    attention: TritonAttention
    pool: Tensor  # K/V, [num_planes, 2, G * num_pages, num_kv_heads, PAGE_SIZE, head_dim]
    first: int = 0  # index of the first model among the SSMs
    heads: Sequence[HeadVocabulary] = ()  # vocabularies of reduced heads, one per model; empty for full heads
    scorer: PassKernels | None = None  # kernels of the model whose LM head is used; None for the stack's own
    states: StateTensors | None = None  # recurrent states of the target's requests; None without recurrent layers

    @property
    def groups(self) -> int:
        return self.kernels.weights.groups

    @cached_property
    def _columns(self) -> Tensor:
        """Token ids of reduced heads' columns, int64 [G, 1, width]."""
        return torch.stack([head.index for head in self.heads])[:, None]

    def logits(self, hidden: Tensor) -> tuple[Tensor, BlockStats | None]:
        """Return logits [G * rows, vocab], -inf outside a reduced head, and block statistics of full heads."""
        head = (self.scorer or self.kernels).logits(hidden)
        if not self.heads:
            return head
        logits = head.logits.view(self.groups, -1, head.logits.shape[1])
        full = logits.new_full((*logits.shape[:2], self.heads[0].size), -torch.inf)
        full.scatter_(2, self._columns.expand_as(logits), logits)
        return full.flatten(0, 1), None


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadStack(ModelStack):
    """A stack of one draft head that reads hidden states of the target."""

    head: FeatureHead


class StackPasses:
    """Passes over R = `rows` rows of each of B requests in each of G models.

    Rows are consecutive tokens if `chain`, otherwise tree nodes.
    """

    def __init__(self, stack: ModelStack, inputs: DeviceInputs, rows: int, chain: bool):
        self.stack, self.inputs = stack, inputs
        attention, limits, device = stack.attention, inputs.limits, inputs.device
        self._layouts = [
            DeviceLayout.allocate(
                stack.groups * inputs.num_requests,
                rows,
                rows if chain else limits.width,
                shape,
                chain=chain,
                max_context=limits.max_context,
                device=device,
                config=attention.config(shape),
                page_size=PAGE_SIZE,
                keeps_partials=False,
            )
            for shape in stack.kernels.shapes
        ]
        self._states = None
        if stack.states is not None:
            of_requests = stack.states, inputs["state_slots"], inputs["replayed"]
            self._states = RoundStates(*of_requests, rows, limits.width)
        models = torch.arange(stack.groups, dtype=torch.int32, device=device)[:, None, None]
        self._first_pages = models * (stack.pool.shape[2] // stack.groups)
        self._first_tokens = models.long() * (len(stack.kernels.weights.embed) // stack.groups)

    @property
    def positions(self) -> Tensor:
        """Row positions of the last pass, int32 [G * B * R]."""
        return self._layouts[0].positions

    @property
    def slots(self) -> Tensor:
        """Physical slots of the rows of the last pass, int64 [G * B * R]."""
        return self._layouts[0].slots

    def place(
        self,
        context_lens: Tensor,
        depths: Tensor,
        row_slots: Tensor | None = None,
        ancestors: Tensor | None = None,
        adapted: bool = False,
    ) -> TritonPass:
        """Plan a pass over the same rows in every model.

        Arguments are int32 [B], [B, R], [B, R] and [B, R, D + 1], as in `pass_layout_ref`; consecutive tokens need only
        the first two. `adapted`: requests may have adapters.
        """
        groups = self.stack.groups

        def repeated(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.expand(groups, *values.shape).flatten(0, 1).contiguous()

        pages = (self.inputs["pages"][None] + self._first_pages).flatten(0, 1)
        lens, of_rows = repeated(context_lens), repeated(depths)
        assert lens is not None and of_rows is not None
        placed = lens, pages, of_rows, repeated(row_slots), repeated(ancestors)
        attention = [layout.fill(*placed) for layout in self._layouts]
        layout, positions = self._layouts[0], self.positions
        if short := self.stack.kernels.config.short_context:  # see `ModelConfig.first_rotation`
            first = (self.inputs["max_lens"] > short).int() * short
            positions = positions + first[None, :, None].expand(groups, -1, layout.rows_per_request).flatten()
        adapters, slots = None, self.stack.kernels.adapters
        if adapted and slots is not None:
            adapters = slots.rows(self.inputs["adapters"][:, None].expand(-1, layout.rows_per_request).flatten())
        states = self._states and self._states.place(of_rows, placed[-1], self.stack.kernels.spreads)
        rows = layout.num_rows, self.stack.tables, layout.slots, attention
        return TritonPass(*rows, positions, adapters=adapters, states=states)

    def hidden(
        self,
        tokens: Tensor,  # int32 [B, R]; any value in padding rows
        context_lens: Tensor,
        depths: Tensor,
        row_slots: Tensor | None = None,
        ancestors: Tensor | None = None,
        states: dict[int, Tensor | None] | None = None,  # filled with residual streams, as in `PassKernels.hidden`
        adapted: bool = False,
    ) -> Tensor:
        """Return the hidden states after the final norm, [G * B * R, hidden_size]."""
        rows = self.place(context_lens, depths, row_slots, ancestors, adapted)
        ids = (tokens.clamp(min=0).long() + self._first_tokens).flatten()
        return self.stack.kernels.hidden(ids, rows, self.stack.pool, states=states)


class TreePass:
    """Target pass over trees of at most N nodes for B requests; stores the hidden states that heads read."""

    def __init__(self, target: ModelStack, inputs: DeviceInputs, nodes: int, features: FeaturePool | None):
        self._target, self._inputs, self._features = target, inputs, features
        self._passes = StackPasses(target, inputs, nodes, chain=nodes == 1)
        self._slots = None
        if nodes > 1:
            slots = torch.arange(nodes, dtype=torch.int32, device=inputs.device)
            self._slots = slots.expand(inputs.num_requests, nodes)

    @property
    def positions(self) -> Tensor:
        """Row positions of the last pass, int32 [B * N]."""
        return self._passes.positions

    def logits(self, tokens: Tensor, depths: Tensor, ancestors: Tensor, adapted: bool = False) -> LmHead:
        """Write the nodes' K/V to the slots after the contexts and return their logits.

        Tokens and depths, -1 for padding, are int32 [B, N]; `ancestors`, int32 [B, N, D + 1], are the indices of a
        node's ancestors by depth, ending with its own index, which is repeated. `adapted`: requests may have adapters.
        """
        of_trees = (self._slots, None if self._slots is None else ancestors)
        placed = tokens, self._inputs["context_lens"], depths, *of_trees
        run = partial(self._passes.hidden, *placed, adapted=adapted)
        kernels = self._target.kernels
        if self._features is None:
            return kernels.logits(run())
        hidden, states = record_states(self._features.layers, kernels.config, run)
        self._features.write(self._passes.slots, states)
        return kernels.logits(hidden)
