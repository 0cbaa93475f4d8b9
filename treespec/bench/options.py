"""Options of a benchmark, from which the flags of `treespec bench` are generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from treespec.errors import ConfigError
from treespec.utils.options import check_values, option


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a benchmark run.

    Args:
        model, drafts: as in `LLM`.
        prompts: JSON lines of Spec-Bench (turns), HumanEval (prompt) or plain ones (prompt, text). None means held-out
            instructions for chat models, and held-out texts for others.
        samples: number of prompts.
        max_tokens: output tokens per prompt.
        k_values: drafted tokens per round for chains and transformers.
        nodes: rows of the target pass. With `verification`, the maximum nodes of the fixed trees.
        combine: sets of sources to measure in addition, such as head+lookup, in trees of each size and in auto.
        batch: batch sizes, all full.
        temperature: sampling temperature, with new seeds per repeat, equal for all modes; skips transformers. None
            is 0 (greedy), or 0.8 with `verification`.
        verification: compare verification rules on a fixed tree of SSM drafts instead: coupled, naive, rejection,
            traversal, or all.
        branching: children of that tree by depth, such as 3,2,1. None derives them from `nodes`.
        repeats: runs per mode.
        warmup: uncounted warm-up batches per mode.
        peers: also measure transformers.
        only: modes by name or pattern, such as 'tree-*'.
        grow: grow the target to about this number of parameters, such as 120M or 0.5B, without changing its function:
            the cost of the larger model with the tokens of the target.
        grow_vocab: also grow the vocabulary of target and drafts.
        keep: folder in which to keep the grown models.
        server: URL of an OpenAI-compatible server to send the prompts to instead, for measuring latency and throughput
            like vLLM's bench serve. The key is $OPENAI_API_KEY.
        request_rate: mean arrivals per second at the server, in a Poisson process. None sends all requests at once.
        max_concurrency: maximum concurrent requests at the server.
        threads: CPU threads. None keeps torch's default.
        device, dtype, compile, quantization, draft_vocabulary: as in `LLM`; not applied to transformers.
        seed: random seed for choosing prompts, sampling, grown weights and arrivals.
    """

    model: str | Path | None = None
    drafts: Sequence[str] | None = None
    prompts: str | Path | None = None
    samples: int = option(12, ge=1)
    max_tokens: int = option(128, ge=2)
    k_values: Sequence[int] = (3, 5, 7)
    nodes: Sequence[int] = (16,)
    combine: Sequence[str] = ()
    batch: Sequence[int] = (1,)
    temperature: float = None  # type: ignore[assignment]
    verification: Sequence[str] = ()
    branching: Sequence[int] | None = None
    repeats: int = option(3, ge=1)
    warmup: int = option(1, ge=0)
    peers: bool = True
    only: Sequence[str] = ()
    grow: str | None = None
    grow_vocab: int | None = None
    keep: str | Path | None = None
    server: str | None = None
    request_rate: float | None = None
    max_concurrency: int | None = option(None, ge=1)
    threads: int | None = option(None, ge=1)
    device: str = "auto"
    dtype: str = "auto"
    compile: bool | str = "auto"
    quantization: str | None = None
    draft_vocabulary: int | str | None = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        check_values(self)
        if self.temperature is None:
            object.__setattr__(self, "temperature", 0.8 if self.verification else 0.0)
        if self.server is not None:
            local = ("drafts", "k_values", "nodes", "combine", "batch", "verification", "only", "grow", "threads")
            if changed := [name for name in local if getattr(self, name) != getattr(Options, name)]:
                raise ConfigError(f"{', '.join(changed)}: determined by the server; omit it, or omit server")
            if self.request_rate is not None and not self.request_rate > 0:
                raise ConfigError(f"request_rate={self.request_rate}; valid: requests per second, above 0")
        elif (self.request_rate, self.max_concurrency) != (None, None):
            raise ConfigError("request_rate and max_concurrency require server")
        if self.branching is not None and (not self.verification or self.nodes != Options.nodes):
            raise ConfigError("branching needs verification and replaces nodes")
        if (self.grow_vocab, self.keep) != (None, None) and self.grow is None:
            raise ConfigError("grow_vocab and keep require grow")
        for name, values, least in (("k_values", self.k_values, 1), ("nodes", self.nodes, 2), ("batch", self.batch, 1)):
            if not all(value >= least for value in values):
                raise ConfigError(f"{name}={tuple(values)}; valid: whole numbers from {least}")
