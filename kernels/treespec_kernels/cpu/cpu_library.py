"""Compilation and caching of C++ libraries on the user's machine; requires only `$CXX`, c++, g++ or clang++.

The name of a cached library contains two hashes: one of the source, the command and the compiler's predefined macros,
which include its version and the machine's instruction set; and one of the library's bytes, because loading a truncated
file crashes the process. If several processes need the same library at once, one compiles it and the others wait.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np

from treespec_kernels.cpu.file_lock import shared_work

logger = logging.getLogger("treespec")

_warned, _warned_lock = set[str](), threading.Lock()  # reasons already logged by `_warn_uncached`
_PATIENCE = 600.0  # maximum seconds to wait for another process's compiler, which takes 10 to 100
# Without -ffast-math and contraction, every operation is rounded, so vectorisation does not affect bits.
_FLAGS = "-std=c++17 -O3 -march=native -ffp-contract=off -fno-math-errno -pthread -fPIC -shared -Wno-psabi".split()
_NUMBERS = {"int64_t": ctypes.c_int64, "float": ctypes.c_float, "double": ctypes.c_double}
TILE_FLAGS = ("-DTILES=1",)
_V4 = "-march=x86-64-v4"
# Values of TREESPEC_CPU: compiler flags, and macros defined on machines with these instructions. amx-emulated computes
# AMX's instructions in C++, for tests.
INSTRUCTION_SETS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "baseline": (("-march=x86-64", "-O2"), ("x86_64",)),  # compiles for 12 s, with -O3 for 30 s
    "avx2": (("-march=x86-64-v3",), ("AVX2", "FMA")),
    "avx512": ((_V4,), ("AVX512F", "AVX512BW", "AVX512CD", "AVX512DQ", "AVX512VL")),
    "avx512-vnni": ((_V4, "-mavx512vnni"), ("AVX512VL", "AVX512VNNI")),
    "avx512-bf16": ((_V4, "-mavx512vnni", "-mavx512bf16"), ("AVX512VNNI", "AVX512BF16")),
    "amx": ((_V4, "-mavx512vnni", "-mamx-tile", "-mamx-bf16", *TILE_FLAGS), ("AVX512VNNI", "AMX_BF16")),
    "amx-emulated": (("-DTILES=2",), ()),
}


class CompileError(RuntimeError):
    """Raised if no compiler is found, or if it fails."""


def find_compiler() -> tuple[str, ...]:
    """Return the command of the C++ compiler, with the flags of `instruction_flags`."""
    configured = os.environ.get("CXX")
    try:
        commands = [shlex.split(configured)] if configured else [["c++"], ["g++"], ["clang++"]]
    except ValueError as error:
        raise CompileError(f"CXX={configured!r} is not a command: {error}") from error
    for command in commands:
        if command and shutil.which(command[0]):
            return *command, *instruction_flags(tuple(command), os.environ.get("TREESPEC_CPU"))
    tried = f"CXX={configured!r} is not one" if configured else "none of c++, g++ and clang++ is installed"
    raise CompileError(f"no C++ compiler: {tried}")


@functools.cache
def instruction_flags(compiler: tuple[str, ...], instructions: str | None) -> tuple[str, ...]:
    """Return the compiler flags for one of `INSTRUCTION_SETS`; None: this machine's, with AMX if granted."""
    if instructions is None:
        return TILE_FLAGS if _grants_tiles() else ()
    if instructions not in INSTRUCTION_SETS:
        raise CompileError(f"TREESPEC_CPU={instructions!r}; valid: {', '.join(INSTRUCTION_SETS)}")
    flags, macros = INSTRUCTION_SETS[instructions]
    defined = _run([*compiler, "-march=native", "-x", "c++", "-dM", "-E", "-"])
    missing = [macro for macro in macros if f"#define __{macro}__ " not in defined]
    if missing or ("-DTILES=1" in flags and not _grants_tiles()):
        reason = f"the CPU has no {', '.join(missing)}" if missing else "the kernel does not grant AMX"
        raise CompileError(f"TREESPEC_CPU={instructions!r} is not supported on this machine: {reason}; unset it")
    return flags


@functools.cache
def _grants_tiles() -> bool:
    """Return whether the kernel lets this process use AMX's tiles, after asking for it."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    number, request, tile_data = 158, 0x1023, 18  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
    return ctypes.CDLL(None).syscall(number, request, tile_data) == 0


@functools.cache
def l3_bytes() -> int | None:
    """Return the size of the first core's L3 cache, or None if Linux does not report it."""
    try:  # sysconf reports the sum of all L3 caches, even the host's in a virtual machine
        return 1024 * int(Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().rstrip("K\n"))
    except (OSError, ValueError):
        return None


def _run(command: Sequence[str], stdin: str = "") -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"{shlex.join(command)} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def address_of(array: np.ndarray, dtype: type = np.int64) -> int:
    """Return the address of the elements of a contiguous array of this dtype. A call takes a microsecond."""
    assert array.flags.c_contiguous and array.dtype == dtype, (array.dtype, array.shape)
    return array.__array_interface__["data"][0]


def function_address(function: Any) -> int:
    """Return the address of a library's function."""
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address
    return address


