// Products with quantised weights, included by decoder_cpu.cpp.
//
// A weight is (q - zero) * scale: q is an integer of 8 or 4 bits, and an output has a scale and a zero per group of
// inputs. Integers are converted exactly in registers, and activations are not quantised. A group's sum is one chain
// over its inputs; groups are scaled and added in order, in fp32. So a row's bits do not depend on the number of rows.

#if IN_PAIRS
typedef __m512bh widened;  // 16 outputs with two inputs each
constexpr int64_t WIDENED = 2;
#else
typedef vec widened;  // LANES outputs
constexpr int64_t WIDENED = 1;
#endif
constexpr int64_t STEP = 2;        // inputs whose weights are stored together
constexpr int64_t NIBBLES = 16;    // outputs whose 4-bit weights are in the same bits of consecutive units
constexpr int64_t FETCHED = 4096;  // prefetch distance in bytes of panels with a single part

constexpr int64_t step_bytes(int64_t bits) { return STEP * PANEL * bits / 8; }

// Converts the weights of WIDENED inputs, of input `t` of a step on, of one part of a panel.
template <int BITS, int PART>
inline __attribute__((always_inline)) void unpack(const uint8_t* from, [[maybe_unused]] int64_t t,
                                                  widened (&to)[COLUMNS]) {
#if IN_PAIRS
    if (BITS == 8) {
        for (int64_t j = 0; j < VECS; j++) {
            const __m256i q = load<__m256i>(from + 2 * LANES * j);
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
        to[0] = (__m512bh)_mm512_permutexvar_epi16(q, table);
        to[1] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(q, 4), table);
        to[2] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(q, 8), table);
        to[3] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(q, 12), table);
    }
#else
    for (int64_t j = 0; j < COLUMNS; j++) {
        const int64_t output = LANES * (PART * COLUMNS + j);
        if (BITS == 8) {
            const uint8_t* q = from + t * PANEL + output;
#if defined(__AVX512F__)
            to[j] = (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(q)));
#elif defined(__AVX2__)
            to[j] = (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)q)));
#else
            for (int64_t i = 0; i < LANES; i++) to[j][i] = int8_t(q[i]);
#endif
        } else {  // the sign is extended by a shift
            const int64_t above = 28 - 4 * (t * (PANEL / NIBBLES) + output / NIBBLES);
            to[j] = __builtin_convertvector((ivec)(load<uvec>(from + output % NIBBLES * 4) << above) >> 28, vec);
        }
    }
#endif
}

// Adds the products of WIDENED inputs. x: [ROWS, k], starting at the first of them.
template <int ROWS>
inline __attribute__((always_inline)) void accumulate(const widened (&w)[COLUMNS], const factor* x, int64_t k,
                                                      vec (&acc)[ROWS][COLUMNS]) {
    for (int64_t r = 0; r < ROWS; r++) {
#if IN_PAIRS
        const __m512bh pair = (__m512bh)_mm512_set1_epi32(load<int32_t>(x + r * k));
        for (int64_t j = 0; j < COLUMNS; j++) acc[r][j] = (vec)_mm512_dpbf16_ps((__m512)acc[r][j], w[j], pair);
#else
        const vec factors = splat(x[r * k]);
        for (int64_t j = 0; j < COLUMNS; j++) acc[r][j] = fma(w[j], factors, acc[r][j]);
#endif
    }
}

// Adds a group's scaled sums to the total. sums: [ROWS, groups], sums of each group's activations; null without zeros.
template <int ROWS>
inline __attribute__((always_inline)) void add_group(const Linear& layer, int64_t panel, int64_t part, int64_t g,
                                                     const float* sums, const vec (&acc)[ROWS][COLUMNS],
                                                     vec (&total)[ROWS][COLUMNS]) {
    const int64_t groups = layer.inputs / layer.group;
    const int64_t at = (panel * groups + g) * PANEL + part * LANES * COLUMNS;
    for (int64_t j = 0; j < COLUMNS; j++) {
        const vec scale = load<vec>(layer.scale + at + LANES * j);
        const vec zero = layer.zero ? load<vec>(layer.zero + at + LANES * j) : vec{};
        for (int64_t r = 0; r < ROWS; r++) {
            const vec sum = layer.zero ? fma(-zero, splat(sums[r * groups + g]), acc[r][j]) : acc[r][j];
            total[r][j] = fma(sum, scale, total[r][j]);
        }
    }
}

