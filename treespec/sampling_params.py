"""The parameters of a request, under vLLM's module name."""

from enum import Enum

from treespec.params import SamplingParams
from treespec.structured import StructuredOutputsParams

__all__ = ["RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]


class RequestOutputKind(Enum):
    """What `SamplingParams(output_kind=...)` may be in vLLM. `generate` returns finished outputs, which the first and
    the last ask for; `DELTA` is refused, as `LLM.stream` gives what each round adds."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2
