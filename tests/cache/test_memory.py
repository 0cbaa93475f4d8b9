"""Memory: constant over 4,000 tokens, what the plan says, taken as it is written, and how much counts as free."""

import dataclasses
import gc
import mmap
import os
import re
import warnings
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.helpers.calls import failing
from tests.helpers.child import run_uninterpreted
from tests.helpers.families import CASES, make_model
from tests.helpers.models import greedy, make_llama, new_folder, open_llm, random_prompts, tiny
from treespec import SpecConfig
from treespec.graphs.capture import planned_bytes, round_limits
from treespec.models.model_config import ModelConfig
from treespec.startup.memory import weight_bytes
from treespec.utils import memory
from treespec_kernels.cpu import huge_pages

CPU = torch.device("cpu")
reads_proc = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read from /proc")


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tensor_bytes() -> dict[int, int]:
    """Bytes of every live tensor by storage; packed weights have no storage and count by themselves."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    for thing in tensors:
        if thing.is_mkldnn:
            found[id(thing)] = thing.numel() * thing.element_size()
        else:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def decode_4000_tokens() -> None:
    target, drafts = tiny()
    llm = open_llm(target, drafts[:1], max_num_seqs=8, max_model_len=250)
    prompts, spec = random_prompts([5, 60, 90, 33, 64, 1, 20, 77]), SpecConfig(nodes=16)
    for tokens in (150, 100):  # every page was touched, every shape was met, and the heap has its final size
        llm.generate(prompts, greedy(tokens), spec=spec)
    gc.collect()
    before, tensors = resident_bytes(), sum(tensor_bytes().values())
    for _ in range(5):
        outputs = llm.generate(prompts, greedy(100), spec=spec)
        assert sum(output.metrics.generated_tokens for output in outputs) == 800
    del outputs
    gc.collect()
    assert sum(tensor_bytes().values()) == tensors
    assert resident_bytes() - before < 4 << 20, f"{(resident_bytes() - before) / 2**20:.1f} MiB more than before"
    llm.engine.check_integrity()


@reads_proc
def test_memory_is_constant_over_4000_tokens() -> None:
    """In a process of its own: this one's heap has a past."""
    child = run_uninterpreted("from tests.cache.test_memory import decode_4000_tokens; decode_4000_tokens()")
    assert child.returncode == 0, child.stderr


def test_tensors_hold_what_the_plan_says() -> None:
    target, drafts = tiny()
    gc.collect()
    before = tensor_bytes()
    llm = open_llm(target, drafts, max_num_seqs=8, max_model_len=600, compile=False)
    llm.generate(random_prompts([30]), greedy(20))
    gc.collect()
    held = sum(size for key, size in tensor_bytes().items() if key not in before)
    planned = sum(llm.stats()["memory"].values())
    assert planned * 0.85 < held < planned * 1.15, f"held {held}, planned {planned}"


def test_a_plan_counts_keys_that_are_values_twice(tmp_path: Path) -> None:
    """Both are held: keys are rotated."""
    config = ModelConfig.from_hf(make_model(tmp_path, CASES["gemma4, experts"], 0))
    values = [sizes.num_kv_heads * sizes.head_dim for sizes in config.shape.sizes if not sizes.has_v]
    held = config.num_parameters + sum(values) * config.shape.hidden_size
    assert values and weight_bytes(config, torch.bfloat16, None) == 2 * held


def test_a_plan_counts_one_scratch_memory_of_states(tmp_path: Path) -> None:
    """Of states so large that they outweigh all else."""
    config = ModelConfig.from_hf(make_model(tmp_path, CASES["qwen3_5"], 0))
    assert config.shape.recurrent is not None
    recurrent = dataclasses.replace(config.shape.recurrent, key_dim=1 << 12, value_dim=1 << 12)
    config = dataclasses.replace(config, shape=dataclasses.replace(config.shape, recurrent=recurrent))
    limits = round_limits(SpecConfig(), 128, 64, 0)
    planned = planned_bytes([config], limits, 64, 512, torch.bfloat16)
    states = 64 * (limits.width + 1)  # also those of the requests, copied in a pass that the host launches
    assert 1 < planned / (states * recurrent.heads * 4 << 24) < 1.1


