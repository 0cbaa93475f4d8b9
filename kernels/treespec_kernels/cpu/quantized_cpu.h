// Products with quantised weights, included by linear_cpu.h.
//
// A weight is (q - zero) * scale: q is an integer of 8 or 4 bits, and an output has a scale and a zero per group of
// inputs. Integers are converted exactly in registers, and activations are not quantised. A group's sum has the order
// of a dense product over its inputs (products_cpu.h); groups are scaled and added in order, in fp32. So a row's bits
// do not depend on the number of rows.
//
// A weight of 4 bits is multiplied as q + NIBBLE_BIAS, 16 .. 31: floating-point numbers that differ only in the four
// highest bits of the mantissa, which a shift and a ternary operation convert. Its zero is stored plus NIBBLE_BIAS.

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
constexpr int NIBBLE_BIAS = 24;    // q is from -8 to 7

// Whether sums of activations are needed, for zeros or for NIBBLE_BIAS.
inline bool needs_sums(const Linear& layer) { return layer.zero || layer.bits == 4; }

// Returns the zeros of LANES outputs of a group, from index `i` on. zeros: as in Linear.
template <int BITS> inline vec zeros_at(const float* zeros, int64_t i) {
    return zeros ? load<vec>(zeros + i) : splat(BITS == 4 ? NIBBLE_BIAS : 0);
}

#if BF16 && defined(__AVX512BW__)
// Converts the 4-bit weights of vector J of a panel to pairs of bf16, plus NIBBLE_BIAS.
template <int J> inline __m512i nibbles_to_pairs(__m512i q) {
    if constexpr (J == 0) q = _mm512_slli_epi16(q, 3);
    else q = _mm512_srli_epi16(q, 4 * J - 3);
    // 0xea: q & mask | 16.0
    return _mm512_ternarylogic_epi32(q, _mm512_set1_epi16(0x78), _mm512_set1_epi16(0x4180), 0xea);
}
#endif

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
        const __m512i q = load<__m512i>(from);
        with_all<C>([&](auto j) { to[j] = (__m512bh)nibbles_to_pairs<FIRST + j>(q); });
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
            const int64_t below = 4 * (t * (PANEL / NIBBLES) + output / NIBBLES);
