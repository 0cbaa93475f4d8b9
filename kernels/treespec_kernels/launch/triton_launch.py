"""Targets, launch options and checks shared by the Triton implementations.

A Triton implementation that cannot run raises; it never falls back to another implementation.
"""

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from treespec_kernels.launch.switches import is_on

WAIT, PREFETCH = 1, 2  # values of the kernels' constant PDL: wait only, or wait preceded by a prefetch of weights


def block_of(size: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `size` and `least`, itself a power of two."""
    return max(least, 1 << (size - 1).bit_length())


def is_interpreted() -> bool:
    """Return whether Triton's kernels run in its interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def target_of(device: torch.device | str) -> str | None:
    """Return the architecture to compile a device's kernels for, such as "sm_90" or "gfx942"; None for a CPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return None
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


# Shared memory bytes per block for every target of ahead-of-time compilation: data center GPUs, then workstation and
# inference cards.
SHARED_BYTES = {
    "sm_80": 163 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "gfx942": 64 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_120": 99 << 10,
}
_OTHERS = {"sm_87": "sm_80", "sm_103": "sm_100", "sm_110": "sm_100"}


def shared_bytes(target: str | None) -> int:
    """Return the bytes of shared memory per block on a target from `target_of`.

    None means sm_80, which has the least of NVIDIA's data center GPUs. An unknown target gets its vendor's smallest
    value.
    """
    if target is None:
        return SHARED_BYTES["sm_80"]
    return SHARED_BYTES.get(_OTHERS.get(target, target), 64 << 10 if target.startswith("gfx") else 99 << 10)


def has_tensor_memory(target: str | None) -> bool:
    """Return whether matrix products use tensor memory (tcgen05), as on NVIDIA's data center Blackwell."""
    return target in ("sm_100", "sm_103", "sm_110")


@dataclass(frozen=True)
class LaunchConfig:
    """Launch options shared by the kernels of a pass; `treespec autotune` tunes them as op "programmatic_launch"."""

    pdl: bool = False


def takes_pdl(device: torch.device | str) -> bool:
    """Return whether a device supports programmatic dependent launch: compiled kernels on NVIDIA sm_90 or later."""
    target = target_of(device)
    return not is_interpreted() and target is not None and has_pdl(target)


def has_pdl(target: str) -> bool:
    """Return whether a target such as "sm_90" supports programmatic dependent launch."""
    return target.startswith("sm_") and int(target.removeprefix("sm_")) >= 90


def launch_options(pdl: bool) -> dict[str, int | bool]:
    """Return launch arguments that enable both PDL's launch attribute and the kernel's wait, or neither.

    `predecessors.py` explains why they belong together. With `pdl`, the launch fails on a device without PDL
    (`takes_pdl`). The switches "pdl" and "prefetch" (`switches.py`) apply here.
    """
    if not pdl or not is_on("pdl"):
        return {"PDL": 0}
    return {"PDL": PREFETCH if is_on("prefetch") else WAIT, "launch_pdl": True}


def load_kernels(module: str, tensor: torch.Tensor) -> Any:
    """Import the kernels of a module such as "tree.tree_root", to launch them on the device of `tensor`.

    Raises ValueError if triton is not installed, or cannot run on the tensor.
    """
    op = module.rpartition(".")[2]
    require_triton(op)
    kernels = importlib.import_module(f"treespec_kernels.{module}_kernels")
    check_launch(op, next(value for value in vars(kernels).values() if hasattr(value, "arg_names")), tensor)
    return kernels


def is_triton_error(error: BaseException) -> bool:
    """Return whether an error was raised by Triton, such as a compilation error or too much shared memory."""
    errors = sys.modules.get("triton.errors")
    return errors is not None and isinstance(error, errors.TritonError)


def emits_proxy_fences(version: str) -> bool:
    """Return whether a Triton version emits fences between shared-memory copies and matrix products (#9610)."""
    return tuple(map(int, version.split(".")[:2])) >= (3, 8)


def known_issue(device: torch.device, version: str | None = None) -> str | None:
    """Return a warning about a known miscompilation of a Triton version, the installed one, for a device, or None.

    Without `emits_proxy_fences`, products in tensor memory are occasionally wrong. On sm_90 the kernels place the fence
    themselves (`linear/dot.py`).
    """
    target = target_of(device)
    if not has_tensor_memory(target):
        return None
    import triton

    if emits_proxy_fences(version := version or triton.__version__):
        return None
    return f"Triton {version} may compute wrong products on {target}; upgrade to Triton 3.8 or later"


def require_triton(op: str) -> None:
    """Raise ValueError if triton is not installed. Call this before importing the kernels."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            f"{op}: implementation 'triton' needs triton, which is not installed; install it or use 'torch'"
        )
    if is_interpreted():
        _repair_interpreter()


@cache
def _repair_interpreter() -> None:
    """Enable loops with computed bounds in the interpreter of Triton before 3.9.

    It calls int(array) on one-dimensional arrays, which NumPy rejects from 2.5 on.
    """
    import triton
    from triton.runtime import interpreter

    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
        return
    patch: Any = interpreter._patch_lang_tensor

    def repaired(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = repaired


def check_launch(op: str, kernel: object, tensor: torch.Tensor) -> None:
    """Raise ValueError if `kernel` cannot run on the tensor's device."""
    import triton

    if isinstance(kernel, triton.JITFunction):
        if tensor.device.type == "cpu":
            raise ValueError(
                f"{op}: implementation 'triton' got CPU tensors; move them to a GPU, use 'torch', "
                "or set TRITON_INTERPRET=1 before Python starts to use Triton's interpreter"
            )
    elif tensor.dtype == torch.bfloat16:
        raise ValueError(f"{op}: Triton's interpreter computes bfloat16 wrongly; use float16 or float32 in it")