def packed(*sequences: Sequence[int]) -> tuple[ctypes.Array[ctypes.c_int64], list[int]]:
    """Return all numbers in one array, and the address of each sequence (taking an array's address costs 1 us)."""
    numbers = [*chain(*sequences)]
    array = (ctypes.c_int64 * len(numbers))(*numbers)
    address = ctypes.addressof(array)
    return array, [address + 8 * first for first in accumulate(map(len, sequences[:-1]), initial=0)]


def read_structs(*sources: Path) -> dict[str, type[ctypes.Structure]]:
    """Return the structs defined in `extern "C"` blocks of C++ files, without methods.

    All pointers are `c_void_p`. The elements of an array `x[2]` are the fields `x_0` and `x_1`.
    """
    structs: dict[str, type[ctypes.Structure]] = {}
    text = re.sub("//.*", "", "".join(source.read_text() for source in sources))
    for block in re.findall(r'^extern "C" {$(.*?)^} *$', text, re.S | re.M):
        for struct, body in re.findall(r"^struct (\w+) {(.*?)^(?:};|$)", block, re.S | re.M):
            fields: list[tuple[str, type]] = []
            for declaration in filter(str.strip, body.split(";")):
                if function := re.search(r"\(\*(\w+)\)", declaration):
                    fields.append((function[1], ctypes.c_void_p))
                    continue
                kind, names = declaration.replace("const ", "").replace("*", " *").split(None, 1)
                for name, length in re.findall(r"(\*? *\w+)(?:\[(\d)\])?", names):
                    field = ctypes.c_void_p if "*" in name else _NUMBERS.get(kind) or structs[kind]
                    ends = [f"_{i}" for i in range(int(length))] if length else [""]
                    fields += [(name.strip("* ") + end, field) for end in ends]
            structs[struct] = type(struct, (ctypes.Structure,), {"_fields_": fields})
    return structs


def _declare(library: ctypes.CDLL, text: str) -> ctypes.CDLL:
    """Declare argument and result types of the functions `treespec_*` defined in the sources."""
    for result, name, parameters in re.findall(r"^(void|int64_t) (treespec_\w+)\(([^)]*)\)", text, re.M):
        function = getattr(library, name)
        function.argtypes = [
            ctypes.c_void_p if "*" in parameter else ctypes.c_int64 for parameter in parameters.split(",")
        ]
        function.restype = _NUMBERS.get(result)
    return library


def compile_library(
    compiler: tuple[str, ...], sources: Sequence[Path], defines: Sequence[str], folder: Path
) -> ctypes.CDLL:
    """Load a library from `folder`, compiling it first if necessary.

    If the folder is not writable, the library is compiled for this process only, with a warning.

    Args:
        compiler: from `find_compiler`: the program and its flags, which follow the default flags.
        sources: the file to compile, followed by the files that it includes.
        defines: additional flags of this library.
        folder: cache folder, created if missing.
    """
    command = [compiler[0], *_FLAGS, *compiler[1:], *defines]
    macros = _run([*command, "-x", "c++", "-dM", "-E", "-"])  # compiler version and instruction set
    texts = [source.read_text() for source in sources]
    key = hashlib.sha256("\n".join([*texts, macros, *command]).encode()).hexdigest()
    name = f"{sources[0].stem}-{key[:24]}"
    build = [*command, str(sources[0]), "-o"]
    path = _cached(folder, name)
    if path is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            scratch = tempfile.TemporaryDirectory(dir=folder)
        except OSError as error:
            _warn_uncached(str(error))
            with tempfile.TemporaryDirectory() as temporary:
                return compile_library(compiler, sources, defines, Path(temporary))
        with scratch, shared_work(folder / f"{name}.lock", f"compile {sources[0].stem}", _PATIENCE):
            path = _cached(folder, name)
            if path is None:
                # Compile to a temporary file and rename it, since a process without the lock may compile concurrently.
                built = Path(scratch.name) / f"{name}.so"
                logger.info("compiling %s with %s into %s", sources[0].stem, compiler[0], folder)
                _run([*build, str(built)])
                path = folder / f"{name}-{_digest(built)}.so"
                os.replace(built, path)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise CompileError(f"{path} does not load: {error}") from error
    return _declare(library, "".join(texts))


def _warn_uncached(reason: str) -> None:
    """Warn once, because an engine compiles several libraries, in threads."""
    with _warned_lock:
        if reason in _warned:
            return
        _warned.add(reason)
    logger.warning(
        "cannot cache compiled libraries (%s), so every start compiles them; set XDG_CACHE_HOME to a writable folder",
        reason,
    )


def build_together(builds: Sequence[Callable[[], object]]) -> None:
    """Run builds in parallel, each in a thread that waits for a compiler.

    Errors are ignored: later calls that need the libraries build them again and raise.
    """
    if len(builds) > 1 and len(_cores()) > 1:
        threads = ThreadPoolExecutor(min(len(builds), len(_cores())))
        try:
            for future in [threads.submit(build) for build in builds]:
                future.exception()
        finally:  # after Ctrl-C, cancel pending builds and do not wait for running ones
            threads.shutdown(wait=False, cancel_futures=True)


def _cores() -> Sequence[int]:
    """Return the cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)


def _cached(folder: Path, name: str) -> Path | None:
    """Return the path of a cached library if it matches the hash in its name (a full disk may truncate it), or None."""
    for path in sorted(folder.glob(f"{name}-*.so")):
        with suppress(OSError):
            if path.stem.endswith(f"-{_digest(path)}"):
                return path
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
