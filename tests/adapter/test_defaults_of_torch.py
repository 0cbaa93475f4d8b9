"""Nothing here depends on torch's default dtype and device: they are the caller's, and may be anything."""

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import treespec
import treespec_kernels
import treespec_weights
from tests.helpers.models import greedy, open_llm, random_prompts, tiny, tokens_of
from tests.helpers.quantized_checkpoints import needs_compiler
from treespec import LLM, SpecConfig

pytestmark = pytest.mark.slow

FLOAT_BY_DEFAULT = {"empty", "zeros", "ones", "full", "tensor", "rand", "randn", "linspace", "eye", "empty_strided"}
FACTORIES = FLOAT_BY_DEFAULT | {"arange", "as_tensor", "asarray", "randint", "randperm", "scalar_tensor"}


def test_factories_are_told_dtype_and_device() -> None:
    """Factories of torch have a device, and where the default would be a float a dtype, or **options that say them."""
    wrong = []
    for package in (treespec, treespec_kernels, treespec_weights):
        for path in Path(package.__file__).parent.rglob("*.py"):
            for call in ast.walk(ast.parse(path.read_text())):
                if isinstance(call, ast.Call) and (name := ast.unparse(call.func)).removeprefix("torch.") in FACTORIES:
                    given = {keyword.arg for keyword in call.keywords}
                    wanted = {"device", "dtype"} if name.removeprefix("torch.") in FLOAT_BY_DEFAULT else {"device"}
                    if name.startswith("torch.") and None not in given and wanted - given:
                        wrong.append(f"{path}:{call.lineno}: {name} without {wanted - given}")
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def defaults() -> Iterator[None]:
    """Torch's defaults come back, whatever a test makes of them."""
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


PARAMS = (greedy(12), greedy(12, temperature=0.9, top_p=0.9, seed=3, repetition_penalty=1.2, logit_bias={5: 1.5}))


def open_tiny(compiled: bool) -> LLM:
    target, drafts = tiny(torch.bfloat16)
    return open_llm(target, drafts[:1], compile=compiled)


def all_tokens(llm: LLM) -> list[list[int]]:
    """Greedily and sampled, as trees and plainly, and logprobs beside them."""
    prompts, found = random_prompts([5, 70]), []
    for params in (*PARAMS, replace(PARAMS[0], logprobs=2)):
        for spec in (SpecConfig(nodes=12), "off"):
            found += tokens_of(llm.generate(prompts, params, spec=spec))
    llm.engine.check_integrity()
    return found


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_compiler)], ids=["eager", "compiled"])
@pytest.mark.parametrize("default", [torch.float64, "meta"], ids=str)
@pytest.mark.usefixtures("defaults")
def test_engines_compute_the_same_under_other_defaults(default: torch.dtype | str, compiled: bool) -> None:
    want = all_tokens(before := open_tiny(compiled))
    (torch.set_default_device if default == "meta" else torch.set_default_dtype)(default)
    assert all_tokens(before) == want
    assert all_tokens(open_tiny(compiled)) == want
