"""Configurations of row-invariant linear layers: tiles, splits of K, and launch options."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch

from treespec_kernels.launch.triton_launch import has_tensor_memory, is_interpreted, shared_bytes
from treespec_kernels.linear.row_tiles import MULTIPROCESSORS, RowTile, RowTiledConfig, fewer_stages, larger_tiles

AMD_STAGES = 3  # fits in the 64 KB of gfx942; the number of stages does not affect bits


@dataclass(frozen=True)
class RowLinearConfig(RowTiledConfig):
    """Configuration of a weight; a row has the same bits for every number of rows."""

    block_m: int  # rows per tile
    block_n: int  # weight rows per tile (with silu_gate, half of them are gates)
    block_k: int  # features per step of the loop
    split_k: int  # number of parts of K, in whole blocks of block_k, summed separately and then added in order
    num_warps: int
    num_stages: int  # does not affect bits
    larger: tuple[RowTile, ...] = ()  # tiles with more rows, selected by the number of rows of a launch

    @classmethod
    def default(
        cls,
        dtype: torch.dtype,  # float16, bfloat16 or float32
        out_features: int,  # shape of the weight; with silu_gate, out_features counts gates and ups
        in_features: int,
        silu_gate: bool = False,
        target: str | None = None,  # from `target_of`; None for a configuration that fits sm_80 and sm_90
    ) -> Self:
        """Return the default configuration, within 12 % of the best of a sweep for every layer of 8B on an H200.

        A layer is bound by reading its weight once. Programs should therefore not read more bytes than that from L2,
        and enough bytes must be in flight: about 4.3 TB/s times 1 us, 32 KB per multiprocessor.

        - block_m 64 computes 64 rows with one read of the weight, and is one `wgmma` on sm_90 and later. More rows
        would read it from L2 once per 64 rows; `larger_tiles` read it once per 128 or 256.
        - block_n is the largest of 128, 64 and 32 that gives enough programs with a modest split_k. Every program reads
          its part of K of all its rows, which for 64 rows is 64 / block_n of the weight's bytes.
        - split_k, at most 8, raises the number of programs to 96 or more, with at least four blocks of K each, and if
          possible to at most 132, one per multiprocessor. Layers with silu_gate or at most 2^20 weights are not split,
          because adding the parts would cost more than it gains.
        - On an H200 all programs are resident at once: one per multiprocessor with 144 KB of stages, or two with 96 KB.
          All stages but two are in flight: one is multiplied, and one may still be read by its `wgmma`.

        float32 has no exact matrix instruction on NVIDIA, and uses 16 rows; with more it would be bound by arithmetic.
        """
        is_float32 = dtype == torch.float32
        block_m, block_k = (16, 32) if is_float32 else (64, 64)
        max_split = max(1, min(8, in_features // (4 * block_k)))
        if silu_gate or out_features * in_features <= 1 << 20:
            max_split = 1
        for block_n in (64, 32) if is_float32 else (128, 64, 32):
            tiles = -(-out_features // block_n)
            split_k = min(max(MULTIPROCESSORS // tiles, 1), max_split)
            if tiles * split_k < 96:
                split_k = min(-(-120 // tiles), max_split)
            if tiles * split_k >= 96:
                break
        is_alone = tiles * split_k <= MULTIPROCESSORS
        num_stages = 6 if is_alone else 4
        if not is_float32:
            room = 144 << 10 if is_alone and shared_bytes(target) > 144 << 10 else 96 << 10
            fitting = room // ((block_m + block_n) * block_k * dtype.itemsize)
            num_stages = min(8, fitting, 2 + -(-in_features // block_k // split_k))
        if target is not None and target.startswith("gfx"):
            num_stages = min(num_stages, AMD_STAGES)
        # with 4 warps, gate and up accumulators in tensor memory spill
        num_warps = 8 if has_tensor_memory(target) and silu_gate and block_n == 128 else 4
        config = cls(block_m, block_n, block_k, split_k, num_warps, num_stages)
        return config._tiled(dtype, out_features, in_features, silu_gate, target)

    @classmethod
    def candidates(
        cls, dtype: torch.dtype, out_features: int, in_features: int, silu_gate: bool = False, target: str | None = None
    ) -> "list[RowLinearConfig]":
        """Return configurations to tune, default first, that fit the target's shared memory (None: sm_90's).

        Arguments as in `default`.
        """
        default = cls.default(dtype, out_features, in_features, silu_gate, target)
        if dtype == torch.float32:
            tiles = [(16, 32, 32, 4), (16, 64, 32, 4), (16, 64, 64, 4), (16, 64, 32, 8), (16, 128, 32, 8)]
        else:
            tiles = [
                *((64, block_n, block_k, 4) for block_n in (32, 64, 128) for block_k in (64, 128)),
                (64, 256, 64, 8),
                (64, 128, 64, 8),
                (32, 64, 128, 4),
                (32, 128, 64, 4),
                (16, 64, 128, 4),
                (16, 128, 64, 4),
                (128, 128, 64, 8),
            ]
        configs: list[RowLinearConfig] = [default]
        for tile in tiles:
            stage_bytes = (tile[0] + tile[1]) * tile[2] * dtype.itemsize
            for config in _resident(tile, out_features, in_features, target, stage_bytes):
                configs.append(config._tiled(dtype, out_features, in_features, silu_gate, target))
        configs += [replace(default, larger=larger) for larger in fewer_stages(default.larger)]
        return list(dict.fromkeys(configs))

    def _tiled(
        self, dtype: torch.dtype, out_features: int, in_features: int, silu_gate: bool, target: str | None
    ) -> Self:
        """Return the configuration with larger tiles if the target supports them."""
        is_alone = -(-out_features // self.block_n) * self.split_k <= MULTIPROCESSORS
        larger = larger_tiles(
            target,
            dtype,
            (self.block_m, self.block_n, self.block_k, self.num_warps),
            -(-in_features // self.block_k // self.split_k),
            residents=1 if is_alone else 2,
            most_rows=256 if silu_gate or self.split_k > 1 else 128,  # with 256 rows, bias and an exact GELU spilled
        )
        return replace(self, larger=larger)

    def workspace_size(self, num_rows: int, out_features: int) -> int:
        """Return the number of float32 elements of the partial sums of `num_rows` rows (of all groups)."""
        return self.split_k * num_rows * out_features


def _resident(
    tile: tuple[int, int, int, int],
    out_features: int,
    in_features: int,
    target: str | None,
    stage_bytes: int,
    spare_bytes: int = 0,
) -> Iterator[RowLinearConfig]:
    """Yield configurations of a tile for 1 to 3 programs per multiprocessor, which determines splits and stages."""
    block_m, block_n, block_k, num_warps = tile
    num_tiles, num_blocks = -(-out_features // block_n), -(-in_features // block_k)
    for residents in (1, 2, 3):
        split_k = max(1, min(round(residents * MULTIPROCESSORS / num_tiles), num_blocks // 2))
        num_stages = min(8, (shared_bytes(target or "sm_90") // residents - spare_bytes) // stage_bytes)
        if num_stages >= 3:
            yield RowLinearConfig(block_m, block_n, block_k, split_k, num_warps, num_stages)


def interpretable(config: RowLinearConfig) -> RowLinearConfig:
    """Return a configuration unchanged, or with small blocks in the interpreter, whose time grows with their size."""
    if not is_interpreted():
        return config
    sizes = {"block_m": 16, "block_n": 64, "block_k": min(config.block_k, 64), "split_k": min(config.split_k, 2)}
    return replace(config, **sizes, larger=())


def quantized_default(
    dtype: torch.dtype, out_features: int, in_features: int, group: int, target: str | None = None
) -> RowLinearConfig:
    """Return the default configuration: a dense layer's, with blocks of K that divide the groups.

    Dequantised weights are in registers between load and product, so tiles have at most 64 outputs, or 32 in float32,
    where 64 outputs used 253 of 255 registers on NVIDIA.
    """
    plain = RowLinearConfig.default(dtype, out_features, in_features, target=target)
    block_n = min(plain.block_n, 32 if dtype == torch.float32 else 64)
    tiles = -(-out_features // block_n)
    block_k = plain.block_k
    while group != in_features and group % block_k:
        block_k //= 2
    max_split = max(1, min(8, in_features // (4 * block_k)))
    split_k = 1 if out_features * in_features <= 1 << 20 else min(-(-120 // tiles), max_split)
    return replace(plain, block_n=block_n, block_k=block_k, split_k=split_k, larger=())


def quantized_candidates(
    dtype: torch.dtype, out_features: int, in_features: int, group: int, bits: int, target: str | None = None
) -> list[RowLinearConfig]:
    """Return configurations to tune, default first, that fit the target's shared memory (None: sm_90's).

    Arguments as in `quantized_default`; bits: 8 or 4.
    """
    if dtype == torch.float32:
        tiles, block_ks = [(16, 16, 4), (16, 32, 4), (16, 64, 8)], [32, 64]
    else:
        tiles = [(64, 32, 4), (64, 64, 4), (64, 128, 8), (32, 64, 4), (16, 64, 4), (16, 128, 8), (128, 64, 8)]
        block_ks = [32, 64, 128]
    dividing = [block_k for block_k in block_ks if group == in_features or group % block_k == 0]
    configs = [quantized_default(dtype, out_features, in_features, group, target)]
    for (block_m, block_n, num_warps), block_k in itertools.product(tiles, dividing[-2:]):
        stage_bytes = block_m * block_k * dtype.itemsize + block_n * block_k * bits // 8
        widened = block_n * block_k * dtype.itemsize  # upper bound of the layout conversion before the product
        tile = block_m, block_n, block_k, num_warps
        configs += _resident(tile, out_features, in_features, target, stage_bytes, widened)
    first = configs[0]
    tile = (first.block_m, first.block_n, first.block_k, first.num_warps)
    blocks = -(-in_features // first.block_k // first.split_k)
    # With 256 rows, tiles of int4 weights spilled.
    configs.append(replace(first, larger=larger_tiles(target, dtype, tile, blocks, most_rows=128)))
    return list(dict.fromkeys(configs))
