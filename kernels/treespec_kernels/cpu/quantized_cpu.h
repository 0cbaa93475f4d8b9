// Products with quantised weights, included by linear_cpu.h.
//
// A weight is scale * q - min: q is an integer of 4, 5, 6 or 8 bits, or one of 16 table values, and each output has a
// scale and possibly a minimum per group of inputs. Integers are converted exactly in registers; activations are not
// quantised. A group's sum has the order of a dense product over its inputs (products_cpu.h); groups are scaled and
// added in order, in fp32. Hence a row's bits do not depend on the number of rows.
//
// Integers q of B < 8 bits are multiplied as q + 2^B: floating-point numbers that differ only in the highest B bits of
// the mantissa, which shifts and ternary operations set. `Linear::base` is their excess over the weight.
//
// A panel is one stream of groups (`Geometry`): the factors of 64 outputs, then the integers of STEP inputs at a time.
// 5- and 6-bit integers are stored in octets: 8 inputs with the low 4 bits of each, then the high bits of all.

#if IN_PAIRS
typedef __m512bh widened;  // 16 outputs with two inputs each
constexpr int64_t WIDENED = 2;
#else
typedef vec widened;  // LANES outputs
constexpr int64_t WIDENED = 1;
#endif
constexpr int64_t FEW_QUANTIZED = 4;
// Maximum number of rows that share the conversion of a group's weights. More than FEW_QUANTIZED rows read them twice,
// half of the columns at a time: 8 rows of an 8-bit head take 20 to 27 % less time than in two parts, of 4-bit weights
// 6 to 10 % (Zen 4).
constexpr int64_t MOST_QUANTIZED = IN_PAIRS ? 8 : FEW_QUANTIZED;
constexpr int64_t STEP = 2;        // inputs whose weights are stored together
constexpr int64_t OCTET = 8;       // inputs whose high bits are stored together
constexpr int64_t NIBBLES = 16;    // outputs whose 4-bit weights are in the same bits of consecutive units
constexpr int64_t SUPER = 256;     // inputs that share the factors of CODES
constexpr int64_t FETCHED = 4096;  // prefetch distance in bytes

// Prefetching of weights: none; lines for all caches; or lines that bypass the larger caches (only L1), so that these
// keep the drafts' weights and other data of a round.
enum Fetch { NOTHING, TO_KEEP, ONCE };

inline __attribute__((always_inline)) void prefetch(const void* from, Fetch fetch) {
    if (fetch == ONCE) __builtin_prefetch(from, 0, 0);
    else __builtin_prefetch(from);
}

constexpr int high_bits(int code) { return code == INT5 ? 1 : code == INT6 ? 2 : 0; }
constexpr int64_t value_bits(int code) { return code == TABLE ? 4 : code; }
constexpr int leading(int code) { return 0x3f80 + (code << 7); }  // 2^code in bf16
constexpr int64_t unit_inputs(int code) { return high_bits(code) ? OCTET : STEP; }
// Bytes of a panel's `inputs` inputs.
constexpr int64_t value_bytes(int code, int64_t inputs) { return inputs * PANEL * value_bits(code) / 8; }

