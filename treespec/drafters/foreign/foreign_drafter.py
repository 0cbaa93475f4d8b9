"""Base of drafts with another tokenizer than the target's: their own KV cache, each request's text in their own tokens,
and the decision whether another pass pays."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from treespec.cache import KVCache
from treespec.drafters.foreign.retokenize import Context, Translation
from treespec.models.decoder import Decoder
from treespec.planning.planner import Planner
from treespec.request import Request
from treespec.tree import TokenTree
from treespec_kernels.attention.tree_batch import RequestRows

CHUNK = 256  # tokens of one request that are read at once
NEAR = 16  # tokens that a pass may read beside the last one and still be a measure of what drafting takes
ROOM = 1.5  # draft tokens that a target's token may take before the draft falls silent for want of pages
_TRUTH_MEMORY = 0.1
_SECONDS_MEMORY = 0.1
_RECOVERY = 0.002  # of hope, with each round without a guess: what is not tried cannot be learned


@dataclass
class Reading:
    """A request's state between rounds.

    Attributes:
        context: its text.
        pages: int64, in the draft's own cache.
        valid: leading tokens of the context whose K/V are computed.
        ahead: the draft's tokens behind the context whose K/V are computed too: accepted guesses, or what it wrote.
        masks, first_slots: of the tree that is being drafted, as the SSMs keep them.
        proposed: the tree of this round, None where there is none.
        slot_of_node: of its nodes, -1 where one was not expanded.
        alone: accepted tokens so far that no other source had proposed.
    """

    context: Context
    pages: np.ndarray
    valid: int = 0
    ahead: list[int] = field(default_factory=list)
    poisoned: bool = False
    masks: np.ndarray = field(default_factory=lambda: np.ones((1, 1), dtype=bool))
    proposed: TokenTree | None = None
    slot_of_node: np.ndarray | None = None
    alone: int = 0

    @property
    def is_near(self) -> bool:
        """Whether few tokens are left to prefill."""
        return len(self.context.tokens) - self.valid <= NEAR

    def follow(self, tokens: Sequence[int]) -> None:
        """Update with the target's tokens, and invalidate K/V positions whose tokens changed."""
        context, before = self.context, len(self.context.tokens)
        same = context.extend(tokens[context.known :])
        if same < before or self.valid < before:
            self.valid = min(self.valid, same)
        else:
            for old, new in zip(self.ahead, context.tokens[before:], strict=False):
                if old != new:
                    break
                self.valid += 1
        self.ahead = []


class Pays:
    """Whether a pass is worth its time to requests whose trees the planner sizes: what it promises, corrected by how
    much of such promises was kept, against the tokens that its seconds would bring otherwise."""

    def __init__(self, planner: Planner):
        self._planner = planner
        self._truth, self._seconds, self._passes = 1.0, 0.0, 0

    def worth(self, promised: float) -> bool:
        """`promised`: tokens."""
        return self._truth * promised > self._planner.rate * self._seconds

    @contextmanager
    def timed(self, counts: bool = True) -> Iterator[None]:
        """Learn from a pass what one takes, if it counts. The first does not: it computes RoPE's table and more."""
        began = time.perf_counter()
        yield
        if not counts:
            return
        took, self._passes = time.perf_counter() - began, self._passes + 1
        if self._passes == 2:
            self._seconds = took
        elif self._passes > 2:
            self._seconds += _SECONDS_MEMORY * (min(took, 2 * self._seconds) - self._seconds)

    def kept(self, tree: TokenTree, brought: int) -> None:
        """Learn from a tree and how many accepted tokens no other source had: those would have come anyway."""
        promised = float(tree.values[1:].sum())
        error = brought - self._truth * promised
        self._truth = min(max(self._truth + _TRUTH_MEMORY * error / max(promised, 1.0), 0.05), 1.2)

    def rested(self) -> None:
        """Learn from a round without a guess."""
        self._truth += _RECOVERY * (1.0 - self._truth)