#if defined(__AVX512F__)
            // A permutation reads four bits of a lane. One row takes 0.6 of the time that shifts and conversions take.
            const __m512 table = _mm512_setr_ps(16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
            to[j] = (vec)_mm512_permutexvar_ps(_mm512_srli_epi32(load<__m512i>(from), below), table);
            continue;
#endif
            const uvec q = load<uvec>(from + output % NIBBLES * 4);
            to[j] = (vec)((below > 19 ? q >> (below - 19) : q << (19 - below)) & 0x780000u | 0x41800000u);
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
        const vec zero = zeros_at<BITS>(layer.zero, factors + LANES * j);
        for (int64_t r = 0; r < ROWS; r++) {
            vec& total = totals[r][COLUMN + j];
            total = add_group(total, sum[r][j], scale, sums, zero, sums ? sums[r * groups + g] : 0.0f);
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
// Widens the weights of SPAN inputs and 16 outputs, those of tile J of a panel, to bf16: [SPAN / 2][16] pairs of inputs.
template <int BITS, int SPAN, int J>
inline __attribute__((always_inline)) void widen_tile(const uint8_t* from, uint32_t* to) {
#if BF16
    for (int64_t i = 0; i < SPAN; i += STEP, from += step_bytes(BITS), to += 16) {
#if defined(__AVX512BW__)
        if (BITS == 4) {
            _mm512_store_si512(to, nibbles_to_pairs<J>(load<__m512i>(from)));
            continue;
        }
#endif
        constexpr int C = 16 / LANES;
        widened even[C], odd[C];
        unpack<BITS, J * C>(from, 0, even);
        unpack<BITS, J * C>(from, 1, odd);
        for (int64_t j = 0; j < C; j++) {
            const uvec units = (uvec)even[j] >> 16 | high_half((uvec)odd[j]);
            std::memcpy(to + j * LANES, &units, sizeof units);
        }
    }
#endif
}

// Sums of a group of inputs of a panel for up to 16 rows, stored as four tiles, [4][16][16].
struct GroupSums {
    const float* sums = nullptr;
    int64_t rows = 0;           // 0: the group is not complete
    const float *scale, *zero;  // of the group, PANEL each; zero may be null
    const float* activations;   // the group's sums of activations, rows `groups` apart; null without zeros
    int64_t groups;
    vec (*totals)[VECS];
};

// Adds the scaled sums of rows 4 * quarter .. 4 * quarter + 3 to the totals.
template <int BITS> inline void add_quarter(const GroupSums& from, int64_t quarter) {
    const int64_t begin = 4 * quarter, end = std::min(begin + 4, from.rows);
    if (begin >= end) return;
    vec scales[VECS], zeros[VECS];
    for (int64_t j = 0; j < VECS; j++) {
        scales[j] = load<vec>(from.scale + j * LANES);
        zeros[j] = zeros_at<BITS>(from.zero, j * LANES);
    }
    const auto add = [&](auto has_zero) {
        for (int64_t row = begin; row < end; row++) {
            vec* const totals = from.totals[row];
            const float activations = has_zero ? from.activations[row * from.groups] : 0.0f;
            for (int64_t j = 0; j < VECS; j++) {
                const vec sum = load<vec>(from.sums + (j * LANES / 16 * TILE_ROWS + row) * 16 + j * LANES % 16);
                totals[j] = add_group(totals[j], sum, scales[j], has_zero, zeros[j], activations);
            }
        }
    };
    BITS == 4 || from.activations ? add(std::true_type()) : add(std::false_type());
}

// Multiplies a panel with at most 64 rows. x: of TiledRows. group_sums: [rows, groups], sums of each group's
// activations; null without zeros.
//
// A block has SPAN inputs: BLOCK, or 16 where BLOCK does not divide groups.
//
// A step computes the tiles of one block of rows and `length` blocks of a group's inputs. A load waits until older
// stores to the same place of any page have reached the cache, which they do only after all older instructions, such as
// a product of 50 cycles. So the loads and stores between two products of a step belong to other steps: the last one's
// sums are stored, those of the one before are added to the totals, and the weights of the next block are widened.
template <int BITS, int SPAN>
void multiply_tiles(const Linear& layer, int64_t panel, const scalar* x, int64_t rows, const float* group_sums,
                    void* out, Then then) {
    constexpr int64_t BLOCK_BYTES = SPAN / STEP * step_bytes(BITS), LINES = BLOCK_BYTES / 64 / 4;
    constexpr int64_t FETCHED_BLOCKS = FETCHED / BLOCK_BYTES, PARTS_OF_TILE = BLOCK / SPAN;
    const int64_t blocks = layer.inputs / SPAN, row_blocks = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t group = layer.group / SPAN, groups = blocks / group, length = std::min<int64_t>(group, 4);
    const int64_t ring = row_blocks == 1 || length == 1 ? 1 : 7;  // few blocks, which stay in the L1 cache
    const uint8_t* w = (const uint8_t*)layer.weight + panel * blocks * BLOCK_BYTES;
    const float* scale = layer.scale + panel * groups * PANEL;
    const float* zero = layer.zero ? layer.zero + panel * groups * PANEL : nullptr;
    alignas(64) uint32_t wide[8][4][TILE_ROWS * 16];
    alignas(64) float sums[4][4][TILE_ROWS * 16];
    alignas(64) vec totals[4 * TILE_ROWS][VECS];
    std::fill_n(&totals[0][0], rows * VECS, vec{});

    const auto widen = [&](int64_t block, auto j) __attribute__((always_inline)) {
        const uint8_t* from = w + block * BLOCK_BYTES;
        for (int64_t i = 0; i < LINES; i++) __builtin_prefetch(from + FETCHED + 64 * (LINES * j + i));
        if (group == 1) {  // the factors of fewer groups need no prefetch
            __builtin_prefetch(scale + (block + FETCHED_BLOCKS) * PANEL + 16 * j);
            if (zero) __builtin_prefetch(zero + (block + FETCHED_BLOCKS) * PANEL + 16 * j);
        }
        widen_tile<BITS, SPAN, j>(from, wide[block & ring][j]);
    };
    with_all<4>([&](auto j) { widen(0, j); });
    const TileRows configured(std::min(rows, TILE_ROWS), std::min(rows, TILE_ROWS), SPAN);
    const bool is_partial = group > length;  // a step has a part of a group
    GroupSums last, before;  // the sums of the last step and the one before
    int64_t g = 0, turn = 0;
    for (int64_t begin = 0, end; begin < blocks; begin = end) {
        const int64_t group_end = (g + 1) * group;
        end = std::min(begin + length, group_end);
        const bool starts = begin == g * group, ends = end == group_end;
        for (int64_t t = 0; t < row_blocks; t++) {
            const int64_t row = t * TILE_ROWS;
            float(*const own)[TILE_ROWS * 16] = sums[is_partial ? t : turn];
            const bool stays = !starts && row_blocks == 1;  // the sums stay in their tiles
            for (int64_t block = begin; block < end; block++) {
                const int64_t tile = (t * blocks + block) / PARTS_OF_TILE, part = block % PARTS_OF_TILE;
                tile_load<4>(x + tile * TILE_SCALARS + part * SPAN, 64);
                with_all<4>([&](auto j) {
                    if (block == begin && !stays) {
                        if (last.sums) tile_store<j>((char*)last.sums + j * 1024, 64);
                        if (starts) tile_zero<j>();
                        else tile_load<j>(own[j], 64);
                    }
                    tile_load<6>(wide[block & ring][j], 64);
                    tile_multiply<j, 4, 6>();
                    tile_free<6>();
                    if (t == 0 && block + 1 < blocks) widen(block + 1, j);
                    if (block == begin) add_quarter<BITS>(before, j);
                });
                tile_free<4>();
            }
            before = last;
            last = {own[0], ends ? std::min(TILE_ROWS, rows - row) : 0, scale + g * PANEL,
                    zero ? zero + g * PANEL : nullptr, group_sums ? group_sums + row * groups + g : nullptr, groups,
                    totals + row};
            turn = 1 - turn;
        }
        g += ends;
    }
    for (int64_t j = 0; j < 4; j++) add_quarter<BITS>(before, j);
    with_all<4>([&](auto j) { tile_store<j>((char*)last.sums + j * 1024, 64); });
    for (int64_t j = 0; j < 4; j++) add_quarter<BITS>(last, j);
    finish(layer, panel, totals, rows, out, then);
}
#endif

void quantized_linear(const Linear& layer, const scalar* x, int64_t rows, void* out, Then then, int threads) {
    static thread_local std::vector<float> summed;
    const int64_t k = layer.inputs, groups = k / layer.group;
    if (needs_sums(layer)) summed.resize(rows * groups);
    float* const sums = needs_sums(layer) ? summed.data() : nullptr;
    const auto sum_groups = [&](int64_t r) {
        for (int64_t g = 0; sums && g < groups; g++) {
            Sums lanes;
            for (int64_t j = 0; j < layer.group; j += LANES) lanes.add(j, widen(x + r * k + g * layer.group + j));
            sums[r * groups + g] = lanes.total();
        }
    };
    const int preparing = threads_of_rows(rows, threads);
#if TILES
    if (rows >= tiled_rows_quantized(layer.bits) && layer.group % 16 == 0 && k % BLOCK == 0) {
        const TiledRows tiles(rows, k);
        parallel(preparing, rows, [&](int64_t r) { sum_groups(r), tiles.copy(r, x + r * k); });
        return parallel(threads, (layer.outputs + PANEL - 1) / PANEL, [&](int64_t panel) {
            const FlushDenormals flushing;
            for (int64_t r = 0; r < rows; r += 4 * TILE_ROWS) {
                const bool whole = layer.group % BLOCK == 0;
                const auto multiply = layer.bits == 8 ? whole ? multiply_tiles<8, BLOCK> : multiply_tiles<8, 16>
                                                      : whole ? multiply_tiles<4, BLOCK> : multiply_tiles<4, 16>;
                void* to = (char*)out + r * layer.outputs * (then == ROUND ? sizeof(scalar) : sizeof(float));
                multiply(layer, panel, tiles.data() + r * k, std::min(4 * TILE_ROWS, rows - r),
                         sums ? sums + r * groups : nullptr, to, then);
            }
        });
    }
#endif
    parallel(preparing, rows, sum_groups);
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
                    } else {  // of a unit of 16 bits per lane and input, `vector` is the nibble
                        uint8_t& byte = out[(lane * STEP + t) * 2 + vector / 2];
                        byte = vector % 2 ? byte | q << 4 : q;
                    }
                }
}
