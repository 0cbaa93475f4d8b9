"""Methods of vLLM's `LLM` other than those that generate."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Self

from treespec.engine.engine import Engine
from treespec.errors import UnsupportedError
from treespec.frontend.engine_args import EngineArgs
from treespec.frontend.vllm_metrics import Metric, as_metrics

_TRANSFORMERS = "LLM generates text; use transformers' AutoModel, or sentence-transformers"
_IN_PROCESS = "the model runs in this process; load a transformers model, modify it, and give it to LLM(model)"
_MISSING = {
    "apply_model": _IN_PROCESS,
    "beam_search": (
        "sample n outputs with logprobs=0 and choose by cumulative_logprob, or use generate(num_beams=...) of "
        "transformers"
    ),
    "classify": f"{_TRANSFORMERS} (AutoModelForSequenceClassification)",
    "collective_rpc": _IN_PROCESS,
    "embed": _TRANSFORMERS,
    "encode": f"{_TRANSFORMERS}; token ids are get_tokenizer().encode(text)",
    "enqueue": "give all prompts to one generate call, or call generate or stream in several threads",
    "llm_engine": "LLMEngine adds requests and runs rounds; llm.config has the resolved options, llm.stats() totals",
    "reward": _TRANSFORMERS,
    "score": f"{_TRANSFORMERS} (a CrossEncoder)",
    "set_tokenizer": "give it when building the engine: LLM(model, tokenizer=...)",
    "sleep": "delete the LLM to free its memory, and build it again",
    "start_profile": "run the calls within torch.profiler.profile(), or measure with treespec bench --profile",
}


class VllmMethods:
    """Base of `LLM` with vLLM's other methods, and errors that name alternatives to missing ones."""

    engine: Engine

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Build an engine from its arguments."""
        return cls(**{option.name: getattr(engine_args, option.name) for option in fields(engine_args)})

    def get_metrics(self) -> list[Metric]:
        """Return the totals of `stats` as vLLM's metrics."""
        return as_metrics(self.engine)

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            """Raise an error that names the alternative to a missing method of vLLM."""
            if name in _MISSING:
                raise UnsupportedError(f"LLM.{name} is not supported; {_MISSING[name]}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
