"""Memory for weights: what is put in comes out, whatever else is put in or let go of."""

import gc
import mmap
from unittest import mock

import pytest
import torch

from treespec_kernels import huge_pages
from treespec_kernels.huge_pages import HugePages

DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.int64)


def tensors() -> list[torch.Tensor]:
    """Of awkward sizes, among them an empty one, a scalar and one that is not contiguous."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1,), (63,), (6, 42, 123), (), (0, 5), (1 << 12, 9), (431,)]
    made = [
        (100 * torch.rand(shape, generator=generator)).to(DTYPES[i % len(DTYPES)]) for i, shape in enumerate(shapes)
    ]
    return [*made, made[2].transpose(0, 2)]


@pytest.mark.parametrize("chunk", [1, 64, 1 << 20])
def test_copies_are_whole_apart_and_aligned(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_CHUNK", chunk)
    memory = HugePages()
    given = tensors()
    held = [memory.hold(tensor) for tensor in given]
    for tensor, copy in zip(given, held, strict=True):
        assert copy.dtype == tensor.dtype and copy.is_contiguous() and torch.equal(copy, tensor)
        assert not copy.numel() or copy.data_ptr() % 64 == 0
    for i, copy in enumerate(held):
        copy.zero_()
        assert all(torch.equal(a, b) for a, b in zip(held[i + 1 :], given[i + 1 :], strict=True)), "they overlap"


def test_a_tensor_outlives_the_memory_it_came_from() -> None:
    memory = HugePages()
    kept, _ = memory.hold(torch.arange(1000)), memory.hold(torch.ones(1000))
    del memory, _
    gc.collect()
    assert torch.equal(kept, torch.arange(1000))


def test_a_system_without_huge_pages_gives_usual_ones() -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *given: int) -> None:
            raise OSError(22, "Invalid argument")

    with mock.patch.object(huge_pages.mmap, "mmap", Refusing):
        assert torch.equal(HugePages().hold(torch.arange(9)), torch.arange(9))
