"""Specs of the sampling ops: coupled choice, row top-k and logit transforms."""

from __future__ import annotations

from treespec_kernels.aot.kernel_spec import KernelShape, KernelSpec
from treespec_kernels.sampling import coupled_choice as choice
from treespec_kernels.sampling import logit_transforms as transforms
from treespec_kernels.sampling import row_topk as topk
from treespec_kernels.sampling.coupled_choice_kernels import choose_in_blocks, choose_of_blocks
from treespec_kernels.sampling.logit_transforms_kernels import transform_scores, truncate_scores
from treespec_kernels.sampling.row_topk_kernels import select_of_blocks, summarise_blocks


def coupled_choice(shape: KernelShape, target: str | None) -> list[KernelSpec]:
    """Return specs of the choice within blocks of the vocabulary, and of the choice among the blocks."""
    types = dict.fromkeys(("seeds", "samples", "positions", "tokens"), "*i64") | {
        "scores": f"*{shape.element}",
        "temperatures": "*fp32",
        "best_values": "*fp32",
        "finite": "*i1",
        "vocab": "i32",
    }
    num_blocks = -(-shape.vocab_size // choice.BLOCK_V)
    of_blocks = {"NUM_BLOCKS": num_blocks, "BLOCK_B": choice.block_of_blocks(shape.vocab_size)}
    config = {"dtype": shape.element, "vocab_size": shape.vocab_size}
    options = {"num_warps": choice.NUM_WARPS, "enable_fp_fusion": False}
    return [
        KernelSpec(choose_in_blocks, types, {"BLOCK_V": choice.BLOCK_V}, options, config),
        KernelSpec(choose_of_blocks, types, of_blocks, options | {"num_warps": 1}, config),
    ]


def row_topk(shape: KernelShape, target: str | None) -> list[KernelSpec]:
    """Return specs of the block summary, and of the selection for k = 1 and `MAX_K`, each with and without noise."""
    numbers = dict.fromkeys(("seeds", "samples", "positions"), "*i64")
    floats = dict.fromkeys(("temperatures", "best_values", "sums", "values", "lse"), "*fp32")
    types = numbers | floats | {"logits": f"*{shape.element}", "finite": "*i1"}
    summary_options = {"num_warps": topk.SUMMARY_WARPS, "enable_fp_fusion": False}
    select_options = {"num_warps": topk.SELECT_WARPS, "enable_fp_fusion": False}
    described = {"dtype": shape.element, "vocab_size": shape.vocab_size, "block": topk.BLOCK}
    specs = []
    for noisy in (False, True):
        span = {"NOISY": noisy, "VOCAB": shape.vocab_size, "BLOCK": topk.BLOCK, "SPAN": topk.SPAN}
        specs.append(KernelSpec(summarise_blocks, types, span, summary_options, described | {"noisy": noisy}))
        for k in sorted({1, min(topk.MAX_K, shape.vocab_size)}):
            sizes = {"NOISY": noisy} | topk.selection_sizes(shape.vocab_size, k, topk.BLOCK)
            config = described | {"noisy": noisy, "k": k}
            specs.append(KernelSpec(select_of_blocks, types, sizes, select_options, config))
    return specs


def logit_transforms(shape: KernelShape, target: str | None) -> list[KernelSpec]:
    """Return specs of the scores of a tree's nodes, and of their truncation."""
    types = dict.fromkeys(("numbers", "biases", "scores", "candidates"), "*fp32")
    types |= {"logits": f"*{shape.element}", "positions": "*i64"}
    vocab = shape.vocab_size
    sizes = {"NODES": 32, "VOCAB": vocab}
    scoring = sizes | {"NUM_ENDS": 8, "WIDTH": 13, "IN_PROMPT": transforms.IN_PROMPT}
    scoring |= {"BLOCK": transforms.block_of(vocab, transforms.SCORE_BLOCK)}
    truncating = sizes | {"BLOCK": transforms.block_of(vocab, transforms.BLOCK), "MARGIN": transforms.MARGIN}
    config = {"dtype": shape.element, "vocab_size": vocab}
    score, truncate = (
        {"num_warps": n, "enable_fp_fusion": False} for n in (transforms.SCORE_WARPS, transforms.NUM_WARPS)
    )
    return [
        KernelSpec(transform_scores, types, scoring, score, config),
        KernelSpec(truncate_scores, types, truncating, truncate, {"vocab_size": vocab}),
    ]
