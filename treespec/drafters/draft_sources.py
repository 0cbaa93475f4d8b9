"""The container of an engine's draft sources."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from treespec.drafters.base import Drafter, ModelFreeDrafter
from treespec.drafters.cross_tokenizer.cross_tokenizer_drafter import CrossTokenizerDrafter
from treespec.drafters.lookup.lookup_drafter import LookupDrafter
from treespec.drafters.ssm.ssm_drafter import SsmDrafter
from treespec.drafters.table.table_drafter import TableDrafter
from treespec.request import Request


@dataclass
class DraftSources:
    """The draft sources of an engine: SSMs, lookup, the table and further drafters. Iteration skips absent ones."""

    ssms: SsmDrafter | None = None
    lookup: LookupDrafter | None = None  # prompt lookup and suffix decoding
    table: TableDrafter | None = None
    others: list[Drafter] = field(default_factory=list)  # custom drafters and cross-tokenizer drafts

    def __iter__(self) -> Iterator[Drafter | SsmDrafter]:
        ssms = () if self.ssms is None else (self.ssms,)
        return iter((*ssms, *self.model_free, *self.others))

    @property
    def model_free(self) -> Sequence[ModelFreeDrafter]:
        """The built-in sources that run no model."""
        return [source for source in (self.lookup, self.table) if source is not None]

    def evict(self, request: Request) -> None:
        """Release the K/V of a preempted request. Other sources depend only on its tokens and keep their state."""
        for source in self:
            if isinstance(source, SsmDrafter | CrossTokenizerDrafter):
                source.evict(request)