@reads_proc
def test_an_engine_takes_what_its_requests_need() -> None:
    """Of a cache of a GiB and more for long contexts, a short request takes little; so does the proof at start."""
    shape = {"num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 1 << 17}
    target = make_llama(new_folder("long") / "target", 0, **shape, num_hidden_layers=2)
    before = resident_bytes()
    llm = open_llm(target, [], max_num_seqs=2, max_model_len=1 << 17, prove=True)
    llm.generate(random_prompts([5]), greedy(8))
    assert llm.stats()["memory"]["kv_cache"] > 1 << 30
    assert resident_bytes() - before < 256 << 20


def test_cached_files_count_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/meminfo": "MemTotal:  2000 kB\nMemFree:  10 kB\nMemAvailable:  700 kB\nHugePages_Total:  0\n"}

    def read(path: Path, *_: object) -> str:
        if (text := files.get(str(path))) is None:
            raise FileNotFoundError(path)
        return text

    monkeypatch.setattr(Path, "read_text", read)
    assert memory.free_memory(CPU) == 700 << 10
    files |= {"/sys/fs/cgroup/memory.max": "1000\n", "/sys/fs/cgroup/memory.current": "900\n"}
    assert memory.free_memory(CPU) == 100
    files["/sys/fs/cgroup/memory.stat"] = "anon 200\ninactive_file 650\nactive_file 40\n"
    assert memory.free_memory(CPU) == 750
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert memory.free_memory(CPU) == 700 << 10


def test_where_nothing_says_what_is_free(caplog: pytest.LogCaptureFixture) -> None:
    unnamed = failing(os, "sysconf", ValueError("unrecognized configuration name"))
    with unnamed, failing(Path, "read_text", FileNotFoundError):
        assert memory.free_memory(CPU) == memory.UNKNOWN
    assert "assuming 8 GiB" in caplog.text


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="needs Linux")
@pytest.mark.parametrize("supported", [True, False], ids=["huge pages", "a kernel without them"])
def test_weights_are_copied_to_huge_pages(supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mapping(mmap.mmap):
        def madvise(self, *advice: int) -> None:
            if not supported:
                raise OSError(22, "Invalid argument")
            super().madvise(*advice)

    monkeypatch.setattr(huge_pages.mmap, "mmap", Mapping)
    pages = huge_pages.HugePages()
    given = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (40_000, 33_333, 9_000_000)]
    placed = [pages.allocate(tensor.nbytes).view(torch.float32).copy_(tensor) for tensor in given]
    assert all(map(torch.equal, placed, given))
    assert all(tensor.data_ptr() % huge_pages.ALIGNMENT == 0 for tensor in placed)
    assert placed[0].untyped_storage().data_ptr() == placed[1].untyped_storage().data_ptr(), "one mapping"
    mappings = [line.split()[:2] for line in Path("/proc/self/maps").read_text().splitlines()]
    bounds = [([int(bound, 16) for bound in place.split("-")], mode) for place, mode in mappings]
    for tensor in placed:
        [mode] = [mode for (start, end), mode in bounds if start <= tensor.data_ptr() < end]
        assert mode == "rw-p", "Linux gives no huge pages to shared mappings unless it is told to"
    small = pages.allocate(32)
    assert small.untyped_storage().nbytes() == 32, "not worth a huge page"


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="needs Linux")
def test_pages_of_mapped_tensors_are_dropped(tmp_path: Path) -> None:
    """Of files only: the values of other memory would be lost."""
    values = torch.arange(1 << 20)
    save_file({"a": values}, tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        mapped = file.get_tensor("a")
    own = values.clone()

    def resident() -> int:
        parts = Path("/proc/self/smaps").read_text().split(f"{tmp_path / 'a.safetensors'}\n")[1:]
        return sum(int(re.search(r"Rss: +(\d+)", part)[1]) for part in parts)  # type: ignore[index]

    assert torch.equal(mapped, values) and resident() >= 8 << 10
    memory.drop_mapped([mapped, own])
    assert resident() < 256
    assert torch.equal(mapped, values) and torch.equal(own, values)
