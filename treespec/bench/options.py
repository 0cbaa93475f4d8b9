"""Options of a benchmark, from which the flags of `treespec bench` are generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from treespec.utils.options import check_values, option


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure, and how.

    Args:
        model, drafts: as in `LLM`.
        prompts: JSON lines of Spec-Bench (turns), HumanEval (prompt) or plain ones (prompt, text). None means held-out
            instructions for chat models, and held-out texts for others.
        samples: number of prompts.
        max_tokens: tokens per prompt.
        k_values: drafted tokens per round, of chains and transformers.
        nodes: rows of the target pass. With `verification`, the fixed trees have at most so many.
        combine: also measure these sets of sources, such as head+lookup, in trees of each size and in auto.
        batch: batch sizes, all full.
        temperature: sample, with new seeds per repeat, the same for all modes, and without transformers. None is 0,
            greedy, or 0.8 with `verification`.
        verification: compare verification rules on a fixed tree of SSM drafts instead: coupled, naive, rejection,
            traversal, or all.
        branching: children of that tree by depth, such as 3,2,1. None derives them from `nodes`.
        repeats: runs per mode.
        warmup: uncounted warm-up batches per mode.
        peers: also measure transformers.
        only: modes by name or pattern, such as 'tree-*'.
        grow: grow the target to about so many parameters, such as 120M or 0.5B, with the same function: costs of the
            larger model, tokens of the target.
        grow_vocab: also grow the vocabulary of target and drafts.
        keep: folder that keeps the grown models.
        server: URL of an OpenAI-compatible server, to which the prompts are sent instead, to measure latency and
            throughput as vLLM's bench serve. The key is $OPENAI_API_KEY.
        request_rate: mean arrivals per second at the server, in a Poisson process. None sends all at once.
        max_concurrency: most requests in flight at the server.
        threads: CPU threads. None leaves torch's.
        device, dtype, compile, quantization, draft_vocabulary: as in `LLM`; not applied to transformers.
        seed: seed of the choice of prompts, of sampling, of grown weights and of arrivals.
    """

    model: str | Path | None = None
    drafts: Sequence[str] | None = None
    prompts: str | Path | None = None
    samples: int = option(12, least=1)
    max_tokens: int = option(128, least=2)
    k_values: Sequence[int] = (3, 5, 7)
    nodes: Sequence[int] = (16,)
    combine: Sequence[str] = ()
    batch: Sequence[int] = (1,)
    temperature: float = None  # type: ignore[assignment]
    verification: Sequence[str] = ()
    branching: Sequence[int] | None = None
    repeats: int = option(3, least=1)
    warmup: int = option(1, least=0)
    peers: bool = True
    only: Sequence[str] = ()
    grow: str | None = None
    grow_vocab: int | None = None
    keep: str | Path | None = None
    server: str | None = None
    request_rate: float | None = None
    max_concurrency: int | None = option(None, least=1)
    threads: int | None = option(None, least=1)
    device: str = "auto"
    dtype: str = "auto"
    compile: bool | str = "auto"
    quantization: str | None = None
    draft_vocabulary: int | str | None = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        from treespec.errors import ConfigError

        check_values(self)
        if self.temperature is None:
            object.__setattr__(self, "temperature", 0.8 if self.verification else 0.0)
        if self.server is not None:
            local = ("drafts", "k_values", "nodes", "combine", "batch", "verification", "only", "grow", "threads")
            if changed := [name for name in local if getattr(self, name) != getattr(Options, name)]:
                raise ConfigError(f"{', '.join(changed)}: the server decides on it; leave it out, or leave server out")
            if self.request_rate is not None and not self.request_rate > 0:
                raise ConfigError(f"request_rate={self.request_rate}; valid: requests per second, above 0")
        elif (self.request_rate, self.max_concurrency) != (None, None):
            raise ConfigError("request_rate and max_concurrency go with server")
        if self.branching is not None and (not self.verification or self.nodes != Options.nodes):
            raise ConfigError("branching needs verification and replaces nodes")
        if (self.grow_vocab, self.keep) != (None, None) and self.grow is None:
            raise ConfigError("grow_vocab and keep go with grow")
        for name, values, least in (("k_values", self.k_values, 1), ("nodes", self.nodes, 2), ("batch", self.batch, 1)):
            if not all(value >= least for value in values):
                raise ConfigError(f"{name}={tuple(values)}; valid: whole numbers from {least}")
