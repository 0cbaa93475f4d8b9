"""Methods of vLLM's `LLM` other than those that generate."""

from typing import TYPE_CHECKING, Any, Self

from treespec.engine import Engine
from treespec.frontend.engine_args import EngineArgs
from treespec.frontend.vllm_metrics import Metric, as_metrics
from treespec.frontend.vllm_options import METHODS, missing_method


class VllmMethods:
    """Base of `LLM` with vLLM's other methods, and errors that name alternatives to missing ones."""

    engine: Engine

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Build an engine from its arguments."""
        return cls(**engine_args.given())

    def get_metrics(self) -> list[Metric]:
        """Return the totals of `stats` as vLLM's metrics."""
        return as_metrics(self.engine)

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            """Raise an error that names the alternative to a missing method of vLLM."""
            if name in METHODS:
                raise missing_method(name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
