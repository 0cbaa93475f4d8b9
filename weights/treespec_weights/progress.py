"""Report the progress of loading a model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Show = Callable[[str, float], None]
"""Called with a description of the current work and its completed fraction."""

_Item = TypeVar("_Item")
_show: ContextVar[Show | None] = ContextVar("show", default=None)


@contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """Report this thread's loading progress to `show` while the context is open."""
    token = _show.set(show)
    try:
        yield
    finally:
        _show.reset(token)


def tracked(doing: str, items: Sequence[_Item], size: Callable[[_Item], int] = lambda item: 1) -> Iterator[_Item]:
    """Yield the items, and report the completed share of their total size before each."""
    show, count = _show.get(), 0
    if show is None:
        yield from items
        return
    total = max(sum(map(size, items)), 1)
    for item in items:
        show(doing, count / total)
        yield item
        count += size(item)
    show(doing, 1.0)
