// Products of int8 activations with quantised weights, included by linear_cpu.h.
//
// Activations are quantised per row and group of the weight's inputs: q = x * 127 / max |x|, rounded to the nearest
// integer, ties to even. A group's sum of integers is exact in int32, so it does not depend on the instruction or the
// number of rows; groups are scaled and added in order, in fp32. Weights are stored without sign (plus 128 or 8), as
// `vpdpbusd` reads them.

constexpr int64_t QUAD = 4;  // inputs whose products an instruction adds up in each lane

struct Activations {  // of all rows: [rows, inputs], and [rows, groups]
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
    result.values.resize(rows * inputs), result.scales.resize(count), result.sums.resize(count);
    for (int64_t i = 0; i < count; i++) {
        const scalar* from = x + i * group;
        int8_t* to = result.values.data() + i * group;
        ivec most = {};  // the bits of positive values are ordered like the values, below those of infinity and NaN
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

constexpr int64_t quad_bytes(int64_t bits) { return QUAD * PANEL * bits / 8; }

// Returns the weights of QUAD inputs and LANES outputs, from `output` of a panel on, a byte each.
template <int BITS> inline uvec quads(const uint8_t* from, int64_t output) {
    if (BITS == 8) return load<uvec>(from + QUAD * output);
    return load<uvec>(from + output / 32 * 64 + output % 16 * QUAD) >> output / 16 % 2 * 4 & 0x0f0f0f0fu;
}

// Multiplies a part of a panel with ROWS rows, of which the first is `row`.
template <int BITS, int ROWS, int PART>
void multiply_integers(const Linear& layer, int64_t panel, const Activations& x, int64_t row,
                       vec (&result)[ROWS][VECS]) {
    constexpr int32_t OFFSET = BITS == 8 ? 128 : 8;
    constexpr int64_t READ = quad_bytes(BITS) / PARTS;
    const int64_t k = layer.inputs, groups = k / layer.group, size = k / QUAD * quad_bytes(BITS);
    const uint8_t* w = (const uint8_t*)layer.weight + panel * size;
    const uint8_t* next = PARTS == 1 ? w + FETCHED : w + size + PART * size / PARTS;
    vec total[ROWS][COLUMNS] = {};
    for (int64_t g = 0; g < groups; g++) {
        ivec acc[ROWS][COLUMNS];
        clear(acc);
        const int8_t* values = x.values.data() + row * k;
        for (int64_t i = g * layer.group; i < (g + 1) * layer.group; i += QUAD, w += quad_bytes(BITS), next += READ) {
            for (int64_t j = 0; j < READ; j += 64) __builtin_prefetch(next + j);
            uvec now[COLUMNS];
            for (int64_t j = 0; j < COLUMNS; j++) now[j] = quads<BITS>(w, (PART * COLUMNS + j) * LANES);
            for (int64_t r = 0; r < ROWS; r++) {
                const uint32_t quad = load<uint32_t>(values + r * k + i);
                for (int64_t j = 0; j < COLUMNS; j++) acc[r][j] = add_quads(acc[r][j], now[j], quad);
            }
        }
        for (int64_t j = 0; j < COLUMNS; j++) {
            const int64_t factors = (panel * groups + g) * PANEL + (PART * COLUMNS + j) * LANES;
            const vec scale = load<vec>(layer.scale + factors);
            const vec zero = layer.zero ? load<vec>(layer.zero + factors) : vec{};
            for (int64_t r = 0; r < ROWS; r++) {
                const int64_t i = (row + r) * groups + g;
                const vec sum = __builtin_convertvector(acc[r][j] - OFFSET * x.sums[i], vec);
                total[r][j] = add_group(total[r][j], sum, scale * x.scales[i], layer.zero, zero, float(x.sums[i]));
            }
        }
    }
    for (int64_t r = 0; r < ROWS; r++) std::memcpy(result[r] + PART * COLUMNS, total[r], sizeof total[r]);
}

template <int BITS, int ROWS>
void multiply_integers(const Linear& layer, int64_t panel, const Activations& x, int64_t row, void* out, Then then) {
    vec result[ROWS][VECS];
    with_all<PARTS>([&](auto part) { multiply_integers<BITS, ROWS, part>(layer, panel, x, row, result); });
    finish(layer, panel, result, ROWS, out, then);
}

void integer_linear(const Linear& layer, const scalar* x, int64_t rows, void* out, Then then, int threads) {
    const int64_t row_bytes = layer.outputs * (then == ROUND ? sizeof(scalar) : sizeof(float));
    const Activations& activations = quantize(x, rows, layer.inputs, layer.group);
    parallel(threads, (layer.outputs + PANEL - 1) / PANEL, [&](int64_t panel) {
        in_parts(rows, FEW, [&](int64_t row, int64_t count) {
            with_constant<FEW>(count, [&](auto number) {
                void* to = (char*)out + row * row_bytes;
                if (layer.bits == 8) multiply_integers<8, number>(layer, panel, activations, row, to, then);
                else multiply_integers<4, number>(layer, panel, activations, row, to, then);
            });
        });
    });
}

// As `pack`, for `quads`.
void pack_quads(const uint8_t* values, int64_t outputs, int64_t inputs, int64_t bits, uint8_t* out) {
    for (int64_t panel = 0; panel * PANEL < outputs; panel++)
        for (int64_t i = 0; i < inputs; i += QUAD, out += quad_bytes(bits))
            for (int64_t o = 0; o < PANEL; o++)
                for (int64_t t = 0; t < QUAD; t++) {
                    const uint8_t q = stored(values, outputs, inputs, bits, panel * PANEL + o, i + t);
                    if (bits == 8) {
                        out[QUAD * o + t] = q ^ 128;
                    } else {
                        uint8_t& byte = out[o / 32 * 64 + o % 16 * QUAD + t];
                        byte = o / 16 % 2 ? byte | q << 4 : q;
                    }
                }
}
