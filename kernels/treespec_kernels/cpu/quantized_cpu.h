// Products with quantised weights, included by linear_cpu.h.
//
// A weight is (q - zero) * scale: q is an integer of 8 or 4 bits, and an output has a scale and a zero per group of
// inputs. Integers are converted exactly in registers, and activations are not quantised. A group's sum has the order
// of a dense product over its inputs (products_cpu.h); groups are scaled and added in order, in fp32. So a row's bits
// do not depend on the number of rows.

#if IN_PAIRS
typedef __m512bh widened;  // 16 outputs with two inputs each
constexpr int64_t WIDENED = 2;
#else
typedef vec widened;  // LANES outputs
constexpr int64_t WIDENED = 1;
#endif
constexpr int64_t FEW_QUANTIZED = LANES == 16 ? FEW : 4;  // as FEW; AVX2 also needs registers for integers
// Maximum number of rows that share the conversion of a group's weights. More than FEW_QUANTIZED rows read them twice,
// half of the columns at a time: 8 rows of an 8-bit head take 20 to 27 % less time than in two parts, of 4-bit weights
// 6 to 10 % (Zen 4).
constexpr int64_t MOST_QUANTIZED = IN_PAIRS ? 2 * FEW : FEW_QUANTIZED;
constexpr int64_t STEP = 2;        // inputs whose weights are stored together
constexpr int64_t NIBBLES = 16;    // outputs whose 4-bit weights are in the same bits of consecutive units
constexpr int64_t FETCHED = 4096;  // prefetch distance in bytes

constexpr int64_t step_bytes(int64_t bits) { return STEP * PANEL * bits / 8; }

// Converts the weights of WIDENED inputs, of input `t` of a step on, of C vectors of a panel from `FIRST` on.
template <int BITS, int FIRST, size_t C>
inline __attribute__((always_inline)) void unpack(const uint8_t* from, [[maybe_unused]] int64_t t, widened (&to)[C]) {
#if IN_PAIRS
    if (BITS == 8) {
        for (size_t j = 0; j < C; j++) {
            const __m256i q = load<__m256i>(from + 2 * LANES * (FIRST + j));
            const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(q)));
            const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(q, 1)));
            to[j] = _mm512_cvtne2ps_pbh(high, low);  // integers up to 256 are exact in bf16
        }
    } else {
        // bf16 of -8 .. 7, twice, because the shuffle uses five bits of a lane, and the fifth is the next weight's.
        const __m256i numbers = _mm256_set_epi16(0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0,
                                                 short(0xbf80), short(0xc000), short(0xc040), short(0xc080),
                                                 short(0xc0a0), short(0xc0c0), short(0xc0e0), short(0xc100));
        const __m512i table = _mm512_broadcast_i64x4(numbers), q = load<__m512i>(from);
        for (size_t j = 0; j < C; j++)
            to[j] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(q, 4 * (FIRST + j)), table);
    }
#else
    for (size_t j = 0; j < C; j++) {
        const int64_t output = LANES * (FIRST + j);
        if (BITS == 8) {
            const uint8_t* q = from + t * PANEL + output;
#if defined(__AVX512F__)
            to[j] = (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(q)));
#elif defined(__AVX2__)
            to[j] = (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)q)));
#else
            for (int64_t i = 0; i < LANES; i++) to[j][i] = int8_t(q[i]);
#endif
        } else {
            const int64_t below = 4 * (t * (PANEL / NIBBLES) + output / NIBBLES), above = 28 - below;
#if defined(__AVX512F__)
            // A permutation reads four bits of a lane. One row takes 0.6 of the time that shifts and conversions take.
            const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
            to[j] = (vec)_mm512_permutexvar_ps(_mm512_srli_epi32(load<__m512i>(from), below), table);
            continue;
#endif
            // the sign is extended by a shift
            to[j] = __builtin_convertvector((ivec)(load<uvec>(from + output % NIBBLES * 4) << above) >> 28, vec);
        }
    }
#endif
}

