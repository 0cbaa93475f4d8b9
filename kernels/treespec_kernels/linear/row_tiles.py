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

MULTIPROCESSORS = 132  # of an H200
PRODUCTS_PER_CYCLE = 2048  # of a multiprocessor's matrix units, for 16-bit numbers
L2_BYTES_PER_CYCLE = 24 * MULTIPROCESSORS  # of all multiprocessors together: 5.5 TB/s at 1.755 GHz
PORT_BYTES_PER_CYCLE = 64  # from L2 to one multiprocessor
ROWS_PER_WARP = 16  # of a `wgmma`, which has 64 rows per warp group
# The K order was decoded on sm_90 only. On sm_100, a tile of 64 rows has another instruction than one of 128 rows.
ORDERED = ("sm_90",)


TiledConfigT = TypeVar("TiledConfigT", bound="RowTiledConfig")


class RowTile(NamedTuple):
    """Rows of a tile, and its launch options."""

    block_m: int
    num_warps: int
    num_stages: int


class RowTiledConfig(TileConfig):
    """Base of configurations with tiles of several numbers of rows."""

    block_m: int
    block_n: int
    larger: tuple[RowTile, ...]  # tiles with more rows than block_m, increasing, that give a row the same bits

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "larger", tuple(RowTile(*tile) for tile in self.larger))  # lists, read from JSON
        for last, tile in itertools.pairwise(self.tiles):
            increases = tile.block_m > last.block_m and not tile.block_m & (tile.block_m - 1)
            if not increases or tile.block_m * last.num_warps != last.block_m * tile.num_warps or tile.num_stages < 1:
                raise ValueError(f"larger has {tile}; use increasing powers of 2 of rows, with as many rows per warp")

    def with_tile(self: TiledConfigT, tile: RowTile) -> TiledConfigT:
        """Return the configuration with one tile for every number of rows."""
        return replace(self, **tile._asdict(), larger=())  # type: ignore[type-var]

    @property
    def tiles(self) -> tuple[RowTile, ...]:
        return (RowTile(self.block_m, self.num_warps, self.num_stages), *self.larger)

    def for_rows(self: TiledConfigT, num_rows: int, num_columns: int) -> TiledConfigT:
        """Return the configuration with the tile that is the fastest for a number of rows.

        Args:
            num_rows: rows of a group.
            num_columns: programs of a tile of rows: tiles of columns times splits of K times groups.
        """
        use_larger = self.larger and is_on("larger_tiles")
        return _for_rows(self, num_rows, num_columns) if use_larger else self


@lru_cache(maxsize=4096)
def _for_rows(config: Any, num_rows: int, num_columns: int) -> Any:
    return config.with_tile(
        min(config.tiles, key=lambda tile: cycles(tile.block_m, config.block_n, num_rows, num_columns))
    )


def cycles(block_m: int, block_n: int, num_rows: int, num_columns: int) -> float:
    """Estimate the cycles that a multiprocessor takes for one feature of all its programs.

    The largest of three times: of the products, padding included; of the loads of 16-bit weights and rows by all
    multiprocessors from L2; and of those by the one with the most programs.
    """
    num_programs = -(-num_rows // block_m) * num_columns
    most = -(-num_programs // MULTIPROCESSORS)  # programs of a multiprocessor
    products = most * block_m * block_n / PRODUCTS_PER_CYCLE
    loads = 2 * (num_programs * block_n + num_rows * num_columns) / L2_BYTES_PER_CYCLE
    return max(products, loads, most * 2 * (min(block_m, num_rows) + block_n) / PORT_BYTES_PER_CYCLE)


def larger_tiles(
    target: str | None,  # from `target_of`
    dtype: torch.dtype,  # of the operands
    tile: tuple[int, int, int, int],  # block_m, block_n, block_k and num_warps for 64 rows
    num_blocks: int,  # blocks of K of a program
    *,
    # Programs of 128 rows per multiprocessor that the stages leave memory for. One of 256 rows takes all registers
    residents: int = 1,
    most_rows: int = 256,  # rows of the largest tile
) -> tuple[RowTile, ...]:
    """Return tiles of 128 and 256 rows for a tile of 64 rows; none where equal bits are not shown."""
    block_m, block_n, block_k, num_warps = tile
    # With 8 warps for 64 rows, or 256 columns, warp groups share rows, and larger tiles divide them otherwise.
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
    """Return the tiles with fewer stages each, to tune over: with less memory, more programs are resident."""
    return [
        tuple(tile._replace(num_stages=num_stages) if tile is varied else tile for tile in tiles)
        for varied in tiles
        for num_stages in range(3, varied.num_stages)
    ]


def proven(config: TiledConfigT, run: Callable[[TiledConfigT], tuple[torch.Tensor, ...]], layer: str) -> TiledConfigT:
    """Return the configuration with the larger tiles that have the bits of the first one on this device.

    Args:
        config: a `RowTiledConfig`.
        run: computes the same rows with a configuration of one tile: more than those of the largest tile.
        layer: names the layer in the warning about a tile whose bits differ.
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
                "%s: tiles of %d rows do not have the bits of tiles of %d here; not using them",
                layer,
                tile.block_m,
                first.block_m,
            )
    return replace(config, larger=tuple(kept))  # type: ignore[type-var]
