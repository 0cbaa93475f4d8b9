"""Several processes, or threads, that need the same libraries at once: one compiles, the others wait for it."""

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.models import tiny
from tests.helpers.quantized_checkpoints import needs_compiler
from treespec_kernels.cpu.cpu_library import compile_library, find_compiler
from treespec_kernels.cpu.file_lock import shared_work

pytestmark = [needs_compiler, pytest.mark.slow]

START = """
import logging, sys, threading
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
from treespec import LLM, SamplingParams

answers = []

def start():
    llm = LLM(sys.argv[1], [], device="cpu", compile=True, max_num_seqs=1, max_model_len=64)
    answers.append(llm.generate([1, 2, 3], SamplingParams(max_tokens=4))[0].outputs[0].token_ids)

threads = [threading.Thread(target=start) for _ in range(int(sys.argv[2]))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*answers, sep="\\n", flush=True)
"""
LIBRARIES = ["decoder_cpu", "growth_cpu", "lookup_cpu"]


class Compiler:
    """A compiler that counts what it builds, and builds nothing before it may."""

    def __init__(self, folder: Path):
        self.builds, self.may_build, self._folder = folder / "builds", folder / "may-build", folder
        self.path = folder / "compiler"
        self.builds.touch()
        self.path.write_text(
            f"""#!/bin/sh
case "$*" in
*" -o "*)
    for last; do :; done
    basename "$last" >> {self.builds}
    while [ ! -e {self.may_build} ]; do sleep 0.05; done
    exec {find_compiler()[0]} "$@" -O0
esac
exec {find_compiler()[0]} "$@"
"""
        )
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)

    def count(self) -> Counter[str]:
        return Counter(name.split("-")[0] for name in self.builds.read_text().split())


class Start:
    """A process that starts engines in an empty cache."""

    def __init__(self, folder: Path, name: str, compiler: Path, threads: int = 1):
        self.log = folder / f"{name}.log"
        environment = os.environ | {"CXX": str(compiler), "XDG_CACHE_HOME": str(folder / "cache")}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, str(tiny()[0]), str(threads)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    @property
    def waits(self) -> bool:
        return "waiting for another process to compile" in self.log.read_text()

    def tokens(self) -> list[str]:
        """A line for each engine; fails with the log where one did not start."""
        output, _ = self.process.communicate(timeout=240)
        assert self.process.returncode == 0, self.log.read_text()
        return output.splitlines()

    def kill(self) -> None:
        """At once, with the compilers that it runs."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def compiler(tmp_path: Path) -> Iterator[Compiler]:
    made = Compiler(tmp_path)
    yield made
    made.may_build.touch()  # none is left waiting, whatever failed


def wait_until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not happens():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads"])
def test_one_compiles_and_the_other_waits(threads: bool, tmp_path: Path, compiler: Compiler) -> None:
    starts = [Start(tmp_path, name, compiler.path, 1 + threads) for name in ("first", "second")[: 2 - threads]]
    wait_until(lambda: any(start.waits for start in starts))
    compiler.may_build.touch()
    one, other = (line for start in starts for line in start.tokens())
    assert one == other
    assert compiler.count() == dict.fromkeys(LIBRARIES, 1)


def test_where_the_builder_is_killed_the_waiter_builds(tmp_path: Path, compiler: Compiler) -> None:
    first = Start(tmp_path, "first", compiler.path)
    wait_until(lambda: len(compiler.count()) > 0)
    second = Start(tmp_path, "second", compiler.path)
    wait_until(lambda: second.waits)
    begun = compiler.count()
    first.kill()
    wait_until(lambda: compiler.count() != begun)
    compiler.may_build.touch()
    assert len(second.tokens()) == 1
    assert compiler.count() == Counter(LIBRARIES) + begun


# --- the library alone


def source(folder: Path) -> Path:
    path = folder / "three.cpp"
    path.write_text('extern "C" int three() { return 3; }')
    return path


def test_a_build_that_fails_is_left_to_the_next(tmp_path: Path) -> None:
    """Only a first compiler that fails, as on a full disk: the one that waited builds for itself."""
    failing = tmp_path / "failing"
    failing.write_text(
        f'#!/bin/sh\ncase "$*" in *" -o "*) mkdir {tmp_path}/failed 2>/dev/null && exit 1;; esac\n'
        f'exec {find_compiler()[0]} "$@"\n'
    )
    failing.chmod(0o755)
    script = (
        "import sys; from pathlib import Path\n"
        "from treespec_kernels.cpu.cpu_library import CompileError, compile_library\n"
        f"arguments = (({str(failing)!r},), (Path({str(source(tmp_path))!r}),), (), Path({str(tmp_path / 'kept')!r}))\n"
        "try:\n    print(compile_library(*arguments).three())\n"
        "except CompileError:\n    print('failed')\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert sorted(child.communicate(timeout=120)[0].strip() for child in children) == ["3", "failed"]


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    library = compile_library(find_compiler(), (source(tmp_path),), (), tmp_path / "kept")
    assert library.three() == 3
    assert "cannot lock" in caplog.text and "No locks available" in caplog.text


def test_a_holder_that_takes_too_long_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with shared_work(tmp_path / "lock", "rest", 1) as first, shared_work(tmp_path / "lock", "rest", 0.1) as second:
        assert (first, second) == (True, False)
    assert "waiting for another process to rest" in caplog.text and "not waiting any longer" in caplog.text
    with shared_work(tmp_path / "lock", "rest", 0) as third:
        assert third
