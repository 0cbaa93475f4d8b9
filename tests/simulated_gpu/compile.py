"""Compiles the launches that a simulated GPU has noted, as Triton's own launcher would specialise them, in bfloat16."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from treespec_kernels.aot.launches import Launch, Pointer


def argument(value: Any) -> Any:
    if isinstance(value, Pointer) and value.dtype == torch.float16:
        return replace(value, dtype=torch.bfloat16)
    return value


def compile_all(path: str, target: str) -> None:
    """Without TRITON_INTERPRET; prints as JSON how many were compiled, and what failed."""
    launches: list[Launch] = pickle.loads(Path(path).read_bytes())
    failed = []
    for launch in launches:
        try:
            replace(launch, arguments={n: argument(v) for n, v in launch.arguments.items()}).compile(target)
        except Exception as error:
            failed.append([repr(launch), f"{type(error).__name__}: {error}"])
    print(json.dumps({"compiled": len(launches) - len(failed), "failed": failed}))
