"""Recurrent updates along the paths of token trees: each node's state is computed from its parent's.

A node's state depends on the tokens of its path only. Every operation is per element, or a sum in a fixed order, so it
has the bits of plain decoding.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Level(NamedTuple):
    """Rows whose parents' states are those of the level before; in the first level, those of the requests."""

    rows: Tensor  # int64 [n]
    parents: Tensor  # int64 [n], index of each row's parent in the level before, or of its request
    # Indices in this level of the last committed rows, int64 [m], and of their requests
    last: Tensor
    requests: Tensor


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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    levels: Sequence[Level],
    reads: bool = True,
) -> Tensor:
    """Apply the gated delta rule (arXiv 2412.06464) along the rows' paths, and store the last committed states.

    S = decay * S' + k (beta (v - k^T (decay * S')))^T, with S' the parent's state; a row's output is q^T S. Without
    `reads`, the rule is that of Mamba 2 (arXiv 2405.21060): S = decay * S' + k (beta v)^T.

    Args:
        states: fp32 [num_requests, heads, key_dim, value_dim], of the requests; changed in place.
        q, k: fp32 [num_rows, heads, key_dim].
        v: fp32 [num_rows, heads, value_dim].
        beta, decay: fp32 [num_rows, heads].
        levels: all rows that belong to a request, by their distance from its state.

    Returns fp32 [num_rows, heads, value_dim], 0 for the other rows.
    """
    out, current = torch.zeros_like(v), states
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


def _sum_keys(x: Tensor) -> Tensor:
    """Sum over the second last dimension by halves: additions of elements, whose order does not depend on the shape."""
    while (size := x.shape[-2]) > 1:
        half = (size + 1) // 2
        head = x[..., :half, :].clone()
        head[..., : size - half, :] += x[..., half:, :]
        x = head
    return x[..., 0, :]