struct Table {  // the 16 values of TABLE, in the formats of the products
    uint16_t halves[32];  // bf16, twice, for indices whose fifth bit is another weight's
    float values[16];
    uint8_t raised[16];  // with 128 added
};
inline const Table& table_of(int64_t index) {
    static const std::vector<Table> tables = [] {
        constexpr int8_t VALUES[2][16] = {  // IQ4, and E2M1 doubled
            {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
            {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}};
        std::vector<Table> all(2);
        for (int t = 0; t < 2; t++)
            for (int i = 0; i < 32; i++) {
                const float value = VALUES[t][i % 16];
                all[t].values[i % 16] = value, all[t].raised[i % 16] = uint8_t(VALUES[t][i % 16] + 128);
                all[t].halves[i] = uint16_t(load<uint32_t>(&value) >> 16);
            }
        return all;
    }();
    return tables[index];
}

// Sizes in a panel's stream: for every SUPER inputs of CODES [d][d of the minima], for every group [scales]
// [minima][integers].
struct Geometry {
    int64_t super_groups, super_bytes, factor_bytes, group_bytes, groups;
    explicit Geometry(const Linear& layer)
        : super_groups(layer.factors == CODES ? SUPER / layer.group : INT64_MAX),
          super_bytes(layer.factors == CODES ? PANEL * 2 * (1 + layer.has_min) : 0),
          factor_bytes(PANEL * (layer.factors == FLOATS ? 4 : layer.factors == HALVES ? 2 : 1) * (1 + layer.has_min)),
          group_bytes(factor_bytes + value_bytes(int(layer.code), layer.group)), groups(layer.inputs / layer.group) {}
    int64_t panel_bytes() const { return start_of(groups - 1) + group_bytes; }
    // Offsets of a group's factors, and of the d that it shares.
    int64_t start_of(int64_t g) const {
        return g * group_bytes + (super_bytes ? (g / super_groups + 1) * super_bytes : 0);
    }
    int64_t super_of(int64_t g) const { return start_of(g - g % super_groups) - super_bytes; }
};

inline float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, rest = uint32_t(half & 0x7fff);
    if (rest >= 0x7c00) return as_float(sign | 0x7f800000u | (rest & 0x3ff) << 13);
    if (rest >= 0x400) return as_float(sign | ((rest << 13) + (112u << 23)));
    return (sign ? -1.0f : 1.0f) * float(rest) * 0x1p-24f;
}

inline vec load_halves(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(load<__m256i>(p));
#elif defined(__F16C__)
    return (vec)_mm256_cvtph_ps(load<__m128i>(p));
#else
    vec result = {};
    for (int64_t i = 0; i < LANES; i++) result[i] = half_to_float(p[i]);
    return result;
#endif
}

inline vec load_bytes(const uint8_t* p) {  // signed
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(p)));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    vec result = {};
    for (int64_t i = 0; i < LANES; i++) result[i] = int8_t(p[i]);
    return result;
#endif
}

// Whether sums of activations are needed, for minima or for `base`.
inline bool needs_sums(const Linear& layer) { return layer.has_min || layer.base != 0.0f; }

// Scales and offsets of a group's outputs; an offset is the excess of a scaled sum per activation.
struct Factors { vec scale[VECS], offset[VECS]; };

// Reads the factors of a group at `from`, for integers with an excess of `base`.
inline void read_factors(const Linear& layer, const uint8_t* super, const uint8_t* from, float base, Factors& to) {
    const auto read = [&](int64_t i) {
        if (layer.factors == FLOATS) return load<vec>((const float*)from + i);
        if (layer.factors == HALVES) return load_halves((const uint16_t*)from + i);
        return load_halves((const uint16_t*)super + i) * load_bytes(from + i);
    };
    for (int64_t j = 0; j < VECS; j++) {
        to.scale[j] = read(j * LANES);
        to.offset[j] = splat(base) * to.scale[j];
        if (layer.has_min) to.offset[j] = fma(splat(base), to.scale[j], read(PANEL + j * LANES));
    }
}

#if BF16 && defined(__AVX512BW__)
// Shifts 16-bit units, to the left if BY is positive.
template <int BY> inline __m512i shifted(__m512i q) {
    if constexpr (BY > 0) return _mm512_slli_epi16(q, BY);
    else if constexpr (BY < 0) return _mm512_srli_epi16(q, -BY);
    else return q;
}

