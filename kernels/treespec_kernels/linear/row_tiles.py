"""Tiles of rows: larger tiles that compute many rows with fewer reads of the weight, and with the same bits.

A configuration has one tile for few rows and may have larger ones. All of them have the same block_n, block_k and
split_k, and the same number of rows per warp, so every warp group computes its 64 rows by the same instructions over
the same features in the same order (`aot/k_order.py` checks this in compiled code). `proven` checks on a device that
the bits are equal.
"""

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch

from treespec_kernels.comparison import same_bits
from treespec_kernels.launch.switches import is_on
from treespec_kernels.launch.tile_config import TileConfig
from treespec_kernels.launch.triton_launch import shared_bytes

logger = logging.getLogger("treespec")

MULTIPROCESSORS = 132  # multiprocessors of an H200
PRODUCTS_PER_CYCLE = 2048  # 16-bit products of a multiprocessor's matrix units
L2_BYTES_PER_CYCLE = 24 * MULTIPROCESSORS  # all multiprocessors together: 5.5 TB/s at 1.755 GHz
PORT_BYTES_PER_CYCLE = 64  # bandwidth from L2 to one multiprocessor
ROWS_PER_WARP = 16  # rows per warp of a `wgmma`, which has 64 rows per warp group
# The K order was decoded on sm_90 only. On sm_100, tiles of 64 and of 128 rows use different instructions.
ORDERED = ("sm_90",)


TiledConfigT = TypeVar("TiledConfigT", bound="RowTiledConfig")


class RowTile(NamedTuple):
    """Rows of a tile, and its launch options."""

    block_m: int
    num_warps: int
    num_stages: int


class RowTiledConfig(TileConfig):
    """Base class of configurations with tiles for several numbers of rows."""

    block_m: int
    block_n: int
    larger: tuple[RowTile, ...]  # tiles with more rows than block_m, ascending, with the same bits for a row

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "larger", tuple(RowTile(*tile) for tile in self.larger))  # lists if read from JSON
        for last, tile in itertools.pairwise(self.tiles):
            increases = tile.block_m > last.block_m and not tile.block_m & (tile.block_m - 1)
            if not increases or tile.block_m * last.num_warps != last.block_m * tile.num_warps or tile.num_stages < 1:
                raise ValueError(f"larger has {tile}; use increasing powers of 2 of rows, with equal rows per warp")

    def with_tile(self: TiledConfigT, tile: RowTile) -> TiledConfigT:
        """Return the configuration with a single tile, for any number of rows."""
        return replace(self, **tile._asdict(), larger=())  # type: ignore[type-var]

    @property
    def tiles(self) -> tuple[RowTile, ...]:
        return (RowTile(self.block_m, self.num_warps, self.num_stages), *self.larger)

    def for_rows(self: TiledConfigT, num_rows: int, num_columns: int) -> TiledConfigT:
        """Return the configuration with the fastest tile for a number of rows.

        Args:
            num_rows: rows of a group.
            num_columns: number of programs per tile of rows: tiles of columns times splits of K times groups.
        """
        use_larger = self.larger and is_on("larger_tiles")
        return _for_rows(self, num_rows, num_columns) if use_larger else self


@lru_cache(maxsize=4096)
def _for_rows(config: Any, num_rows: int, num_columns: int) -> Any:
    return config.with_tile(
        min(config.tiles, key=lambda tile: cycles(tile.block_m, config.block_n, num_rows, num_columns))
    )


def cycles(block_m: int, block_n: int, num_rows: int, num_columns: int) -> float:
    """Estimate the cycles that a multiprocessor takes for one feature in all its programs.

    Returns the largest of three times: products, including padding; loads of 16-bit weights and rows from L2 by all
    multiprocessors; loads by the multiprocessor with the most programs.
    """
    num_programs = -(-num_rows // block_m) * num_columns
    most = -(-num_programs // MULTIPROCESSORS)  # programs per multiprocessor
    products = most * block_m * block_n / PRODUCTS_PER_CYCLE
    loads = 2 * (num_programs * block_n + num_rows * num_columns) / L2_BYTES_PER_CYCLE
    return max(products, loads, most * 2 * (min(block_m, num_rows) + block_n) / PORT_BYTES_PER_CYCLE)


def larger_tiles(
    target: str | None,  # from `target_of`
    dtype: torch.dtype,  # dtype of the operands
    tile: tuple[int, int, int, int],  # block_m, block_n, block_k and num_warps for 64 rows
    num_blocks: int,  # number of blocks of K per program
    *,
    # Number of resident programs of 128 rows that fit with these stages. One of 256 rows takes all registers
    residents: int = 1,
    most_rows: int = 256,  # maximum rows of a tile
) -> tuple[RowTile, ...]:
    """Return tiles of 128 and 256 rows for a tile of 64 rows; none if equal bits are not verified."""
    block_m, block_n, block_k, num_warps = tile
    # With 8 warps for 64 rows, or 256 columns, warp groups share rows, and larger tiles divide them differently.
    if target not in ORDERED or dtype.itemsize != 2 or (block_m, num_warps) != (64, 4) or block_n > 128:
        return ()
    tiles = []
    for rows in (128, 256):
        room = shared_bytes(target) // (residents if rows == 128 else 1)
        num_stages = min(8, room * 7 // 8 // ((rows + block_n) * block_k * dtype.itemsize), 2 + num_blocks)
        if num_stages >= 3 and rows <= most_rows:
            tiles.append(RowTile(rows, rows // ROWS_PER_WARP, num_stages))
    return tuple(tiles)


def fewer_stages(tiles: tuple[RowTile, ...]) -> list[tuple[RowTile, ...]]:
    """Return tiles with fewer stages as tuning candidates: with less memory, more programs are resident."""
    return [
        tuple(tile._replace(num_stages=num_stages) if tile is varied else tile for tile in tiles)
        for varied in tiles
        for num_stages in range(3, varied.num_stages)
    ]


def proven(config: TiledConfigT, run: Callable[[TiledConfigT], tuple[torch.Tensor, ...]], layer: str) -> TiledConfigT:
    """Return the configuration with only those larger tiles that have the first one's bits on this device.

    Args:
        config: a `RowTiledConfig`.
        run: computes the same rows with a single-tile configuration: more rows than the largest tile has.
        layer: name of the layer for the warning about a tile with different bits.
    """
    if not config.larger:
        return config
    first, *larger = config.tiles
    expected = [result.clone() for result in run(config.with_tile(first))]
    kept = []
    for tile in larger:
        results = run(config.with_tile(tile))
        if all(map(same_bits, results, expected)):
            kept.append(tile)
        else:
            logger.warning(
                "%s: tiles of %d rows differ in bits from tiles of %d on this device; not using them",
                layer,
                tile.block_m,
                first.block_m,
            )
    return replace(config, larger=tuple(kept))  # type: ignore[type-var]
