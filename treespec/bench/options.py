"""Options of a benchmark."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Options:
    """Benchmark options.

    Args:
        model, drafts: as in `LLM`.
        prompts: file of prompts; None = held-out prompts of this repository: instructions for chat models, else texts.
        samples: number of prompts.
        max_tokens: output tokens per prompt.
        k_values: drafted tokens per round, for chains and peers.
        nodes: tree sizes.
        combinations: further sets of sources, such as "head+lookup".
        batches: batch sizes.
        temperature: 0 = greedy; above 0, seeds differ between repeats and transformers is skipped.
        verification: rules to compare on fixed trees, instead of the modes; empty = none.
        branching: children per node by depth of these trees; None = one tree derived from each of `nodes`.
        repeats: runs per mode.
        warmup: uncounted warm-up batches per mode.
        peers: include transformers.
        only: names or patterns of modes; empty = all.
        device, dtype, compile, quantization: as in `LLM`; not applied to transformers.
        seed: for prompt selection and sampling.
    """

    model: str | Path | None = None
    drafts: Sequence[str] | None = None
    prompts: Path | None = None
    samples: int = 12
    max_tokens: int = 128
    k_values: tuple[int, ...] = (3, 5, 7)
    nodes: tuple[int, ...] = (16,)
    combinations: tuple[str, ...] = ()
    batches: tuple[int, ...] = (1,)
    temperature: float = 0.0
    verification: tuple[str, ...] = ()
    branching: tuple[int, ...] | None = None
    repeats: int = 3
    warmup: int = 1
    peers: bool = True
    only: tuple[str, ...] = ()
    device: str = "auto"
    dtype: str = "auto"
    compile: bool | str = "auto"
    quantization: str | None = None
    seed: int = 0
