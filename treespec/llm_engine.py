"""vLLM's `LLMEngine` interface: add requests and run one round at a time."""

from collections.abc import Iterable, Mapping
from typing import Any, Self, Unpack

from treespec.config.configs import SpecConfig
from treespec.config.vllm_options import CallOptions
from treespec.errors import ConfigError
from treespec.frontend.engine_args import EngineArgs
from treespec.frontend.requests import Prompt
from treespec.llm import LLM, new_request, refuse_unknown
from treespec.lora import LoRARequest
from treespec.outputs import RequestOutput
from treespec.request import Request
from treespec.sampling_params import RequestOutputKind, SamplingParams


class LLMEngine:
    """Runs the engine of an `LLM` round by round.

    Args:
        llm: the LLM whose engine to run. It remains usable: requests of other threads share the rounds.
    """

    def __init__(self, llm: LLM):
        self.llm = llm
        self._open: dict[str, list[Request]] = {}
        self._seen: dict[str, int] = {}  # number of tokens returned by `step`, by request id

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Build an engine from its arguments."""
        return cls(LLM.from_engine_args(engine_args))

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        spec: SpecConfig | str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        **vllm_options: Unpack[CallOptions],
    ) -> None:
        """Add a request to the next round. Arguments as in `LLM.generate`, for one prompt.

        Raises:
            ConfigError: an unknown keyword, or an id that is in use.
            RequestError: the request cannot be served.
        """
        refuse_unknown(LLMEngine.add_request, vllm_options)
        if params is not None and params.output_kind is RequestOutputKind.DELTA:
            raise ConfigError("output_kind='DELTA': LLMEngine.step returns all tokens so far; use AsyncLLM")
        if request_id in self._open:
            raise ConfigError(f"request_id={request_id!r} is in use; choose another one")
        llm = self.llm
        with llm.between_rounds():
            samples = new_request(llm, prompt, params, spec, tokenization_kwargs, priority, lora_request)
            for sample in samples:
                sample.output_id = request_id
                llm.engine.scheduler.add(sample)
            self._open[request_id], self._seen[request_id] = samples, 0

    def step(self) -> list[RequestOutput]:
        """Run one round. Return the requests that have new tokens or have ended, with all of their tokens so far."""
        rounds = self.llm.rounds
        rounds.check_threads()
        with rounds.between():
            if any(not sample.finished for samples in self._open.values() for sample in samples):
                rounds.step()
                self.llm.engine.run_deferred()  # makes the outputs reflect this round's acceptance
            outputs = []
            for request_id, samples in list(self._open.items()):
                generated, finished = sum(s.num_generated for s in samples), all(s.finished for s in samples)
                if finished or generated > self._seen[request_id]:
                    outputs.append(self.llm.request_factory.output(samples, finished))
                self._seen[request_id] = generated
                if finished:
                    del self._open[request_id], self._seen[request_id]
        return outputs

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests. The next step returns them. Unknown and finished ids are ignored."""
        with self.llm.between_rounds():
            for key in [request_id] if isinstance(request_id, str) else request_id:
                self.llm.rounds.end(self._open.get(key, ()))

    def has_unfinished_requests(self) -> bool:
        """Return whether there are requests to run or to return."""
        return bool(self._open)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests not yet returned as finished."""
        return len(self._open)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """As `LLM.reset_prefix_cache`."""
        return self.llm.reset_prefix_cache(reset_running_requests, reset_connector)
