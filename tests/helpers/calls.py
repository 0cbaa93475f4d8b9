"""Calls of functions that a test watches or lets fail."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from treespec import LLM


@contextmanager
def calls_of(owner: Any, name: str, before: Callable[[list[Any]], object] = lambda _: None) -> Iterator[list[Any]]:
    """The arguments of each call of a function, which runs after `before(calls)`."""
    original, calls = getattr(owner, name), list[Any]()

    def watched(*args: Any, **options: Any) -> Any:
        calls.append(args)
        before(calls)
        return original(*args, **options)

    with mock.patch.object(owner, name, watched):
        yield calls


def failing(owner: Any, name: str, error: Any) -> AbstractContextManager[mock.Mock]:
    """Let every call of a function fail while the block runs."""
    return mock.patch.object(owner, name, side_effect=error)


def by_the_host(llm: LLM) -> AbstractContextManager[object]:
    """Let the host take all steps of rounds, none of them in C++, while the block runs."""
    return mock.patch.object(llm.engine.host, "rounds", None)
