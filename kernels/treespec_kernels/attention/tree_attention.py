"""Tree attention: every row of a pass attends to its request's committed positions and to its own ancestors.

The K/V of a layer are paged: logical slot s of request b is page `page_table[b, s // page_size]`, offset
`s % page_size`. The committed positions 0..L-1 of the request (L = `context_lens[b]`) have logical slots 0..L-1, and
node i of its token tree has logical slot L + i. A row is one node of one tree. Its absolute position is L + depth, and
its key at absolute position L + j is that of its ancestor at depth j, in logical slot L + `ancestors[row, j]`. Plain
decoding is one row of depth 0 with ancestors [[0]]; a prefill chunk is a chain.
"""

import math

import torch

from treespec_kernels.attention.tree_attention_config import SegmentPartition as SegmentPartition
from treespec_kernels.attention.tree_attention_config import TreeAttentionConfig as TreeAttentionConfig
from treespec_kernels.attention.tree_attention_plan import AttentionShape as AttentionShape
from treespec_kernels.attention.tree_attention_plan import TreeAttentionPlan as TreeAttentionPlan
from treespec_kernels.attention.tree_attention_plan import plan_tree_attention as plan_tree_attention
from treespec_kernels.launch.arguments import check_arguments
from treespec_kernels.launch.triton_launch import block_of, launch_options, load_kernels
from treespec_kernels.linear.activations import soft_cap


