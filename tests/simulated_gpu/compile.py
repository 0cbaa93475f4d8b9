"""Compiles the launches that a simulated GPU has noted, as Triton's own launcher would specialise them.

`python -m tests.simulated_gpu.compile FILE TARGET`, without TRITON_INTERPRET; prints JSON: how many were compiled, and
what failed. Bits of float16 become bfloat16, which is what a GPU is given and the interpreter cannot compute.
"""

import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from treespec_kernels.aot.launches import Launch, Pointer


def argument(value: Any) -> Any:
    if isinstance(value, Pointer) and value.dtype == torch.float16:
        return replace(value, dtype=torch.bfloat16)
    return value


def main(path: str, target: str) -> None:
    launches: list[Launch] = pickle.loads(Path(path).read_bytes())
    failed = []
    for launch in launches:
        try:
            replace(launch, arguments={n: argument(v) for n, v in launch.arguments.items()}).compile(target)
        except Exception as error:
            failed.append([repr(launch), f"{type(error).__name__}: {error}"])
    print(json.dumps({"compiled": len(launches) - len(failed), "failed": failed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
