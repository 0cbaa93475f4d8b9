"""Methods of vLLM's `LLM` beside those that generate."""

from typing import TYPE_CHECKING, Any, Self

from treespec.engine import Engine
from treespec.frontend.engine_args import EngineArgs
from treespec.frontend.vllm_metrics import Metric, as_metrics
from treespec.frontend.vllm_options import METHODS, missing_method


class VllmMethods:
    """Base of `LLM`: what needs no more than its engine, and errors that say what to do instead of the rest."""

    engine: Engine

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """An engine with these arguments."""
        return cls(**engine_args.given())

    def get_metrics(self) -> list[Metric]:
        """The totals of `stats` as vLLM's metrics."""
        return as_metrics(self.engine)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """True: no prefix is cached between requests, so there is nothing to reset."""
        return True

    if not TYPE_CHECKING:  # a type checker would take any attribute of a class that has this method

        def __getattr__(self, name: str) -> Any:
            """Say what to do instead of a method that treespec does not have."""
            if name in METHODS:
                raise missing_method(name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