// Multiplies a panel with at most FEW rows. Integers are converted again for every FEW rows, which takes a quarter of
// the time with 8 bits and a tenth with 4 if the data is in the caches (AVX-512). With one conversion for all rows,
// into the L2 cache, 24 rows took 5 % less and 12 rows 8 % more.
template <int BITS, int ROWS, int PART>
void multiply_part(const Linear& layer, int64_t panel, const factor* x, const float* sums, vec (&result)[ROWS][VECS]) {
    const int64_t k = layer.inputs, groups = k / layer.group, size = k / STEP * step_bytes(BITS);
    constexpr int64_t READ = step_bytes(BITS) / PARTS;
    const uint8_t* w = (const uint8_t*)layer.weight + panel * size;
    const uint8_t* next = PARTS == 1 ? w + FETCHED : w + size + PART * size / PARTS;
    vec total[ROWS][COLUMNS] = {};
    for (int64_t g = 0; g < groups; g++) {
        vec acc[ROWS][COLUMNS] = {};
        for (int64_t i = g * layer.group; i < (g + 1) * layer.group; i += STEP, w += step_bytes(BITS), next += READ) {
            for (int64_t j = 0; j < READ; j += 64) __builtin_prefetch(next + j);
            for (int64_t t = 0; t < STEP; t += WIDENED) {
                widened now[COLUMNS];
                unpack<BITS, PART>(w, t, now);
                accumulate(now, x + i + t, k, acc);
            }
        }
        add_group(layer, panel, PART, g, sums, acc, total);
    }
    for (int64_t r = 0; r < ROWS; r++) std::memcpy(result[r] + PART * COLUMNS, total[r], sizeof total[r]);
}

template <int BITS, int ROWS, int... PART>
void multiply(const Linear& layer, int64_t panel, const factor* x, const float* sums, void* out, Then then,
              std::integer_sequence<int, PART...>) {
    vec result[ROWS][VECS];
    (multiply_part<BITS, ROWS, PART>(layer, panel, x, sums, result), ...);
    finish(layer, panel, result, ROWS, out, then);
}

template <int BITS>
void multiply_panel(const Linear& layer, int64_t panel, const factor* x, int64_t rows, const float* sums, void* out,
                    Then then) {
    const int64_t row_bytes = layer.outputs * (then == ROUND ? sizeof(scalar) : sizeof(float));
    const int64_t groups = layer.inputs / layer.group;
    in_parts(rows, FEW, [&](int64_t r, int64_t count) {
        with_constant(count, [&](auto number) {
            multiply<BITS, number>(layer, panel, x + r * layer.inputs, sums ? sums + r * groups : nullptr,
                                   (char*)out + r * row_bytes, then, std::make_integer_sequence<int, PARTS>());
        });
    });
}

void quantized_linear(const Linear& layer, const scalar* x, int64_t rows, void* out, Then then, int threads) {
    static thread_local std::vector<float> summed;
    const int64_t k = layer.inputs, groups = k / layer.group;
    const float* sums = nullptr;
    if (layer.zero) {
        summed.resize(rows * groups);
        for (int64_t i = 0; i < rows * groups; i++) {
            vec lanes = {};
            for (int64_t j = 0; j < layer.group; j += LANES) lanes += widen(x + i * layer.group + j);
            summed[i] = sum(lanes);
        }
        sums = summed.data();
    }
    const factor* factors = to_factors(x, rows * k);
    parallel(threads, (layer.outputs + PANEL - 1) / PANEL, [&](int64_t panel) {
        if (layer.bits == 8) multiply_panel<8>(layer, panel, factors, rows, sums, out, then);
        else multiply_panel<4>(layer, panel, factors, rows, sums, out, then);
    });
}

void pack(const uint8_t* values, int64_t outputs, int64_t inputs, int64_t bits, uint8_t* out) {
    const auto value = [&](int64_t output, int64_t input) -> uint8_t {
        if (output >= outputs) return bits == 8 ? 0 : 8;
        const int64_t at = output * inputs + input;
        return bits == 8 ? values[at] : values[at / 2] >> at % 2 * 4 & 15;
    };
    for (int64_t panel = 0; panel * PANEL < outputs; panel++)
        for (int64_t i = 0; i < inputs; i += STEP, out += step_bytes(bits))
            for (int64_t o = 0; o < PANEL; o++)
                for (int64_t t = 0; t < STEP; t++) {
                    const uint8_t q = value(panel * PANEL + o, i + t);
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
