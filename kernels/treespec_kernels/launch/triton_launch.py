"""What every Triton implementation checks before it launches. An implementation asked for by name never falls back."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass

import torch


def block_of_head_dim(head_dim: int) -> int:
    """The power of two, 16 or more, that a kernel pads `head_dim` to by masks."""
    return max(16, 1 << (head_dim - 1).bit_length())


def is_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def target_of(device: torch.device | str) -> str | None:
    """What a device's kernels are compiled for, such as "sm_90" or "gfx942"; None for one that is no GPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return None
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


# Bytes of shared memory that one block may take: of every target that kernels can be compiled for without a GPU. Those
# of the second line are workstations and cards for inference.
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
    """Bytes of shared memory that one block may take on a target, as `target_of` gives it; None: on sm_80 and later
    GPUs for servers. Of an unknown one the least that any from sm_80 on has."""
    if target is None:
        return SHARED_BYTES["sm_80"]
    return SHARED_BYTES.get(_OTHERS.get(target, target), 64 << 10 if target.startswith("gfx") else 99 << 10)


def has_tensor_memory(target: str | None) -> bool:
    """Whether matrix products of a target go through tensor memory (tcgen05), as on NVIDIA's Blackwell for servers."""
    return target in ("sm_100", "sm_103", "sm_110")


@dataclass(frozen=True)
class LaunchConfig:
    """How the kernels of a pass are launched; `treespec autotune` measures it as op "programmatic_launch"."""

    pdl: bool = False


def takes_pdl(device: torch.device | str) -> bool:
    """Whether kernels can be launched programmatically: compiled ones, on NVIDIA's GPUs from sm_90 on."""
    target = target_of(device)
    return not is_interpreted() and target is not None and has_pdl(target)


def has_pdl(target: str) -> bool:
    """Whether what is compiled for a target, "sm_90", can wait for the kernel before it."""
    return target.startswith("sm_") and int(target.removeprefix("sm_")) >= 90


def launch_options(pdl: bool) -> dict[str, bool]:
    """What a kernel of a pass is launched with: that its programs wait, and that they may begin before they need to;
    both or neither. `predecessors` says why that is safe.

    Args:
        pdl: asked for, where `takes_pdl`. Elsewhere the launch fails.
    """
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


def is_triton_error(error: BaseException) -> bool:
    """Whether Triton or what it calls refuses a kernel: too much shared memory, or code that does not compile."""
    errors = sys.modules.get("triton.errors")
    return errors is not None and isinstance(error, errors.TritonError)


def doubts_about(device: torch.device) -> str | None:
    """What is known against kernels of this version of Triton on a device; None: nothing.

    Before 3.8, products that read what was just copied to shared memory through tensor memory miss a fence (triton
    #9610), so that a result may now and then be another one.
    """
    target = target_of(device)
    if not has_tensor_memory(target):
        return None
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8):
        return None
    return f"Triton {triton.__version__} may now and then compute a wrong product on {target}; take 3.8 or later"


def require_triton(op: str) -> None:
    """Raises ValueError where triton is not installed, before the kernels are imported."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            f"{op}: implementation 'triton' needs triton, which is not installed; install it or use 'torch'"
        )


def check_last_strides(**tensors: torch.Tensor) -> None:
    """Raises ValueError where a last dimension is not contiguous; outer strides are free."""
    for name, tensor in tensors.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} has stride {tensor.stride(-1)} over its last dimension; make it contiguous")


def check_launch(op: str, kernel: object, tensor: torch.Tensor) -> None:
    """Raises ValueError where `kernel` cannot run on the tensor's device."""
    import triton

    if isinstance(kernel, triton.JITFunction):
        if tensor.device.type == "cpu":
            raise ValueError(
                f"{op}: implementation 'triton' was asked for on CPU tensors; move them to a GPU, use 'torch', "
                "or set TRITON_INTERPRET=1 before Python starts to run it in Triton's interpreter"
            )
    elif tensor.dtype == torch.bfloat16:
        raise ValueError(f"{op}: Triton's interpreter computes bfloat16 wrongly; use float16 or float32 in it")
