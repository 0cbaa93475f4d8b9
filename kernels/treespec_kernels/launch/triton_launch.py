"""Targets, launch options and checks shared by the Triton implementations. An implementation never falls back."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass

import torch


def block_of_head_dim(head_dim: int) -> int:
    """The power of two, 16 or more, that a kernel pads `head_dim` to."""
    return max(16, 1 << (head_dim - 1).bit_length())


def is_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def target_of(device: torch.device | str) -> str | None:
    """The architecture that kernels of a device are compiled for, such as "sm_90" or "gfx942"; None for a CPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return None
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


# Bytes of shared memory per block, for every target of ahead-of-time compilation: data center GPUs first, then
# workstation and inference cards.
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
    """Bytes of shared memory per block on a target from `target_of`; None is sm_80, the least of the data center GPUs.
    An unknown target gets the least of its vendor."""
    if target is None:
        return SHARED_BYTES["sm_80"]
    return SHARED_BYTES.get(_OTHERS.get(target, target), 64 << 10 if target.startswith("gfx") else 99 << 10)


def has_tensor_memory(target: str | None) -> bool:
    """Whether matrix products use tensor memory (tcgen05), as on NVIDIA's data center Blackwell."""
    return target in ("sm_100", "sm_103", "sm_110")


@dataclass(frozen=True)
class LaunchConfig:
    """Launch options of the kernels of a pass; `treespec autotune` tunes them as op "programmatic_launch"."""

    pdl: bool = False


def takes_pdl(device: torch.device | str) -> bool:
    """Whether a device supports programmatic dependent launch: compiled kernels on NVIDIA GPUs, sm_90 or later."""
    target = target_of(device)
    return not is_interpreted() and target is not None and has_pdl(target)


def has_pdl(target: str) -> bool:
    """Whether a target such as "sm_90" supports programmatic dependent launch."""
    return target.startswith("sm_") and int(target.removeprefix("sm_")) >= 90


def launch_options(pdl: bool) -> dict[str, bool]:
    """Launch arguments of a kernel of a pass: the launch attribute and the wait in the kernel, both or neither
    (`predecessors.py`). `pdl` requires a device that `takes_pdl`; elsewhere the launch fails."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


def is_triton_error(error: BaseException) -> bool:
    """Whether Triton rejected a kernel, for example because of too much shared memory or a compilation error."""
    errors = sys.modules.get("triton.errors")
    return errors is not None and isinstance(error, errors.TritonError)


def known_issue(device: torch.device) -> str | None:
    """A warning about a known miscompilation of this Triton version for a device, or None.

    Before 3.8, tensor memory products of operands just copied to shared memory miss a fence (triton #9610), so a result
    is occasionally wrong.
    """
    target = target_of(device)
    if not has_tensor_memory(target):
        return None
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8):
        return None
    return f"Triton {triton.__version__} may compute wrong products on {target}; upgrade to Triton 3.8 or later"


def require_triton(op: str) -> None:
    """Raises ValueError if triton is not installed; called before the kernels are imported."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            f"{op}: implementation 'triton' needs triton, which is not installed; install it or use 'torch'"
        )


def check_last_strides(**tensors: torch.Tensor) -> None:
    """Raises ValueError if a last dimension is not contiguous; outer strides are free."""
    for name, tensor in tensors.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} has stride {tensor.stride(-1)} over its last dimension; make it contiguous")


def check_tensors(of: str, device: torch.device, dtype: torch.dtype, **tensors: torch.Tensor) -> None:
    """Raises ValueError if a tensor has another dtype, or is not on the device of the tensor named `of`."""
    for name, tensor in tensors.items():
        if tensor.dtype != dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}; convert it to {dtype}")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device} and {of} on {device}; move it there")


def check_alike(of: str, like: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    """Raises ValueError if a tensor has not the dtype and device of `like`, which is named `of`."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype != like.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype} and {of} {like.dtype}; they must be equal")
        if tensor is not None and tensor.device != like.device:
            raise ValueError(f"{name} is on {tensor.device} and {of} on {like.device}; move it there")


def check_launch(op: str, kernel: object, tensor: torch.Tensor) -> None:
    """Raises ValueError if `kernel` cannot run on the tensor's device."""
    import triton

    if isinstance(kernel, triton.JITFunction):
        if tensor.device.type == "cpu":
            raise ValueError(
                f"{op}: implementation 'triton' got CPU tensors; move them to a GPU, use 'torch', "
                "or set TRITON_INTERPRET=1 before Python starts to use Triton's interpreter"
            )
    elif tensor.dtype == torch.bfloat16:
        raise ValueError(f"{op}: Triton's interpreter computes bfloat16 wrongly; use float16 or float32 in it")
