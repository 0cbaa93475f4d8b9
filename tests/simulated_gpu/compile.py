"""Compiles the launches that a simulated GPU has noted, as Triton's own launcher would specialise them.

`python -m tests.simulated_gpu.compile FILE TARGET`, without TRITON_INTERPRET; prints JSON: how many were compiled, and
what failed. Bits of float16 become bfloat16, which is what a GPU is given and the interpreter cannot compute.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget


class Pointer:
    """What the launcher asks of a tensor."""

    def __init__(self, dtype: str, offset: int):
        self.dtype = torch.bfloat16 if dtype == "float16" else getattr(torch, dtype)
        self._offset = offset

    def data_ptr(self) -> int:
        return 512 + self._offset


class _Driver:
    """A driver of a target that is not there."""

    def __init__(self, target: GPUTarget):
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def argument(value: Any) -> Any:
    return Pointer(*value[1:]) if isinstance(value, list) and value[0] == "tensor" else value


def compile_launch(module: str, name: str, arguments: dict[str, Any], options: dict[str, Any]) -> None:
    kernel = getattr(importlib.import_module(module), name)
    given = {key: argument(value) for key, value in arguments.items()}
    if "FIXED_ORDER_DOT" in given:
        given["FIXED_ORDER_DOT"] = False  # the interpreter's stand-in for a matrix instruction
    kernel.warmup(**given, **options, grid=(1,))


def main(path: str, target: str) -> None:
    triton.runtime.driver.set_active(_Driver(GPUTarget("cuda", int(target.removeprefix("sm_")), 32)))
    failed, launches = [], json.loads(Path(path).read_text())
    for launch in launches:
        try:
            compile_launch(*launch)
        except Exception as error:
            failed.append([launch, f"{type(error).__name__}: {error}"])
    print(json.dumps({"compiled": len(launches) - len(failed), "failed": failed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
