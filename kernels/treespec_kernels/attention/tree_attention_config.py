"""Configuration of tree attention: the partition of positions into segments, and the tiles."""

from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch

from treespec_kernels.launch.tile_config import TileConfig
from treespec_kernels.launch.triton_launch import has_tensor_memory, shared_bytes


@dataclass(frozen=True)
class SegmentPartition:
    """Partition of positions into segments: of `short` positions below `long_from`, and of `long` positions above."""

    short: int = 256
    long: int = 1024
    long_from: int = 8192

    def segment_of(self, position: np.ndarray) -> np.ndarray:
        beyond = np.maximum(position - self.long_from, 0)
        return np.minimum(position, self.long_from) // self.short + beyond // self.long

    def start_of(self, segment: np.ndarray) -> np.ndarray:
        num_short = self.long_from // self.short
        return np.minimum(segment, num_short) * self.short + np.maximum(segment - num_short, 0) * self.long


@dataclass(frozen=True)
class TreeAttentionConfig(TileConfig):
    """Configuration of tree attention: tiles, partition of positions, and launch options."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    partition: SegmentPartition = field(default_factory=SegmentPartition)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("short", "long", "long_from"):
            if getattr(self.partition, name) % self.block_n:
                raise ValueError(f"{name} of {self.partition} is not a multiple of block_n {self.block_n}")

    @classmethod
    def default(cls, dtype: torch.dtype, head_dim: int, target: str | None = None) -> Self:
        """Return the default configuration, which does not spill with or without a window.

        M = 64 is one `wgmma` on sm_90: 16 nodes of a group of 4 heads per tile. float32 has no exact matrix instruction
        and uses small tiles.
        """
        check_supported(dtype, head_dim)
        if target is not None and target.startswith("gfx"):
            return cls._default_of_amd(dtype, head_dim)
        if head_dim > 256:  # tiles of 98 KB, which all of NVIDIA's GPUs have
            block = 16 if dtype == torch.float32 else 32
            return cls(block_m=block, block_n=block, num_warps=8, num_stages=2)
        if dtype == torch.float32 and head_dim <= 128:  # no spills with Triton 3.7 and 3.9
            return cls(block_m=16, block_n=16, num_warps=8, num_stages=2)
        if dtype == torch.float32:
            return cls(block_m=16, block_n=32, num_warps=8, num_stages=2)
        if head_dim <= 64:
            return cls(block_m=64, block_n=64, num_warps=4, num_stages=3)
        if head_dim <= 128:  # on an H200, 12 % faster at 32 nodes than block_n 64 with 8 warps
            return cls(block_m=64, block_n=32, num_warps=4, num_stages=2 if has_tensor_memory(target) else 3)
        # Three stages need 100 KB of shared memory.
        return cls(block_m=64, block_n=32, num_warps=8, num_stages=3 if shared_bytes(target) >= 100 << 10 else 2)

    @classmethod
    def _default_of_amd(cls, dtype: torch.dtype, head_dim: int) -> Self:
        """Return a configuration with smaller tiles: gfx942 has 64 KiB of shared memory and 64 threads per warp."""
        if dtype == torch.float32:
            return cls(block_m=16, block_n=16, num_warps=4, num_stages=1 if head_dim > 256 else 2)
        if head_dim > 256:
            return cls(block_m=32, block_n=16, num_warps=8, num_stages=2)
        if head_dim <= 64:
            return cls(block_m=64, block_n=64, num_warps=4, num_stages=2)
        if head_dim <= 128:
            return cls(block_m=64, block_n=32, num_warps=8, num_stages=2)
        return cls(block_m=32, block_n=32, num_warps=4, num_stages=2)

    @classmethod
    def candidates(cls, dtype: torch.dtype, head_dim: int, target: str | None = None) -> list[Self]:
        """Return the configurations to tune, default first.

        They vary the tiles at the default partition, and the segment length. Arguments and errors as in `default`.
        """
        default = cls.default(dtype, head_dim, target)
        if head_dim > 256:
            tiles = [(16, 16, 8, 2), (32, 16, 8, 2), (16, 32, 8, 2)] if dtype != torch.float32 else []
        elif dtype == torch.float32:
            tiles = [(16, 16, 4, 2), (16, 16, 8, 2), (16, 32, 8, 2), (32, 16, 8, 2)]  # larger tiles spill with 4 warps
        else:
            tiles = [
                *((64, block_n, num_warps, 3) for block_n in (32, 64) for num_warps in (4, 8)),
                *((block_m, block_n, 4, 4) for block_m in (16, 32) for block_n in (32, 64)),
                *((64, 64, num_warps, 2) for num_warps in (4, 8)),
                *((128, 64, 8, num_stages) for num_stages in (2, 3)),
            ]
        configs = [replace(default, partition=replace(default.partition, short=short)) for short in (256, 128, 512)]
        return list(dict.fromkeys([*configs, *(cls(*tile, default.partition) for tile in tiles)]))


def check_supported(dtype: torch.dtype, head_dim: int) -> None:
    """Raise ValueError for a dtype or head_dim that the kernels do not support."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"dtype {dtype} is not supported; use float16, bfloat16 or float32")
    if not 1 <= head_dim <= 512:
        raise ValueError(f"head_dim {head_dim} is not supported; use 1 to 512")
