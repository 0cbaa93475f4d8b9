"""The container of an engine's draft sources."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from treespec.drafters.base import DraftSource
from treespec.drafters.ssm.ssm_drafter import SsmDrafter


@dataclass
class DraftSources:
    """The draft sources of an engine. The others propose first, and the SSMs extend their proposals."""

    ssms: SsmDrafter | None = None
    others: list[DraftSource] = field(default_factory=list)

    def __iter__(self) -> Iterator[DraftSource | SsmDrafter]:
        ssms = () if self.ssms is None else (self.ssms,)
        return iter((*ssms, *self.others))
