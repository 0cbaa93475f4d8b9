"""Tiles of many rows with the bits of those of few: configurations, the choice by rows, and compiled code for sm_90."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from treespec_kernels.aot.code_order import OrderError
from treespec_kernels.aot.k_order import check_same_order, float_operations, k_order
from treespec_kernels.launch.switches import without
from treespec_kernels.launch.triton_launch import shared_bytes
from treespec_kernels.linear.lm_head import LmHeadConfig
from treespec_kernels.linear.row_linear import RowLinearConfig
from treespec_kernels.linear.row_linear_config import quantized_default
from treespec_kernels.linear.row_tiles import MULTIPROCESSORS, RowTile, cycles

# (out_features, in_features, silu_gate) of the layers of an 8B decoder.
LAYERS = [(6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False)]
HALF = [torch.bfloat16, torch.float16]
TILED = RowLinearConfig(64, 128, 64, 1, 4, 6, larger=(RowTile(128, 8, 6), RowTile(256, 16, 4)))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layer", LAYERS)
def test_an_8b_has_larger_tiles_on_sm_90(dtype: torch.dtype, layer: tuple[int, int, bool]) -> None:
    out_features = layer[0]
    config = RowLinearConfig.default(dtype, *layer, target="sm_90")
    assert config.with_tile(config.tiles[0]) == RowLinearConfig.default(dtype, *layer)
    assert [tile.block_m for tile in config.larger] == [128, 256]
    for tile in config.larger:
        held = tile.num_stages * (tile.block_m + config.block_n) * config.block_k * dtype.itemsize
        assert held <= shared_bytes("sm_90") and tile.num_stages >= 3
        assert tile.block_m == 16 * tile.num_warps, "a wgmma of 64 rows per warp group"
    columns = -(-out_features // config.block_n) * config.split_k
    chosen = {rows: config.for_rows(rows, columns).block_m for rows in (1, 64, 65, 128, 129, 256, 2048)}
    assert chosen == {1: 64, 64: 64, 65: 128, 128: 128, 129: 256, 256: 256, 2048: 256}


def test_other_targets_and_layers_have_one_tile() -> None:
    for target in (None, "sm_80", "sm_86", "sm_89", "sm_100", "sm_120", "gfx942"):
        for layer in LAYERS:
            assert RowLinearConfig.default(torch.bfloat16, *layer, target=target).larger == ()
        assert LmHeadConfig.default(torch.bfloat16, 128256, 4096, target).larger == ()
    assert RowLinearConfig.default(torch.float32, 4096, 4096, target="sm_90").larger == ()
    assert LmHeadConfig.default(torch.float32, 128256, 4096, "sm_90").larger == ()
    assert quantized_default(torch.bfloat16, 4096, 4096, 128, "sm_90").larger == ()
    # A layer that is not split has an epilogue, which has no registers left with 16 warps.
    unsplit = RowLinearConfig.default(torch.bfloat16, 24576, 6144, target="sm_90")
    assert [tile.block_m for tile in unsplit.larger] == [128]
    # 8 warps for 64 rows do not each have 16 rows, and 16 or 32 rows have another instruction.
    for config in RowLinearConfig.candidates(torch.bfloat16, 4096, 4096, target="sm_90"):
        assert not config.larger or (config.block_m, config.num_warps) == (64, 4)


@pytest.mark.parametrize(
    "larger", [[(64, 4, 3)], [(256, 16, 3), (128, 8, 3)], [(192, 12, 3)], [(128, 4, 3)], [(128, 8, 0)]]
)
def test_tiles_that_cannot_be_are_refused(larger: Any) -> None:
    message = r"larger has RowTile\(.*\); use increasing powers of 2 of rows, with equal rows per warp"
    with pytest.raises(ValueError, match=message):
        replace(TILED, larger=larger)
    with pytest.raises(ValueError, match=message):
        LmHeadConfig(64, 128, 64, 4, 3, larger=larger)


def test_the_choice_follows_products_and_loads() -> None:
    assert replace(TILED, larger=()).for_rows(4096, 132) == replace(TILED, larger=())
    for columns in (1, 24, 96, 128, 224, 1002):
        for rows in (1, 40, 64, 65, 128, 200, 256, 300, 2048):
            costs = {tile.block_m: cycles(tile.block_m, 128, rows, columns) for tile in TILED.tiles}
            chosen = TILED.for_rows(rows, columns)
            assert costs[chosen.block_m] == min(costs.values()) and not chosen.larger
            assert rows > 64 or chosen.block_m == 64
    with without("larger_tiles"):
        assert TILED.for_rows(2048, MULTIPROCESSORS).block_m == 64
    with without("tiles"), pytest.raises(ValueError, match="TREESPEC_OFF='tiles': unknown feature 'tiles'; valid: p"):
        TILED.for_rows(2048, MULTIPROCESSORS)
    # Few programs: more rows per program would leave more multiprocessors idle.
    assert TILED.for_rows(256, 4).block_m == 64
    assert TILED.for_rows(256, MULTIPROCESSORS).block_m == 256


PTX = """
	mov.pred 	%p5, -1;
	bfe.u32 	%r153, %r150, 4, 14;
	cvt.u64.u32 	%rd194, %r153;
	bfe.u32 	%r154, %r152, 4, 14;
	cvt.u64.u32 	%rd195, %r154;
	or.b64 	%rd172, %rd194, 4611686293305294848;
	or.b64 	%rd173, %rd195, 4611686293305294848;
	wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%r1,%r2}, %rd172, %rd173, %p5, 1, 1, 0, 0;
	add.s64 	%rd174, %rd194, SECOND;
	add.s32 	%r155, %r154, 2;
	cvt.u64.u32 	%rd196, %r155;
	or.b64 	%rd175, %rd196, 4611686293305294848;
	wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%r1,%r2}, %rd174, %rd175, ACCUMULATES, 1, 1, 0, 0;
	add.rn.f32 	%r3, %r1, %r2;
	cvt.f32.bf16 	%r4, %rs1;
	cvt.rn.bf16x2.f32 	%r5, %r1, %r2;
