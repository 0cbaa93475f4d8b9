"""Captured target passes for rounds of the host executor."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec.engine.runner import tree_rows
from treespec.graphs.round_inputs import DeviceInputs, RoundLimits
from treespec.graphs.stack_passes import FeaturePool, ModelStack, TreePass
from treespec.models.adapter_slots import NO_ADAPTER
from treespec.request import Request
from treespec.tree import TokenTree
from treespec_kernels.launch.graph_capture import GraphMemory, run_then_capture
from treespec_kernels.launch.switches import is_on

logger = logging.getLogger("treespec")

MAX_ROWS = 512  # maximum rows of a captured pass: larger ones gain little, and their logits take much memory


class _PassShape(NamedTuple):
    """Shape of a captured pass: maximum numbers of requests, nodes per request, and committed positions."""

    requests: int
    nodes: int
    context: int
    adapted: bool  # whether requests may have adapters


class TargetPass:
    """Target passes over host trees, replayed from CUDA graphs.

    The host executor's rounds (custom drafters, structured outputs, rules with random draws) launch one graph per
    target pass instead of several hundred kernels. A graph is captured at the first pass of its shape, and is used from
    then on if its bits equal those of the same pass without it.
    """

    def __init__(
        self,
        target: ModelStack,  # a stack of one model
        limits: RoundLimits,  # limits of captured rounds; larger trees run without a graph
        sizes: Sequence[int],  # numbers of requests to capture, ascending
        contexts: Sequence[int],  # maximum committed positions to capture, ascending
        memory: GraphMemory,  # memory pool of the engine's graphs
        features: FeaturePool | None,  # hidden states of the target for heads; None without heads
        exact: bool,  # whether the graphs must reproduce the bits of the runner's passes
    ):
        self._target, self._limits, self._sizes, self._contexts = target, limits, sizes, contexts
        self._memory, self._features, self._exact = memory, features, exact
        self.has_captured = False  # whether the last pass was the first of its shape
        self._graphs: dict[_PassShape, _Graph] | None = {}  # None if graphs cannot run here

    @property
    def num_graphs(self) -> int:
        return len(self._graphs or ())

    def logits(self, requests: Sequence[Request], trees: Sequence[TokenTree], run: Callable[[], Tensor]) -> Tensor:
        """Return the logits of all nodes of all requests, [total nodes, vocab]; `run` computes them without a graph."""
        shape = self._shape_of(requests, trees)
        self.has_captured = False
        if shape is None or not is_on("captured_passes"):
            return run()
        if shape not in (graphs := self._graphs or {}):
            self.has_captured = True
            return self._first(shape, requests, trees, run)
        return graphs[shape].replay(requests, trees)

    def _shape_of(self, requests: Sequence[Request], trees: Sequence[TokenTree]) -> _PassShape | None:
        """Return the smallest shape with room for a pass; None if the pass is too large or graphs cannot run here."""
        nodes = max(map(len, trees))
        if self._graphs is None or nodes > self._limits.nodes[-1]:
            return None
        if max(int(tree.depths.max()) for tree in trees) > self._limits.max_depth:
            return None
        context = max(request.context_len for request in requests)
        size = next((limit for limit in self._sizes if limit >= len(requests)), None)
        max_context = next((limit for limit in self._contexts if limit >= context), None)
        if size is None or max_context is None:
            return None
        if any(request.num_replayed > self._limits.width for request in requests):
            return None  # a deeper tree was verified before
        adapted = any(request.adapter is not None for request in requests)
        shape = _PassShape(size, self._limits.fitting(nodes), max_context, adapted)
        return shape if size * shape.nodes <= MAX_ROWS else None

    @cached_property
    def _out(self) -> Tensor:
        """Logits of the last pass, [rows, vocab], in a buffer shared by all graphs."""
        head, rows = self._target.kernels.weights.head, min(self._sizes[-1] * self._limits.nodes[-1], MAX_ROWS)
        return torch.empty(rows, head.shape[1], dtype=self._target.kernels.dtype, device=head.device)

    def _first(
        self, shape: _PassShape, requests: Sequence[Request], trees: Sequence[TokenTree], run: Callable[[], Tensor]
    ) -> Tensor:
        """Run a pass without a graph, capture its shape, and compare the results."""
        assert self._graphs is not None
        logits = run()
        try:
            graph = _Graph(shape, self._target, self._limits, self._memory, self._features, self._out)
            replayed = graph.replay(requests, trees)
            differs = self._exact and not torch.equal(replayed.view(torch.int16), logits.view(torch.int16))
        except Exception as error:  # drivers and compilers may raise any error for new kernels
            torch.cuda.synchronize(logits.device)  # raises if the device is lost
            logger.warning("cannot capture target passes; launching their kernels individually", exc_info=error)
        else:
            if not differs:
                self._graphs[shape] = graph
                return replayed
            logger.warning(
                "a captured target pass of %s requests with %s nodes differs in bits; launching kernels individually",
                *shape[:2],
            )
        self._graphs = None
        return run()  # the graph may have written different K/V


class _Graph:
    def __init__(
        self,
        shape: _PassShape,
        target: ModelStack,
        limits: RoundLimits,
        memory: GraphMemory,
        features: FeaturePool | None,
        out: Tensor,
    ):
        b, n, context, adapted = shape
        fields = {
            "context_lens": (b,),
            "max_lens": (b,),
            "adapters": (b,),
            "state_slots": (b,),
            "replayed": (b,),
            "pages": (b, limits.max_pages),
            "tokens": (b, n),
        }
        fields |= {"depths": (b, n), "ancestors": (b, n, limits.width)}
        limits = replace(limits, max_context=context)
        inputs = DeviceInputs(
            b, limits, {torch.int32: fields}, target.pool.device, idle={"depths": -1, "adapters": NO_ADAPTER}
        )
        tree_pass = TreePass(target, inputs, n, features)
        self._inputs, self._memory, self._shape, self._out = inputs, memory, shape, out[: b * n]
        self._slots_of = target.kernels.slots_of
        rows = inputs["tokens"], inputs["depths"], inputs["ancestors"], adapted
        self._launches = lambda: tree_pass.logits(*rows).logits
        self._replay: Callable[[], None] | None = None

    def replay(self, requests: Sequence[Request], trees: Sequence[TokenTree]) -> Tensor:
        """Return the logits of all nodes, [total nodes, vocab], in their own memory."""
        self._fill(requests, trees)
        if self._replay is None:
            self._replay = run_then_capture(self._run, self._memory)
        self._replay()
        for request in requests:
            if request.state is not None:
                request.state.length = request.context_len
        rows = self._out.view(*self._shape[:2], -1)
        # Copy the rows, because the next pass writes to the same memory.
        return torch.cat([rows[i, : len(tree)] for i, tree in enumerate(trees)])

    def _run(self) -> None:
        self._out.copy_(self._launches())

    def _fill(self, requests: Sequence[Request], trees: Sequence[TokenTree]) -> None:
        """Upload a batch; unused rows are idle."""
        self._inputs.clear()
        host = self._inputs.host
        host["adapters"][: len(requests)] = self._slots_of([request.adapter for request in requests])
        for i, (request, tree) in enumerate(zip(requests, trees, strict=True)):
            count, ancestors = len(tree), tree_rows(request, tree).ancestors
            host["context_lens"][i], host["max_lens"][i] = request.context_len, request.max_len
            if (state := request.state) is not None:
                host["state_slots"][i], host["replayed"][i] = state.slot, request.num_replayed
            host["pages"][i, : len(request.pages)] = request.pages
            host["tokens"][i, :count] = tree.tokens
            host["depths"][i, :count] = tree.depths
            host["ancestors"][i, :count] = np.arange(count)[:, None]
            host["ancestors"][i, :count, : ancestors.shape[1]] = ancestors
        self._inputs.upload()
