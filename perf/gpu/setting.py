"""Where a run happens and how large it is: the one object that tells a dry run from a real one."""

import hashlib
import json
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers

from gpu import host
from treespec.bench.run import commit
from treespec_weights.rules import ModelShape

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ("perf/gpu", "perf/identity.py", "treespec", "kernels", "weights/treespec_weights", "tests/interpreted")
"""Sources that results depend on: what was measured under the same ones is not measured again."""

LLAMA_8B = ModelShape(
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
)
LLAMA_1B = ModelShape(
    num_layers=16,
    hidden_size=2048,
    intermediate_size=8192,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    vocab_size=128256,
    tied=True,
)
TINY = ModelShape(
    num_layers=1, hidden_size=32, intermediate_size=64, num_heads=2, num_kv_heads=1, head_dim=16, vocab_size=64
)


@dataclass(frozen=True)
class Setting:
    """One run of the suite.

    Args:
        out: where results go.
        dry: everything tiny and on the CPU, kernels in Triton's interpreter.
        seed: of weights, inputs and prompts.
        commit: of the checkout; None asks git.
    """

    out: Path
    dry: bool = False
    seed: int = 0
    commit: str | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def dtype(self) -> torch.dtype:
        """Of kernels and models; the interpreter computes bfloat16 wrongly."""
        return torch.float32 if self.dry else torch.bfloat16

    @property
    def target(self) -> ModelShape:
        """The shape that the targets are stated for."""
        return TINY if self.dry else LLAMA_8B

    @property
    def small(self) -> ModelShape:
        return TINY if self.dry else LLAMA_1B

    @cached_property
    def cache_bytes(self) -> int:
        """Data that no cache holds: three times the L2, so that a buffer has left it before its turn comes again."""
        return 1 if self.dry else 3 * max(l2_bytes(self.device), 60 << 20)

    def generator(self) -> torch.Generator:
        """A fresh one on the device."""
        return torch.Generator(self.device).manual_seed(self.seed)

    def random(self, *size: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal numbers on the device; never zeros, on which a GPU draws less power and runs faster."""
        tensor = torch.empty(size, dtype=dtype or self.dtype, device=self.device)
        return tensor.normal_(0.0, scale)

    def facts(self) -> dict[str, Any]:
        """What every document says about its machine and code."""
        import triton

        versions = {module.__name__: module.__version__ for module in (torch, triton, transformers, numpy)}
        return {
            "device": device_facts(self.device),
            "versions": versions | {"python": platform.python_version(), "cuda": torch.version.cuda},
            "commit": self.commit or commit(),
            "source": source_hash(),
            "tuned": tuned_hash(),
            "host": None if self.dry else host.facts(),
            "seed": self.seed,
            "dry_run": self.dry,
        }


def l2_bytes(device: torch.device) -> int:
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))


def device_slug(dry: bool) -> str:
    """The name of the device as a folder's."""
    name = "dry-run" if dry else torch.cuda.get_device_name()
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def device_facts(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {"name": f"CPU ({platform.machine()})", "driver": None}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "driver": _driver(),
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(l2_bytes(device) / 2**20, 1),
        "capability": f"{properties.major}.{properties.minor}",
    }


def _driver() -> str | None:
    """The driver's version and the clocks as they are; None where nvidia-smi does not answer."""
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


@cache
def source_hash() -> str:
    """Of everything that is measured. A checkout without .git has it too, and a change of a text leaves it alone."""
    digest = hashlib.sha256()
    for path in sorted(file for part in MEASURED for file in _files(ROOT / part)):
        digest.update(f"{path.relative_to(ROOT)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [file for kind in ("*.py", "*.cpp") for file in path.rglob(kind) if "__pycache__" not in file.parts]


def tuned_hash() -> str | None:
    """Of the tuned configurations that are shipped or the user's; None where there are none. `autotune` writes them, so
    they are no source, but times before and after are not of the same kernels. Quantised layers are left out: they run
    in one stage only, which tunes them itself."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treespec" / "tuned"
    files = [
        file for folder in (user, ROOT / "kernels/treespec_kernels/tuned") for file in sorted(folder.glob("*.json"))
    ]
    return hashlib.sha256(b"".join(map(_plain_entries, files))).hexdigest()[:16] if files else None


def _plain_entries(file: Path) -> bytes:
    """Of a tuned file; of another one everything."""
    content = file.read_bytes()
    try:
        entries = json.loads(content)["entries"]
        return json.dumps([entry for entry in entries if entry["op"] != "quantized_row_linear"]).encode()
    except (ValueError, TypeError, KeyError):
        return content
