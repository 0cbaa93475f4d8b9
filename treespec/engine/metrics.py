"""Engine-wide counters."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from treespec.request import Request
from treespec.tree import TokenTree

WHOLE_TREE = "tree"


@dataclass
class SourceCounts:
    """Drafted and accepted tokens of a source, in all rounds."""

    num_drafts: int = 0  # number of trees with nodes from this source
    num_tokens: int = 0  # number of these nodes
    accepted: list[int] = field(default_factory=list)  # entry i is the number of accepted nodes at depth i + 1


@dataclass
class Stats:
    """Counters since the engine was built.

    A request, including a rejected one, is counted when it ends. `rounds`, `num_preemptions` and `accepted_lengths`
    (number of verified trees by accepted drafted tokens) are updated in every round, as is `drafts`: by source, and of
    whole trees under `WHOLE_TREE`. `prefill_tokens` includes tokens that preempted requests recomputed.
    """

    requests: int = 0
    failed_requests: int = 0
    rounds: int = 0
    num_preemptions: int = 0
    target_passes: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    accepted_tokens: int = 0
    nodes_verified: int = 0
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    drafts: dict[str, SourceCounts] = field(default_factory=lambda: defaultdict(SourceCounts))
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    accepted_only_by_source: Counter[str] = field(default_factory=Counter)

    def count_draft(self, tree: TokenTree, accepted: Sequence[tuple[str, ...]]) -> None:
        """Count the verified tree of a request, and the sources of its accepted nodes, by depth."""
        drafted = len(tree.tokens) - 1
        if not drafted:
            return
        for source, count in ((WHOLE_TREE, drafted), *tree.drafted_by_source().items()):
            self.drafts[source].num_drafts += 1
            self.drafts[source].num_tokens += count
        for depth, sources in enumerate(accepted):
            for source in (WHOLE_TREE, *sources):
                counts = self.drafts[source].accepted
                if depth < len(counts):
                    counts[depth] += 1
                else:
                    counts += [*[0] * (depth - len(counts)), 1]

    def add_finished(self, request: Request) -> None:
        self.requests += 1
        self.failed_requests += request.finish_reason == "error"
        self.target_passes += request.target_passes
        self.prefill_tokens += request.num_prefilled
        self.cached_tokens += request.num_cached
        self.generated_tokens += request.num_generated
        self.accepted_tokens += request.accepted_tokens
        self.nodes_verified += request.nodes_verified
        self.accepted_by_source.update(request.accepted_by_source)
        self.accepted_only_by_source.update(request.accepted_only_by_source)

    def as_dict(self) -> dict[str, Any]:
        """Return the counters as JSON-serialisable values, and ratios of them.

        `acceptance_length`, also as `avg_tokens_per_round`, is tokens per target pass of a request; `acceptance_rate`
        is accepted over drafted tokens in verified trees. Both are 0 before the first pass or draft.
        """
        drafted = self.nodes_verified - self.target_passes
        length = self.generated_tokens / self.target_passes if self.target_passes else 0.0
        counters = {counter.name: getattr(self, counter.name) for counter in fields(self) if counter.type is int}
        return {
            **counters,
            "acceptance_length": length,
            "avg_tokens_per_round": length,
            "acceptance_rate": self.accepted_tokens / drafted if drafted else 0.0,
            "accepted_by_source": dict(self.accepted_by_source),
            "accepted_only_by_source": dict(self.accepted_only_by_source),
        }