"""
TILE = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 32}


def code(second: int = 4611686293305294850, accumulates: str = "%p5") -> str:
    return PTX.replace("SECOND", str(second)).replace("ACCUMULATES", accumulates)


def test_the_order_follows_the_descriptors() -> None:
    ((first, second),) = k_order(code(), TILE)
    assert (first.x, first.weight) == ((0, 0), (0, 0)) and (second.x, second.weight) == ((0, 16), (0, 16))
    assert first.opcode == "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 1, 1, 0, 0"
    assert float_operations(code()) == Counter({"add.rn.f32": 1, "cvt.rn.bf16x2.f32": 1})
    # With blocks of 128 features, the features from 64 on follow behind all rows of the block.
    wide = {"BLOCK_M": 128, "BLOCK_N": 32, "BLOCK_K": 128}
    assert k_order(code(4611686293305294848 + 128 * 8 + 2), wide)[0][1].x == (0, 80)
    check_same_order(code(), TILE, code(), TILE)


@pytest.mark.parametrize(
    ("ptx", "message"),
    [
        (code(4611686293305294848 + 4 * 4), r"a tile of 64 x 32 multiplies in the order .*x=\(4, 0\)"),
        (code(accumulates="%p6"), "accumulates only if %p6 is set"),
        (code().replace("m64n32k16", "m64n16k16"), "multiplies in the order .*m64n16k16"),
        (
            code().replace("add.rn.f32", "fma.rn.f32"),
            r"different numbers of operations per thread: {'add.rn.f32': \(0, 1\)",
        ),
        ("mma.sync.aligned.m16n8k16 {%r1}, {%r2}, {%r3}, {%r1};", "the kernel has no wgmma"),
    ],
)
def test_another_order_is_refused(ptx: str, message: str) -> None:
    with pytest.raises(OrderError, match=message):
        check_same_order(ptx, TILE, code(), TILE)