// Adds the products of inputs [begin, end) and C vectors of a panel from COLUMN on, of the chains [FIRST, LAST).
template <int BITS, int ROWS, int COLUMN, int FIRST, int LAST, size_t C>
inline __attribute__((always_inline)) void accumulate_steps(const uint8_t* w, const factor* x, int64_t k, int64_t begin,
                                                            int64_t end, bool fetch,
                                                            vec (&acc)[LAST - FIRST][ROWS][C]) {
    constexpr int64_t INPUTS = CHAINS == 1 ? STEP : LAST;
    if (begin >= end) __builtin_unreachable();  // otherwise the sums of no inputs are written to memory first
    for (int64_t i = begin; i < end; i += STEP, w += step_bytes(BITS)) {
        if (FIRST == 0 && COLUMN == 0 && fetch)
            for (int64_t j = 0; j < step_bytes(BITS); j += 64) __builtin_prefetch(w + FETCHED + j);
        for (int64_t t = FIRST; t < INPUTS; t += WIDENED) {
            widened now[C];
            unpack<BITS, COLUMN>(w, t, now);
            // GCC keeps the weights of two rows in memory: they took 1.8 times as long.
            for (size_t j = 0; ROWS > 1 && j < C; j++) asm("" : WHOLE(now[j]));
            for (int64_t r = 0; r < ROWS; r++) {
                vec(&sums)[C] = acc[CHAINS == 1 ? 0 : t - FIRST][r];
#if IN_PAIRS
                const __m512bh pair = (__m512bh)_mm512_set1_epi32(load<int32_t>(x + r * k + i));
                for (size_t j = 0; j < C; j++) sums[j] = (vec)_mm512_dpbf16_ps((__m512)sums[j], now[j], pair);
#else
                const vec factors = splat(x[r * k + i + t]);
                for (size_t j = 0; j < C; j++) sums[j] = fma(now[j], factors, sums[j]);
#endif
            }
        }
    }
}

// Returns a total with a group's scaled sum added. activations: the sum of the group's activations, if there are zeros.
inline vec add_group(vec total, vec sum, vec scale, bool has_zero, vec zero, float activations) {
    return fma(has_zero ? fma(-zero, splat(activations), sum) : sum, scale, total);
}

// Adds the scaled products of one group of inputs and C vectors of a panel from COLUMN on to `totals`. sums: [ROWS,
// groups], sums of each group's activations; null without zeros. fetch: whether to prefetch.
template <int BITS, int ROWS, int COLUMN, int C>
void multiply_group(const Linear& layer, int64_t panel, int64_t g, const factor* x, const float* sums, bool fetch,
                    vec (*totals)[VECS]) {
    const int64_t k = layer.inputs, groups = k / layer.group, start = g * layer.group, end = start + layer.group;
    const uint8_t* w = (const uint8_t*)layer.weight + (panel * k + start) / STEP * step_bytes(BITS);
    vec sum[ROWS][C];
    if constexpr (CHAINS == 1) {
        vec acc[1][ROWS][C];
        clear(acc[0]);
        accumulate_steps<BITS, ROWS, COLUMN, 0, 1>(w, x, k, start, end, fetch, acc);
        std::memcpy(sum, acc[0], sizeof sum);
    } else {
        for (int64_t begin = start, last; begin < end; begin = last, w += BLOCK / STEP * step_bytes(BITS)) {
            last = std::min(begin + BLOCK, end);
            vec block[ROWS][C];
            sum_chains(
                [&](auto first, auto end, auto& acc) {
                    accumulate_steps<BITS, ROWS, COLUMN, first, end>(w, x, k, begin, last, fetch, acc);
                },
                block);
            for (int64_t r = 0; r < ROWS; r++)
                for (int64_t j = 0; j < C; j++) sum[r][j] = (begin == start ? vec{} : sum[r][j]) + block[r][j];
        }
    }
    const int64_t factors = (panel * groups + g) * PANEL + COLUMN * LANES;
    for (int64_t j = 0; j < C; j++) {
        const vec scale = load<vec>(layer.scale + factors + LANES * j);
        const vec zero = layer.zero ? load<vec>(layer.zero + factors + LANES * j) : vec{};
        for (int64_t r = 0; r < ROWS; r++) {
            vec& total = totals[r][COLUMN + j];
            total = add_group(total, sum[r][j], scale, layer.zero, zero, layer.zero ? sums[r * groups + g] : 0.0f);
        }
    }
}

// As above, for all vectors of a panel from COLUMN on, C at a time.
template <int BITS, int ROWS, int C, int COLUMN = 0>
inline void multiply_columns(const Linear& layer, int64_t panel, int64_t g, const factor* x, const float* sums,
                             bool fetch, vec (*totals)[VECS]) {
    multiply_group<BITS, ROWS, COLUMN, C>(layer, panel, g, x, sums, fetch, totals);
    if constexpr (COLUMN + C < VECS)
        multiply_columns<BITS, ROWS, C, COLUMN + C>(layer, panel, g, x, sums, fetch, totals);
}

