"""LM head: the logits of every row, and a summary of each vocabulary block for greedy choice and softmax.

logits = x W^T with fp32 accumulators, an optional soft cap, and one rounding to the dtype. The summary of a block of
`block_n` tokens has the maximum of the *rounded* logits, its first token, and the sum of exp(logit - maximum). Greedy
choice, top-k and log-sum-exp then read vocab / block_n numbers per row instead of vocab.

The weight is read once for up to `block_m` rows. A row's bits do not depend on the other rows: the order of its sum is
the same for every number of rows (`row_tiles`), and one program sums over all of K. Retuning may change bits.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from treespec_kernels.launch.arguments import check_arguments
from treespec_kernels.launch.rows import FLOAT_TYPES
from treespec_kernels.launch.triton_launch import launch_options, load_kernels, shared_bytes, target_of
from treespec_kernels.linear.activations import soft_cap
from treespec_kernels.linear.row_tiles import RowTile, RowTiledConfig, fewer_stages, larger_tiles


class BlockStats(NamedTuple):
    """Summary of each row's blocks of consecutive tokens; a NaN counts as +inf."""

    values: Tensor  # [rows, num_blocks] float32, maximum of the block
    tokens: Tensor  # [rows, num_blocks] int32, first token with this maximum
    sums: Tensor  # [rows, num_blocks] float32, sum of exp(v - maximum), with 0 instead of an infinite maximum

    @classmethod
    def empty(cls, num_rows: int, num_blocks: int, device: torch.device | str) -> Self:
        """Allocate the summary of `num_rows` rows; num_blocks = ceil(vocab / block_n)."""
        values, sums = (torch.empty(num_rows, num_blocks, dtype=torch.float32, device=device) for _ in range(2))
        return cls(values, torch.empty(num_rows, num_blocks, dtype=torch.int32, device=device), sums)


class LmHead(NamedTuple):
    """Result of the LM head: logits [rows, vocab] in the dtype of x, and the block summary of the rounded logits."""

    logits: Tensor
    stats: BlockStats


