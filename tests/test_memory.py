"""What counts as free, and memory that is taken as it is written."""

import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.models import greedy, make_llama, new_folder, open_llm, random_prompts
from treespec import memory
from treespec.memory import _available, _left_in_group, free_memory, lazy_zeros

CPU = torch.device("cpu")
linux = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads what /proc says of a process")


def resident() -> int:
    """Bytes of this process that lie in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@linux
def test_zeros_take_no_memory_before_they_are_written() -> None:
    before = resident()
    zeros = lazy_zeros((2, 256, 1 << 20), torch.bfloat16, CPU)
    assert zeros.nbytes == 1 << 30 and resident() - before < 64 << 20
    zeros[1, 100] = 3
    assert zeros[1, 100].sum() == 3 << 20 and not zeros[1, 99].any() and not zeros[0, 100].any()
    assert resident() - before < 64 << 20
    part = zeros[1]
    del zeros
    assert part[100, 0] == 3, "a view keeps the memory"


@pytest.mark.parametrize("size", [(), (0, 4), (3,), (2, 3, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_of_every_shape(size: tuple[int, ...], dtype: torch.dtype) -> None:
    assert torch.equal(lazy_zeros(size, dtype, CPU), torch.zeros(size, dtype=dtype))


@linux
def test_an_engine_takes_what_its_requests_need() -> None:
    """Of a cache of a GiB and more for long contexts, a short request takes little; so does the proof at start."""
    shape = {"num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 1 << 17, "num_hidden_layers": 2}
    target = make_llama(new_folder("long") / "target", 0, **shape)
    before = resident()
    llm = open_llm(target, [], max_num_seqs=2, max_model_len=1 << 17, prove=True)
    llm.generate(random_prompts([5]), greedy(8))
    assert llm.stats()["memory"]["kv_cache"] > 1 << 30
    assert resident() - before < 256 << 20


def test_cached_files_count_as_free(tmp_path: Path) -> None:
    system = tmp_path / "meminfo"
    system.write_text(
        "MemTotal:       1000 kB\nMemFree:          10 kB\nMemAvailable:    700 kB\nHugePages_Total:   0\n"
    )
    assert _available(system) == 700 << 10
    for name, text in (("memory.max", "1000\n"), ("memory.current", "900\n")):
        (tmp_path / name).write_text(text)
    assert _left_in_group(tmp_path) == 100
    (tmp_path / "memory.stat").write_text("anon 200\ninactive_file 650\nactive_file 40\n")
    assert _left_in_group(tmp_path) == 750
    (tmp_path / "memory.max").write_text("max\n")
    assert _left_in_group(tmp_path) > 1 << 60


def test_where_nothing_says_what_is_free(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nowhere = tmp_path / "meminfo"
    with mock.patch("os.sysconf", side_effect=ValueError("unrecognized configuration name")):
        assert _available(nowhere) == memory.UNKNOWN
    assert "assuming 8 GiB" in caplog.text


def test_the_tighter_limit_counts() -> None:
    with mock.patch.object(memory, "_available", lambda: 500), mock.patch.object(memory, "_left_in_group", lambda: 300):
        assert free_memory(CPU) == 300
    with mock.patch.object(memory, "_available", lambda: 500), mock.patch.object(memory, "_left_in_group", lambda: -1):
        assert free_memory(CPU) == 0
