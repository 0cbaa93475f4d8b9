"""Rows of a recurrent layer with a state per head, before and after the update of the states.

Both ops compute every row alone, with all sums in fixed orders.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from treespec_kernels.launch.arguments import check_arguments
from treespec_kernels.launch.rows import FLOAT_TYPES
from treespec_kernels.launch.triton_launch import block_of, load_kernels
from treespec_kernels.linear.activations import sigmoid, silu, softplus
from treespec_kernels.linear.rms_norm import norm_heads
from treespec_kernels.recurrent.state_update import causal_conv_ref

_L2_EPS = 1e-6  # epsilon of the norms of queries and keys


class MixerSizes(NamedTuple):
    """Kind and sizes of a layer.

    Mamba 2 calls queries, keys and values C, B and x, key heads groups, `key_dim` state size, `value_dim` head size.
    """

    delta: bool  # a Gated DeltaNet (arXiv 2412.06464); otherwise a layer of Mamba 2 (arXiv 2405.21060)
    key_heads: int
    key_dim: int
    heads: int
    value_dim: int
    doubled: bool = False  # beta of a Gated DeltaNet is up to 2
    # Mamba 2 only, and not in Triton kernels:
    step_scale: float = 1.0  # factor on time steps, before their bias
    normed: bool = True  # whether outputs are normalised, or only multiplied by the gains


class MixedRows(NamedTuple):
    """Inputs of the state update, fp32."""

    qk: Tensor  # [num_rows, 2 * key_heads, key_dim], queries, then keys
    v: Tensor  # [num_rows, heads, value_dim]
    beta: Tensor  # [num_rows, heads]
    decay: Tensor


def mix_rows_ref(
    inputs: Tensor,
    taps: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dt_bias: Tensor,
    rate: Tensor,
    sizes: MixerSizes,
) -> MixedRows:
    """Convolve and activate queries, keys and values, norm those of a Gated DeltaNet, and compute beta and decay.

    Args:
        inputs: [num_inputs, width], of the convolution and then of beta (not of Mamba 2) and the time step.
        taps, weight, bias: as in `causal_conv_ref`.
        dt_bias, rate: fp32 [heads], added to the time step, and its factor in the exponent of the decay.
    """
    channels, heads = weight.shape[1], sizes.heads
    made = silu(causal_conv_ref(inputs[:, :channels], taps, weight, bias))
    qk, v = made.split([2 * sizes.key_heads * sizes.key_dim, heads * sizes.value_dim], 1)
    qk = qk.reshape(len(qk), 2 * sizes.key_heads, sizes.key_dim)
    rates = inputs[taps[:, -1], channels:].float()
    step = softplus(rates[:, -heads:] * sizes.step_scale + dt_bias)
    beta = step
    if sizes.delta:
        # `norm_heads` divides by the root of the mean square; a query is also divided by sqrt(key_dim).
        scale = torch.full((2 * sizes.key_heads, 1), sizes.key_dim**-0.5, dtype=torch.float32, device=qk.device)
        scale[: sizes.key_heads] = 1 / sizes.key_dim
        norm_heads(qk, scale, _L2_EPS / sizes.key_dim)
        beta = sigmoid(rates[:, :heads])
        beta = beta * 2 if sizes.doubled else beta
    return MixedRows(qk, v.reshape(len(v), heads, sizes.value_dim), beta, torch.exp(rate * step))


def mix_rows_triton(
    inputs: Tensor,
    taps: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dt_bias: Tensor,
    rate: Tensor,
    sizes: MixerSizes,
) -> MixedRows:
    """Compute `mix_rows_ref` on a GPU, in one launch."""
    delta, key_heads, key_dim, heads, value_dim, doubled, *_ = sizes
    channels = 2 * key_heads * key_dim + heads * value_dim
    check_arguments(
        {"channels": channels, "heads": heads, "width": channels + heads * (1 + delta)},
        inputs=(inputs, "[inputs width]", FLOAT_TYPES),
        taps=(taps, "[rows kernel]", torch.int64),
        weight=(weight, "[kernel channels]", torch.float32),
        bias=(bias, "[channels]", torch.float32),
        dt_bias=(dt_bias, "[heads]", torch.float32),
        rate=(rate, "[heads]", torch.float32),
    )
    num_rows, kernel = taps.shape
    made = MixedRows(
        *(
            torch.empty(num_rows, *size, dtype=torch.float32, device=inputs.device)
            for size in ((2 * key_heads, key_dim), (heads, value_dim), (heads,), (heads,))
        )
    )
    if num_rows:
        load_kernels("recurrent.mixer_rows", inputs).mix_rows[(num_rows, 2 * key_heads + heads + 1)](
            *(inputs, taps, weight, bias, dt_bias, rate, *made),
            DELTA=delta,
            KEY_HEADS=key_heads,
            KEY_DIM=key_dim,
            HEADS=heads,
            VALUE_DIM=value_dim,
            KERNEL=kernel,
            EPS=_L2_EPS / key_dim,
            QUERY_SCALE=1 / key_dim,
            KEY_SCALE=key_dim**-0.5,
            BETA_SCALE=2.0 if doubled else 1.0,
            BLOCK_D=block_of(max(key_dim, value_dim)),
            BLOCK_H=block_of(heads),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return made


def gate_rows_ref(
    out: Tensor, v: Tensor, gate: Tensor, gain: Tensor, skip: Tensor | None, sizes: MixerSizes, eps: float
) -> Tensor:
    """Gate and normalise the outputs of the state update; return [num_rows, heads * value_dim].

    A Gated DeltaNet norms each head and then multiplies by the SiLU of the gate; Mamba 2 adds the skipped values,
    multiplies, and then norms each group. Changes `out`.

    Args:
        out, v: fp32 [num_rows, heads, value_dim].
        gate: [num_rows, heads * value_dim], of the result's dtype.
        gain: fp32 weight of the norm, [value_dim] for a Gated DeltaNet, else [heads * value_dim].
        skip: fp32 [heads]; None for a Gated DeltaNet.
        eps: epsilon of the norm.
    """
    factor = silu(gate.float())
    if skip is None:
        norm_heads(out, gain.expand(sizes.heads, -1), eps)
        return (out.flatten(1) * factor).to(gate.dtype)
    out = (out + v * skip[:, None]).flatten(1) * factor
    if not sizes.normed:
        return (out * gain).to(gate.dtype)
    out = out.unflatten(1, (sizes.key_heads, -1))
    norm_heads(out, gain.view(sizes.key_heads, -1), eps)
    return out.flatten(1).to(gate.dtype)


def gate_rows_triton(
    out: Tensor, v: Tensor, gate: Tensor, gain: Tensor, skip: Tensor | None, sizes: MixerSizes, eps: float
) -> Tensor:
    """Compute `gate_rows_ref` on a GPU, in one launch."""
    check_arguments(
        {"width": sizes.heads * sizes.value_dim},
        out=(out, "[rows heads value]", torch.float32),
        v=(v, "[rows heads value]", torch.float32),
        gate=(gate, "rows width", FLOAT_TYPES),
        gain=(gain, "[gains]", torch.float32),
        skip=(skip, "[heads]", torch.float32),
    )
    groups = sizes.heads if skip is None else sizes.key_heads
    size = gate.shape[1] // groups
    result = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if len(out):
        load_kernels("recurrent.mixer_rows", out).gate_rows[(len(out), groups)](
            *(out, v, gate, gain, skip, result, eps, gate.stride(0)),
            SIZE=size,
            GROUPS=groups,
            VALUE_DIM=sizes.value_dim,
            BLOCK=block_of(size),
            num_warps=min(max(block_of(size) // 512, 1), 8),
            enable_fp_fusion=False,
        )
    return result
