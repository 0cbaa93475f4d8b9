"""`SamplingParams` as a mutable object: what may be set, what a request keeps, and signatures in step with fields."""

import dataclasses
import inspect
import pickle
from typing import Any

import numpy as np
import pytest

from tests.helpers.models import greedy, tiny_llm
from treespec import LLM, EngineArgs, FlexibleArgumentParser, SamplingParams, SpecConfig, StructuredOutputsParams
from treespec.config.engine_options import EngineOptions
from treespec.config.vllm_options import absent_options
from treespec.errors import ConfigError
from treespec.training.run import train_drafts
from treespec.training.settings import TrainingSettings
from treespec.utils.options import VLLM

LLM_DEFAULTS = {name: each.default for name, each in list(inspect.signature(LLM).parameters.items())[:-1]}


def test_fields_may_be_set() -> None:
    params = SamplingParams()
    params.temperature = 0.5
    params.stop = ["a"]
    params.logit_bias = {np.int64(3): 1}
    params.structured_outputs = {"choice": ["a"]}  # type: ignore[assignment]
    params.logprobs = -1
    given: dict[str, Any] = {"stop": "a", "logit_bias": {3: 1.0}, "structured_outputs": {"choice": ["a"]}}
    same = SamplingParams(temperature=0.5, logprobs=-1, **given)
    assert params == same and hash(params) == hash(same)
    assert pickle.loads(pickle.dumps(params)) == params
    params.output_kind = "FINAL_ONLY"  # type: ignore[attr-defined]  # asks for nothing
    assert params == same
    params.top_p = 0.5
    assert params != same
    for name, value, message in (
        ("temperature", "hot", "temperature='hot'; valid: 0"),
        ("temperature", 1e39, r"temperature=1e\+39; valid: 0 \(greedy\) or a positive number up to 3\.4e38"),
        ("max_token", 3, r"unknown 'max_token' \(did you mean 'max_tokens'\?\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            setattr(params, name, value)
    assert params.temperature == 0.5


def test_contradictions_are_refused_at_use() -> None:
    """Fields may contradict each other while they are set one after the other."""
    llm, params = tiny_llm(), SamplingParams(max_tokens=4)
    params.min_tokens = 9
    for call in (lambda: llm.generate([1, 2], params), lambda: next(llm.stream([1, 2], params))):
        with pytest.raises(ConfigError, match="min_tokens=9 is more than max_tokens=4"):
            call()
    params.max_tokens = 9
    assert len(llm.generate([1, 2], params)[0].outputs[0].token_ids) == 9
    params.logit_bias = {3: 1.0}
    params.logit_bias[4] = "x"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"logit_bias=\{4: 'x'\}"):
        llm.generate([1, 2], params)


def test_a_request_keeps_its_own_copy() -> None:
    llm, params = tiny_llm(), greedy(6, ignore_eos=True)
    chunks = llm.stream([1, 2], params, spec="off")
    next(chunks)
    params.max_tokens = 2
    assert list(chunks)[-1].output.outputs[0].finish_reason == "length"  # type: ignore[union-attr]
    assert llm.generate([1, 2], params)[0].metrics.generated_tokens == 2
    llm.get_default_sampling_params().max_tokens = 1
    assert llm.get_default_sampling_params() == SamplingParams()


def test_clones_are_independent() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias, logits_processors=[lambda ids, scores: scores])
    clone = params.clone()
    assert clone == params and hash(clone) == hash(params)
    assert clone.logits_processors[0] is params.logits_processors[0] and clone.logit_bias is not None
    clone.logit_bias[1] = bias[1] = 3.0
    clone.max_tokens = 5
    assert params.logit_bias == {1: 2.0} and params.max_tokens == 128


def test_signatures_are_in_step() -> None:
    """What `inspect` and type checkers see is what is accepted."""
    for kind in (SamplingParams, StructuredOutputsParams, SpecConfig):
        parameters = list(inspect.signature(kind).parameters.values())
        names = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        assert names == [each.name for each in dataclasses.fields(kind) if VLLM not in each.metadata]
    stated = {each.name: each.default for each in dataclasses.fields(EngineOptions) if VLLM not in each.metadata}
    assert stated == LLM_DEFAULTS and list(stated) == list(LLM_DEFAULTS)
    assert not absent_options(EngineOptions).keys() & stated.keys()
    assert inspect.signature(train_drafts).parameters == inspect.signature(TrainingSettings).parameters
    with pytest.raises(ConfigError, match=r"train_drafts: unknown 'minute' \(did you mean 'minutes'\?\)"):
        train_drafts("target", ["data"], "out", minute=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(0.5)  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"unknown 'choices' \(did you mean 'choice'\?\)"):
        StructuredOutputsParams(choices=["a"])  # type: ignore[arg-type]


def test_arguments_of_an_engine_as_a_dict() -> None:
    args = EngineArgs(model="folder", spec=SpecConfig(nodes=8), enforce_eager=True)
    with pytest.raises(OSError, match="folder"):
        LLM(**dataclasses.asdict(args))
    with pytest.raises(ConfigError, match="nodes=-1"):
        LLM(**dataclasses.asdict(args) | {"spec": {"nodes": -1}})
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 is not supported"):
        LLM.from_engine_args(EngineArgs(tensor_parallel_size=2))
    args.model = "other"  # type: ignore[misc]  # vLLM's users change it in place
    with pytest.raises(OSError, match="other"):
        LLM.from_engine_args(args)


def test_arguments_of_an_engine_from_a_command_line() -> None:
    parser = FlexibleArgumentParser()
    assert EngineArgs.add_cli_args(parser) is parser
    parser.add_argument("--my_own")
    line = "--model 123 --compile false --drafts a b --max_model_len=64 --no-exact --my_own x --enforce-eager"
    words = [*line.split(), "--spec", '{"nodes": 4}', "--speculative-config", '{"method": "ngram"}']
    args = parser.parse_args(words)
    assert args.my_own == "x" and not hasattr(args, "swap_space")
    expected: dict[str, Any] = {"model": "123", "compile": False, "drafts": ["a", "b"], "max_model_len": 64}
    expected |= {"exact": False, "enforce_eager": True, "spec": {"nodes": 4}}
    assert EngineArgs.from_cli_args(args) == EngineArgs(speculative_config={"method": "ngram"}, **expected)
    assert vars(parser.parse_args([])) == {"my_own": None} | LLM_DEFAULTS
