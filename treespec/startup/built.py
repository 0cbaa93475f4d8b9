"""An engine and the facts about its start that `LLM` reports."""

from dataclasses import dataclass
from typing import Any

from treespec.adapter.trace import AdapterConfig
from treespec.config import EngineConfig
from treespec.engine import Engine
from treespec.models.model_config import ModelConfig
from treespec_kernels.attention.tree_batch import PAGE_SIZE
from treespec_kernels.tuning.tuned import KernelConfigs


@dataclass(frozen=True)
class Built:
    """An engine and the settings it was built with.

    It keeps no model in memory that the engine does not keep itself.

    Attributes:
        engine, config: the engine and its resolved resources.
        target: config of the target.
        backend: backend of the target: "native" or "transformers".
        exactness: guarantee about the output tokens.
        memory: bytes in use, by purpose.
        kernels: configurations of the Triton kernels; None without Triton.
        connections: how each draft model proposes tokens for the target, by name.
    """

    engine: Engine
    config: EngineConfig
    target: ModelConfig | AdapterConfig
    backend: str
    exactness: str
    memory: dict[str, int]
    kernels: KernelConfigs | None
    connections: dict[str, str]

    def stats(self) -> dict[str, Any]:
        """Return the document of `LLM.stats`."""
        config, sources = self.config, self.engine.sources
        drafts = sources.ssms.names if sources.ssms else ()
        return self.engine.stats.as_dict() | {
            "frozen": self._frozen(),
            "suffix_tokens": 0 if sources.lookup is None else sources.lookup.remembered,
            "drafts": [*drafts, *(drafter.name for drafter in sources.others)],
            "draft_vocabularies": dict(self.connections),
            "max_model_len": config.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "memory": dict(self.memory),
            "cost_curve": self._cost_curve(),
        }

    def _frozen(self) -> dict[str, Any]:
        """Return the settings that bits depend on. They do not change during the engine's lifetime."""
        config, kernels = self.config, self.kernels
        return {
            "dtype": str(config.dtype).removeprefix("torch."),
            "device": str(config.device),
            "threads": config.num_threads,
            "exact": config.exact,
            "exactness": self.exactness,
            "backend": self.backend,
            "attention": config.attention,
            "linear": config.linear,
            "compile": config.compile,
            "quantization": config.quantization,
            "attention_tile": PAGE_SIZE,
            "fixed_rows": self.engine.runner.max_rows,
            "rounds": "on the device" if self.engine.captured is not None else "step by step",
            "tuned_file": None if kernels is None else kernels.file,
            "default_kernels": [] if kernels is None else list(kernels.fallbacks),
        }

    def _cost_curve(self) -> dict[str, Any]:
        curve = self.engine.host.planner.costs.curve
        return {
            "rows": list(curve.rows),
            "verify_seconds": list(curve.verify_seconds),
            "draft_seconds": curve.draft_seconds,
            "draft_start_seconds": curve.draft_start_seconds,
        }
