"""Progress output of `treespec autotune --aot` on stderr."""

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from tqdm import tqdm  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from treespec_kernels.aot.binary_cache import ResultCache
    from treespec_kernels.aot.compiler import Plan

KERNEL_SECONDS = 2.5  # approximate core-seconds per kernel: 497 kernels take ten minutes on two cores
_EVERY = 15.0  # seconds between lines if stderr is not a terminal


class CompileProgress:
    """Shows progress as a bar on a terminal, otherwise as periodic lines.

    Args:
        targets: compilation targets.
        cache: cache of results, if any.
    """

    def __init__(self, targets: Sequence[str], cache: "ResultCache | None"):
        self._targets, self._cache = targets, cache
        self._bar: tqdm | None = None
        self._known, self._began, self._printed = 0, 0.0, 0.0

    def begin(self, plan: "Plan") -> None:
        """Print the amount of work and the expected duration."""
        self._known, self._began = plan.known, time.monotonic()
        self._printed = self._began
        left = plan.total - plan.known
        kept = "" if self._cache is None else f"; results are cached in {self._cache.folder}"
        if not left:
            print(f"{plan.total} kernels for {', '.join(self._targets)}: all cached{kept}", file=sys.stderr)
            return
        processes = f"{plan.processes} process{'es' * (plan.processes > 1)}"
        known = f", {plan.known} others are cached" if plan.known else ""
        print(
            f"compiling {left} kernels for {', '.join(self._targets)} in {processes}{known}: "
            f"{_about(left * KERNEL_SECONDS / plan.processes)}{kept}",
            file=sys.stderr,
            flush=True,
        )
        if sys.stderr.isatty():
            self._bar = tqdm(desc="compiling", total=plan.total, initial=plan.known, leave=False)

    def advance(self, done: int, total: int) -> None:
        """Report the number of finished kernels."""
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            return
        now = time.monotonic()
        if now - self._printed >= _EVERY and done < total:
            self._printed = now
            left = (total - done) * (now - self._began) / (done - self._known)
            print(f"{done} of {total} kernels compiled, {_about(left)} left", file=sys.stderr, flush=True)

    def __enter__(self) -> "CompileProgress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _about(seconds: float) -> str:
    """Format an approximate duration."""
    return f"about {max(seconds, 1):.0f} s" if seconds < 90 else f"about {seconds / 60:.0f} min"