// Converts the weights of step P of an octet (0 without octets) and vector J of a panel to pairs of bf16.
template <int CODE, int P, int J>
inline __attribute__((always_inline)) __m512i to_pairs(__m512i low, [[maybe_unused]] __m512i high,
                                                       [[maybe_unused]] __m512i table) {
    // 0xea: a & b | c
    if constexpr (CODE == TABLE) return _mm512_permutexvar_epi16(shifted<-4 * J>(low), table);
    constexpr int SHIFT = 7 - int(value_bits(CODE)), BITS = high_bits(CODE);
    const __m512i nibbles = _mm512_ternarylogic_epi32(shifted<SHIFT - 4 * J>(low), _mm512_set1_epi16(15 << SHIFT),
                                                      _mm512_set1_epi16(leading(CODE)), 0xea);
    if constexpr (BITS == 0) return nibbles;
    constexpr int BELOW = BITS == 1 ? 4 * P + J : 8 * (P % 2) + 2 * J;
    const __m512i mask = _mm512_set1_epi16(((1 << BITS) - 1) << (SHIFT + 4));
    return _mm512_ternarylogic_epi32(shifted<SHIFT + 4 - BELOW>(high), mask, nibbles, 0xea);
}
#endif

// The weights of one step of a panel, with the high bits of its octet.
template <int CODE, int P> struct Step {
    const uint8_t *low, *high;  // high: unused without octets
    explicit Step(const uint8_t* unit)
        : low(unit + P * PANEL), high(unit + value_bytes(INT4, OCTET) + (CODE == INT6 ? P / 2 * PANEL : 0)) {}
};

// Converts the weights of WIDENED inputs, starting at input T of step P, for C vectors of a panel starting at FIRST.
template <int CODE, int P, int T, int FIRST, size_t C>
inline __attribute__((always_inline)) void unpack(const uint8_t* unit, [[maybe_unused]] const Table* table,
                                                  widened (&to)[C]) {
    [[maybe_unused]] const Step<CODE, P> from(unit);
#if IN_PAIRS
    if constexpr (CODE == INT8) {
        for (size_t j = 0; j < C; j++) {
            const __m256i q = load<__m256i>(unit + 2 * LANES * (FIRST + j));
            const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(q)));
            const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(q, 1)));
            to[j] = _mm512_cvtne2ps_pbh(high, low);  // integers up to 256 are exact in bf16
        }
    } else {
        const __m512i low = load<__m512i>(from.low), high = high_bits(CODE) ? load<__m512i>(from.high) : low;
        const __m512i values = CODE == TABLE ? load<__m512i>(table->halves) : low;
        with_all<C>([&](auto j) { to[j] = (__m512bh)to_pairs<CODE, P, FIRST + j>(low, high, values); });
    }
#else
    for (size_t j = 0; j < C; j++) {
        const int64_t output = LANES * (FIRST + j), vector = output / NIBBLES, below = 16 * T + 4 * vector;
        if constexpr (CODE == INT8) {
            to[j] = load_bytes(unit + T * PANEL + output);
            continue;
        }
        const uvec q = load<uvec>(from.low + output % NIBBLES * 4);
        if constexpr (CODE == INT4 || CODE == TABLE) {
#if defined(__AVX512F__)
            // A permutation reads four bits of a lane. One row takes 0.6 times as long as with shifts and conversions.
            const __m512 numbers = _mm512_setr_ps(16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
            const __m512 values = CODE == TABLE ? load<__m512>(table->values) : numbers;
            to[j] = (vec)_mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)q, below), values);
            continue;
#elif defined(__AVX2__)
            if constexpr (CODE == TABLE) {
                const __m256i index = (__m256i)(q >> below);
                const __m256 low = _mm256_permutevar8x32_ps(load<__m256>(table->values), index);
                const __m256 high = _mm256_permutevar8x32_ps(load<__m256>(table->values + 8), index);
                to[j] = (vec)_mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32(index, 28));
                continue;
            }
#else
            if constexpr (CODE == TABLE) {
                for (int64_t i = 0; i < LANES; i++) to[j][i] = table->values[q[i] >> below & 15];
                continue;
            }
