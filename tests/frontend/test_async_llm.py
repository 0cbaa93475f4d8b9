"""`AsyncLLM`: plain decoding's tokens whatever else runs, streams that wait for their readers, and free pages."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from tests.helpers.models import greedy, random_prompts
from tests.helpers.serving import PATIENCE, wait_until
from treespec import LLM, AsyncLLM, RequestOutput, SamplingParams, SpecConfig
from treespec.async_llm import RequestStream
from treespec.errors import ConfigError, RequestError

pytestmark = pytest.mark.usefixtures("gives_all_pages_back")

PROMPTS = ["def add(", "import os", [5, 6, 7], "x = 1\ny = 2"]


def run(work: Awaitable[Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(work, PATIENCE)

    return asyncio.run(limited())


async def collect(engine: AsyncLLM, prompt: Any, params: SamplingParams, spec: Any = None) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, spec=spec)]


def joined(outputs: list[RequestOutput], kind: str) -> list[tuple[str, list[int]]]:
    """The text and tokens of every completion, from outputs of any kind."""
    found: dict[int, tuple[str, list[int]]] = {}
    for output in outputs:
        for completion in output.outputs:
            text, tokens = found.get(completion.index, ("", [])) if kind == "DELTA" else ("", [])
            found[completion.index] = text + str(completion.text), tokens + completion.token_ids
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("kind", ["CUMULATIVE", "DELTA", "FINAL_ONLY"])
def test_tokens_are_those_of_plain_decoding(engine: AsyncLLM, llm: LLM, kind: str) -> None:
    """Requests of all kinds share rounds, more than the engine has slots for."""
    params = [
        greedy(12, output_kind=kind),
        SamplingParams(max_tokens=10, temperature=0.9, seed=3, n=2, logprobs=2, output_kind=kind),
        SamplingParams(max_tokens=14, temperature=0.7, seed=4, stop=["e"], repetition_penalty=1.2, output_kind=kind),
    ]
    work = [(prompt, param) for prompt in PROMPTS[:2] for param in params]
    expected = [llm.generate(prompt, param, "off")[0] for prompt, param in work]  # type: ignore[list-item]

    async def together() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(collect(engine, prompt, param, SpecConfig(nodes=8)) for prompt, param in work))

    for outputs, plain in zip(run(together()), expected, strict=True):
        assert joined(outputs, kind) == [(completion.text, completion.token_ids) for completion in plain.outputs]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert len(outputs) == 1 or kind != "FINAL_ONLY"
        for expect in plain.outputs:
            parts = [part for output in outputs for part in output.outputs if part.index == expect.index]
            last = parts[-1]
            assert (last.finish_reason, last.stop_reason) == (expect.finish_reason, expect.stop_reason)
            assert sum(last.metrics.accepted_lengths) == last.metrics.target_passes  # type: ignore[union-attr]
            said = parts if kind == "DELTA" else [last]
            assert [each for part in said for each in part.logprobs or []] == (expect.logprobs or [])


@pytest.mark.parametrize("kind", ["CUMULATIVE", "DELTA"])
def test_what_a_slow_reader_missed_is_one_output(engine: AsyncLLM, llm: LLM, kind: str) -> None:
    params = greedy(30, output_kind=kind)
    expected = llm.generate("def add(", params, "off")[0].outputs[0]

    async def slowly() -> list[RequestOutput]:
        stream = await engine.add_request("slow", "def add(", params)
        outputs = [await anext(stream)]
        while engine.get_num_unfinished_requests():  # the others are served
            assert (await collect(engine, "x = 1", greedy(4)))[-1].finished
            await asyncio.sleep(0)
        return outputs + [output async for output in stream]

    outputs = run(slowly())
    assert len(outputs) == 2 and outputs[0].outputs[0].finish_reason is None
    assert joined(outputs, kind) == [(expected.text, expected.token_ids)]


async def cancel_a_wait(stream: RequestStream) -> list[RequestOutput]:
    """What a wait returns at once; otherwise it is cancelled."""
    wait = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    return [] if wait.cancel() else [wait.result()]


@pytest.mark.parametrize("kind", ["CUMULATIVE", "DELTA", "FINAL_ONLY"])
def test_a_cancelled_wait_loses_nothing(engine: AsyncLLM, llm: LLM, kind: str) -> None:
    params = greedy(30, output_kind=kind)
    expected = llm.generate("def add(", params, "off")[0].outputs[0]

    async def impatiently() -> list[RequestOutput]:
        stream, outputs = await engine.add_request("impatient", "def add(", params), list[RequestOutput]()
        while not outputs or not outputs[-1].finished:
            seen = stream.token_ids
            outputs += await cancel_a_wait(stream)
            while engine.get_num_unfinished_requests() and (kind == "FINAL_ONLY" or stream.token_ids == seen):
                await asyncio.sleep(0.001)
            if kind == "FINAL_ONLY":
                outputs += await cancel_a_wait(stream)  # while another thread decodes the tokens
            outputs += [] if (output := await anext(stream, None)) is None else [output]
        return outputs

    outputs = run(impatiently())
    assert joined(outputs, kind) == [(expected.text, expected.token_ids)]


def endless(engine: AsyncLLM) -> Any:
    return engine.generate("def add(", greedy(200, temperature=1.0, n=2, output_kind="DELTA"), "endless")


async def leave(engine: AsyncLLM) -> None:
    async for _ in endless(engine):
        break  # the event loop closes the generator


async def cancel(engine: AsyncLLM) -> None:
    async def read() -> None:
        async for _ in endless(engine):
            begun.set()

    begun = asyncio.Event()
    task = asyncio.create_task(read())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def close_unread(engine: AsyncLLM) -> None:
    stream = await engine.add_request(None, "def add(", greedy(200))
    stream.close()
    stream.close()


async def abort(engine: AsyncLLM) -> None:
    stream = endless(engine)
    await anext(stream)
    await engine.abort(["unknown", "endless"])
    assert not engine.llm.engine.scheduler.find("endless")
    await assert_aborted(stream)


async def cancel_an_abort(engine: AsyncLLM) -> None:
    stream = endless(engine)
    await anext(stream)
    with engine.llm.between_rounds():  # the call is not made yet
        task = asyncio.create_task(engine.abort("endless"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
    await assert_aborted(stream)
    assert engine.is_running


async def abort_before_it_is_admitted(engine: AsyncLLM) -> None:
    class Slow(list[int]):
        def __iter__(self) -> Iterator[int]:
            assert aborted.wait(PATIENCE)
            return super().__iter__()

    aborted = threading.Event()
    adding = asyncio.create_task(engine.add_request("early", Slow([5, 6, 7]), greedy(200, temperature=1.0, n=2)))
    await asyncio.sleep(0)
    await engine.abort("early")
    aborted.set()
    await assert_aborted(await adding)


async def assert_aborted(stream: AsyncIterator[RequestOutput]) -> None:
    outputs = [output async for output in stream]
    assert outputs[-1].finished and {completion.finish_reason for completion in outputs[-1].outputs} == {"abort"}


def test_an_id_in_use_is_refused(engine: AsyncLLM) -> None:
    """Even while its request is being created. An id is free again when its request has failed or ended."""

    async def reuse() -> None:
        with pytest.raises(RequestError):
            await engine.add_request("a", [], greedy(4))
        adding = asyncio.create_task(engine.add_request("a", "def add(", greedy(200, temperature=1.0)))
        await asyncio.sleep(0)
        for _ in range(2):  # the request is being created, and then runs
            with pytest.raises(ValueError, match="request_id='a' is in use"):
                await engine.add_request("a", "import os", greedy(4))
            stream = await adding
        await engine.abort("a")
        await assert_aborted(stream)
        [output] = [output async for output in await engine.add_request("a", "import os", greedy(1))]
        assert output.request_id == "a"

    run(reuse())


@pytest.mark.parametrize("way", [leave, cancel, close_unread, abort, cancel_an_abort, abort_before_it_is_admitted])
def test_a_request_that_is_left_gives_its_pages_back(engine: AsyncLLM, way: Callable[..., Awaitable[None]]) -> None:
    async def leave_beside_another() -> list[RequestOutput]:
        other = asyncio.create_task(collect(engine, "import os", greedy(40)))
        await way(engine)
        while len(engine.llm.engine.scheduler.running) > 1:
            await asyncio.sleep(0.002)
        return await other

    expected = engine.llm.generate("import os", greedy(40), "off")[0].outputs[0]
    before = engine.llm.stats()["generated_tokens"]
    assert run(leave_beside_another())[-1].outputs[0].token_ids == expected.token_ids
    wait_until(lambda: engine.llm.engine.scheduler.is_idle)
    assert engine.llm.stats()["generated_tokens"] - before < 40 + 200, "it ran to its end"


@pytest.mark.parametrize("kind", [SystemExit, asyncio.CancelledError])
def test_a_processor_that_exits_does_not_end_the_engine(engine: AsyncLLM, kind: type[BaseException]) -> None:
    def leave(ids: Any, scores: Any) -> Any:
        raise kind

    (output,) = run(collect(engine, "x", SamplingParams(max_tokens=4, logits_processors=[leave])))
    assert output.outputs[0].finish_reason == "abort"
    assert run(collect(engine, "x", greedy(4)))[-1].outputs[0].finish_reason == "length"


def test_refused_requests_are_counted(engine: AsyncLLM, llm: LLM) -> None:
    before = llm.stats()["failed_requests"]
    with pytest.raises(RequestError, match="an empty prompt"):
        run(collect(engine, "", greedy(4)))
    with pytest.raises(ConfigError, match="sampling_params=3"):
        run(collect(engine, "x", 3))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown 'max_token'"):
        run(anext(engine.generate("x", max_token=3)))  # type: ignore[call-arg]
    wait_until(lambda: llm.stats()["failed_requests"] == before + 1)


def test_the_llm_remains_usable(engine: AsyncLLM, llm: LLM) -> None:
    """Threads that generate take turns with the thread of the rounds."""
    prompts = random_prompts((5, 30), seed=3)
    expected = llm.generate(prompts, greedy(30), "off")

    async def both() -> tuple[list[RequestOutput], list[RequestOutput]]:
        mine = asyncio.create_task(collect(engine, prompts[0], greedy(30)))
        return await mine, await asyncio.to_thread(llm.generate, prompts, greedy(30))

    mine, theirs = run(both())
    assert mine[-1].outputs == expected[0].outputs and [o.outputs for o in theirs] == [o.outputs for o in expected]


def test_a_shutdown_ends_what_runs(llm: LLM) -> None:
    async def shut_down() -> list[RequestOutput]:
        engine = AsyncLLM(llm)
        read, unread = endless(engine), await engine.add_request(None, "x", greedy(200))
        await anext(read)
        await asyncio.to_thread(engine.shutdown)
        engine.shutdown()
        outputs = [[o async for o in read][-1], [o async for o in unread][-1]]
        assert not engine.is_running
        with pytest.raises(ConfigError, match="shut down"):
            await engine.add_request(None, "x")
        unread.close()
        return outputs

    for output in run(shut_down()):
        assert output.finished and {completion.finish_reason for completion in output.outputs} == {"abort"}
