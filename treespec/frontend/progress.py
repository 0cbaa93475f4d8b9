"""Progress bar of a call: `tqdm` or the user's own."""

import logging
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from treespec.errors import ConfigError, describe_error, safe_repr

logger = logging.getLogger("treespec")


class Progress:
    """Counts finished outputs on a progress bar, which may be user code.

    If creating the bar fails, the call raises an error before any round runs. If the bar fails later, it is dropped
    with a warning and the call continues.

    Args:
        use_tqdm: whether to show `tqdm.tqdm`, or a callable that replaces it.
        total: number of outputs.

    Raises:
        ConfigError: the callable fails.
    """

    def __init__(self, use_tqdm: bool | Callable[..., Any], total: int):
        make = use_tqdm if callable(use_tqdm) else partial(tqdm, disable=not use_tqdm)
        self._close: Callable[..., Any] | None = None
        try:
            bar = make(total=total, desc="outputs")
            self._bar = bar.__enter__()
            self._close = bar.__exit__
        except Exception as error:  # user code may raise anything
            raise ConfigError(f"use_tqdm={safe_repr(use_tqdm)} failed: {describe_error(error)}") from error

    def update(self, count: int) -> None:
        """Count finished outputs."""
        self._guarded(lambda: self._bar.update(count))

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        close = self._close
        if close is not None:
            self._guarded(lambda: close(kind, error, traceback))

    def _guarded(self, call: Callable[[], object]) -> None:
        if self._close is None:  # the bar has failed
            return
        try:
            call()
        except Exception as error:  # user code may raise anything
            self._close = None
            logger.warning("the progress bar of use_tqdm failed and is dropped: %s", describe_error(error))