#endif
        }
        constexpr int FIRST_BIT = 23 - int(value_bits(CODE)), BITS = high_bits(CODE);
        const uvec low = below > FIRST_BIT ? q >> (below - FIRST_BIT) : q << (FIRST_BIT - below);
        to[j] = (vec)(low & 15u << FIRST_BIT | uint32_t(leading(CODE)) << 16);
        if constexpr (BITS > 0) {
            const int64_t above = 16 * T + (BITS == 1 ? 4 * P : 8 * (P % 2)) + BITS * vector;
            const uvec rest = load<uvec>(from.high + output % NIBBLES * 4);
            const uvec high = above > FIRST_BIT + 4 ? rest >> (above - FIRST_BIT - 4) : rest << (FIRST_BIT + 4 - above);
            to[j] = (vec)((uvec)to[j] | high & ((1u << BITS) - 1) << (FIRST_BIT + 4));
        }
    }
#endif
}

// Adds the products of inputs [begin, end) and C vectors of a panel, starting at COLUMN, for chains [FIRST, LAST).
template <int CODE, int ROWS, int COLUMN, int FIRST, int LAST, size_t C>
inline __attribute__((always_inline)) void accumulate_steps(const uint8_t* w, const Table* table, const factor* x,
                                                            int64_t k, int64_t begin, int64_t end, Fetch fetch,
                                                            vec (&acc)[LAST - FIRST][ROWS][C]) {
    constexpr int64_t INPUTS = unit_inputs(CODE), BYTES = value_bytes(CODE, INPUTS);
    constexpr int TURNS = CHAINS == 1 ? STEP / WIDENED : LAST - FIRST;
    if (begin >= end) __builtin_unreachable();  // otherwise GCC first writes the sums of an empty range to memory
    for (int64_t i = begin; i < end; i += INPUTS, w += BYTES) {
        if (FIRST == 0 && COLUMN == 0 && fetch)
            for (int64_t j = 0; j < BYTES; j += 64) prefetch(w + FETCHED + j, fetch);
        with_all<INPUTS / STEP>([&](auto p) __attribute__((always_inline)) {
            with_all<TURNS>([&](auto turn) __attribute__((always_inline)) {
                constexpr int T = FIRST + decltype(turn)::value;
                widened now[C];
                unpack<CODE, decltype(p)::value, T, COLUMN>(w, table, now);
                // With two rows, GCC keeps the weights in memory, which took 1.8 times as long.
                for (size_t j = 0; ROWS > 1 && j < C; j++) asm("" : WHOLE(now[j]));
                for (int64_t r = 0; r < ROWS; r++) {
                    vec(&sums)[C] = acc[CHAINS == 1 ? 0 : T - FIRST][r];
                    const factor* from = x + r * k + i + STEP * p + T;
#if IN_PAIRS
                    const __m512bh pair = (__m512bh)_mm512_set1_epi32(load<int32_t>(from));
                    for (size_t j = 0; j < C; j++) sums[j] = (vec)_mm512_dpbf16_ps((__m512)sums[j], now[j], pair);
#else
                    const vec factors = splat(*from);
                    for (size_t j = 0; j < C; j++) sums[j] = fma(now[j], factors, sums[j]);
#endif
                }
            });
        });
    }
}

// Returns a total plus a group's scaled sum. activations: the sum of the group's activations.
inline vec add_group(vec total, vec sum, vec scale, bool has_offset, vec offset, float activations) {
    total = fma(sum, scale, total);
    return has_offset ? fma(-offset, splat(activations), total) : total;
}

