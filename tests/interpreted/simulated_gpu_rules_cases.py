"""That a simulated GPU notices what CUDA would not forgive."""

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch

from tests.simulated_gpu import Gpu
from treespec_kernels.launch import graph_capture
from treespec_kernels.launch.graph_capture import GraphMemory
from treespec_kernels.sampling.row_topk import row_topk_triton
from treespec_kernels.tuning.clock import Clock

torch.set_num_threads(1)


@contextlib.contextmanager
def captured(pool: object = None) -> Iterator[torch.cuda.CUDAGraph]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        yield graph


def test_both_devices_in_one_operation_are_refused(gpu: Gpu) -> None:
    with pytest.raises(RuntimeError, match="expected all tensors on cuda:0"):
        torch.ones(3, device="cuda") + torch.ones(3)
    assert (torch.ones(3, device="cuda") + torch.tensor(1.0)).tolist() == [2.0] * 3
    with pytest.raises(ValueError, match="of the host"):
        row_topk_triton(torch.ones(2, 8), 1)


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x[x > 1],
        lambda x: x.repeat_interleave(x.long()),
        lambda x: x[torch.tensor([1])],
        lambda x: x.__setitem__([1], 1.0),
    ],
)
def test_waiting_is_counted_and_not_captured(gpu: Gpu, waits: object) -> None:
    assert callable(waits)
    x = torch.ones(3, device="cuda")
    waits(x)
    assert len(gpu.waits) == 1
    with pytest.raises(RuntimeError, match="cannot wait while a graph is captured"), captured():
        waits(x)


def test_what_a_failed_capture_leaves_behind(gpu: Gpu) -> None:
    """torch puts nothing back; `graph_capture` does, so that whatever follows runs as before."""
    x = torch.ones(3, device="cuda")
    before, memory = torch.cuda.current_stream(), GraphMemory.of(x.device)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot wait while a graph is captured"):
            graph_capture.captured(x.tolist, memory)
        torch.cuda.empty_cache()
        assert torch.cuda.current_stream() is before and not gpu.captures.generators
    with pytest.raises(ZeroDivisionError):  # of the host: CUDA ends the capture in order
        graph_capture.captured(lambda: 1 // 0, memory)
    graph_capture.captured(lambda: x.add_(1), memory).replay()
    assert x.tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="cannot wait while a graph is captured"), captured():
        x.tolist()
    assert torch.cuda.current_stream() is not before and gpu.captures.generators
    with pytest.raises(RuntimeError, match="captures_underway"):
        torch.cuda.empty_cache()


def test_the_stream_of_the_first_capture_belongs_to_one_gpu(gpu: Gpu) -> None:
    scores = torch.ones(2, 8, device="cuda:0")
    with torch.cuda.device(torch.device("cuda:1")), captured():
        pass
    graph_capture.captured(lambda: row_topk_triton(scores, 1), GraphMemory.of(scores.device)).replay()
    with pytest.raises(ValueError, match="launched on cuda:1, its tensors lie on cuda:0"), captured():
        row_topk_triton(scores, 1)


def test_other_threads_take_memory_while_a_graph_is_captured(gpu: Gpu) -> None:
    x, made, refused = torch.ones(3, device="cuda"), [], []

    def beside() -> None:
        try:
            made.append(x + 1)
        except RuntimeError as error:
            refused.append(error)

    def launches() -> None:
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        x.add_(1)

    graph_capture.captured(launches, GraphMemory.of(x.device)).replay()
    assert x.tolist() == [2.0] * 3 == made[0].tolist() and not refused
    with pytest.raises(RuntimeError, match="previous error during capture: another thread takes memory"), captured():
        launches()
    assert refused


def test_memory_of_a_pool_is_lost_when_another_graph_runs_and_freed_memory_is_noticed(gpu: Gpu) -> None:
    pool, x = torch.cuda.graph_pool_handle(), torch.ones(2, device="cuda")
    with captured(pool) as first:
        inside = x + 1
    with captured(pool) as second:
        x.add_(1)
    first.replay()
    assert inside.tolist() == [2, 2]
    second.replay()
    assert inside.isnan().all()
    del x
    first.replay()
    with pytest.raises(RuntimeError, match="freed memory"):
        gpu.finish()


def test_pinned_memory_is_copied_late(gpu: Gpu) -> None:
    host, x = torch.ones(2, pin_memory=True), torch.zeros(2, device="cuda")
    x.copy_(host, non_blocking=True)
    host.fill_(7)  # too early: nobody has waited
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    assert x.tolist() == [7, 7]
    host.copy_(x + 1, non_blocking=True)
    assert host.tolist() == [7, 7]
    torch.cuda.synchronize()
    assert host.tolist() == [8, 8]


def test_the_autotuners_clock(gpu: Gpu) -> None:
    """Calls are captured together and replayed between two events, each of which takes 1 ms here."""
    x, y = torch.zeros(2, device="cuda")
    clock = Clock(torch.device("cuda"))
    turns = 5  # in the graph: five of them took 1 ms before
    assert clock.seconds([lambda: x.add_(1), lambda: y.add_(1)]) == pytest.approx(1e-3 / turns / 2)
    assert gpu.replays > 1 and not gpu.waits
    assert x.item() == y.item() == 1 + turns + turns * gpu.replays
