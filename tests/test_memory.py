"""Memory: constant over 10,000 tokens, and what the plan says."""

import gc
import os
import warnings

import pytest
import torch

from tests.child import runs_alone
from tests.models import greedy, open_llm, random_prompts, tiny
from treespec import SpecConfig


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tensor_bytes() -> dict[int, int]:
    """Bytes of every live tensor by storage; packed weights have no storage and count by themselves."""
    found = {}
    for thing in gc.get_objects():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not isinstance(thing, torch.Tensor):
                continue
        if thing.is_mkldnn:
            found[id(thing)] = thing.numel() * thing.element_size()
        else:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read from /proc")
def test_memory_is_constant_over_10000_tokens(request: pytest.FixtureRequest) -> None:
    if not runs_alone(request.node.nodeid):
        return
    target, drafts = tiny()
    llm = open_llm(target, drafts, max_num_seqs=8, max_model_len=600)
    prompts, spec = random_prompts([5, 60, 90, 33, 64, 1, 20, 77]), SpecConfig(nodes=16)
    for _ in range(4):  # every page was touched, every shape was met, and the heap has its final size
        llm.generate(prompts, greedy(500), spec=spec)
    gc.collect()
    before, tensors = resident_bytes(), sum(tensor_bytes().values())
    generated = 0
    while generated < 10_000:
        outputs = llm.generate(prompts, greedy(500), spec=spec)
        generated += sum(output.metrics.generated_tokens for output in outputs)
    del outputs
    gc.collect()
    assert sum(tensor_bytes().values()) == tensors
    assert resident_bytes() - before < 4 << 20, f"{(resident_bytes() - before) / 2**20:.1f} MiB more than before"
    llm.engine.check_integrity()


def test_tensors_hold_what_the_plan_says() -> None:
    target, drafts = tiny()
    gc.collect()
    before = tensor_bytes()
    llm = open_llm(target, drafts, max_num_seqs=8, max_model_len=600)
    llm.generate(random_prompts([30]), greedy(20))
    gc.collect()
    held = sum(size for key, size in tensor_bytes().items() if key not in before)
    planned = sum(llm.stats()["memory"].values())
    assert planned * 0.85 < held < planned * 1.15, f"held {held}, planned {planned}"