// Adds the scaled products of group g and C vectors of a panel, starting at COLUMN, to `totals`. sums: [ROWS, groups],
// sums of each group's activations; null without offsets.
template <int CODE, int ROWS, int COLUMN, int C>
void multiply_group(const Linear& layer, const uint8_t* w, const Factors& factors, int64_t g, int64_t groups,
                    const factor* x, const float* sums, Fetch fetch, vec (*totals)[VECS]) {
    const int64_t k = layer.inputs, start = g * layer.group, end = start + layer.group;
    const Table* table = CODE == TABLE ? &table_of(layer.table) : nullptr;
    vec sum[ROWS][C];
    if constexpr (CHAINS == 1) {
        vec acc[1][ROWS][C];
        clear(acc[0]);
        accumulate_steps<CODE, ROWS, COLUMN, 0, 1>(w, table, x, k, start, end, fetch, acc);
        std::memcpy(sum, acc[0], sizeof sum);
    } else {
        for (int64_t begin = start, last; begin < end; begin = last, w += value_bytes(CODE, BLOCK)) {
            last = std::min(begin + BLOCK, end);
            vec block[ROWS][C];
            sum_chains(
                [&](auto first, auto end, auto& acc) {
                    accumulate_steps<CODE, ROWS, COLUMN, first, end>(w, table, x, k, begin, last, fetch, acc);
                },
                block);
            for (int64_t r = 0; r < ROWS; r++)
                for (int64_t j = 0; j < C; j++) sum[r][j] = (begin == start ? vec{} : sum[r][j]) + block[r][j];
        }
    }
    for (int64_t j = 0; j < C; j++)
        for (int64_t r = 0; r < ROWS; r++) {
            vec& total = totals[r][COLUMN + j];
            total = add_group(total, sum[r][j], factors.scale[COLUMN + j], sums, factors.offset[COLUMN + j],
                              sums ? sums[r * groups + g] : 0.0f);
        }
}

// As above, for all vectors of a panel starting at COLUMN, C at a time.
template <int CODE, int ROWS, int C, int COLUMN = 0>
inline void multiply_columns(const Linear& layer, const uint8_t* w, const Factors& factors, int64_t g, int64_t groups,
                             const factor* x, const float* sums, Fetch fetch, vec (*totals)[VECS]) {
    multiply_group<CODE, ROWS, COLUMN, C>(layer, w, factors, g, groups, x, sums, fetch, totals);
    if constexpr (COLUMN + C < VECS)
        multiply_columns<CODE, ROWS, C, COLUMN + C>(layer, w, factors, g, groups, x, sums, fetch, totals);
}

// Calls body(g, factors, integers) for the groups of a panel in order.
template <class Body> inline void for_groups(const Linear& layer, int64_t panel, float base, Body body) {
    const Geometry sizes(layer);
    const uint8_t *at = (const uint8_t*)layer.weight + panel * sizes.panel_bytes(), *super = at;
    for (int64_t g = 0, left = 0; g < sizes.groups; g++, left--, at += sizes.group_bytes) {
        if (sizes.super_bytes && left == 0) super = at, at += sizes.super_bytes, left = sizes.super_groups;
        Factors factors;
        read_factors(layer, super, at, base, factors);
        body(g, factors, at + sizes.factor_bytes);
    }
}

// Multiplies a panel with at most MOST_QUANTIZED rows.
template <int CODE, int ROWS>
void multiply(const Linear& layer, int64_t panel, const factor* x, const float* sums, Fetch fetch, void* out,
              Then then) {
    constexpr int C = ROWS > FEW_QUANTIZED ? COLUMNS / 2 : COLUMNS;
    const int64_t groups = layer.inputs / layer.group, factor_bytes = Geometry(layer).factor_bytes;
    vec totals[ROWS][VECS] = {};
    for_groups(layer, panel, layer.base, [&](int64_t g, const Factors& factors, const uint8_t* w) {
        for (int64_t j = 64; fetch == ONCE && j <= factor_bytes; j += 64) prefetch(w + FETCHED - j, fetch);
        multiply_columns<CODE, ROWS, C>(layer, w, factors, g, groups, x, sums, fetch, totals);
    });
    finish(layer, panel, totals, ROWS, out, then);
}

