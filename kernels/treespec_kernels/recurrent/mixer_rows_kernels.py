"""Triton kernels of the rows of recurrent layers. Needs triton."""

import triton
import triton.language as tl

from treespec_kernels.launch.pointwise import activate


@triton.jit(do_not_specialize="inputs taps weight bias dt_bias rate qk v beta decay".split())
def mix_rows(
    inputs,  # [num_inputs, channels of the convolution and rates]
    taps,  # [num_rows, KERNEL] int64
    weight,  # [KERNEL, channels] fp32
    bias,  # [channels] fp32, or None
    dt_bias,  # [HEADS] fp32
    rate,
    qk,  # `MixedRows`
    v,
    beta,
    decay,
    DELTA: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr,
    EPS: tl.constexpr,
    QUERY_SCALE: tl.constexpr,
    KEY_SCALE: tl.constexpr,
    BETA_SCALE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program computes one head's query, key or value of one row, and the last one of a row beta and decay."""
    KEYS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = KEYS + HEADS * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + (2 * HEADS if DELTA else HEADS)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    p_taps = taps + row * KERNEL
    if head == 2 * KEY_HEADS + HEADS:
        o_h = tl.arange(0, BLOCK_H)
        m_h = o_h < HEADS
        p_rates = inputs + tl.load(p_taps + KERNEL - 1) * WIDTH + CHANNELS + o_h
        p_step = p_rates + HEADS if DELTA else p_rates
        x = tl.load(p_step, mask=m_h, other=0.0).to(tl.float32) + tl.load(dt_bias + o_h, mask=m_h, other=0.0)
        e = tl.exp(-tl.abs(x))
        t = 1.0 + e
        # log(1 + e) without the rounding error of t, which is e where t is 1
        log = tl.where(t == 1.0, e, tl.log(t) * (e / tl.where(t == 1.0, 1.0, t - 1.0)))
        step = tl.where(x < 0.0, 0.0, x) + log  # keeps NaN
        b_beta = step
        if DELTA:
            b_rate = tl.load(p_rates, mask=m_h, other=0.0).to(tl.float32)
            b_beta = 1.0 / (1.0 + tl.exp(-b_rate)) * BETA_SCALE
        tl.store(beta + row * HEADS + o_h, b_beta, mask=m_h)
        b_decay = tl.exp(tl.load(rate + o_h, mask=m_h, other=0.0) * step)
        tl.store(decay + row * HEADS + o_h, b_decay, mask=m_h)
    else:
        is_value = head >= 2 * KEY_HEADS
        first = tl.where(is_value, KEYS + (head - 2 * KEY_HEADS) * VALUE_DIM, head * KEY_DIM)
        o_d = tl.arange(0, BLOCK_D)
        m_d = o_d < tl.where(is_value, VALUE_DIM, KEY_DIM)
        o_c = first + o_d
        b_sum = tl.zeros([BLOCK_D], dtype=tl.float32)
        for tap in tl.static_range(KERNEL):
            b_input = tl.load(inputs + tl.load(p_taps + tap) * WIDTH + o_c, mask=m_d, other=0.0).to(tl.float32)
            b_sum += b_input * tl.load(weight + tap * CHANNELS + o_c, mask=m_d, other=0.0)
        if bias is not None:
            b_sum += tl.load(bias + o_c, mask=m_d, other=0.0)
        b_made = activate(b_sum, "silu")
        if is_value:
            tl.store(v + row * (HEADS * VALUE_DIM) + o_c - KEYS, b_made, mask=m_d)
        else:
            if DELTA:
                scale = tl.where(head < KEY_HEADS, QUERY_SCALE, KEY_SCALE)
                b_made = b_made * tl.rsqrt(tl.sum(b_made * b_made, axis=0) / KEY_DIM + EPS) * scale
            tl.store(qk + row * KEYS + o_c, b_made, mask=m_d)


@triton.jit(do_not_specialize=["out", "v", "gate", "gain", "skip", "result", "eps", "stride_gate"])
def gate_rows(
    out,  # [num_rows, GROUPS * SIZE] fp32, also v
    v,
    gate,  # [num_rows, GROUPS * SIZE], rows `stride_gate` apart
    gain,  # [SIZE] fp32 without `skip`, else [GROUPS * SIZE]
    skip,  # [GROUPS * SIZE / VALUE_DIM] fp32, or None
    result,  # [num_rows, GROUPS * SIZE]
    eps,
    stride_gate,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program norms one group of one row."""
    row = tl.program_id(0).to(tl.int64)
    o_s = tl.arange(0, BLOCK)
    m_s = o_s < SIZE
    o_c = tl.program_id(1) * SIZE + o_s
    o_row = row * (GROUPS * SIZE) + o_c
    b_out = tl.load(out + o_row, mask=m_s, other=0.0)
    b_gate = tl.load(gate + row * stride_gate + o_c, mask=m_s, other=0.0).to(tl.float32)
    b_factor = activate(b_gate, "silu")
    if skip is not None:
        b_skip = tl.load(skip + o_c // VALUE_DIM, mask=m_s, other=0.0)
        b_out += tl.load(v + o_row, mask=m_s, other=0.0) * b_skip
        b_out *= b_factor
        b_gain = tl.load(gain + o_c, mask=m_s, other=0.0)
    else:
        b_gain = tl.load(gain + o_s, mask=m_s, other=0.0)
    b_out = b_out * tl.rsqrt(tl.sum(b_out * b_out, axis=0) / SIZE + eps) * b_gain
    if skip is None:
        b_out *= b_factor
    tl.store(result + o_row, b_out.to(result.dtype.element_ty), mask=m_s)
