"""Row top-k: the k best tokens of every row, their values, and the row's log-sum-exp.

A token's value is its logit. In a row whose temperature is not 0, it is logit / temperature + Gumbel noise of the row's
(seed, sample, position), as defined by `coupled_choice`. Tokens are ordered by descending value, then ascending token;
+0 and -0 are equal, and a NaN counts as +inf. So k = 1 equals `coupled_choice`, and argmax without a temperature. With
noise, the k best tokens are a sample without replacement (Kool et al., 2019).

The k best tokens are in the k blocks of the vocabulary with the best maxima, since the best token of each of these
blocks precedes every token of another block. The first launch therefore summarises blocks, and the second reads k of
them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from treespec_kernels.launch.arguments import check_arguments
from treespec_kernels.launch.rows import FLOAT_TYPES
from treespec_kernels.launch.triton_launch import check_last_strides, check_launch, require_triton
from treespec_kernels.linear.lm_head import BlockStats, check_block_stats
from treespec_kernels.sampling.coupled_choice import check_coupled_choice, coupled_values_ref

MAX_K = 16
BLOCK = 128  # tokens per block; a vocabulary of 128 k has 1,002 blocks, of which at most 2,048 tokens are compared
SPAN = 1024  # tokens per program of the summary: one Philox block of 8 per thread
SUMMARY_WARPS = 4
SELECT_WARPS = 8  # with noise, 16 blocks spill in 4 warps


class RowTopk(NamedTuple):
    """The k best tokens of each row, best first.

    Attributes:
        tokens: [rows, k] int32.
        values: [rows, k] float32, +inf for a NaN.
        lse: [rows] float32, log of the sum of exp(value) over the whole vocabulary.
        finite: [rows] bool, whether the best value is finite and no value is NaN.
    """

    tokens: torch.Tensor
    values: torch.Tensor
    lse: torch.Tensor
    finite: torch.Tensor


def row_topk_ref(
    logits: torch.Tensor,
    k: int,
    *,
    temperatures: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    samples: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> RowTopk:
    """Return the k best tokens by a stable sort of every row (reference: eager torch, fp32).

    Args:
        logits: [rows, vocab] float32, bfloat16 or float16; -inf is masked.
        k: 1 to 16, at most vocab.
        temperatures: [rows] float32, >= 0; at 0 the value is the logit. None for no noise.
        seeds, samples, positions: [rows] int64, only with temperatures; as in `coupled_choice_ref`.

    Raises:
        ValueError: k, a shape, dtype or device does not match, or some arguments of the noise are missing.
    """
    check_row_topk(logits, k, temperatures, seeds, samples, positions)
    if temperatures is None or seeds is None or samples is None or positions is None:
        values = logits.float().masked_fill(logits.isnan(), float("inf"))
    else:
        values = coupled_values_ref(logits, temperatures, seeds, samples, positions).to(logits.device)
    ordered, tokens = values.sort(dim=1, descending=True, stable=True)
    lse = values.logsumexp(dim=1)
    return RowTopk(tokens[:, :k].int(), ordered[:, :k].contiguous(), lse, ordered[:, 0].isfinite())


def row_topk_triton(
    logits: torch.Tensor,
    k: int,
    *,
    stats: BlockStats | None = None,
    temperatures: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    samples: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    block: int | None = None,
) -> RowTopk:
    """Compute `row_topk_ref` on a GPU, in two launches, or one with `stats`, and without a host sync.

    The last dimension of `logits` and the vectors must be contiguous; the row stride of `logits` is arbitrary.

    Args:
        logits, k, temperatures, seeds, samples, positions: as in `row_topk_ref`.
        stats: summary of these logits, as from `lm_head_triton`; only without temperatures.
        block: tokens per block of the summary, a power of two from 16 to 1024; None for that of `stats`, or `BLOCK`.

    Raises:
        ValueError: k, a shape, dtype, stride or device does not match, some arguments of the noise are missing,
            temperatures are combined with stats, or triton cannot run on the tensors.
    """
    check_row_topk(logits, k, temperatures, seeds, samples, positions)
    noise = {"temperatures": temperatures, "seeds": seeds, "samples": samples, "positions": positions}
    check_last_strides(logits=logits, **{name: tensor for name, tensor in noise.items() if tensor is not None})
    rows, vocab = logits.shape
    if stats is not None and temperatures is not None:
        raise ValueError("stats are of the logits without noise; pass either stats or temperatures")
    block = _checked_block(block, vocab, stats)
    num_blocks = -(-vocab // block)
    if stats is not None:
        check_block_stats(stats, rows, num_blocks, logits)
    require_triton("row_topk")
    from treespec_kernels.sampling import row_topk_kernels as kernels

    # All arithmetic is in float32; the interpreter also widens bfloat16 correctly.
    values = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
    check_launch("row_topk", kernels.select_of_blocks, values)
    tokens = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    lse = torch.empty(rows, dtype=torch.float32, device=logits.device)
    finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if rows == 0:
        return RowTopk(tokens, values, lse, finite)
    if stats is None:
        stats = BlockStats.empty(rows, num_blocks, logits.device)
        kernels.summarise_blocks[(rows, -(-vocab // SPAN))](
            logits,
            *noise.values(),
            *stats,
            logits.stride(0),
            NOISY=temperatures is not None,
            VOCAB=vocab,
            BLOCK=block,
            SPAN=SPAN,
            num_warps=SUMMARY_WARPS,
            enable_fp_fusion=False,
        )
    kernels.select_of_blocks[(rows,)](
        logits,
        *noise.values(),
        *stats,
        tokens,
        values,
        lse,
        finite,
        logits.stride(0),
        NOISY=temperatures is not None,
        num_warps=SELECT_WARPS,
        enable_fp_fusion=False,
        **selection_sizes(vocab, k, block),
    )
    return RowTopk(tokens, values, lse, finite)


def selection_sizes(vocab: int, k: int, block: int) -> dict[str, int]:
    """Return the constexpr arguments of the selection kernel: counts, and counts rounded up to powers of two."""
    num_blocks = -(-vocab // block)
    counts = {"B": num_blocks, "R": min(k, num_blocks), "K": k}
    powers = {f"BLOCK_{name}": 1 << (count - 1).bit_length() for name, count in counts.items()}
    return {"VOCAB": vocab, "BLOCK": block, "NUM_BLOCKS": num_blocks, "NUM_READ": counts["R"], "K": k} | powers


def _checked_block(block: int | None, vocab: int, stats: BlockStats | None) -> int:
    """Return the tokens per block, given or inferred from a summary.

    Block sizes are powers of two, so the number of blocks determines them.
    """
    if block is None and stats is not None and stats.values.dim() == 2:
        num_blocks = stats.values.shape[1]
        fitting = [size for size in _powers(16, SPAN) if -(-vocab // size) == num_blocks]
        if not fitting:
            raise ValueError(
                f"stats has {num_blocks} blocks, which no block size from 16 to {SPAN} gives for {vocab} tokens"
            )
        return fitting[0]
    if block is None:
        return BLOCK
    if block not in _powers(16, SPAN):
        raise ValueError(f"block is {block}; it must be a power of two from 16 to {SPAN}")
    return block


def _powers(least: int, most: int) -> list[int]:
    return [1 << bit for bit in range(least.bit_length() - 1, most.bit_length())]


def check_row_topk(
    logits: torch.Tensor,
    k: int,
    temperatures: torch.Tensor | None,
    seeds: torch.Tensor | None,
    samples: torch.Tensor | None,
    positions: torch.Tensor | None,
) -> None:
    """Raise ValueError if k, a shape, dtype or device does not match, or some arguments of the noise are missing."""
    check_arguments(logits=(logits, "rows vocab+", FLOAT_TYPES))
    if not 1 <= k <= min(MAX_K, logits.shape[1]):
        raise ValueError(f"k is {k}; it must be 1 to {MAX_K} and at most the vocabulary's {logits.shape[1]}")
    noise = {"temperatures": temperatures, "seeds": seeds, "samples": samples, "positions": positions}
    missing = [name for name, tensor in noise.items() if tensor is None]
    if 0 < len(missing) < len(noise):
        raise ValueError(f"{', '.join(missing)} must be given too: the noise needs {', '.join(noise)}")
    if temperatures is not None and seeds is not None and samples is not None and positions is not None:
        check_coupled_choice(logits, temperatures, seeds, samples, positions)
