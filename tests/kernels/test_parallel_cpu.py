"""The parallel loop of compiled passes: every index once, and no thread that the others must wait for."""

import ctypes
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import treespec_kernels
from treespec_kernels.cpu.cpu_library import compile_library, find_compiler

THREADS = (1, 2, 3, 8)
COUNTS = (1, 2, 7, 64, 1000)
HEADERS = Path(treespec_kernels.__file__).parent / "cpu"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = Path(__file__).with_name("parallel_loop.cpp")
    sources = (source, HEADERS / "parallel_cpu.h")
    loaded = compile_library(find_compiler(), sources, (f"-I{HEADERS}",), tmp_path_factory.mktemp("libraries"))
    loaded.run_loops.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    loaded.run_with_stuck_thread.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    loaded.run_loops.restype = loaded.run_with_stuck_thread.restype = None
    return loaded


def counts_of(library: ctypes.CDLL, threads: int, count: int, loops: int) -> list[int]:
    """How often each index was computed."""
    counts = np.zeros(count, dtype=np.int64)
    library.run_loops(threads, count, loops, counts.ctypes.data)
    return counts.tolist()


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("count", COUNTS)
def test_each_index_is_computed_once_in_each_loop(library: ctypes.CDLL, threads: int, count: int) -> None:
    assert counts_of(library, threads, count, 2000) == [2000] * count


@pytest.mark.parametrize("threads", THREADS[1:])
def test_the_others_take_over_from_a_thread_that_is_stuck(library: ctypes.CDLL, threads: int) -> None:
    """A static schedule would never end: what lies behind the stuck index belongs to the thread that holds it."""
    for stuck in (0, 20, 40, 63):
        library.run_with_stuck_thread(threads, 64, stuck)


def test_callers_in_several_threads_have_loops_of_their_own(library: ctypes.CDLL) -> None:
    with ThreadPoolExecutor(6) as callers:
        found = callers.map(lambda threads: counts_of(library, threads, 50, 2000), THREADS[1:] * 4)
    assert list(found) == [[2000] * 50] * len(THREADS[1:] * 4)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_starts_workers_of_its_own(library: ctypes.CDLL) -> None:
    assert counts_of(library, 3, 64, 10) == [10] * 64
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a loop that waits for the parent's workers would not end
        library.run_with_stuck_thread(3, 64, 20)
        os._exit(0 if counts_of(library, 3, 64, 10) == [10] * 64 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert counts_of(library, 3, 64, 10) == [10] * 64
