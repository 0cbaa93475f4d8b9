// Products of int8 activations with quantised weights, included by linear_cpu.h.
//
// Activations are quantised per row and group of the weight's inputs: q = x * 127 / max |x|, rounded to the nearest
// integer, ties to even. A group's sum of integers is exact in int32, so it does not depend on the instruction or the
// number of rows; groups are scaled and added in order, in fp32. Weights are unsigned, as `vpdpbusd` reads them: int8
// and table values have 128 added. A panel's stream is the one of quantized_cpu.h, but QUAD inputs of an output are
// adjacent.

constexpr int64_t QUAD = 4;  // inputs whose products an instruction adds in each lane
constexpr int64_t MOST_INTEGER = LANES == 16 ? FEW : FEW_QUANTIZED;  // maximum rows that share one read of a panel

struct Activations {  // activations of all rows: [rows, inputs], and [rows, groups]
    std::vector<int8_t> values;
    std::vector<float> scales;   // NaN if a value of the group is not finite
    std::vector<int32_t> sums;
};

inline ivec add_quads(ivec acc, uvec w, uint32_t x) {
    const uvec quad = uvec{} + x;
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)quad);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)quad);
#elif defined(__AVX2__)
    const uvec low = uvec{} + 0x00ff00ffu;
    const auto multiply = [](uvec a, uvec b) {
#if defined(__AVX512BW__)
        return (ivec)_mm512_madd_epi16((__m512i)a, _mm512_srai_epi16((__m512i)b, 8));
#else
        return (ivec)_mm256_madd_epi16((__m256i)a, _mm256_srai_epi16((__m256i)b, 8));
#endif
    };
    return acc + (multiply(w & low, quad << 8) + multiply(w >> 8 & low, quad));
#else
    for (int shift = 0; shift < 32; shift += 8)
        acc += (ivec)(w >> shift & 0xff) * ((ivec)(quad << (24 - shift)) >> 24);
    return acc;
#endif
}

const Activations& quantize(const scalar* x, int64_t rows, int64_t inputs, int64_t group) {
    static thread_local Activations result;
    const int64_t count = rows * inputs / group;
    at_least(result.values, rows * inputs), at_least(result.scales, count), at_least(result.sums, count);
    for (int64_t i = 0; i < count; i++) {
        const scalar* from = x + i * group;
        int8_t* to = result.values.data() + i * group;
        ivec most = {};  // bits of positive values are ordered like the values, below the bits of infinity and NaN
        for (int64_t j = 0; j < group; j += LANES) {
            const ivec bits = (ivec)widen(from + j) & 0x7fffffff;
            most = bits > most ? bits : most;
        }
        const float size = as_float(uint32_t(largest_lane(most)));
        const bool finite = size < INFINITY;
        const float factor = finite && size > 0.0f ? 127.0f / size : 0.0f;
        ivec lanes = {};
        for (int64_t j = 0; j < group; j += LANES) {
            // Adding 1.5 * 2^23 leaves the rounded integer in the low bits. `factor` may be infinite.
            const vec scaled = finite ? widen(from + j) * factor : vec{}, bound = splat(127.0f);
            const vec bounded = scaled > bound ? bound : scaled < -bound ? -bound : scaled == scaled ? scaled : vec{};
            const ivec q = (ivec)(bounded + 12582912.0f) - (ivec)splat(12582912.0f);
            for (int64_t lane = 0; lane < LANES; lane++) to[j + lane] = int8_t(q[lane]);
            lanes += q;
        }
        result.scales[i] = finite ? size / 127.0f : NAN;
        result.sums[i] = sum(lanes);
    }
    return result;
}

// Returns the weights of quad P of an octet (0 without octets) and of LANES outputs, starting at `output` in a panel,
// one byte each.
template <int CODE, int P> inline uvec quads(const uint8_t* unit, const Table* table, int64_t output) {
    constexpr uint32_t NIBBLE = 0x0f0f0f0fu;
    if constexpr (CODE == INT8) return load<uvec>(unit + QUAD * output);
    const int64_t vector = output / NIBBLES, lane = output % NIBBLES * QUAD;
    const uvec low = load<uvec>(unit + value_bytes(INT4, QUAD) * P + vector / 2 * 64 + lane) >> vector % 2 * 4 & NIBBLE;
    if constexpr (CODE == TABLE) {
#if defined(__AVX512BW__)
        return (uvec)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(table->raised)), (__m512i)low);
#elif defined(__AVX2__)
        return (uvec)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(table->raised)), (__m256i)low);
#else
        uint8_t places[sizeof low];
        std::memcpy(places, &low, sizeof low);
        for (uint8_t& place : places) place = table->raised[place];
        return load<uvec>(places);
#endif
    }
    constexpr int BITS = high_bits(CODE);
    if constexpr (BITS == 0) return low;
    const int64_t below = BITS == 1 ? 4 * P + vector : 2 * vector;
    const uvec high = load<uvec>(unit + value_bytes(INT4, OCTET) + (BITS == 1 ? 0 : 64 * P) + lane) >> below;
    return low | (high & (BITS == 1 ? 0x01010101u : 0x03030303u)) << 4;
}

// The excess of unsigned integers over the weights.
constexpr int32_t excess(int code, float base) {
    return code < INT8 ? int32_t(base) - (1 << code) : 128;
}

