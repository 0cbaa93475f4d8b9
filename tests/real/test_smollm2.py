"""SmolLM2-135M-Instruct in bfloat16: a published Llama, through every way in.

Transformers' sdpa and eager attentions differ by up to 0.3 of the logits' RMS. So tokens are compared with its own up
to the first position at which they move its two leading tokens past each other, and throughout with plain decoding.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

import treespec.hf
from tests.helpers.architectures import logits_by
from tests.helpers.faults import FAULTS, open_with
from treespec import LLM, SamplingParams, SpecConfig
from treespec.adapter.decoder import open_adapter
from treespec.adapter.source import Source
from treespec.errors import ModelError

pytestmark = pytest.mark.real
COUNT = 40
QUESTIONS = (
    "Name the planets of the solar system in order.",
    "Write a Python function that adds two numbers, and call it.",
)
TREES = SpecConfig(nodes=8)
PLAIN = SamplingParams(max_tokens=COUNT, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(fetched: Callable[[str], Path]) -> Path:
    return fetched("smollm2")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    found = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        found.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    return found


@pytest.fixture(scope="module")
def wanted(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers' greedy generate adds."""
    options = {"max_new_tokens": COUNT, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]


def check_tokens(model: Any, prompts: list[list[int]], wanted: list[list[int]], found: list[list[int]]) -> None:
    """Equal to transformers' up to a near tie, and not only at the beginning."""
    compared = 0
    for prompt, theirs, ours in zip(prompts, wanted, found, strict=True):
        assert len(theirs) == len(ours) == COUNT
        same = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b), COUNT)
        compared += same
        if same < COUNT:
            text = prompt + theirs[:same]
            eager, sdpa = (logits_by(model, text, name)[len(prompt) - 1 :] for name in ("eager", "sdpa"))
            first, second = eager.topk(2).indices.T[:, :, None]
            gaps = [(each.gather(1, first) - each.gather(1, second)).flatten() for each in (eager, sdpa)]
            rounding = float((gaps[0] - gaps[1]).abs().max())
            gap = float(eager[-1].max() - eager[-1, ours[same]])
            assert gap <= 2 * rounding, (
                f"token {same}: {gap:.3f} below transformers' own, whose attentions differ by {rounding:.3f}"
            )
    assert compared >= COUNT * len(prompts) // 2


def tokens_of(llm: LLM, prompts: list[list[int]], spec: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, PLAIN, spec=spec)]


WAYS: dict[str, dict[str, Any]] = {
    "native, compiled": {"compile": "auto"},
    "native, eager": {"compile": False},
    "by transformers' code": {"backend": "transformers"},
    "in memory": {},
}


@functools.cache
def open_model(given: Any, way: str) -> LLM:
    return LLM(given, device="cpu", dtype="bfloat16", max_model_len=512, **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_tokens(way: str, folder: Path, model: Any, prompts: list[list[int]], wanted: list[list[int]]) -> None:
    llm = open_model(model if way == "in memory" else folder, way)
    plain = tokens_of(llm, prompts, "off")
    assert tokens_of(llm, prompts, TREES) == plain
    check_tokens(model, prompts, wanted, plain)


def test_a_folder_as_a_chat(folder: Path, tokenizer: Any, prompts: list[list[int]]) -> None:
    """The chat template, text in and out, streamed and whole."""
    llm = open_model(folder, "native, compiled")
    params = SamplingParams(max_tokens=24)
    outputs = llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], params)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.prompt_token_ids == prompt
        [completion] = output.outputs
        assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    chunks = list(llm.stream(prompts[0], params))
    assert "".join(chunk.text or "" for chunk in chunks) == outputs[0].outputs[0].text


@pytest.fixture
def accelerated(model: Any) -> Iterator[Any]:
    yield treespec.hf.accelerate(model, spec=TREES)
    treespec.hf.restore(model)


def test_inside_transformers(
    accelerated: Any, tokenizer: Any, prompts: list[list[int]], wanted: list[list[int]]
) -> None:
    options = {"max_new_tokens": COUNT, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found, plain = [], []
    for prompt in prompts:
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        found.append(accelerated.generate(torch.tensor([prompt]), streamer=streamer, **options)[0, len(prompt) :])
        assert "".join(streamer) == tokenizer.decode(found[-1])
        plain.append(accelerated.generate(torch.tensor([prompt]), spec="off", **options)[0, len(prompt) :])
    call = {"custom_generate": treespec.hf.generate, "spec": TREES}
    same = type(accelerated).generate(accelerated, torch.tensor(prompts[:1]), **call, **options)
    assert torch.equal(same[0, len(prompts[0]) :], found[0])
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert treespec.hf.last_metrics(accelerated).acceptance_length > 1
    check_tokens(accelerated, prompts, wanted, [each.tolist() for each in found])


# --- the probe


@pytest.mark.parametrize("name", ["tree mask ignored", "positions off by one", "scale off by 3 %"])
def test_planted_faults_are_refused(name: str, model: Any) -> None:
    """In one layer of thirty."""
    with pytest.raises(ModelError, match="logits differ from transformers'"):
        open_with(model, FAULTS[name], layer=15)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_accepted(folder: Path, dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    open_adapter(Source.from_model(model), dtype, torch.device("cpu"), "cpu-packed")
