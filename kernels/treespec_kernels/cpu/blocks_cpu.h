// Blocks of GGUF files: unpacking them, and packing quantised weights for products. Included by linear_cpu.h.

struct Block {  // 32 or SUPER weights of a row, scale * (q - BlockFormat::zero) - minimum
    uint8_t q[SUPER];                         // unsigned; int8 for Q8_0; indices into a table for TABLE
    int8_t scales[16] = {}, minima[16] = {};  // for CODES: factors of d and m, by group
    uint16_t d = 0, m = 0;                    // fp16 bits
    float scale = 0.0f;                       // for FLOATS

    float scale_of(int factors, int64_t g) const {
        return factors == FLOATS ? scale : half_to_float(d) * (factors == CODES ? float(scales[g]) : 1.0f);
    }
    float minimum_of(int factors, int64_t g) const {
        return half_to_float(m) * (factors == CODES ? float(minima[g]) : 1.0f);
    }
};

struct BlockFormat {
    int64_t bytes, values, group;  // bytes and values per block; inputs that share a scale
    int code, zero, factors;       // Code; integer that represents 0; FactorForm
    bool has_min;
    int table;  // index of the table for TABLE
    void (*read)(const uint8_t* from, Block& to);
};

inline uint16_t half_at(const uint8_t* p) { return load<uint16_t>(p); }

// Reads `count` 4-bit integers, the low halves of all bytes first.
inline void read_nibbles(const uint8_t* from, int64_t count, uint8_t* to) {
    for (int64_t i = 0; i < count / 2; i++) to[i] = from[i] & 15, to[count / 2 + i] = from[i] >> 4;
}

// Reads `planes` times `count` integers of BITS bits, the lowest bits of all bytes first.
template <int BITS> inline void add_planes(const uint8_t* from, int64_t count, int64_t planes, int shift, uint8_t* to) {
    for (int64_t p = 0; p < planes; p++)
        for (int64_t i = 0; i < count; i++) to[p * count + i] |= (from[i] >> BITS * p & ((1 << BITS) - 1)) << shift;
}

// Reads the scales and minima of Q4_K and Q5_K: 6 bits each, in 12 bytes.
inline void read_scales_and_minima(const uint8_t* from, Block& to) {
    to.d = half_at(from), to.m = half_at(from + 2), from += 4;
    for (int i = 0; i < 4; i++) {
        to.scales[i] = from[i] & 63, to.minima[i] = from[4 + i] & 63;
        to.scales[4 + i] = (from[8 + i] & 15) | from[i] >> 6 << 4;
        to.minima[4 + i] = from[8 + i] >> 4 | from[4 + i] >> 6 << 4;
    }
}

template <int HEADER> void read_q4(const uint8_t* from, Block& to) {
    to.d = half_at(from), to.m = HEADER == 4 ? half_at(from + 2) ^ 0x8000 : 0;
    read_nibbles(from + HEADER, 32, to.q);
}

template <int HEADER> void read_q5(const uint8_t* from, Block& to) {
    read_q4<HEADER>(from, to);
    read_nibbles(from + HEADER + 4, 32, to.q);
    for (int i = 0; i < 32; i++) to.q[i] |= (from[HEADER + i / 8] >> i % 8 & 1) << 4;
}

void read_q8_0(const uint8_t* from, Block& to) { to.d = half_at(from), std::memcpy(to.q, from + 2, 32); }

void read_q2_k(const uint8_t* from, Block& to) {
    for (int i = 0; i < 16; i++) to.scales[i] = from[i] & 15, to.minima[i] = from[i] >> 4;
    std::memset(to.q, 0, SUPER);
    for (int half = 0; half < 2; half++) add_planes<2>(from + 16 + 32 * half, 32, 4, 0, to.q + 128 * half);
    to.d = half_at(from + 80), to.m = half_at(from + 82);
}