// Computes the sums over a group of inputs for a part of a panel. x: [ROWS, ...], rows `k` apart. next: address to
// prefetch. The indices of `acc` are constants, because GCC keeps an array indexed in a loop in memory.
template <int CODE, int ROWS, int PART>
inline __attribute__((always_inline)) void sum_quads(const uint8_t* w, const Table* table, const int8_t* x, int64_t k,
                                                     int64_t group, const uint8_t* next, ivec (&sums)[ROWS][COLUMNS]) {
    constexpr int64_t INPUTS = high_bits(CODE) ? OCTET : QUAD, BYTES = value_bytes(CODE, INPUTS), READ = BYTES / PARTS;
    ivec acc[ROWS * COLUMNS], zero = {};
    asm("" : WHOLE(zero));
    with_all<ROWS * COLUMNS>([&](auto i) __attribute__((always_inline)) { acc[i] = zero; });
    for (int64_t i = 0; i < group; i += INPUTS, w += BYTES, next += BYTES) {
        for (int64_t j = 0; j < READ; j += 64) __builtin_prefetch(next + j);
        with_all<INPUTS / QUAD>([&](auto p) __attribute__((always_inline)) {
            uvec now[COLUMNS];
            with_all<COLUMNS>([&](auto j) __attribute__((always_inline)) {
                now[j] = quads<CODE, p>(w, table, (PART * COLUMNS + j) * LANES);
            });
            with_all<ROWS>([&](auto r) __attribute__((always_inline)) {
                const uint32_t quad = load<uint32_t>(x + r * k + i + QUAD * p);
                with_all<COLUMNS>([&](auto j) __attribute__((always_inline)) {
                    acc[r * COLUMNS + j] = add_quads(acc[r * COLUMNS + j], now[j], quad);
                });
            });
        });
    }
    with_all<ROWS * COLUMNS>([&](auto i) __attribute__((always_inline)) { sums[i / COLUMNS][i % COLUMNS] = acc[i]; });
}

// A separate function for several rows: inlined, the same instructions took up to twice as long (GCC 12, Zen 5).
template <int CODE, int ROWS, int PART>
__attribute__((noinline)) void sum_quads_apart(const uint8_t* w, const Table* table, const int8_t* x, int64_t k,
                                               int64_t group, const uint8_t* next, ivec (&sums)[ROWS][COLUMNS]) {
    sum_quads<CODE, ROWS, PART>(w, table, x, k, group, next, sums);
}

// Multiplies a part of a panel with ROWS rows, starting at `row`.
template <int CODE, int ROWS, int PART>
void multiply_integers(const Linear& layer, int64_t panel, const Activations& x, int64_t row,
                       vec (&result)[ROWS][VECS]) {
    constexpr int64_t READ = value_bytes(CODE, high_bits(CODE) ? OCTET : QUAD) / PARTS;
    const int64_t k = layer.inputs, groups = k / layer.group, size = Geometry(layer).panel_bytes();
    const int32_t offset = excess(CODE, layer.base);
    const Table* table = CODE == TABLE ? &table_of(layer.table) : nullptr;
    vec total[ROWS][COLUMNS];
    clear(total);
    for_groups(layer, panel, 0.0f, [&](int64_t g, const Factors& factors, const uint8_t* w) {
        const uint8_t* next = PARTS == 1 ? w + FETCHED : w + size + PART * READ;
        const int8_t* values = x.values.data() + row * k + g * layer.group;
        ivec sums[ROWS][COLUMNS];
        if constexpr (ROWS == 1) sum_quads<CODE, ROWS, PART>(w, table, values, k, layer.group, next, sums);
        else sum_quads_apart<CODE, ROWS, PART>(w, table, values, k, layer.group, next, sums);
        for (int64_t r = 0; r < ROWS; r++) {
            const int64_t i = (row + r) * groups + g;
            const float activations = x.scales[i] * float(x.sums[i]);
            for (int64_t j = 0; j < COLUMNS; j++) {
                const int64_t column = PART * COLUMNS + j;
                const vec scaled = __builtin_convertvector(sums[r][j] - offset * x.sums[i], vec);
                total[r][j] = add_group(total[r][j], scaled, factors.scale[column] * x.scales[i], layer.has_min,
                                        factors.offset[column], activations);
            }
        }
    });
    for (int64_t r = 0; r < ROWS; r++) std::memcpy(result[r] + PART * COLUMNS, total[r], sizeof total[r]);
}

template <int CODE, int ROWS>
void multiply_integers(const Linear& layer, int64_t panel, const Activations& x, int64_t row, void* out, Then then) {
    vec result[ROWS][VECS];
    with_all<PARTS>([&](auto part) { multiply_integers<CODE, ROWS, part>(layer, panel, x, row, result); });
    finish(layer, panel, result, ROWS, out, then);
}

void integer_product(const Product& product) {
    const Activations& activations =
        quantize(product.x, product.rows(), product.form().inputs, product.form().group);
    product.each_panel([&](const Share& share, int64_t panel) {
        in_parts(share.rows, MOST_INTEGER, [&](int64_t r, int64_t count) {
            const int64_t row = share.first + r;
            with_constant<MOST_INTEGER>(count, [&](auto number) {
                with_code(*share.layer, [&](auto code) {
                    multiply_integers<code, number>(*share.layer, panel, activations, row, product.row(row),
                                                    product.then);
                });
            });
        });
    });
}
