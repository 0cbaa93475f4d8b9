"""Several processes, or threads, that need the same libraries at once: one compiles, the others wait for it."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.calls import failing
from tests.helpers.quantized_checkpoints import needs_compiler
from tests.helpers.serving import wait_until
from treespec_kernels.cpu.cpu_library import compile_library, find_compiler
from treespec_kernels.cpu.file_lock import shared_work

pytestmark = [needs_compiler, pytest.mark.slow]

LIBRARY = """
import logging, sys
from pathlib import Path
from treespec_kernels.cpu.cpu_library import CompileError, compile_library

logging.basicConfig(format="%(message)s")
compiler, source, folder = sys.argv[1:]
try:
    print(compile_library((compiler,), (Path(source),), (), Path(folder)).three())
except CompileError:
    print("failed")
"""


class Compiler:
    """A compiler that notes what it builds, and goes on, or fails once, when a file says so."""

    def __init__(self, folder: Path):
        self._builds, self.goes_on, self.fails = (folder / name for name in ("builds", "goes-on", "fails"))
        self.path = folder / "compiler"
        self._builds.touch()
        self.path.write_text(
            f"""#!/bin/sh
case "$*" in
*" -o "*)
    for last; do :; done
    basename "$last" >> {self._builds}
    while [ ! -e {self.goes_on} ]; do
        rm {self.fails} 2>/dev/null && exit 1
        sleep 0.02
    done
    exec {find_compiler()[0]} "$@" -O0
esac
exec {find_compiler()[0]} "$@"
"""
        )
        self.path.chmod(0o755)

    @property
    def builds(self) -> list[str]:
        return sorted(name.split("-")[0] for name in self._builds.read_text().split())


@pytest.fixture
def compiler(tmp_path: Path) -> Iterator[Compiler]:
    made = Compiler(tmp_path)
    yield made
    made.goes_on.touch()  # none is left waiting, whatever failed


def source(folder: Path) -> Path:
    path = folder / "three.cpp"
    path.write_text('extern "C" int three() { return 3; }')
    return path


@pytest.mark.parametrize(
    ("end", "said", "builds"),
    [("goes on", "3\n", 1), ("fails", "failed\n", 2), ("is killed", "", 2)],  # fails: as on a full disk
    ids=["it builds", "it fails", "it is killed"],
)
def test_one_process_builds_and_the_other_waits(
    end: str, said: str, builds: int, tmp_path: Path, compiler: Compiler
) -> None:
    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", LIBRARY, str(compiler.path), str(source(tmp_path)), str(tmp_path / "kept")]
        with log.open("a") as stderr:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True)

    log = tmp_path / "log"
    first = start()
    wait_until(lambda: compiler.builds)
    second = start()
    wait_until(lambda: "waiting for another process to compile three" in log.read_text())
    if end == "is killed":
        os.killpg(first.pid, signal.SIGKILL)  # with its compiler
    elif end == "fails":
        compiler.fails.touch()
    else:
        compiler.goes_on.touch()
    assert first.communicate(timeout=120)[0] == said
    wait_until(lambda: len(compiler.builds) == builds)
    compiler.goes_on.touch()
    assert second.communicate(timeout=120)[0] == "3\n" and compiler.builds == ["three"] * builds


def test_a_file_system_without_locks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with failing(fcntl, "flock", OSError(errno.ENOLCK, "No locks available")):
        assert compile_library(find_compiler(), (source(tmp_path),), (), tmp_path / "kept").three() == 3
    assert "cannot lock" in caplog.text and "No locks available" in caplog.text


def test_a_holder_that_takes_too_long_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with shared_work(tmp_path / "lock", "rest", 1) as first, shared_work(tmp_path / "lock", "rest", 0.1) as second:
        assert (first, second) == (True, False)
    assert "waiting for another process to rest" in caplog.text and "not waiting any longer" in caplog.text
    with shared_work(tmp_path / "lock", "rest", 0) as third:
        assert third
