"""Row top-k: the k best tokens of every row, their values, and the row's log-sum-exp.

A token's value is its logit. In a row whose temperature is not 0, it is logit / temperature + Gumbel noise of the row's
(seed, sample, position), as defined by `coupled_choice`. Tokens are ordered by descending value, then ascending token;
+0 and -0 are equal, and a NaN counts as +inf. So k = 1 is the coupled choice, and argmax without a temperature. With
noise, the k best tokens are a sample without replacement (Kool et al., 2019).

The k best tokens are in the k blocks of the vocabulary with the best maxima, since the best token of each of these
blocks precedes every token of another block. The first launch therefore summarises blocks, and the second reads k of
them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from treespec_kernels.launch.arguments import check_arguments
from treespec_kernels.launch.rows import FLOAT_TYPES
from treespec_kernels.launch.triton_launch import block_of, load_kernels
from treespec_kernels.linear.lm_head import BlockStats
from treespec_kernels.sampling.coupled_choice import RowNoise, coupled_values_ref

MAX_K = 16
BLOCK = 128  # tokens per block; a vocabulary of 128 k has 1,002 blocks, of which at most 2,048 tokens are compared
SPAN = 1024  # tokens per program of the summary: one Philox block of 8 per thread
_BLOCKS = [1 << bit for bit in range(4, SPAN.bit_length())]  # possible block sizes of a summary
SUMMARY_WARPS = 4
SELECT_WARPS = 8  # with noise, 16 blocks spill in 4 warps


class RowTopk(NamedTuple):
    """The k best tokens of each row, best first."""

    tokens: Tensor  # [rows, k] int32
    values: Tensor  # [rows, k] float32, +inf for a NaN
    lse: Tensor  # [rows] float32, log of the sum of exp(value) over the whole vocabulary
    finite: Tensor  # [rows] bool, whether the best value is finite and no value is NaN


def row_topk_ref(logits: Tensor, k: int, noise: RowNoise | None = None) -> RowTopk:
    """Return the k best tokens by a stable sort of every row (reference: eager torch, fp32).

    Args:
        logits: [rows, vocab] float32, bfloat16 or float16; -inf is masked.
        k: 1 to 16, at most vocab.
        noise: temperatures, and keys of the noise; None for temperature 0.
    """
    if noise is None:
        values = logits.float().masked_fill(logits.isnan(), float("inf"))
    else:
        values = coupled_values_ref(logits, noise).to(logits.device)
    ordered, tokens = values.sort(dim=1, descending=True, stable=True)
    lse = values.logsumexp(dim=1)
    return RowTopk(tokens[:, :k].int(), ordered[:, :k].contiguous(), lse, ordered[:, 0].isfinite())


def row_topk_triton(
    logits: Tensor, k: int, noise: RowNoise | None = None, *, stats: BlockStats | None = None
) -> RowTopk:
    """Compute `row_topk_ref` on a GPU, in two launches (or one with `stats`), without a host sync.

    Args:
        stats: summary of these logits from `lm_head_triton`; only without noise.
    """
    check_arguments(logits=(logits, "rows vocab+", FLOAT_TYPES), **(noise.arguments if noise is not None else {}))
    assert 1 <= k <= min(MAX_K, logits.shape[1]), f"k is {k}, the vocabulary's size {logits.shape[1]}"
    assert stats is None or noise is None, "stats must not be combined with noise"
    rows, vocab = logits.shape
    block, num_blocks = BLOCK, -(-vocab // BLOCK)
    if stats is not None:  # the number of blocks determines their size, a power of two
        num_blocks = stats.values.shape[1]
        block = next(size for size in _BLOCKS if -(-vocab // size) == num_blocks)
        assert len(stats.values) == rows, "stats of other logits"
    device, num_read = logits.device, min(k, num_blocks)
    top = RowTopk(
        torch.empty(rows, k, dtype=torch.int32, device=device),
        torch.empty(rows, k, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.bool, device=device),
    )
    # All arithmetic is in float32; the interpreter also widens bfloat16 correctly.
    kernels = load_kernels("sampling.row_topk", top.values)
    constants = {"VOCAB": vocab, "BLOCK": block, "enable_fp_fusion": False}
    keys = (None,) * 4 if noise is None else noise
    if stats is None:
        stats = BlockStats.empty(rows, num_blocks, device)
        grid = (rows, -(-vocab // SPAN))
        kernels.summarise_blocks[grid](
            logits, *keys, *stats, logits.stride(0), SPAN=SPAN, num_warps=SUMMARY_WARPS, **constants
        )
    kernels.select_of_blocks[(rows,)](
        logits,
        *keys,
        *stats,
        *top,
        logits.stride(0),
        NUM_BLOCKS=num_blocks,
        NUM_READ=num_read,
        K=k,
        BLOCK_B=block_of(num_blocks),
        BLOCK_R=block_of(num_read),
        BLOCK_K=block_of(k),
        num_warps=SELECT_WARPS,
        **constants,
    )
    return top