@dataclass(frozen=True)
class LmHeadConfig(RowTiledConfig):
    """Configuration of the LM head: tiles and launch options."""

    block_m: int  # rows per tile; only the first tile of rows reads the weight from HBM, the others from L2
    block_n: int  # tokens per tile, and per block of the summary
    block_k: int  # features per step of the loop
    num_warps: int
    num_stages: int
    larger: tuple[RowTile, ...] = ()  # tiles with more rows, selected by the number of rows of a launch

    @classmethod
    def default(cls, dtype: torch.dtype, vocab_size: int, hidden_size: int, target: str | None = None) -> Self:
        """Return the default configuration.

        M = 64 is one `wgmma` on sm_90, and 64 rows read the weight once. Four stages fill the last wave of 128 k tokens
        on 132 multiprocessors to 80 %, three to 53 %. A small vocabulary uses narrow tiles, to occupy all
        multiprocessors. float32 has no exact matrix instruction. Tiles of 256 rows spill in the summary.
        """
        if dtype == torch.float32:
            return cls(block_m=16, block_n=32, block_k=32, num_warps=4, num_stages=3)
        if vocab_size < _LARGE_VOCAB:
            return cls(block_m=64, block_n=32, block_k=64 if hidden_size <= 64 else 128, num_warps=4, num_stages=3)
        num_stages = 4 if target is not None and shared_bytes(target) >= 2 * (96 << 10) else 3
        larger = larger_tiles(target, dtype, (64, 128, 64, 4), -(-hidden_size // 64), most_rows=128)
        return cls(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=num_stages, larger=larger)

    @classmethod
    def candidates(cls, dtype: torch.dtype, vocab_size: int, hidden_size: int, target: str | None = None) -> list[Self]:
        """Return the configurations to tune, default first. Arguments as in `default`."""
        tiles: list[tuple[int, int, int, int, int]]
        if dtype == torch.float32:
            tiles = [(16, 32, 64, 4, 3), (16, 64, 32, 4, 3), (16, 64, 32, 8, 3), (32, 32, 32, 4, 3)]
        elif vocab_size < _LARGE_VOCAB:
            tiles = [(m, n, k, 4, 3) for m in (16, 64) for n in (16, 32, 64) for k in (64, 128)]
        else:
            tiles = [(64, 128, 64, 4, n) for n in (3, 4, 5)]
            tiles += [(64, 128, 64, 8, 3), (64, 128, 128, 8, 2), (64, 128, 128, 8, 3)]
            tiles += [(64, 64, 64, 4, 4), (64, 64, 128, 4, 3), (64, 256, 64, 8, 3), (64, 256, 64, 8, 4)]
            tiles += [(32, 128, 64, 4, 4), (16, 128, 64, 4, 5), (16, 128, 128, 4, 3)]
            tiles += [(128, 128, 64, 8, 3)]
        default = cls.default(dtype, vocab_size, hidden_size, target)
        configs = [default, *(cls(*tile) for tile in tiles)]
        configs += [replace(default, larger=larger) for larger in fewer_stages(default.larger)]
        return list(dict.fromkeys(configs))


_LARGE_VOCAB = 1 << 15  # tokens; from this size on, tiles of 128 tokens yield at least 256 programs


def block_stats_ref(values: Tensor, block: int) -> BlockStats:
    """Summarise `values`, [rows, vocab] of any float dtype, in blocks of `block` tokens (eager torch, fp32)."""
    plain = values.float().masked_fill(values.isnan(), float("inf"))
    blocks = list(plain.split(block, dim=1))
    best = torch.stack([b.amax(dim=1) for b in blocks], dim=1)
    tokens = torch.stack([b.argmax(dim=1) + i * block for i, b in enumerate(blocks)], dim=1)
    shift = best.masked_fill(best.isinf(), 0.0)
    sums = torch.stack([(b - shift[:, i, None]).exp().sum(dim=1) for i, b in enumerate(blocks)], dim=1)
    return BlockStats(best, tokens.int(), sums)


def lm_head_ref(
    x: Tensor, weight: Tensor, *, config: LmHeadConfig | None = None, logit_cap: float | None = None
) -> LmHead:
    """Compute logits as one fp32 product, rounded once, and the summary of the rounded logits (reference).

    Args:
        x: [rows, hidden], or [groups, rows, hidden] with consecutive groups; float16, bfloat16 or float32.
        weight: [vocab, hidden], or [groups, vocab, hidden], in the dtype of x.
        config: its `block_n` is the number of tokens per block; None for `LmHeadConfig.default`.
        logit_cap: soft cap c: logits x become c tanh(x / c); None for no cap.

    Returns:
        LmHead with groups * rows rows.
    """
    vocab, hidden = weight.shape[-2:]
    config = config or LmHeadConfig.default(x.dtype, vocab, hidden, target_of(x.device))
    logits = x.float() @ weight.float().mT
    logits = (logits if logit_cap is None else soft_cap(logits, logit_cap)).to(x.dtype).reshape(-1, vocab)
    return LmHead(logits, block_stats_ref(logits, config.block_n))


def lm_head_triton(
    x: Tensor,
    weight: Tensor,
    *,
    config: LmHeadConfig | None = None,
    logit_cap: float | None = None,
    logits: Tensor | None = None,  # output [groups * rows, vocab] in the dtype of x; None allocates it
    stats: BlockStats | None = None,  # output of `BlockStats.empty`; None allocates it
    pdl: bool = False,  # see `launch_options`
) -> LmHead:
    """Compute `lm_head_ref` on a GPU, in one launch. Consecutive groups of rows in x must be adjacent."""
    assert logit_cap is None or logit_cap > 0
    prefix = "groups " * (x.dim() == 3)
    check_arguments(
        {"all_rows": x.shape[:-1].numel()},
        x=(x, f"{prefix}rows hidden+", FLOAT_TYPES),
        weight=(weight, f"{prefix}vocab+ hidden", x.dtype),
        logits=(logits, "all_rows vocab", x.dtype),
    )
    kernels = load_kernels("linear.lm_head", x)
    vocab, hidden = weight.shape[-2:]
    config = config or LmHeadConfig.default(x.dtype, vocab, hidden, target_of(x.device))
    grouped_x = x if x.dim() == 3 else x[None]
    grouped_weight = weight if weight.dim() == 3 else weight[None]
    groups, num_rows = grouped_x.shape[:2]
    assert groups == 1 or num_rows == 0 or grouped_x.stride(0) == num_rows * grouped_x.stride(1), "gaps between groups"
    if logits is None:
        logits = torch.empty(groups * num_rows, vocab, dtype=x.dtype, device=x.device)
    num_blocks = -(-vocab // config.block_n)
    if stats is None:
        stats = BlockStats.empty(groups * num_rows, num_blocks, x.device)
    assert stats.values.shape == (len(logits), num_blocks)
    config = config.for_rows(num_rows, num_blocks * groups)
    kernels.project_to_vocab[(-(-num_rows // config.block_m), num_blocks, groups)](
        *(x, weight, logits, *stats),
        logit_cap,
        num_rows,
        grouped_x.stride(1),
        grouped_weight.stride(0),
        grouped_weight.stride(1),
        logits.stride(0),
        VOCAB=vocab,
        HIDDEN=hidden,
        **config.constants,
        **config.options,
        **launch_options(pdl),
    )
    return LmHead(logits, stats)
