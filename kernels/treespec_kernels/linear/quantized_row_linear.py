"""Partial sums of row-invariant linear layers with quantised weights, called by `row_linear`.

The kernel writes the fp32 sums of every split of K, even of a single split. `add_splits` adds them and applies bias,
activation and residual.
"""

import itertools
from dataclasses import replace

import torch

from treespec_kernels.launch.rows import alignment, is_aligned, row_strides
from treespec_kernels.launch.triton_launch import launch_options, load_kernels, shared_bytes
from treespec_kernels.linear.quantized import QuantizedWeight
from treespec_kernels.linear.row_linear_config import MULTIPROCESSORS, RowLinearConfig
from treespec_kernels.linear.row_tiles import larger_tiles


def quantized_default(
    dtype: torch.dtype, out_features: int, in_features: int, group: int, target: str | None = None
) -> RowLinearConfig:
    """Return the shipped configuration: that of a dense layer, with blocks of K that divide the groups.

    Dequantised weights are in registers between their load and the product, so tiles have at most 64 outputs, or 32 in
    float32, where 64 outputs used 253 of 255 registers on NVIDIA.

    Args:
        dtype: dtype of x.
        out_features, in_features: shape of the weight.
        group: number of inputs that share a scale.
        target: from `target_of`.
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
    """Return configurations to tune over, the default first, that fit the target's shared memory (None: of sm_90).

    Arguments as in `quantized_default`; bits: 8 or 4.
    """
    if dtype == torch.float32:
        tiles, blocks = [(16, 16, 4), (16, 32, 4), (16, 64, 8)], (32, 64)
    else:
        tiles = [(64, 32, 4), (64, 64, 4), (64, 128, 8), (32, 64, 4), (16, 64, 4), (16, 128, 8), (128, 64, 8)]
        blocks = (32, 64, 128)
    dividing = [block_k for block_k in blocks if group == in_features or group % block_k == 0]
    configs = [quantized_default(dtype, out_features, in_features, group, target)]
    for (block_m, block_n, num_warps), block_k in itertools.product(tiles, dividing[-2:]):
        num_tiles, num_blocks = -(-out_features // block_n), -(-in_features // block_k)
        stage_bytes = block_m * block_k * dtype.itemsize + block_n * block_k * bits // 8
        for residents in (1, 2, 3):  # resident programs per multiprocessor, which determine splits and stages
            split_k = max(1, min(round(residents * MULTIPROCESSORS / num_tiles), num_blocks // 2))
            widened = block_n * block_k * dtype.itemsize  # upper bound of the layout conversion before the product
            num_stages = min(8, (shared_bytes(target or "sm_90") // residents - widened) // stage_bytes)
            if num_stages >= 3:
                configs.append(RowLinearConfig(block_m, block_n, block_k, split_k, num_warps, num_stages))
    first = configs[0]
    tile = (first.block_m, first.block_n, first.block_k, first.num_warps)
    blocks = -(-in_features // first.block_k // first.split_k)
    # Of 256 rows, tiles of int4 weights spilled.
    configs.append(replace(first, larger=larger_tiles(target, dtype, tile, blocks, most_rows=128)))
    return list(dict.fromkeys(configs))


def multiply_quantized_triton(
    x: torch.Tensor,
    weight: QuantizedWeight,
    config: RowLinearConfig,
    partials: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Write the partial sums of every split of K.

    Args:
        x: [rows, in_features], or [groups, rows, in_features]; already checked, with last stride 1.
        weight: with as many dimensions, contiguous.
        config: its block_k must divide the weight's group, unless the group is all inputs.
        partials: output, float32 [split_k, rows of all groups, out_features], contiguous.
        pdl: see `launch_options`.
    """
    assert weight.group == weight.in_features or weight.group % config.block_k == 0, "blocks of K must divide groups"
    kernels = load_kernels("linear.quantized_row_linear", x)
    num_groups = weight.values.shape[0] if weight.values.dim() == 3 else 1
    bytes_x = alignment(x.element_size(), weight.in_features)
    assert is_aligned(bytes_x, x) and all(
        tensor is None or (tensor.is_contiguous() and tensor.data_ptr() % 16 == 0) for tensor in weight
    )
    num_rows = x.shape[-2]
    tiles = -(-weight.out_features // config.block_n)
    config = config.for_rows(num_rows, tiles * num_groups * config.split_k)
    kernels.multiply_quantized[(-(-num_rows // config.block_m), tiles, num_groups * config.split_k)](
        x,
        *weight,
        partials,
        num_rows,
        *row_strides(x),
        BITS=weight.bits,
        GROUP=weight.group,
        OUT_FEATURES=weight.out_features,
        IN_FEATURES=weight.in_features,
        BYTES_X=bytes_x,
        BYTES_VALUES=alignment(1, weight.values.shape[-1]),
        BYTES_OUT=alignment(4, weight.out_features),
        **config.constants,
        **config.options,
        **launch_options(pdl),
    )