template <int CODE>
void multiply_panel(const Linear& layer, int64_t panel, const factor* x, int64_t rows, const float* sums, void* out,
                    Then then) {
    const int64_t row_bytes = layer.stride * (then == ROUND ? sizeof(scalar) : sizeof(float));
    const int64_t groups = layer.inputs / layer.group;
    const Fetch fetch = layer.streams && rows <= MOST_QUANTIZED ? ONCE : TO_KEEP;
    in_parts(rows, MOST_QUANTIZED, [&](int64_t r, int64_t count) {
        with_constant<MOST_QUANTIZED>(count, [&](auto number) {
            multiply<CODE, number>(layer, panel, x + r * layer.inputs, sums ? sums + r * groups : nullptr,
                                   r ? NOTHING : fetch, (char*)out + r * row_bytes, then);
        });
    });
}

// Calls body(code) with the layer's code as a compile-time constant.
template <class Body> inline void with_code(const Linear& layer, Body body) {
    switch (layer.code) {
        case INT4: return body(std::integral_constant<int, INT4>());
        case INT5: return body(std::integral_constant<int, INT5>());
        case INT6: return body(std::integral_constant<int, INT6>());
        case INT8: return body(std::integral_constant<int, INT8>());
        default: return body(std::integral_constant<int, TABLE>());
    }
}

#if TILES
#include "quantized_tiles_cpu.h"
#endif

void quantized_product(const Product& product) {
    static thread_local std::vector<float> summed;
    const Linear& form = product.form();
    const int64_t k = form.inputs, groups = k / form.group, rows = product.rows();
    const scalar* x = product.x;
    const auto needs = [](const Share& share) { return needs_sums(*share.layer); };  // some matrices may have no minima
    const bool any = std::any_of(product.shares, product.shares + product.count, needs);
    float* const sums = any ? at_least(summed, rows * groups) : nullptr;
    if (sums)
        parallel(threads_of_rows(rows, product.threads), rows, [&](int64_t r) {
            for (int64_t g = 0; g < groups; g++) {
                Sums lanes;
                for (int64_t j = 0; j < form.group; j += LANES) lanes.add(j, widen(x + r * k + g * form.group + j));
                sums[r * groups + g] = lanes.total();
            }
        });
#if TILES
    const bool fits = form.group % 16 == 0 && k % BLOCK == 0;
    const TiledShares tiled(product, fits ? tiled_rows_quantized(form.code) : INT64_MAX, form.group);
    const factor* factors = tiled.has_all ? nullptr : to_factors(x, rows * k);
#else
    const factor* factors = to_factors(x, rows * k);
#endif
    product.each_panel([&](const Share& share, int64_t panel) {
        const FlushDenormals flushing;
        const float* own = needs(share) ? sums + share.first * groups : nullptr;
#if TILES
        if (const scalar* from = tiled.of(share)) {
            const int64_t merged = merged_groups(share.rows);
            for (int64_t r = 0; r < share.rows; r += 4 * TILE_ROWS)
                with_code(form, [&](auto code) {
                    const auto multiply = [&](auto span) {
                        constexpr int CODE = code, SPAN = span;
                        return merged == 4 ? multiply_merged<CODE, SPAN, 4>
                               : merged == 2 ? multiply_merged<CODE, SPAN, 2> : multiply_tiles<CODE, SPAN>;
                    };
                    const auto fitting = form.group % BLOCK ? multiply(std::integral_constant<int, 16>())
                                                            : multiply(std::integral_constant<int, BLOCK>());
                    fitting(*share.layer, panel, from + r * k, std::min(4 * TILE_ROWS, share.rows - r),
                            own ? own + r * groups : nullptr, product.row(share.first + r), product.then);
                });
            return;
        }
#endif
        with_code(form, [&](auto code) {
            multiply_panel<code>(*share.layer, panel, factors + share.first * k, share.rows, own,
                                 product.row(share.first), product.then);
        });
    });
}
