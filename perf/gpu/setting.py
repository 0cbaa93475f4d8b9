"""Settings of a run: device, sizes and dry-run mode."""

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from treespec_weights.rules import ModelShape

ROOT = Path(__file__).resolve().parents[2]
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
        out: results folder.
        dry: whether to use tiny sizes on the CPU, with kernels in Triton's interpreter.
        seed: seed of weights, inputs and prompts.
        commit: commit of the checkout; None asks git.
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
        """dtype of kernels and models: bfloat16, or float32 in the interpreter, whose bfloat16 is incorrect."""
        return torch.float32 if self.dry else torch.bfloat16

    @property
    def target(self) -> ModelShape:
        """Model shape of the stated targets."""
        return TINY if self.dry else LLAMA_8B

    @property
    def small(self) -> ModelShape:
        return TINY if self.dry else LLAMA_1B

    @cached_property
    def cache_bytes(self) -> int:
        """Bytes of rotating buffers that always evict each other: three times the L2."""
        return 1 if self.dry else 3 * max(l2_bytes(self.device), 60 << 20)

    def generator(self) -> torch.Generator:
        """Return a new generator on the device."""
        return torch.Generator(self.device).manual_seed(self.seed)

    def random(self, *size: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return normal random numbers. Zeros would lower the power draw and raise the clocks."""
        tensor = torch.empty(size, dtype=dtype or self.dtype, device=self.device)
        return tensor.normal_(0.0, scale)


def l2_bytes(device: torch.device) -> int:
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))


def tuned_hash() -> str | None:
    """Return a hash of the shipped and the user's tuned configurations, or None without any.

    Tuning changes the measured kernels but not the sources. Quantised layers are excluded, because they run only in a
    stage that tunes them itself.
    """
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treespec" / "tuned"
    files = [
        file for folder in (user, ROOT / "kernels/treespec_kernels/tuned") for file in sorted(folder.glob("*.json"))
    ]
    return hashlib.sha256(b"".join(map(_plain_entries, files))).hexdigest()[:16] if files else None


def _plain_entries(file: Path) -> bytes:
    """Return the entries of a tuned file without those of quantised layers; the whole content of other files."""
    content = file.read_bytes()
    try:
        entries = json.loads(content)["entries"]
        return json.dumps([entry for entry in entries if entry["op"] != "quantized_row_linear"]).encode()
    except (ValueError, TypeError, KeyError):
        return content