// Multiplies a panel with at most MOST_QUANTIZED rows.
template <int BITS, int ROWS>
void multiply(const Linear& layer, int64_t panel, const factor* x, const float* sums, bool fetch, void* out,
              Then then) {
    constexpr int C = ROWS > FEW_QUANTIZED ? COLUMNS / 2 : COLUMNS;
    vec totals[ROWS][VECS] = {};
    for (int64_t g = 0; g < layer.inputs / layer.group; g++)
        multiply_columns<BITS, ROWS, C>(layer, panel, g, x, sums, fetch, totals);
    finish(layer, panel, totals, ROWS, out, then);
}

template <int BITS>
void multiply_panel(const Linear& layer, int64_t panel, const factor* x, int64_t rows, const float* sums, void* out,
                    Then then) {
    const int64_t row_bytes = layer.outputs * (then == ROUND ? sizeof(scalar) : sizeof(float));
    const int64_t groups = layer.inputs / layer.group;
    in_parts(rows, MOST_QUANTIZED, [&](int64_t r, int64_t count) {
        with_constant<MOST_QUANTIZED>(count, [&](auto number) {
            multiply<BITS, number>(layer, panel, x + r * layer.inputs, sums ? sums + r * groups : nullptr, r == 0,
                                   (char*)out + r * row_bytes, then);
        });
    });
}

#if TILES
// Widens the weights of BLOCK inputs of a panel to bf16, in the layout of dense weights.
template <int BITS>
inline void widen_block(const uint8_t* from, uint32_t* to) {
#if BF16
    for (int64_t i = 0; i < BLOCK; i += STEP, from += step_bytes(BITS), to += PANEL)
#if defined(__AVX512BW__)
        if (BITS == 4) {  // bf16 of 0 .. 7 and -8 .. -1, twice, as in `unpack`
            const __m256i numbers = _mm256_set_epi16(short(0xbf80), short(0xc000), short(0xc040), short(0xc080),
                                                     short(0xc0a0), short(0xc0c0), short(0xc0e0), short(0xc100), 0x40e0,
                                                     0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0);
            const __m512i table = _mm512_broadcast_i64x4(numbers), q = load<__m512i>(from);
            _mm512_storeu_si512(to, _mm512_permutexvar_epi16(q, table));
            _mm512_storeu_si512(to + 16, _mm512_permutexvar_epi16(_mm512_srli_epi16(q, 4), table));
            _mm512_storeu_si512(to + 32, _mm512_permutexvar_epi16(_mm512_srli_epi16(q, 8), table));
            _mm512_storeu_si512(to + 48, _mm512_permutexvar_epi16(_mm512_srli_epi16(q, 12), table));
        } else
#endif
            with_all<PARTS>([&](auto part) {
                widened even[COLUMNS], odd[COLUMNS];
                unpack<BITS, part * COLUMNS>(from, 0, even);
                unpack<BITS, part * COLUMNS>(from, 1, odd);
                for (int64_t j = 0; j < COLUMNS; j++) {
                    const uvec units = (uvec)even[j] >> 16 | high_half((uvec)odd[j]);
                    std::memcpy(to + (part * COLUMNS + j) * LANES, &units, sizeof units);
                }
            });
#endif
}

// Scaled sums of `count` groups of inputs from `group` on, and of rows from `row` on, that are not yet in the totals.
struct GroupSums {
    int64_t group, count, row;
    const vec (*sums)[VECS];
    int64_t set, sharing;  // rows of a set of tiles, and groups whose rows share a set
};

// Adds the sums of COUNT groups and at most 32 rows to the totals. group_sums: [rows, groups], sums of activations.
template <int COUNT>
void add_groups(const Linear& layer, int64_t panel, const GroupSums& from, const float* group_sums, int64_t rows,
                vec (*totals)[VECS]) {
    constexpr int64_t WIDTH = 2;  // vectors whose scales and zeros are in registers
    const int64_t groups = layer.inputs / layer.group, count = std::min(2 * TILE_ROWS, rows - from.row);
    const bool has_zero = layer.zero;
    const vec(*sums[COUNT])[VECS];
    for (int64_t i = 0; i < COUNT; i++)
        sums[i] = from.sums + i / from.sharing * from.set + i % from.sharing * (TILE_ROWS / from.sharing);
    for (int64_t column = 0; column < VECS; column += WIDTH) {
        vec scales[COUNT][WIDTH], zeros[COUNT][WIDTH] = {};
        for (int64_t i = 0; i < COUNT; i++)
            for (int64_t j = 0; j < WIDTH; j++) {
                const int64_t factors = (panel * groups + from.group + i) * PANEL + (column + j) * LANES;
                scales[i][j] = load<vec>(layer.scale + factors);
                if (has_zero) zeros[i][j] = load<vec>(layer.zero + factors);
            }
        for (int64_t r = 0; r < count; r++) {
            const float* activations = has_zero ? group_sums + (from.row + r) * groups + from.group : nullptr;
            for (int64_t j = 0; j < WIDTH; j++) {
                vec total = totals[from.row + r][column + j];
                for (int64_t i = 0; i < COUNT; i++)
                    total = add_group(total, sums[i][r][column + j], scales[i][j], has_zero, zeros[i][j],
                                      has_zero ? activations[i] : 0.0f);
                totals[from.row + r][column + j] = total;
            }
        }
    }
}

