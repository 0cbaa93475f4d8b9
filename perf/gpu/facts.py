"""Facts about the machine and the checkout that every document has."""

import platform
import subprocess
from importlib.metadata import version
from typing import Any

import torch

from gpu import host
from gpu.setting import Setting, l2_bytes, tuned_hash
from treespec.bench.run import commit
from treespec_kernels.tuning.tuned import slug


def facts(setting: Setting, source: str) -> dict[str, Any]:
    """Return the facts of a document. `source` is the hash of the sources that its stage depends on."""
    versions: dict[str, Any] = {name: version(name) for name in ("torch", "triton", "transformers", "numpy")}
    return {
        "device": device_facts(setting.device),
        "versions": versions | {"python": platform.python_version(), "cuda": torch.version.cuda},
        "commit": setting.commit or commit(),
        "source": source,
        "tuned": tuned_hash(),
        "host": None if setting.dry else host.facts(),
        "seed": setting.seed,
        "dry_run": setting.dry,
    }


def device_slug() -> str:
    """Return the GPU's name as a folder name."""
    return slug(torch.cuda.get_device_name())


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
    """Return driver version, current clocks and power limit; None if nvidia-smi fails."""
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None
