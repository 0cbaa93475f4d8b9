"""Triton kernels of recurrent layers. Needs triton."""

import triton
import triton.language as tl

_TENSORS = "states slots qk v beta decay out scratch starts ends order parents kept last stride_slot".split()


@triton.jit(do_not_specialize=_TENSORS)
def update_states(
    states,  # [num_slots, HEADS, KEY_DIM, VALUE_DIM] fp32, slots `stride_slot` apart
    slots,  # [num_requests] int32
    qk,  # [num_rows, 2 * KEY_HEADS, KEY_DIM] fp32
    v,  # [num_rows, HEADS, VALUE_DIM] fp32, also out
    beta,  # [num_rows, HEADS] fp32, also decay
    decay,
    out,
    scratch,  # [num_kept, HEADS, KEY_DIM, VALUE_DIM] fp32
    starts,  # `StatePaths`
    ends,
    order,
    parents,
    kept,
    last,
    stride_slot,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    TILED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    READS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program updates BLOCK_V columns of one head's state along the rows of one request.

    Columns do not depend on one another. The state of the row before stays in registers; that of another parent, a node
    with several children, is read from the scratch memory.
    """
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    o_k = tl.arange(0, BLOCK_K)
    o_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k = o_k < KEY_DIM
    m_v = o_v < VALUE_DIM
    m_state = m_k[:, None] & m_v[None, :]
    o_state = o_k[:, None] * VALUE_DIM + o_v[None, :]
    SIZE: tl.constexpr = KEY_DIM * VALUE_DIM
    slot = tl.load(slots + request).to(tl.int64)
    key_head = head % KEY_HEADS if TILED else head // (HEADS // KEY_HEADS)
    p_state = states + slot * stride_slot + head * SIZE + o_state
    b_state = tl.load(p_state, mask=m_state, other=0.0)
    end_row = tl.load(last + request)
    previous = -1
    for i in range(tl.load(starts + request), tl.load(ends + request)):
        row = tl.load(order + i)
        parent = tl.load(parents + row)
        if parent != previous:  # the first row's parent, -1, is the request's state
            place = tl.load(kept + parent).to(tl.int64)
            b_state = tl.load(scratch + (place * HEADS + head) * SIZE + o_state, mask=m_state, other=0.0)
        i_head = row.to(tl.int64) * HEADS + head
        p_query = qk + (row.to(tl.int64) * (2 * KEY_HEADS) + key_head) * KEY_DIM + o_k
        b_key = tl.load(p_query + KEY_HEADS * KEY_DIM, mask=m_k, other=0.0)
        b_query = tl.load(p_query, mask=m_k, other=0.0)
        b_value = tl.load(v + i_head * VALUE_DIM + o_v, mask=m_v, other=0.0)
        b_state = b_state * tl.load(decay + i_head)
        if READS:
            b_value -= tl.sum(b_state * b_key[:, None], axis=0)
        b_delta = b_value * tl.load(beta + i_head)
        b_state += b_key[:, None] * b_delta[None, :]
        tl.store(out + i_head * VALUE_DIM + o_v, tl.sum(b_state * b_query[:, None], axis=0), mask=m_v)
        place = tl.load(kept + row).to(tl.int64)
        tl.store(scratch + (place * HEADS + head) * SIZE + o_state, b_state, mask=m_state & (place >= 0))
        tl.store(p_state, b_state, mask=m_state & (row == end_row))
        # The threads that load a state may differ from those that stored it.
        tl.debug_barrier()
        previous = row


@triton.jit(do_not_specialize=["inputs", "taps", "weight", "bias", "out", "stride_input"])
def convolve_rows(
    inputs,  # [num_inputs, CHANNELS], rows `stride_input` apart
    taps,  # [num_rows, KERNEL] int64
    weight,  # [KERNEL, CHANNELS] fp32
    bias,  # [CHANNELS] fp32, or None
    out,  # [num_rows, CHANNELS] fp32
    stride_input,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program convolves BLOCK_C channels of one row's path."""
    row = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < CHANNELS
    b_sum = tl.zeros([BLOCK_C], dtype=tl.float32)
    for tap in tl.static_range(KERNEL):
        place = tl.load(taps + row * KERNEL + tap)
        b_input = tl.load(inputs + place * stride_input + o_c, mask=m_c, other=0.0).to(tl.float32)
        b_sum += b_input * tl.load(weight + tap * CHANNELS + o_c, mask=m_c, other=0.0)
    if bias is not None:
        b_sum += tl.load(bias + o_c, mask=m_c, other=0.0)
    tl.store(out + row * CHANNELS + o_c, b_sum, mask=m_c)
