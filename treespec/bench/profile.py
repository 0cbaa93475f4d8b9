"""Where the time of a round goes, and what was accepted, seen from outside the engine.

`profiled` replaces bound methods of an engine, and the noise's own, by timed ones and puts everything back: the engine
itself measures no more than its planner needs.

A round that runs from captured graphs is one wait for the host. Its seconds are drafting and target pass (with merging,
verification and commit, which are the graphs' own) in the proportion that the engine measured for these graphs alone.
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
    "draft": "all sources propose",
    "merge": "plan, merge and cut the trees",
    "forward": "the target pass",
    "verify": "from logits to the accepted path",
    "noise": "draw a position's noise, for drafts and target once",
    "commit": "emit, compact the caches",
    "update": "let go of what has ended",
    "host": "the rest of the round",
}


class Timer:
    """The seconds of all calls of what it wraps.

    Args:
        around: timers whose calls may contain this one's; while one of them runs, these seconds are not its own.
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
    """What happened since `profiled` was opened.

    Attributes:
        rounds: rounds with at least one tree.
        accepted: trees by how many accepted drafted tokens they emitted.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.accepted: Counter[int] = Counter()
        names = ("step", "prefill", "draft", "propose", "forward", "verify", "commit", "update")
        self.timers = {name: Timer() for name in names}
        self.timers["noise"] = Timer([self.timers[name] for name in ("draft", "verify", "propose")])

    @property
    def prefill_seconds(self) -> float:
        """Seconds in prompts, the SSMs' share included."""
        return self.timers["prefill"].total

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part, as in `MEANING`. They add up to all rounds without prefill."""
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
    """The share of trees whose accepted path reached depth 1, 2, ...; `accepted` counts trees by accepted tokens."""
    total, deepest = accepted.total(), max(accepted, default=0)
    return [sum(n for depth, n in accepted.items() if depth >= d) / total for d in range(1, deepest + 1)]


@contextmanager
def profiled(engine: Engine) -> Iterator[Profile]:
    """Measure an engine while the context is open. Open it between rounds."""
    profile = Profile()
    timers = profile.timers

    def watched(commit: Callable[..., None]) -> Callable[..., None]:
        """Commit, timed, and what the round accepted."""
        timed = timers["commit"].wrap(commit)

        def commit_and_count(decided: Sequence[Decided]) -> None:
            before = [len(each.scored.request.tokens) for each in decided]
            timed(decided)
            profile.rounds += bool(decided)
            for ((request, _, _), (path, _)), length in zip(decided, before, strict=True):
                profile.accepted[min(len(path) - 1, len(request.tokens) - length)] += 1  # a stop may lie in the path

        return commit_and_count

    def captured(run: Callable[..., list[RoundResult]], seconds: RoundSeconds) -> Callable[..., list[RoundResult]]:
        """A captured round, timed, and what it accepted."""

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
    """An instance's attribute as it was: its own, where it had one, or else its class's."""
    if own is None:
        delattr(owner, name)
    else:
        setattr(owner, name, own)