def tree_attention_ref(
    # [num_rows, num_heads, head_dim], any float dtype. Head h reads KV head h // (num_heads / num_kv_heads)
    q: torch.Tensor,
    # [num_pages, num_kv_heads, page_size, head_dim], any outer strides; also v_cache. Or planes of a cache,
    # [num_planes, num_pages, heads, page_size, part_dim], whose heads, one plane after the other, are parts of heads
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    row_request: torch.Tensor,  # [num_rows] int32, the request of each row, ascending
    context_lens: torch.Tensor,  # [num_requests] int32, number of committed positions L
    page_table: torch.Tensor,  # [num_requests, max_pages] int32
    depths: torch.Tensor,  # [num_rows] int32
    # [num_rows, max_depth + 1] int32; `ancestors[r, j]` for j <= depths[r] is the tree index of the row's ancestor at
    # depth j (j = depth is the row's own node). Other entries are ignored
    ancestors: torch.Tensor,
    scale: float,  # factor on the scores, usually head_dim ** -0.5
    score_cap: float | None = None,  # soft cap c: scaled scores x become c tanh(x / c) (Gemma 2); None for no cap
    # Sliding window: number of positions that a row reads, including its own; None for all
    window: int | None = None,
    # fp32 [num_heads], scores that add to the sum of a row's weights, and weigh no value (arXiv 2309.17453)
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute softmax(scale * q k^T) v over each row's positions, in fp32 and one row at a time (reference).

    Returns:
        [num_rows, num_heads, head_dim] in q's dtype.
    """
    k_cache, v_cache = (whole_heads(cache, q.shape[2]) for cache in (k_cache, v_cache))
    page_size, group = k_cache.shape[2], q.shape[1] // k_cache.shape[1]
    out = torch.empty_like(q)
    for row, request in enumerate(row_request.tolist()):
        length, depth = int(context_lens[request]), int(depths[row])
        committed = torch.arange(length, device=q.device)
        slots = torch.cat([committed, length + ancestors[row, : depth + 1].long()])  # column = absolute position
        slots = slots if window is None else slots[-window:]
        pages = page_table[request, slots // page_size].long()
        keys = k_cache[pages, :, slots % page_size].float().repeat_interleave(group, dim=1)  # [n, num_heads, head_dim]
        values = v_cache[pages, :, slots % page_size].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,nhd->hn", q[row].float(), keys) * scale
        scores = scores if score_cap is None else soft_cap(scores, score_cap)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None]), 1)
        weights = scores.softmax(dim=-1)[:, : len(slots)]
        out[row] = torch.einsum("hn,nhd->hd", weights, values).to(q.dtype)
    return out


def whole_heads(cache: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return K or V of a layer with whole heads, [num_pages, num_kv_heads, page_size, head_dim]; copies planes."""
    if cache.dim() == 4:
        return cache
    parts = cache.transpose(0, 1).flatten(1, 2)  # [num_pages, num_planes * heads, page_size, part_dim]
    return parts.unflatten(1, (-1, head_dim // cache.shape[-1])).transpose(2, 3).flatten(3)


def tree_attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    row_request: torch.Tensor,
    context_lens: torch.Tensor,
    page_table: torch.Tensor,
    depths: torch.Tensor,
    ancestors: torch.Tensor,
    scale: float,
    score_cap: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    plan: TreeAttentionPlan,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Compute tree attention on a GPU, in at most three launches; the first two run the same compiled kernel.

    Arguments as in `tree_attention_ref`; the last dimension of q, caches and out must be contiguous. `plan` is from
    `plan_tree_attention` for the same context_lens, rows and depths; its padding rows become 0. If `out` is given,
    nothing is allocated. `pdl`: see `launch_options`.

    The bits of a row depend only on its q, on the keys and values of its path by absolute position, and on
    `plan.config`. They do not depend on other rows, the order of the tree, the batch or the root's position.

    Raises:
        ValueError: a shape, dtype, stride or device does not match, or triton cannot run on the tensors.
    """
    rows, cache = "num_rows num_heads head_dim", "(num_planes) num_pages plane_heads page_size part_dim"
    check_arguments(
        q=(q, rows, q.dtype),
        k_cache=(k_cache, cache, q.dtype),
        v_cache=(v_cache, cache, q.dtype),
        row_request=(row_request, "num_rows", torch.int32),
        context_lens=(context_lens, "num_requests", torch.int32),
        page_table=(page_table, "num_requests max_pages", torch.int32),
        depths=(depths, "num_rows", torch.int32),
        ancestors=(ancestors, "num_rows width+", torch.int32),
        sinks=(sinks, "num_heads", torch.float32),
        out=(out, rows, q.dtype),
    )
    (num_rows, num_heads, head_dim), (plane_heads, page_size, part_dim) = q.shape, k_cache.shape[-3:]
    in_planes, num_kv_heads = k_cache.dim() == 5, k_cache.shape[:-4].numel() * plane_heads * part_dim // head_dim
    assert in_planes or part_dim == head_dim, f"the cache has heads of {part_dim}, q of {head_dim}"
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, q.dtype, window)
    shape.check()
    assert plan.shape == shape and len(plan.first_partial) == num_rows, f"the plan is for {plan.shape}, not {shape}"
    assert score_cap is None or score_cap > 0, f"score_cap is {score_cap}"
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    kernels, config = load_kernels("attention.tree_attention", q), plan.config
    if num_rows == 0:
        return out
    block_d, log2_e = block_of(head_dim, 16), math.log2(math.e)
    tables = page_table, context_lens, depths, ancestors
    factors = scale * log2_e, window, None if score_cap is None else score_cap * log2_e
    of_k, of_v = (cache.stride()[:-1] if in_planes else (None, *cache.stride()[:-1]) for cache in (k_cache, v_cache))
    strides = *q.stride()[:2], *of_k, *of_v, page_table.stride(0), ancestors.stride(0)
    segments = plan.first_partial, plan.first_segment, plan.num_segments
    for items in (plan.packed_items, plan.node_items):
        if len(items) == 0:
            continue
        kernels.attend_items[(len(items), shape.num_kv_heads)](
            *(q, k_cache, v_cache, *plan.partials, items, *segments, *tables, *factors, *strides),
            NUM_HEADS=num_heads,
            GROUP=shape.group,
            HEAD_DIM=head_dim,
            PAGE_SIZE=page_size,
            PART_DIM=part_dim,
            PLANE_HEADS=plane_heads if in_planes else 0,
            BLOCK_D=block_d,
            **config.constants,
            **config.options,
            **launch_options(pdl),
        )
    kernels.combine_segments[(num_rows, num_heads)](
        *(*plan.partials, plan.first_partial, plan.num_segments, sinks, out, *out.stride()[:2]),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        num_warps=1,
        enable_fp_fusion=False,
        **launch_options(pdl),
    )
    return out
