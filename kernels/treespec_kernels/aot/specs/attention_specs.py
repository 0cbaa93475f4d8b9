"""Specs of the attention ops: KV commit, pass layout, QKV with RoPE, and tree attention."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from treespec_kernels.aot.kernel_spec import PAGE_SIZE, KernelShape, KernelSpec
from treespec_kernels.attention import kv_commit as commit
from treespec_kernels.attention import pass_layout as layout
from treespec_kernels.attention import qkv_rope as rope
from treespec_kernels.attention.kv_commit_kernels import move_path
from treespec_kernels.attention.pass_layout_kernels import lay_out_pass
from treespec_kernels.attention.qkv_rope_kernels import rotate_and_write
from treespec_kernels.attention.tree_attention_config import TreeAttentionConfig
from treespec_kernels.attention.tree_attention_kernels import attend_items, combine_segments
from treespec_kernels.attention.tree_attention_masked_kernels import attend_masked_items
from treespec_kernels.launch.triton_launch import block_of_head_dim


def kv_commit(shape: KernelShape, target: str | None) -> list[KernelSpec]:
    """Return the spec of KV commit's kernel."""
    return [
        KernelSpec(
            kernel=move_path,
            types={"kv_cache": "*i32" if shape.element == "fp32" else "*i16", "max_path": "i32"},
            constants={
                "NUM_KV_HEADS": shape.num_kv_heads,
                "HEAD_DIM": shape.head_dim,
                "PAGE_SIZE": PAGE_SIZE,
                "BLOCK_J": commit.BLOCK_J,
                "BLOCK_D": block_of_head_dim(shape.head_dim),
            },
            options={"num_warps": commit.NUM_WARPS, "enable_fp_fusion": False},
            config={"dtype": shape.element, "head_dim": shape.head_dim, "kv_heads": shape.num_kv_heads},
        )
    ]


def pass_layout(shape: KernelShape, target: str | None) -> list[KernelSpec]:
    """Return specs for trees, chains and masked trees of 64 slots, in the default configuration of attention."""
    config = TreeAttentionConfig.default(shape.dtype, shape.head_dim, target)
    pointers = {"slots": "*i64", "ancestor_words": "*i64", "num_segments": "*i32"}
    sizes = ("num_requests", "num_rows", "width", "max_context", "tree_slots", "num_slots", "num_tiles", "window")
    return [
        KernelSpec(
            kernel=lay_out_pass,
            types=pointers | dict.fromkeys((*sizes, "num_packed_segments", "num_node_segments"), "i32"),
            constants=layout.constants(config, shape.group, chain, words, PAGE_SIZE),
            options={"num_warps": layout.NUM_WARPS, "enable_fp_fusion": False},
            config=_attention_shape(shape) | {"chain": chain, "words": words},
        )
        for chain, words in ((False, 0), (True, 0), (False, 1))
    ]


def qkv_rope(shape: KernelShape, target: str | None) -> list[KernelSpec]:
    """Return specs for input rows in the model's dtype, and for a linear layer's partial sums of 2 and 8 splits."""
    names = ("qkv", "bias", "q_weight", "k_weight", "kv_layer", "q_out")
    tensors = dict.fromkeys(names, f"*{shape.element}")
    tensors |= {"rotation": "*fp32", "positions": "*i32", "slots": "*i64", "eps": "fp32"}
    if shape.norm == "rms_plus_one":
        tensors |= {"q_weight": "*fp32", "k_weight": "*fp32"}
    return [
        KernelSpec(
            kernel=rotate_and_write,
            types=tensors | ({"qkv": "*fp32"} if num_splits > 1 else {}),
            constants={
                "NUM_HEADS": shape.num_heads,
                "NUM_KV_HEADS": shape.num_kv_heads,
                "HEAD_DIM": shape.head_dim,
                "PAGE_SIZE": PAGE_SIZE,
                "NUM_SPLITS": num_splits,
                "HAS_BIAS": has_bias,
                "HAS_NORM": shape.qk_norm,
                "ROTATES": shape.rotary,
                "BLOCK_H": rope.block_of_heads(shape.head_dim),
                "BLOCK_D": rope.block_of_half(shape.head_dim),
                "PDL": False,
            },
            options={"num_warps": rope.NUM_WARPS, "enable_fp_fusion": False},
            config=_attention_shape(shape) | {"splits": num_splits, "qk_norm": shape.qk_norm, "rotary": shape.rotary},
        )
        for num_splits, has_bias in ((1, False), (2, False), (8, True))
    ]


def tree_attention(shape: KernelShape, target: str | None) -> list[KernelSpec]:
    """Return specs in the default configuration, with and without a sliding window, and of `combine_segments`."""
    combine = KernelSpec(
        kernel=combine_segments,
        types=_attention_types(shape),
        constants=_attention_constants(shape),
        options={"num_warps": 1, "enable_fp_fusion": False},
        config=_attention_shape(shape),
    )
    return [*_attention_specs(attend_items, shape, target), combine]


def tree_attention_masked(shape: KernelShape, target: str | None) -> list[KernelSpec]:
    """Return specs in the default configuration, with and without a sliding window."""
    return _attention_specs(attend_masked_items, shape, target)


def _attention_specs(kernel: Any, shape: KernelShape, target: str | None) -> list[KernelSpec]:
    """Return specs of a kernel over work items in the default configuration, with and without a sliding window."""
    config = TreeAttentionConfig.default(shape.dtype, shape.head_dim, target)
    constants = _attention_constants(shape) | {
        "GROUP": shape.group,
        "PAGE_SIZE": PAGE_SIZE,
        "HAS_CAP": shape.capped,
        **config.constants,
    }
    return [
        KernelSpec(
            kernel=kernel,
            types=_attention_types(shape),
            constants=constants | {"HAS_WINDOW": window},
            options=config.options,
            config=_attention_shape(shape) | {"window": window, "cap": shape.capped} | asdict(config),
        )
        for window in (False, True)
    ]


def _attention_types(shape: KernelShape) -> dict[str, str]:
    return (
        dict.fromkeys(("q", "k_cache", "v_cache", "out"), f"*{shape.element}")
        | dict.fromkeys(("partial_acc", "partial_max", "partial_sum"), "*fp32")
        | {"num_items": "*i32", "num_segments": "*i32", "ancestor_words": "*i64"}
        | {"scale_log2": "fp32", "window": "i32", "score_cap": "fp32"}
    )


def _attention_constants(shape: KernelShape) -> dict[str, int | bool | str]:
    return {
        "NUM_HEADS": shape.num_heads,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_D": block_of_head_dim(shape.head_dim),
        "PDL": False,
    }


def _attention_shape(shape: KernelShape) -> dict[str, Any]:
    return {"dtype": shape.element, "head_dim": shape.head_dim, "group": shape.group}