// How tiles divide the inputs of a layer, whose groups are multiples of BLOCK, for a number of rows.
struct Spans {
    int64_t group;    // blocks of a group
    int64_t length;   // blocks whose products are computed before the next rows: of whole groups, or a part of one
    int64_t sharing;  // groups whose rows share tiles, if there are few rows: the time to store a tile is fixed
    int64_t ahead;    // blocks between a block that is multiplied and one that is widened
    int64_t ring;     // blocks that are in memory, widened; a power of two

    Spans(const Linear& layer, int64_t rows) : group(layer.group / BLOCK) {
        const bool many = rows > TILE_ROWS;
        length = group * std::max<int64_t>((many ? 2 : 4) / group, 1);
        const int64_t groups = length / group;
        sharing = std::min<int64_t>(rows > 8 ? 1 : rows > 4 ? 2 : 4, groups == 3 ? 1 : groups);
        if (many) length = std::min<int64_t>(length, 8);
        ahead = many ? length : 2;
        ring = ahead > 4 ? 16 : ahead > 2 ? 8 : 4;
    }
    int64_t end(int64_t begin, int64_t blocks) const {  // of the span that begins with a block
        return std::min(begin + length, length < group ? (begin / group + 1) * group : blocks);
    }
};

// Multiplies a panel with at most 64 rows. x: from `to_tiles`. group_sums: [rows, groups], sums of each group's
// activations; null without zeros.
template <int BITS>
void multiply_tiles(const Linear& layer, const Spans& spans, int64_t panel, const scalar* x, int64_t rows,
                    const float* group_sums, void* out, Then then) {
#if BF16
    // A load waits until stores to a tile's memory, or of a tile, have reached the cache. So weights are widened ahead,
    // and sums are added while the tiles of the next span are computed.
    const int64_t blocks = layer.inputs / BLOCK, row_blocks = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t block_bytes = BLOCK / STEP * step_bytes(BITS);
    const uint8_t* w = (const uint8_t*)layer.weight + panel * blocks * block_bytes;
    alignas(64) uint32_t wide[16][BLOCK / STEP * PANEL];
    alignas(64) vec totals[4 * TILE_ROWS][VECS], sums[2][4 * TILE_ROWS][VECS];
    std::fill_n(&totals[0][0], rows * VECS, vec{});
    const auto widened = [&](int64_t block) { return wide[block & (spans.ring - 1)]; };
    const auto widen = [&](int64_t block) {
        if (block >= blocks) return;
        for (int64_t i = 0; i < block_bytes; i += 64) __builtin_prefetch(w + block * block_bytes + FETCHED + i);
        widen_block<BITS>(w + block * block_bytes, widened(block));
    };
    const auto add = [&](const GroupSums& from) {
        if (from.count)
            with_constant<4>(from.count, [&](auto count) {
                add_groups<count>(layer, panel, from, group_sums, rows, totals);
            });
    };
    const bool is_partial = spans.length < spans.group;  // a span is a part of one group
    const int64_t low = spans.sharing > 1 ? TILE_ROWS : std::min(rows, TILE_ROWS);
    const TileRows configured(low, row_blocks == 2 ? rows - TILE_ROWS : low);
    GroupSums pending = {};
    for (int64_t block = 0; block < spans.ahead; block++) widen(block);
    for (int64_t begin = 0, end, turn = 0; begin < blocks; begin = end) {
        end = spans.end(begin, blocks);
        const int64_t g = begin / spans.group, count = is_partial ? 1 : (end - begin) / spans.group;
        const bool starts = begin == g * spans.group, ends = end == (g + count) * spans.group;
        for (int64_t t = 0; t < row_blocks; t += 2) {
            const bool is_tall = t + 1 < row_blocks;
            vec(*tiles)[VECS] = sums[is_partial ? t / 2 : turn];
            const GroupSums span = {g, count, t * TILE_ROWS, tiles, (1 + is_tall) * TILE_ROWS, spans.sharing};
            for (int64_t half = 0; half < 1 + is_tall; half++)
                for (int64_t first = begin, last, set = 0; first < end; first = last, set += span.set) {
                    last = std::min(first + spans.sharing * spans.group, end);
                    starts ? zero_tiles() : load_tiles(tiles + set, is_tall, half);
                    for (int64_t block = first; block < last; block++) {
                        if (t == 0 && half == 0) widen(block + spans.ahead);
                        const scalar* from = x + (t * blocks + block) * TILE_SCALARS;
                        if (is_tall) multiply_tall(widened(block) + half * 32, from, blocks * TILE_SCALARS);
                        else multiply_wide(widened(block), from);
                    }
                    is_tall ? store_tall(tiles + set, half) : store_wide(tiles + set);
                }
            if (is_partial) {
                if (ends) add(span);
            } else {
                add(pending);
                pending = span, turn = 1 - turn;
            }
        }
    }
    add(pending);
    finish(layer, panel, totals, rows, out, then);
#endif
}
#endif

