"""What cases of engines share: small models, and rounds that must run captured."""

import contextlib
import os
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from tests.helpers.calls import failing
from tests.helpers.models import LONGROPE, make_draft, make_llama, new_folder, open_llm, random_prompts, tokens_of
from treespec import LLM, RequestOutput, SpecConfig
from treespec.engine.executor import Execution
from treespec.engine.host_executor import HostExecutor
from treespec.graphs.graph_executor import GraphExecutor
from treespec_kernels.aot.launches import Launch, Pointer

if TYPE_CHECKING:
    from tests.simulated_gpu import Gpu

torch.set_num_threads(1)
SMALL = {"num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1}  # half the programs of attention
LONG = SMALL | {"rope_parameters": LONGROPE}
TREES = SpecConfig(nodes=8, max_depth=2)
SHORT = random_prompts([3, 9], vocab=64)  # a prompt of 62 tokens takes the interpreter a second, and more beside drafts
PROMPTS = random_prompts([3, 62], vocab=64)  # the longer one goes on over a border of pages
TRITON: dict[str, Any] = {"attention": "triton", "linear": "triton", "compile": False, "prove": None}
ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "float16", "prove": None}


@contextlib.contextmanager
def captured_rounds() -> Iterator[None]:
    """Asserts that all rounds are captured."""
    with failing(HostExecutor, "propose", AssertionError("step by step")):
        yield


@contextlib.contextmanager
def step_by_step(llm: LLM) -> Iterator[None]:
    """No round is captured."""
    engine = llm.engine
    captured, executors = engine.captured, engine.executors
    engine.captured, engine.executors = None, [engine.host]
    try:
        yield
    finally:
        engine.captured, engine.executors = captured, executors


def launched_ahead() -> contextlib.AbstractContextManager[object]:
    """From the first round on, a round like the last one is launched before that one has ended."""
    return mock.patch("treespec.graphs.graph_executor.STEADY_ROUNDS", 0)


@contextlib.contextmanager
def captured_at_start(proven: bool = False) -> Iterator[None]:
    """Engines capture rounds when they open, and measure them once; with `proven`, they compare their tokens, too."""
    with (
        mock.patch("treespec.startup.build.is_interpreted", lambda: not proven),
        mock.patch.multiple("treespec.graphs.capture", is_interpreted=lambda: False, _REPEATS=1),
    ):
        yield


def trees_as_plain(llm: LLM, prompts: Sequence[list[int]], params: Any, spec: SpecConfig) -> list[RequestOutput]:
    """What captured rounds give by trees, whose tokens must be those of plain decoding."""
    with captured_rounds():
        trees = llm.generate(prompts, params, spec=spec)
    assert tokens_of(trees) == tokens_of(llm.generate(prompts, params, spec="off"))
    llm.engine.check_integrity()
    return trees


def told(llm: LLM, prompts: Sequence[list[int]], params: Any, spec: Any, **options: Any) -> list[Any]:
    """Tokens and log-probabilities, which show every bit of the logits."""
    outputs = llm.generate(prompts, params, spec=spec, **options)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def open_on_gpu() -> LLM:
    """An engine that captures its graphs and measures them once, as it does on a GPU; its SSMs have two shapes."""
    root = new_folder("simulated")
    target = make_llama(root / "target", 0, torch.float16, **LONG)
    drafts = [
        make_draft(root / "near", target, 1, 0.05),
        make_llama(root / "other", 9, torch.float16, **(LONG | {"hidden_size": 48})),
    ]
    with captured_at_start():
        return open_llm(target, drafts, spec=TREES, max_num_seqs=2, max_model_len=128, **ON_GPU)


@contextlib.contextmanager
def rounds_wait_for_nothing(gpu: "Gpu") -> Iterator[None]:
    """Rounds replay graphs, and the host waits for their ends alone."""
    run, waits = GraphExecutor.run, []

    def watched(executor: GraphExecutor, *batch: Any) -> Execution:
        before = len(gpu.waits)
        execution = run(executor, *batch)
        waits.extend(gpu.waits[before:])
        return execution

    before = gpu.replays
    with mock.patch.object(GraphExecutor, "run", watched):
        yield
    assert gpu.replays > before and not waits


def leave(gpu: "Gpu") -> None:
    """Adds a GPU's launches to those that another process compiles, one of each kind: compiling takes a second."""
    path = Path(os.environ["TREESPEC_LAUNCHES"])
    found: list[Launch] = pickle.loads(path.read_bytes()) if path.exists() and path.stat().st_size else []
    kinds = {kind_of(launch): launch for launch in (*gpu.launches.signatures.values(), *reversed(found))}
    path.write_bytes(pickle.dumps(list(kinds.values())))


def kind_of(launch: Launch) -> str:
    """What tells launches of a kernel apart for Triton, but for sizes other than 1."""
    told = {
        name: value
        for name, value in launch.arguments.items()
        if value is None or value == 1 or isinstance(value, bool | str | Pointer)
    }
    return repr((launch.module, launch.kernel, told))