void read_q3_k(const uint8_t* from, Block& to) {
    std::memset(to.q, 0, SUPER);
    for (int half = 0; half < 2; half++) add_planes<2>(from + 32 + 32 * half, 32, 4, 0, to.q + 128 * half);
    add_planes<1>(from, 32, 8, 2, to.q);
    for (int i = 0; i < 16; i++)
        to.scales[i] = int8_t(((from[96 + i % 8] >> i / 8 * 4 & 15) | (from[104 + i % 4] >> i / 4 * 2 & 3) << 4) - 32);
    to.d = half_at(from + 108);
}

void read_q4_k(const uint8_t* from, Block& to) {
    read_scales_and_minima(from, to);
    for (int i = 0; i < 4; i++) read_nibbles(from + 16 + 32 * i, 64, to.q + 64 * i);
}

void read_q5_k(const uint8_t* from, Block& to) {
    read_scales_and_minima(from, to);
    for (int i = 0; i < 4; i++) read_nibbles(from + 48 + 32 * i, 64, to.q + 64 * i);
    add_planes<1>(from + 16, 32, 8, 4, to.q);
}

void read_q6_k(const uint8_t* from, Block& to) {
    for (int half = 0; half < 2; half++) {
        read_nibbles(from + 64 * half, 128, to.q + 128 * half);
        add_planes<2>(from + 128 + 32 * half, 32, 4, 4, to.q + 128 * half);
    }
    std::memcpy(to.scales, from + 192, 16);
    to.d = half_at(from + 208);
}

void read_iq4_xs(const uint8_t* from, Block& to) {
    to.d = half_at(from);
    for (int i = 0; i < 8; i++) {
        to.scales[i] = int8_t(((from[4 + i / 2] >> i % 2 * 4 & 15) | (half_at(from + 2) >> 2 * i & 3) << 4) - 32);
        read_nibbles(from + 8 + 16 * i, 32, to.q + 32 * i);
    }
}

void read_mxfp4(const uint8_t* from, Block& to) {  // the table is doubled, so the power of two is halved
    const uint32_t exponent = from[0];
    to.scale = as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
    read_nibbles(from + 1, 32, to.q);
}

// Returns a block type by its number in GGUF files.
inline const BlockFormat& format_of(int64_t type) {
    static const BlockFormat FORMATS[] = {
        {18, 32, 32, INT4, 8, HALVES, false, 0, read_q4<2>},           // 2: Q4_0
        {20, 32, 32, INT4, 0, HALVES, true, 0, read_q4<4>},            // 3: Q4_1
        {}, {},
        {22, 32, 32, INT5, 16, HALVES, false, 0, read_q5<2>},          // 6: Q5_0
        {24, 32, 32, INT5, 0, HALVES, true, 0, read_q5<4>},            // 7: Q5_1
        {34, 32, 32, INT8, 0, HALVES, false, 0, read_q8_0},            // 8: Q8_0
        {},
        {84, SUPER, 16, INT4, 0, CODES, true, 0, read_q2_k},           // 10: Q2_K
        {110, SUPER, 16, INT4, 4, CODES, false, 0, read_q3_k},         // 11: Q3_K
        {144, SUPER, 32, INT4, 0, CODES, true, 0, read_q4_k},          // 12: Q4_K
        {176, SUPER, 32, INT5, 0, CODES, true, 0, read_q5_k},          // 13: Q5_K
        {210, SUPER, 16, INT6, 32, CODES, false, 0, read_q6_k},        // 14: Q6_K
        {}, {}, {}, {}, {},
        {18, 32, 32, TABLE, 0, HALVES, false, 0, read_q4<2>},          // 20: IQ4_NL
        {}, {},
        {136, SUPER, 32, TABLE, 0, CODES, false, 0, read_iq4_xs},      // 23: IQ4_XS
    };
    static const BlockFormat MXFP4 = {17, 32, 32, TABLE, 0, FLOATS, false, 1, read_mxfp4};  // 39
    return type == 39 ? MXFP4 : FORMATS[type - 2];
}

