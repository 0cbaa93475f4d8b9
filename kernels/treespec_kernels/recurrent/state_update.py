"""Recurrent updates along the paths of token trees: each node's state is computed from its parent's.

A node's state depends on the tokens of its path only. Every operation is per element, or a sum in a fixed order, so it
has the bits of plain decoding.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from treespec_kernels.launch.arguments import check_arguments
from treespec_kernels.launch.rows import FLOAT_TYPES
from treespec_kernels.launch.triton_launch import block_of, load_kernels

_COLUMNS = 8  # columns of a state per program of one warp, so that sums over keys need no other warp
_CHANNELS = 256  # channels per program of a convolution


class Level(NamedTuple):
    """Rows whose parents' states are those of the level before; in the first level, those of the requests."""

    rows: Tensor  # int64 [n]
    parents: Tensor  # int64 [n], index of each row's parent in the level before, or of its request
    # Indices in this level of the last committed rows, int64 [m], and of their requests
    last: Tensor
    requests: Tensor


class StatePaths(NamedTuple):
    """The rows of each request in an order in which parents precede their children, for `state_update_triton`; int32.

    Row numbers are indices of qk and v.
    """

    slots: Tensor  # [num_requests], index of each request's state
    starts: Tensor  # [num_requests], first index of each request's rows in `order`
    ends: Tensor  # [num_requests], index after the last one
    order: Tensor  # [num_rows], row numbers
    parents: Tensor  # [num_rows], number of each row's parent; -1 for a request's first row
    # [num_rows], place of a row's state in scratch memory; -1 if only the next row in order needs it. A later row may
    # take the place after the row's last child
    kept: Tensor
    last: Tensor  # [num_requests], the row after which a request's state is stored; -1 for none
    num_kept: int


def causal_conv_ref(inputs: Tensor, taps: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Convolve each row's path: the sum over t of weight[t] * inputs[taps[:, t]], in order, in fp32.

    Args:
        inputs: [num_inputs, channels].
        taps: int64 [num_rows, kernel], the inputs of each row's ancestors and of the row itself, last.
        weight: fp32 [kernel, channels].
        bias: fp32 [channels], added last, or None.
    """
    result = inputs[taps[:, 0]].float() * weight[0]
    for column, tap in zip(taps.T[1:], weight[1:], strict=True):
        result += inputs[column].float() * tap  # not addcmul, whose SIMD body and tail may round differently
    return result if bias is None else result + bias


def state_update_ref(
    states: Tensor,
    qk: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    levels: Sequence[Level],
    reads: bool = True,
    tiled: bool = False,
) -> Tensor:
    """Apply the gated delta rule (arXiv 2412.06464) along the rows' paths, and store the last committed states.

    S = decay * S' + k (beta (v - k^T (decay * S')))^T, with S' the parent's state; a row's output is q^T S. Without
    `reads`, the rule is that of Mamba 2 (arXiv 2405.21060): S = decay * S' + k (beta v)^T. Head i has the query and key
    of head i // (heads / key_heads), or i % key_heads if `tiled`.

    Args:
        states: fp32 [num_requests, heads, key_dim, value_dim], of the requests; changed in place.
        qk: fp32 [num_rows, 2 * key_heads, key_dim], queries, then keys.
        v: fp32 [num_rows, heads, value_dim].
        beta, decay: fp32 [num_rows, heads].
        levels: all rows that belong to a request, by their distance from its state.

    Returns fp32 [num_rows, heads, value_dim], 0 for the other rows.
    """
    out, current, value_heads_per_key = torch.zeros_like(v), states, 2 * v.shape[1] // qk.shape[1]
    q, k = (
        x.repeat(1, value_heads_per_key, 1) if tiled else x.repeat_interleave(value_heads_per_key, 1)
        for x in qk.chunk(2, 1)
    )
    for rows, parents, last, requests in levels:
        key = k[rows][..., None]
        current = current[parents] * decay[rows][..., None, None]
        value = v[rows] - _sum_keys(current * key) if reads else v[rows]
        delta = value * beta[rows][..., None]
        current += key * delta[..., None, :]
        out[rows] = _sum_keys(current * q[rows][..., None])
        if len(last):
            states[requests] = current[last]
    return out


def causal_conv_triton(inputs: Tensor, taps: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `causal_conv_ref` on a GPU, in one launch."""
    check_arguments(
        inputs=(inputs, "num_inputs channels+", FLOAT_TYPES),
        taps=(taps, "[num_rows kernel]", torch.int64),
        weight=(weight, "[kernel channels]", torch.float32),
        bias=(bias, "[channels]", torch.float32),
    )
    (num_rows, kernel), channels = taps.shape, inputs.shape[1]
    out = torch.empty(num_rows, channels, dtype=torch.float32, device=inputs.device)
    if num_rows:
        load_kernels("recurrent.state_update", inputs).convolve_rows[(num_rows, -(-channels // _CHANNELS))](
            *(inputs, taps, weight, bias, out, inputs.stride(0)),
            CHANNELS=channels,
            KERNEL=kernel,
            BLOCK_C=_CHANNELS,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


def state_update_triton(
    states: Tensor,
    qk: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    paths: StatePaths,
    reads: bool = True,
    tiled: bool = False,
    scratch: Tensor | None = None,
) -> Tensor:
    """Compute `state_update_ref` on a GPU, in one launch; arguments as there, with `paths` of the same rows.

    `states` are [num_slots, heads, key_dim, value_dim]: those of `paths.slots` are changed. Other rows than those of
    `paths` have 0 in the result. `scratch` is memory for `paths.num_kept` states; allocated if it is None or smaller.
    """
    check_arguments(
        states=(states, "slots heads key value", torch.float32),
        scratch=(scratch, "[places heads key value]", torch.float32),
        slots=(paths.slots, "[requests]", torch.int32),
        qk=(qk, "[rows both key]", torch.float32),
        v=(v, "[rows heads value]", torch.float32),
        beta=(beta, "[rows heads]", torch.float32),
        decay=(decay, "[rows heads]", torch.float32),
        starts=(paths.starts, "[requests]", torch.int32),
        ends=(paths.ends, "[requests]", torch.int32),
        order=(paths.order, "[rows]", torch.int32),
        parents=(paths.parents, "[rows]", torch.int32),
        kept=(paths.kept, "[rows]", torch.int32),
        last=(paths.last, "[requests]", torch.int32),
    )
    (_, heads, key_dim, value_dim), requests = states.shape, len(paths.starts)
    out, block_v = torch.zeros_like(v), min(_COLUMNS, block_of(value_dim))
    if scratch is None or len(scratch) < paths.num_kept:
        scratch = states.new_empty(max(paths.num_kept, 1), heads, key_dim, value_dim)
    load_kernels("recurrent.state_update", states).update_states[(requests, heads, -(-value_dim // block_v))](
        *(states, paths.slots, qk, v, beta, decay, out, scratch, *paths[1:-1], states.stride(0)),
        HEADS=heads,
        KEY_HEADS=qk.shape[1] // 2,
        TILED=tiled,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        READS=reads,
        BLOCK_K=block_of(key_dim),
        BLOCK_V=block_v,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out


def _sum_keys(x: Tensor) -> Tensor:
    """Sum over the second last dimension by halves: additions of elements, whose order does not depend on the shape."""
    while (size := x.shape[-2]) > 1:
        half = (size + 1) // 2
        head = x[..., :half, :].clone()
        head[..., : size - half, :] += x[..., half:, :]
        x = head
    return x[..., 0, :]