void quantized_linear(const Linear& layer, const scalar* x, int64_t rows, void* out, Then then, int threads) {
    static thread_local std::vector<float> summed;
    const int64_t k = layer.inputs, groups = k / layer.group;
    const float* sums = nullptr;
    if (layer.zero) {
        summed.resize(rows * groups);
        for (int64_t i = 0; i < rows * groups; i++) {
            Sums lanes;
            for (int64_t j = 0; j < layer.group; j += LANES) lanes.add(j, widen(x + i * layer.group + j));
            summed[i] = lanes.total();
        }
        sums = summed.data();
    }
#if TILES
    if (rows >= TILED_ROWS_QUANTIZED && layer.group % BLOCK == 0) {
        const Spans spans(layer, rows);
        const scalar* tiles = to_tiles(x, rows, k, spans.group, spans.sharing);
        return parallel(threads, (layer.outputs + PANEL - 1) / PANEL, [&](int64_t panel) {
            const FlushDenormals flushing;
            for (int64_t r = 0; r < rows; r += 4 * TILE_ROWS) {
                const auto multiply = layer.bits == 8 ? multiply_tiles<8> : multiply_tiles<4>;
                void* to = (char*)out + r * layer.outputs * (then == ROUND ? sizeof(scalar) : sizeof(float));
                multiply(layer, spans, panel, tiles + r * k, std::min(4 * TILE_ROWS, rows - r),
                         sums ? sums + r * groups : nullptr, to, then);
            }
        });
    }
#endif
    const factor* factors = to_factors(x, rows * k);
    parallel(threads, (layer.outputs + PANEL - 1) / PANEL, [&](int64_t panel) {
        const FlushDenormals flushing;
        if (layer.bits == 8) multiply_panel<8>(layer, panel, factors, rows, sums, out, then);
        else multiply_panel<4>(layer, panel, factors, rows, sums, out, then);
    });
}

// Returns a weight as `treespec_pack` is given it; past the outputs, 0.
inline uint8_t stored(const uint8_t* values, int64_t outputs, int64_t inputs, int64_t bits, int64_t output,
                      int64_t input) {
    if (output >= outputs) return bits == 8 ? 0 : 8;
    const int64_t i = output * inputs + input;
    return bits == 8 ? values[i] : values[i / 2] >> i % 2 * 4 & 15;
}

void pack(const uint8_t* values, int64_t outputs, int64_t inputs, int64_t bits, uint8_t* out) {
    for (int64_t panel = 0; panel * PANEL < outputs; panel++)
        for (int64_t i = 0; i < inputs; i += STEP, out += step_bytes(bits))
            for (int64_t o = 0; o < PANEL; o++)
                for (int64_t t = 0; t < STEP; t++) {
                    const uint8_t q = stored(values, outputs, inputs, bits, panel * PANEL + o, i + t);
                    const int64_t vector = o / NIBBLES, lane = o % NIBBLES;
                    if (bits == 8) {
                        out[IN_PAIRS ? (vector * NIBBLES + lane) * STEP + t : t * PANEL + o] = q;
                    } else {  // the weight is nibble n of a lane of 2 or 4 bytes
                        const int64_t n = IN_PAIRS ? vector : t * (PANEL / NIBBLES) + vector;
                        uint8_t& byte = out[IN_PAIRS ? (lane * STEP + t) * 2 + n / 2 : lane * 4 + n / 2];
                        const uint8_t nibble = IN_PAIRS ? q : q ^ 8;  // in two's complement, for shifts
                        byte = n % 2 ? byte | nibble << 4 : nibble;
                    }
                }
}