// Converts a row of blocks to fp32. inputs: a multiple of the values per block.
void dequantize_row(int64_t type, const uint8_t* from, int64_t inputs, float* to) {
    const BlockFormat& format = format_of(type);
    const float* table = table_of(format.table).values;
    Block block;
    for (int64_t i = 0; i < inputs; i += format.values, from += format.bytes, to += format.values) {
        format.read(from, block);
        for (int64_t j = 0; j < format.values; j++) {
            const float q = format.code == TABLE  ? table[block.q[j]]
                            : format.code == INT8 ? float(int8_t(block.q[j]))
                                                  : float(int(block.q[j]) - format.zero);
            const float value = block.scale_of(format.factors, j / format.group) * q;
            to[j] = format.has_min ? value - block.minimum_of(format.factors, j / format.group) : value;
        }
    }
}

// Writes the integers of `count` inputs of a panel, starting at `first` in its group. q: [PANEL][SUPER].
inline void pack_values(const Linear& layer, const uint8_t (*q)[SUPER], int64_t first, int64_t count, uint8_t* group) {
    const int code = int(layer.code), high = high_bits(code);
    const int64_t unit = layer.integer ? QUAD : STEP, inputs = high ? OCTET : unit;
    if (code == INT8) {
        for (int64_t o = 0; o < PANEL; o++)
            for (int64_t i = 0; i < count; i++) {
                uint8_t* const to = group + value_bytes(INT8, (first + i) / unit * unit);
                if (layer.integer) to[o * QUAD + i % QUAD] = q[o][i] ^ 128;
                else to[IN_PAIRS ? o * STEP + i % STEP : i % STEP * PANEL + o] = q[o][i];
            }
        return;
    }
    // In each of the four vectors of a panel, outputs `lane` share a unit of 16 bits, or a byte of each of two halves
    // if activations are integers; `tops` holds the high bits of all four.
    uint16_t lows[NIBBLES][SUPER];
    uint8_t tops[NIBBLES][SUPER];
    for (int64_t lane = 0; lane < NIBBLES; lane++) {
        const uint8_t *a = q[lane], *b = q[NIBBLES + lane], *c = q[2 * NIBBLES + lane], *d = q[3 * NIBBLES + lane];
        for (int64_t i = 0; i < count; i++) {
            lows[lane][i] = uint16_t((a[i] & 15) | (b[i] & 15) << 4 | (c[i] & 15) << 8 | (d[i] & 15) << 12);
            tops[lane][i] = uint8_t(a[i] >> 4 | b[i] >> 4 << high | c[i] >> 4 << 2 * high | d[i] >> 4 << 3 * high);
        }
    }
    for (int64_t i = 0; i < count; i += inputs) {
        uint8_t* to = group + value_bytes(code, first + i);
        for (int64_t j = i; j < i + inputs; j += unit, to += value_bytes(INT4, unit))
            for (int64_t lane = 0; lane < NIBBLES; lane++) {
                if (!layer.integer) {
                    std::memcpy(to + lane * 4, &lows[lane][j], 4);
                    continue;
                }
                for (int64_t t = 0; t < QUAD; t++)
                    for (int64_t half = 0; half < 2; half++)
                        to[64 * half + lane * QUAD + t] = uint8_t(lows[lane][j + t] >> 8 * half);
            }
        for (int64_t lane = 0; high && lane < NIBBLES; lane++) {
            const uint8_t* top = &tops[lane][i];
            if (layer.integer) {
                for (int64_t t = 0; t < QUAD; t++) {
                    if (high == 1) to[lane * QUAD + t] = uint8_t(top[t] | top[QUAD + t] << 4);
                    else to[lane * QUAD + t] = top[t], to[64 + lane * QUAD + t] = top[QUAD + t];
                }
                continue;
            }
            for (int64_t t = 0; t < STEP; t++)
                for (int64_t p = 0; p < OCTET / STEP; p++) {
                    uint8_t* const at = to + (high == 1 ? 0 : p / 2 * PANEL) + (lane * STEP + t) * 2;
                    if (high == 2) at[p % 2] = top[STEP * p + t];
                    else at[p / 2] = uint8_t(p % 2 ? at[p / 2] | top[STEP * p + t] << 4 : top[STEP * p + t]);
                }
        }
    }
}

