"""Triton kernels of logit transforms. Needs triton.

`transform_scores` computes each token's score from its logit alone, and `truncate_scores` excludes the tokens outside
top-k, top-p and min-p. Sums of a row run over the same blocks of the vocabulary in the same order for any number of
rows. There are no atomics.
"""

import triton
import triton.language as tl

_NO_KEY = tl.constexpr(-(2**31))  # less than or equal to the key of every number


@triton.jit
def _keys(values):
    """Return int32 keys in the order of the float32 `values`; NaN as +inf."""
    values = tl.where(values == values, values, float("inf"))
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # -0 equals +0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def transform_scores(
    logits,  # [rows, VOCAB]
    numbers,  # [requests, 6] fp32: temperature, top_p, log(min_p), repetition, frequency and presence penalty
    integers,  # [requests, 3] int32: slot or -1, top_k, first position at which the request may end
    end_tokens,  # [requests, NUM_ENDS] int32
    positions,  # [rows] int64, positions of the tokens to choose
    paths,  # [rows, WIDTH] int32, tokens of a node's path below the root, -1 for none
    biases,  # [slots, VOCAB] fp32, -inf for excluded tokens
    counts,  # [slots, VOCAB] int32, occurrences in the output, plus IN_PROMPT
    scores,  # [rows, VOCAB] fp32
    stride_logits,
    NODES: tl.constexpr,  # rows per request
    NUM_ENDS: tl.constexpr,
    WIDTH: tl.constexpr,
    IN_PROMPT: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program handles one block of the vocabulary of one row."""
    row = tl.program_id(0).to(tl.int64)
    request = row // NODES
    o_v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_v = o_v < VOCAB
    values = tl.load(logits + row * stride_logits + o_v, mask=m_v, other=0.0).to(tl.float32)
    slot = tl.load(integers + request * 3)
    if slot >= 0:
        o_slot = slot.to(tl.int64) * VOCAB + o_v
        bias = tl.load(biases + o_slot, mask=m_v, other=0.0)
        values = tl.where(bias == float("-inf"), bias, values + bias)
    if tl.load(positions + row) < tl.load(integers + request * 3 + 2):
        for i in tl.static_range(NUM_ENDS):
            values = tl.where(o_v == tl.load(end_tokens + request * NUM_ENDS + i), float("-inf"), values)
    repetition = tl.load(numbers + request * 6 + 3)
    frequency = tl.load(numbers + request * 6 + 4)
    presence = tl.load(numbers + request * 6 + 5)
    if (slot >= 0) & ((repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)):
        count = tl.load(counts + slot.to(tl.int64) * VOCAB + o_v, mask=m_v, other=0)
        written = count & (IN_PROMPT - 1)
        for i in tl.static_range(WIDTH):
            written += (o_v == tl.load(paths + row * WIDTH + i)).to(tl.int32)
        repeated = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
        values = tl.where((count != 0) | (written > 0), repeated, values)
        penalised = values - written.to(tl.float32) * frequency - presence
        values = tl.where(written > 0, penalised, values)
    temperature = tl.load(numbers + request * 6)
    if temperature > 0:
        values = tl.div_rn(values, temperature)
    tl.store(scores + row * VOCAB + o_v, values, mask=m_v)


@triton.jit
def _sums_above(p_scores, size, top, pivot_0, pivot_1, pivot_2, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number of scores with keys above each pivot, or, with MASS, the sum of their exp(score - top)."""
    zero = tl.zeros([BLOCK], dtype=tl.float32 if MASS else tl.int32)
    sum_0, sum_1, sum_2 = zero, zero, zero
    for start in range(0, size, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        values = tl.load(p_scores + o_v, mask=o_v < size, other=float("-inf"))
        keys = _keys(values)
        if MASS:
            amounts = tl.where(o_v < size, tl.exp(values - top), 0.0)
        else:
            amounts = (o_v < size).to(tl.int32)
        sum_0 += tl.where(keys > pivot_0.to(tl.int32), amounts, 0)
        sum_1 += tl.where(keys > pivot_1.to(tl.int32), amounts, 0)
        sum_2 += tl.where(keys > pivot_2.to(tl.int32), amounts, 0)
    return tl.sum(sum_0, axis=0), tl.sum(sum_1, axis=0), tl.sum(sum_2, axis=0)


@triton.jit
def _least_key(p_scores, size, top, low, high, limit, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the least key in low..high (int64) such that the scores above it have less than `limit` number or mass.

    This must hold for `high`. The result is the key of a score: the last one inside the limit.
    """
    while low < high:
        step = (high - low) // 4
        pivot_0, pivot_1, pivot_2 = low + step, low + 2 * step, low + 3 * step
        sum_0, sum_1, sum_2 = _sums_above(p_scores, size, top, pivot_0, pivot_1, pivot_2, MASS, BLOCK)
        if sum_0 < limit:
            high = pivot_0
        elif sum_1 < limit:
            low, high = pivot_0 + 1, pivot_1
        elif sum_2 < limit:
            low, high = pivot_1 + 1, pivot_2
        else:
            low = pivot_2 + 1
    return low


@triton.jit
def _around_key(p_scores, size, top, key, BLOCK: tl.constexpr):
    """Return the numbers of scores with keys above `key` and equal to it, and the mass of each group."""
    number_above, number_equal = tl.zeros([BLOCK], dtype=tl.int32), tl.zeros([BLOCK], dtype=tl.int32)
    mass_above, mass_equal = tl.zeros([BLOCK], dtype=tl.float32), tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, size, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        m_v = o_v < size
        values = tl.load(p_scores + o_v, mask=m_v, other=float("-inf"))
        keys, mass = _keys(values), tl.exp(values - top)
        is_above, is_equal = m_v & (keys > key.to(tl.int32)), m_v & (keys == key.to(tl.int32))
        number_above += is_above.to(tl.int32)
        number_equal += is_equal.to(tl.int32)
        mass_above += tl.where(is_above, mass, 0.0)
        mass_equal += tl.where(is_equal, mass, 0.0)
    return (
        tl.sum(number_above, axis=0),
        tl.sum(number_equal, axis=0),
        tl.sum(mass_above, axis=0),
        tl.sum(mass_equal, axis=0),
    )


@triton.jit
def truncate_scores(
    numbers,  # see `transform_scores`
    integers,
    scores,  # [rows, VOCAB] fp32, modified in place
    candidates,  # [rows, BLOCK] fp32
    NODES: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    MARGIN: tl.constexpr,
):
    """One program handles one row. It searches the least key to keep, and the number of tokens with this key to keep.

    The search reads the row repeatedly, so it first copies the scores within MARGIN of the best one. It searches the
    whole row only if there are more than BLOCK or fewer than top-k of them, or if they have less mass than top-p.
    """
    row = tl.program_id(0).to(tl.int64)
    request = row // NODES
    top_k = tl.load(integers + request * 3 + 1)
    top_p = tl.load(numbers + request * 6 + 1)
    log_min_p = tl.load(numbers + request * 6 + 2)
    has_top_k = (top_k > 0) & (top_k < VOCAB)
    has_min_p = log_min_p > float("-inf")
    if (tl.load(numbers + request * 6) > 0) & (has_top_k | (top_p < 1.0) | has_min_p):
        p_row = scores + row * VOCAB
        b_top = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        for start in range(0, VOCAB, BLOCK):
            o_v = start + tl.arange(0, BLOCK)
            values = tl.load(p_row + o_v, mask=o_v < VOCAB, other=float("-inf"))
            b_top = tl.maximum(b_top, tl.where(values == values, values, float("inf")))
        top = tl.max(b_top, axis=0)

        p_near = candidates + row * BLOCK
        num_near = tl.full([], 0, dtype=tl.int32)
        b_mass, b_near = tl.zeros([BLOCK], dtype=tl.float32), tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, VOCAB, BLOCK):
            o_v = start + tl.arange(0, BLOCK)
            values = tl.load(p_row + o_v, mask=o_v < VOCAB, other=float("-inf"))
            mass = tl.where(o_v < VOCAB, tl.exp(values - top), 0.0)
            is_near = (o_v < VOCAB) & (values >= top - MARGIN)
            o_near = num_near + tl.cumsum(is_near.to(tl.int32), axis=0) - 1
            tl.store(p_near + o_near, values, mask=is_near & (o_near < BLOCK))
            num_near += tl.sum(is_near.to(tl.int32), axis=0)
            b_mass += mass
            b_near += tl.where(is_near, mass, 0.0)
        tl.debug_barrier()  # the candidates are loaded by other threads than those that stored them
        total, near = tl.sum(b_mass, axis=0), tl.sum(b_near, axis=0)
        p_from, size = p_row, tl.full([], VOCAB, dtype=tl.int32)
        least = tl.full([], _NO_KEY, dtype=tl.int64)
        if (num_near <= BLOCK) & ((has_top_k & (top_k <= num_near)) | ((top_k <= 0) & (near >= top_p * total))):
            p_from, size = p_near, num_near
            least = _keys(top - MARGIN).to(tl.int64)
        highest = _keys(top).to(tl.int64)
        first_equal = tl.full([], VOCAB, dtype=tl.int32)  # the first tokens with the least key are kept
        if has_top_k:
            least = _least_key(p_from, size, top, least, highest, top_k, False, BLOCK)
            above, equal, mass_above, mass_equal = _around_key(p_from, size, top, least, BLOCK)
            first_equal = top_k - above
            total = mass_above + mass_equal * (first_equal.to(tl.float32) / equal.to(tl.float32))
        if top_p < 1.0:
            wanted = top_p * total  # share of the mass that top-k keeps
            key = _least_key(p_from, size, top, least, highest, wanted, True, BLOCK)
            _, equal, mass_above, mass_equal = _around_key(p_from, size, top, key, BLOCK)
            needed = tl.ceil((wanted - mass_above) / (mass_equal / equal.to(tl.float32)))
            needed = tl.minimum(tl.maximum(needed, 1.0), VOCAB).to(tl.int32)
            first_equal = tl.where(key == least, tl.minimum(first_equal, needed), needed)
            least = key
        lowest = tl.where(has_min_p, top + log_min_p, float("-inf"))
        passed = tl.full([], 0, dtype=tl.int32)  # number of tokens with the least key in earlier blocks
        for start in range(0, VOCAB, BLOCK):
            o_v = start + tl.arange(0, BLOCK)
            m_v = o_v < VOCAB
            values = tl.load(p_row + o_v, mask=m_v, other=float("-inf"))
            keys = _keys(values)
            equal_here = (m_v & (keys == least.to(tl.int32))).to(tl.int32)
            order = passed + tl.cumsum(equal_here, axis=0)
            kept = (keys > least.to(tl.int32)) | ((equal_here > 0) & (order <= first_equal))
            kept = (kept & (values >= lowest)) | (values != values)
            tl.store(p_row + o_v, tl.where(kept, values, float("-inf")), mask=m_v)
            passed += tl.sum(equal_here, axis=0)