class ForeignDrafter(ABC):
    """A draft with another tokenizer: one source beside the SSMs, under its own name and under "ssm".

    Args:
        name: for attribution.
        model: the draft.
        cache: of its own, one pool, with pages for every request that runs at once.
        translation: between the tokenizers.
        capacity: tokens of a request that it reads at most; behind them it is silent.
        scratch: slots behind them, for its trees.
        planner: what a second is worth.
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
    ):
        self.name, self.model, self.cache, self.translation = name, model, cache, translation
        self.capacity, self.scratch, self.planner = capacity, scratch, planner
        self.pays = Pays(planner)
        self._readings: dict[str, Reading] = {}
        self._fallback = next((t for t in model.config.eos_token_ids if t < model.vocab_size), 0)

    @abstractmethod
    def propose(self, requests: Sequence[Request], max_depths: Sequence[int]) -> list[TokenTree]:
        """As `Drafter.propose`."""

    @abstractmethod
    def commit(self, requests: Sequence[Request], paths: Sequence[np.ndarray]) -> None:
        """As `Drafter.commit`."""

    def allows(self, request: Request) -> bool:
        """Whether it may draft for a request."""
        return request.spec.allows("ssm", self.name)

    def release(self, request: Request) -> None:
        """Release a request and its pages."""
        reading = self._readings.pop(request.request_id, None)
        if reading is not None:
            self.cache.release(request.request_id, scrub=reading.poisoned)

    def _serve(self, requests: Sequence[Request], max_depths: Sequence[int]) -> list[int]:
        """Which requests to draft for, their texts read so far; their places."""
        places = []
        for i, (request, depth) in enumerate(zip(requests, max_depths, strict=True)):
            if depth <= 0 or not self.allows(request):
                continue
            reading = self._readings.get(request.request_id)
            if reading is None:
                pages = self.cache.reserve(request.request_id, self.capacity + self.scratch)
                reading = Reading(Context(self.translation, self._fallback), pages)
                self._readings[request.request_id] = reading
            reading.follow(request.tokens)
            reading.proposed = None
            if len(reading.context.tokens) + depth <= self.capacity:
                places.append(i)
        return places

    def _learn(self, request: Request, reading: Reading) -> None:
        """Hook after a tree was verified and counted."""
        assert reading.proposed is not None
        alone = request.accepted_only_by_source.get(self.name, 0)
        self.pays.kept(reading.proposed, alone - reading.alone)
        reading.alone, reading.proposed = alone, None

    def _of(self, requests: Sequence[Request], places: Sequence[int]) -> list[Reading]:
        return [self._readings[requests[i].request_id] for i in places]

    def _score_roots(self, readings: Sequence[Reading]) -> Tensor:
        """float32 [len(readings), draft's vocabulary]: logits after each text, having read what was new in it."""
        while late := [each for each in readings if len(each.context.tokens) - each.valid > CHUNK]:
            rows = [RequestRows.chain(each.valid, CHUNK, each.pages) for each in late]
            self._forward(rows, [t for each in late for t in each.context.tokens[each.valid : each.valid + CHUNK]], 0)
            for each in late:
                each.valid += CHUNK
        starts = [min(each.valid, len(each.context.tokens) - 1) for each in readings]
        rows = [
            RequestRows.chain(start, len(each.context.tokens) - start, each.pages)
            for each, start in zip(readings, starts, strict=True)
        ]
        tokens = [t for each, start in zip(readings, starts, strict=True) for t in each.context.tokens[start:]]
        logits = self._forward(rows, tokens, np.cumsum([each.num_rows for each in rows]) - 1)
        for each in readings:
            each.valid, each.masks = len(each.context.tokens), np.ones((1, 1), dtype=bool)
        return logits

    def _forward(self, rows: list[RequestRows], tokens: Sequence[int], scored: np.ndarray | int | None) -> Tensor:
        """One pass. float32 logits of the scored rows: an index, 0 for none of them, None for all."""
        pool = self.cache.pools[0]
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.model.device)
        hidden = self.model.forward(ids, self.model.plan(rows, pool), pool)
        if isinstance(scored, int):
            return torch.empty(0, self.model.vocab_size, dtype=torch.float32, device=self.model.device)
        every = scored is None
        return self.model.logits(
            hidden[: len(tokens)] if every else hidden, None if every else torch.from_numpy(scored)
        ).float()


def roots(requests: Sequence[Request]) -> list[TokenTree]:
    """The one-node tree, which proposes nothing."""
    return [TokenTree.root(request.tokens[-1]) for request in requests]


DrawsFor = Callable[[Request], bool]
