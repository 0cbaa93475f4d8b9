"""Profiles rounds by part and counts accepted tokens by instrumenting an engine.

`profiled` temporarily replaces methods of the engine and of `Noise` by timed ones; the engine itself measures only what
its planner needs.

The host only waits for a captured round. Its time is split into drafting and target pass (including merge, verification
and commit) in the proportion measured for its graphs at start.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from treespec.engine import Decided, Engine
from treespec.graphs.graph_engine import GraphEngine
from treespec.graphs.graph_planner import RoundSeconds
from treespec.graphs.verify_stage import RoundResult
from treespec.sampling.noise import Noise

MEANING = {
    "draft": "drafting by all sources",
    "merge": "plan, merge and prune trees",
    "forward": "the target pass",
    "verify": "logits to accepted path",
    "noise": "sampling noise of drafts and target",
    "commit": "emit tokens, compact caches",
    "update": "release finished requests",
    "host": "rest of the round",
}


class Timer:
    """Accumulates the seconds of the calls it wraps.

    Args:
        around: timers of enclosing calls; while one runs, this timer's seconds are subtracted from it.
    """

    def __init__(self, around: "Sequence[Timer]" = ()) -> None:
        self.total, self.running, self.around = 0.0, False, around

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            self.running = True
            start = time.perf_counter()
            try:
                return original(*args, **options)
            finally:
                seconds = time.perf_counter() - start
                self.running = False
                self.total += seconds
                for outer in self.around:
                    outer.total -= seconds if outer.running else 0.0

        return timed


class Profile:
    """Measurements since `profiled` was entered.

    Attributes:
        rounds: rounds with at least one tree.
        accepted: number of trees by emitted drafted tokens.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.accepted: Counter[int] = Counter()
        names = ("step", "prefill", "draft", "propose", "forward", "verify", "commit", "update")
        self.timers = {name: Timer() for name in names}
        self.timers["noise"] = Timer([self.timers[name] for name in ("draft", "verify", "propose")])

    @property
    def prefill_seconds(self) -> float:
        """Prefill seconds, including the SSMs'."""
        return self.timers["prefill"].total

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part, as in `MEANING`; the sum is all rounds without prefill."""
        total = {name: timer.total for name, timer in self.timers.items()}
        parts = {
            "draft": total["draft"],
            "merge": total["propose"] - total["draft"],
            "forward": total["forward"],
            "verify": total["verify"],
            "noise": total["noise"],
            "commit": total["commit"],
            "update": total["update"],
        }
        return parts | {"host": total["step"] - total["prefill"] - sum(parts.values())}


def acceptance_by_depth_of(accepted: Counter[int]) -> list[float]:
    """Share of trees whose accepted path reached depth 1, 2, ...; `accepted` counts trees by accepted tokens."""
    total, deepest = accepted.total(), max(accepted, default=0)
    return [sum(n for depth, n in accepted.items() if depth >= d) / total for d in range(1, deepest + 1)]


@contextmanager
def profiled(engine: Engine) -> Iterator[Profile]:
    """Profile an engine while the context is open; enter between rounds."""
    profile = Profile()
    timers = profile.timers

    def watched(commit: Callable[..., None]) -> Callable[..., None]:
        """Time commit and count accepted tokens."""
        timed = timers["commit"].wrap(commit)

        def commit_and_count(decided: Sequence[Decided]) -> None:
            before = [len(each.scored.request.tokens) for each in decided]
            timed(decided)
            profile.rounds += bool(decided)
            for ((request, _, _), (path, _)), length in zip(decided, before, strict=True):
                profile.accepted[min(len(path) - 1, len(request.tokens) - length)] += 1  # a stop may cut the path

        return commit_and_count

    def captured(run: Callable[..., list[RoundResult]], seconds: RoundSeconds) -> Callable[..., list[RoundResult]]:
        """Time a captured round and count accepted tokens."""

        def run_and_count(requests: Any, levels: int, nodes: int) -> list[RoundResult]:
            start = time.perf_counter()
            results = run(requests, levels, nodes)
            took = time.perf_counter() - start
            whole, verify = seconds.of(levels, nodes) - seconds.host, seconds.verify[nodes]
            timers["draft"].total += took * (1 - verify / whole)
            timers["forward"].total += took * verify / whole
            profile.rounds += 1
            profile.accepted.update(len(result.tokens) - 1 for result in results if result.tokens)
            return results

        return run_and_count

    with ExitStack() as restore:

        def replace(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
            restore.callback(_restore_attribute, owner, name, vars(owner).get(name))
            setattr(owner, name, wrap(getattr(owner, name)))

        for source in (engine.ssms, engine.lookup, *engine.drafters):
            if source is not None:
                replace(source, "propose", timers["draft"].wrap)
        for name in ("step", "prefill", "propose", "forward", "verify", "update"):
            replace(engine, name, timers[name].wrap)
        replace(engine, "commit", watched)
        replace(Noise, "row", timers["noise"].wrap)
        if isinstance(engine, GraphEngine):
            for size, batches in engine.rounds.by_size.items():
                seconds = engine.rounds.planners[size].seconds
                for batch in batches:
                    replace(batch, "run", partial(captured, seconds=seconds))
        yield profile


def _restore_attribute(owner: Any, name: str, own: Any) -> None:
    """Restore an attribute: the instance's own, or the class's."""
    if own is None:
        delattr(owner, name)
    else:
        setattr(owner, name, own)