// Finds a row of joined matrices. Returns null past the last one.
inline const Source* row_of(const Source* sources, int64_t count, int64_t& row) {
    for (; count > 0; sources++, count--) {
        if (row < sources->outputs) return sources;
        row -= sources->outputs;
    }
    return nullptr;
}

// Writes a panel of blocks of a type.
void pack_blocks(const Linear& layer, int64_t type, const Source* sources, int64_t num_sources, int64_t panel,
                 uint8_t* out) {
    const BlockFormat& format = format_of(type);
    const Geometry sizes(layer);
    static const Block EMPTY{};
    std::vector<Block> blocks(PANEL, EMPTY);
    std::vector<uint8_t> values(PANEL * SUPER);
    auto* const q = (uint8_t(*)[SUPER])values.data();
    const int64_t row_bytes = layer.inputs / format.values * format.bytes;
    const uint8_t* rows[PANEL];
    for (int64_t o = 0; o < PANEL; o++) {
        int64_t row = panel * PANEL + o;
        const Source* source = row_of(sources, num_sources, row);
        rows[o] = source ? source->values + row * row_bytes : nullptr;
    }
    for (int64_t i = 0; i < layer.inputs; i += format.values) {
        for (int64_t o = 0; o < PANEL; o++)
            if (rows[o]) {
                format.read(rows[o] + i / format.values * format.bytes, blocks[o]);
                std::memcpy(q[o], blocks[o].q, format.values);
            }
        if (format.factors == CODES)
            for (int64_t o = 0; o < PANEL; o++, out += 2) {
                std::memcpy(out, &blocks[o].d, 2);
                if (format.has_min) std::memcpy(out + 2 * PANEL, &blocks[o].m, 2);
            }
        if (format.factors == CODES && format.has_min) out += 2 * PANEL;
        for (int64_t g = 0; g < format.values / format.group; g++, out += sizes.group_bytes) {
            for (int64_t o = 0; o < PANEL; o++) {
                const Block& block = blocks[o];
                if (format.factors == CODES) {
                    out[o] = uint8_t(block.scales[g]);
                    if (format.has_min) out[PANEL + o] = uint8_t(block.minima[g]);
                } else if (format.factors == HALVES) {
                    std::memcpy(out + 2 * o, &block.d, 2);
                    if (format.has_min) std::memcpy(out + 2 * (PANEL + o), &block.m, 2);
                } else {
                    std::memcpy(out + 4 * o, &block.scale, 4);
                }
            }
            if (g) for (int64_t o = 0; o < PANEL; o++) std::memcpy(q[o], blocks[o].q + g * format.group, format.group);
            pack_values(layer, q, 0, format.group, out + sizes.factor_bytes);
        }
    }
}

// Writes a panel of integers of 4 or 8 bits with fp32 scales.
void pack_integers(const Linear& layer, const Source* sources, int64_t num_sources, int64_t panel, uint8_t* out) {
    const Geometry sizes(layer);
    std::vector<uint8_t> values(PANEL * SUPER);
    auto* const q = (uint8_t(*)[SUPER])values.data();
    for (int64_t g = 0; g < sizes.groups; g++, out += sizes.group_bytes) {
        float* const factors = (float*)out;
        for (int64_t first = 0; first < layer.group; first += SUPER) {
            const int64_t count = std::min(SUPER, layer.group - first), begin = g * layer.group + first;
            for (int64_t o = 0; o < PANEL; o++) {
                int64_t row = panel * PANEL + o;
                const Source* source = row_of(sources, num_sources, row);
                for (int64_t i = 0; i < count; i++) {
                    const int64_t place = row * layer.inputs + begin + i;
                    q[o][i] = !source ? 0 : layer.code == INT8 ? source->values[place]
                                                               : source->values[place / 2] >> place % 2 * 4 & 15;
                }
                const int64_t place = row * sizes.groups + g;
                factors[o] = source ? source->scale[place] : 0.0f;
                if (layer.has_min) factors[PANEL + o] = source && source->zero ? source->zero[place] * factors[o] : 0.0f;
            }
            pack_values(layer, q, first, count, out + sizes.factor_bytes);
        }
    }
}
