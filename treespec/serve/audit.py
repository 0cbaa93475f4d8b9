"""Audit: decodes a share of the finished requests again, without speculation."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from itertools import zip_longest
from typing import Any, NamedTuple

from treespec.async_llm import AsyncLLM, RequestStream
from treespec.config.configs import RANDOM_DRAWS, SpecConfig
from treespec.errors import TreespecError
from treespec.lora import LoRARequest
from treespec.outputs import RequestOutput
from treespec.sampling_params import RequestOutputKind, SamplingParams

logger = logging.getLogger("treespec")

AUDIT_PREFIX = "audit-"  # prefix of the ids of requests that are decoded again
_MAX_WAITING = 256  # maximum number of queued requests; the oldest are dropped
_IDLE_CHECK = 0.05  # seconds between checks whether a busy engine is idle


class _Finished(NamedTuple):
    """A finished request: the arguments of `AsyncLLM.add_request`, and its tokens by completion."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    lora: LoRARequest | None
    token_ids: list[list[int]]


class Audit:
    """Comparison of finished requests with plain decoding, while no other requests run.

    Skips requests with a rule that preserves only the distribution ("rejection", "traversal"). `fraction` is the share
    of the other requests to audit, 0 to 1; `count` is called with the numbers of compared and differing tokens;
    requests with an adapter for which `has_adapter` is False are skipped.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        fraction: float,
        count: Callable[[int, int], None],
        has_adapter: Callable[[LoRARequest], bool],
    ):
        self._engine, self._fraction, self._count, self._has_adapter = engine, fraction, count, has_adapter
        self._due = 0.0
        self._waiting: deque[_Finished] = deque(maxlen=_MAX_WAITING)
        self._task: asyncio.Task[None] | None = None

    def add(
        self, stream: RequestStream, output: RequestOutput, params: SamplingParams, spec: Any, lora: LoRARequest | None
    ) -> None:
        """Sample a finished request for the audit: its last output, and the arguments of `add_request`."""
        rule = SpecConfig.resolve(spec, self._engine.llm.spec).verification
        if rule in RANDOM_DRAWS and params.temperature > 0:
            return
        self._due += self._fraction
        if self._due < 1:
            return
        self._due -= 1
        params = params.clone()
        params.seed, params.output_kind = output.metrics.seed, RequestOutputKind.DELTA
        params.logprobs = params.prompt_logprobs = None
        finished = _Finished(output.request_id, output.prompt_token_ids, params, lora, stream.token_ids)
        self._waiting.append(finished)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while self._waiting:
            if self._engine.get_num_unfinished_requests():
                await asyncio.sleep(_IDLE_CHECK)
                continue
            finished = self._waiting.popleft()
            if finished.lora is not None and not self._has_adapter(finished.lora):
                continue
            try:
                await self._decode_again(finished)
            except TreespecError as error:
                logger.warning("audit of request %s: %s", finished.request_id, error)

    async def _decode_again(self, finished: _Finished) -> None:
        """Compare a request with plain decoding; requeue it if another request arrives."""
        stream = await self._engine.add_request(
            f"{AUDIT_PREFIX}{finished.request_id}",
            finished.prompt_token_ids,
            finished.params,
            spec="off",
            lora_request=finished.lora,
        )
        try:
            async for _ in stream:
                if self._engine.get_num_unfinished_requests() > 1:
                    self._waiting.appendleft(finished)
                    return
        finally:
            stream.close()
        self._compare(finished, stream.token_ids)

    def _compare(self, finished: _Finished, replay: list[list[int]]) -> None:
        pairs = [pair for rows in zip(finished.token_ids, replay, strict=True) for pair in zip_longest(*rows)]
        num_differing = sum(token != plain for token, plain in pairs)
        self._count(len(pairs), num_differing)
        if num_differing:
            logger.error(
                "audit: %d of %d tokens of request %s (seed %s) differ from plain decoding; please report this",
                num_differing,
                len(pairs),
                finished.request_id,
                finished.params.seed,
            )
