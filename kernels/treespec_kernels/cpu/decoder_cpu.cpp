// Runs a decoder's pass on a CPU in one call. The file is compiled on the user's machine for one head size and dtype
// (HEAD_DIM, BF16).
//
// A row's bits depend only on the row:
//  - without -ffast-math and with -ffp-contract=off, the compiler may vectorise but not change an operation's result;
//  - an element of a matrix product is one chain over its summands, for any number of rows;
//  - scores are stored by *position*, independent of the slots of the keys, and later sums run over positions in order;
//  - threads divide rows, heads and columns, never a sum.
// Hidden sizes are multiples of 16, so that no vector has a remainder.

#include "vectors_cpu.h"

#include "batch_cpu.h"
#include "parallel_cpu.h"

namespace {

constexpr int64_t PANEL = 64, PAGE = 64, VECS = PANEL / LANES, HEAD_VECS = HEAD_DIM / LANES;
#if BF16
typedef uint16_t scalar;
#else
typedef float scalar;
#endif
// Whether bf16 is multiplied in pairs, by an instruction of the machine. Otherwise it is widened to fp32.
#if BF16 && defined(__AVX512BF16__) && defined(__AVX512BW__)
#define IN_PAIRS 1
typedef scalar factor;  // activations, as products read them
#else
#define IN_PAIRS 0
typedef float factor;
#endif
constexpr int64_t PAIR = 4 / sizeof(scalar), UNITS = HEAD_DIM / PAIR;  // scalars per 32-bit unit, units per head

inline float as_float(uint32_t bits) { return load<float>(&bits); }
inline float to_float(uint16_t x) { return as_float(uint32_t(x) << 16); }
inline float to_float(float x) { return x; }
inline vec widen(const uint16_t* p) { return (vec)(__builtin_convertvector(load<hvec>(p), uvec) << 16); }
inline vec widen(const float* p) { return load<vec>(p); }

// Clears the low half of each unit. A mask would occupy one of AVX2's 16 registers, of which 12 hold sums.
inline uvec high_half(uvec bits) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return (uvec)_mm256_slli_epi32(_mm256_srli_epi32((__m256i)bits, 16), 16);
#else
    return bits & 0xffff0000u;
#endif
}

// Adds the products of 32-bit units of x and y: of one fp32, or of two bf16 in order.
inline vec add_products(vec acc, uvec x, uint32_t y) {
    const uvec unit = uvec{} + y;
#if !BF16
    return fma((vec)x, (vec)unit, acc);
#elif IN_PAIRS
    return (vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)unit);
#else
    acc = fma((vec)(x << 16), (vec)(unit << 16), acc);
    return fma((vec)(x & 0xffff0000u), (vec)(unit & 0xffff0000u), acc);
#endif
}

inline void store(uint16_t* p, vec v) {
#if IN_PAIRS
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
#else
    const uvec bits = (uvec)v, even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, quiet = (bits >> 16) | 0x40;
    const uvec high = (uvec)(v == v ? (ivec)even : (ivec)quiet);
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i both = (__m256i)high;
    const __m128i rounded = _mm_packus_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
#else
    const hvec rounded = __builtin_convertvector(high, hvec);
#endif
#endif
    std::memcpy(p, &rounded, sizeof rounded);
}

}  // namespace

extern "C" {

struct Linear {  // weight: [panels of 64 outputs][inputs][64], in bf16 with pairs of inputs next to each other
    const void* weight;
    const float* bias;  // padded to whole panels, or null
    int64_t inputs, outputs;
    int64_t bits, group;  // quantised weights (quantized_cpu.h): 8 or 4, and inputs per scale; bits 0: not quantised
    const float *scale, *zero;  // [panels][groups][64]; zero may be null
};

struct Norm {
    const float *weight, *bias;  // bias may be null; weight is null if the model family has no such norm
};

struct Layer {
    Norm attn_norm, mlp_norm, attn_post_norm, mlp_post_norm;
    const float* head_norm;  // [heads + kv_heads, HEAD_DIM], or null
    Linear qkv, o, gate_up, down;
    int64_t rope, window;  // index of the layer's rope; number of positions that a row attends to, 0: all
};

struct Pairing {  // what a draft head makes of a token and the feature of the token before it
    const Linear* qkv;    // of its first layer: [2 * hidden] -> [(heads + 2 * kv_heads) * HEAD_DIM]
    const scalar* embed;  // [vocab, hidden]
    Norm embed_norm, feature_norm;
    int64_t hidden, residual_after_norm;  // residual_after_norm: the residual stream begins with the normalised feature
    float eps;
};

struct Model {
    const Layer* layers;
    const scalar *embed, *positions;  // [vocab, hidden]; learned positions [positions, hidden], or null
    Norm final_norm;
    int64_t hidden, heads, kv_heads, mlp, threads;
    int64_t activation, layer_norm, parallel, ropes;  // RMSNorm unless layer_norm; ropes: number of ropes
    float eps, scale, embed_scale, score_cap;         // scale: factor on scores; score_cap 0: no cap
};

}  // extern "C"

namespace {

enum Then { STORE, ADD, ROUND };
// Maximum number of rows, and vectors of a panel, whose sums are in registers: in 24 of AVX-512's 32 registers, or 12
// of AVX2's 16.
constexpr int64_t FEW = 6, COLUMNS = LANES == 16 ? VECS : 2, PARTS = VECS / COLUMNS;
constexpr int64_t MANY = 24;  // maximum number of rows that share a pass over a panel
// A panel of several parts is read in blocks of 12 KiB, which stay in the L1 cache for all parts and rows, while the
// next block is prefetched evenly. On two cores with AVX2, 6 rows of SmolLM2's products take 1.1 times as long as one
// row, and 8 rows 1.4 times. With a single part, a prefetch distance of 4 KiB saves a tenth of a pass of 1 to 16 rows.
constexpr int64_t BLOCK = 48, AHEAD = 16;  // in steps of 4 * PANEL bytes

// Returns activations as products read them, valid until the next call.
[[maybe_unused]] inline const float* to_factors(const float* x, int64_t) { return x; }
[[maybe_unused]] inline const factor* to_factors(const uint16_t* x, [[maybe_unused]] int64_t count) {
#if IN_PAIRS
    return x;
#else
    static thread_local std::vector<float> wide;
    wide.resize(count);
    for (int64_t i = 0; i < count; i++) wide[i] = to_float(x[i]);
    return wide.data();
#endif
}

// Calls body(first row, number of rows) for all rows in as few and as equal parts of at most `most` rows as possible: 4
// and 4 rows take less time than 6 and 2 (4-bit weights, AVX-512).
template <class Body> inline void in_parts(int64_t rows, int64_t most, Body body) {
    const int64_t times = (rows + most - 1) / most;
    for (int64_t t = 0, r = 0; t < times; t++) {
        const int64_t count = (rows - r + times - t - 1) / (times - t);
        body(r, count);
        r += count;
    }
}

// Calls body(count) with 1 <= count <= FEW as a constant of the compiler.
template <class Body> inline void with_constant(int64_t count, Body body) {
    switch (count) {
        case 1: return body(std::integral_constant<int, 1>());
        case 2: return body(std::integral_constant<int, 2>());
        case 3: return body(std::integral_constant<int, 3>());
        case 4: return body(std::integral_constant<int, 4>());
        case 5: return body(std::integral_constant<int, 5>());
        default: return body(std::integral_constant<int, FEW>());
    }
}

// Stores the sums of some rows and one panel.
void finish(const Linear& layer, int64_t panel, const vec (*sums)[VECS], int64_t rows, void* out, Then then) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < VECS; j++) {
            const int64_t column = panel * PANEL + LANES * j, width = std::min(LANES, layer.outputs - column);
            if (width <= 0) break;
            vec y = sums[r][j];
            if (layer.bias) y += load<vec>(layer.bias + column);
            if (then == ROUND) {
                scalar rounded[LANES];
                store(rounded, y);
                std::memcpy((scalar*)out + r * layer.outputs + column, rounded, width * sizeof(scalar));
            } else {
                float* p = (float*)out + r * layer.outputs + column;
                store(p, then == ADD ? load<vec>(p) + y : y);
            }
        }
}

// Adds the products of a part of a panel, with inputs [begin, end). w: the part's weights of the first of them. next:
// to prefetch, `fetched` scalars in every step.
template <int ROWS>
inline __attribute__((always_inline)) void accumulate(const scalar* w, const factor* x, int64_t k, int64_t begin,
                                                      int64_t end, const scalar* next, int64_t fetched,
                                                      vec (&acc)[ROWS][COLUMNS]) {
    for (int64_t i = begin; i < end; i += PAIR, w += PAIR * PANEL, next += fetched) {
        for (int64_t j = 0; j < COLUMNS * LANES; j += 16) __builtin_prefetch(next + PAIR * j);
#if IN_PAIRS
        for (int64_t r = 0; r < ROWS; r++) {
            const __m512bh pair = (__m512bh)_mm512_set1_epi32(load<int32_t>(x + r * k + i));
            for (int64_t j = 0; j < COLUMNS; j++)
                acc[r][j] = (vec)_mm512_dpbf16_ps((__m512)acc[r][j], load<__m512bh>(w + 2 * LANES * j), pair);
        }
#else
        for (int64_t t = 0; t < PAIR; t++) {
            vec now[COLUMNS];
            for (int64_t j = 0; j < COLUMNS; j++) {
                const uvec bits = load<uvec>(w + PAIR * LANES * j);
                now[j] = (vec)(PAIR == 1 ? bits : t == 0 ? bits << 16 : high_half(bits));
            }
            for (int64_t r = 0; r < ROWS; r++) {
                const vec factors = splat(x[r * k + i + t]);
                for (int64_t j = 0; j < COLUMNS; j++) acc[r][j] = fma(now[j], factors, acc[r][j]);
            }
        }
#endif
    }
}

// Multiplies a panel with at most MANY rows.
void multiply(const Linear& layer, int64_t panel, const factor* x, int64_t rows, void* out, Then then) {
    const int64_t k = layer.inputs, times = (rows + FEW - 1) / FEW;
    const scalar* w = (const scalar*)layer.weight + panel * PANEL * k;
    const int64_t fetched = PAIR * PANEL / PARTS / (PARTS == 1 ? 1 : times);
    vec sums[MANY][VECS];
    std::fill_n(&sums[0][0], rows * VECS, vec{});
    for (int64_t begin = 0, end; begin < k; begin = end) {
        end = PARTS == 1 ? k : std::min(begin + PAIR * BLOCK, k);
        const scalar* next = w + end * PANEL;
        in_parts(rows, FEW, [&](int64_t first, int64_t count) {
            with_constant(count, [&](auto number) {
                constexpr int ROWS = number;
                for (int64_t part = 0; part < PARTS; part++, next += (end - begin) / PAIR * fetched) {
                    const scalar* from = w + begin * PANEL + part * PAIR * LANES * COLUMNS;
                    vec acc[ROWS][COLUMNS];
                    for (int64_t r = 0; r < ROWS; r++)
                        std::memcpy(acc[r], sums[first + r] + part * COLUMNS, sizeof acc[r]);
                    const scalar* ahead = PARTS == 1 ? w + AHEAD * PAIR * PANEL : next;
                    accumulate(from, x + first * k, k, begin, end, ahead, fetched, acc);
                    for (int64_t r = 0; r < ROWS; r++)
                        std::memcpy(sums[first + r] + part * COLUMNS, acc[r], sizeof acc[r]);
                }
            });
        });
    }
    finish(layer, panel, sums, rows, out, then);
}

#include "quantized_cpu.h"

void linear(const Linear& layer, const scalar* x, int64_t rows, void* out, Then then, int threads) {
    const int64_t row_bytes = layer.outputs * (then == ROUND ? sizeof(scalar) : sizeof(float));
    if (layer.bits) return quantized_linear(layer, x, rows, out, then, threads);
    const factor* factors = to_factors(x, rows * layer.inputs);
    parallel(threads, (layer.outputs + PANEL - 1) / PANEL, [&](int64_t panel) {
        in_parts(rows, MANY, [&](int64_t r, int64_t count) {
            multiply(layer, panel, factors + r * layer.inputs, count, (char*)out + r * row_bytes, then);
        });
    });
}

#include "pointwise_cpu.h"
#include "attention_cpu.h"

// One pass with its buffers: the residual stream `x`, fp32 [num_rows, hidden], and intermediate results.
class Pass {
    const Model& model;
    const Batch& batch;
    const int64_t n, hidden, heads, kv_heads, mlp, width, pool;  // pool: scalars of a layer's keys
    const int threads;
    static inline thread_local std::vector<float> stream, wide;
    static inline thread_local std::vector<scalar> narrow, normed_rows;
    float *x, *y;
    scalar *a, *h;
    int64_t block;  // rows that are processed together, so that they share the reordering of pages
    std::vector<std::vector<Scattered>> scattered;  // of each block

    scalar* keys(int64_t layer) const { return (scalar*)batch.cache + 2 * layer * pool; }

    void embed() {
        if (batch.inputs) {
            for (int64_t i = 0; i < n * hidden; i++) x[i] = to_float(((const scalar*)batch.inputs)[i]);
            return;
        }
        for (int64_t r = 0; r < n; r++)
            for (int64_t i = 0; i < hidden; i++) {
                float value = to_float(model.embed[batch.tokens[r] * hidden + i]) * model.embed_scale;
                if (model.positions) value += to_float(model.positions[batch.places[r] * hidden + i]);
                x[r * hidden + i] = value;
            }
    }

    void norm(const Norm& norm, scalar* out) const {
        for (int64_t r = 0; r < n; r++) {
            const float* row = x + r * hidden;
            const Moments of = moments(row, hidden, model.eps, model.layer_norm);
            for (int64_t i = 0; i < hidden; i += LANES) store(out + r * hidden + i, normed(row, of, norm, i));
        }
    }

    // Adds a layer's output to the residual stream, after a post norm if the model family has one.
    void add(const Linear& layer, const scalar* from, const Norm& norm) {
        if (!norm.weight) return linear(layer, from, n, x, ADD, threads);
        linear(layer, from, n, y, STORE, threads);
        for (int64_t r = 0; r < n; r++) {
            const float* row = y + r * hidden;
            float* to = x + r * hidden;
            const Moments of = moments(row, hidden, model.eps, model.layer_norm);
            for (int64_t i = 0; i < hidden; i += LANES) store(to + i, load<vec>(to + i) + normed(row, of, norm, i));
        }
    }

    // Normalises, rotates and scales a row's heads, and writes its K and V to the cache.
    void rotate_and_write(const Layer& layer, int64_t r, scalar* k, scalar* v) {
        float rotated[HEAD_DIM];
        for (int64_t i = 0; i < heads + kv_heads; i++) {
            float* head = y + r * width + i * HEAD_DIM;
            if (layer.head_norm) norm_head(head, layer.head_norm + i * HEAD_DIM, model.eps);
            if (model.ropes) {
                rotate(head, batch.rotation + (batch.positions[r] * model.ropes + layer.rope) * 2 * HEAD_DIM, rotated);
                std::memcpy(head, rotated, sizeof rotated);
            }
            if (i < heads)
                for (int64_t j = 0; j < HEAD_DIM; j += LANES) store(head + j, load<vec>(head + j) * model.scale);
        }
        const int64_t slot = batch.slots[r], first = (slot / PAGE * kv_heads * PAGE + slot % PAGE) * HEAD_DIM;
        for (int64_t i = 0; i < kv_heads; i++) {
            const float* key = y + r * width + (heads + i) * HEAD_DIM;
            for (int64_t j = 0; j < HEAD_DIM; j += LANES) {
                store(k + first + i * PAGE * HEAD_DIM + j, load<vec>(key + j));
                store(v + first + i * PAGE * HEAD_DIM + j, load<vec>(key + kv_heads * HEAD_DIM + j));
            }
        }
    }

    // Writes the residual stream before a layer to `batch.states` if it is asked for.
    void keep(int64_t layer) const {
        for (int64_t s = 0; s < batch.num_states; s++)
            if (batch.state_layers[s] == layer)
                for (int64_t r = 0; r < n; r++)
                    for (int64_t i = 0; i < hidden; i += LANES)
                        store((scalar*)batch.states + (r * batch.num_states + s) * hidden + i,
                              load<vec>(x + r * hidden + i));
    }

    // Writes the projections of the residual stream to `y`.
    void project(const Layer& layer) {
        norm(layer.attn_norm, h);
        linear(layer.qkv, h, n, y, STORE, threads);
    }

    // Writes the attention of the projections in `y` to `a`.
    void attend(const Layer& layer, scalar* k, scalar* v) {
        const int64_t group = heads / kv_heads, blocks = scattered.size();
        for (int64_t r = 0; r < n; r++) rotate_and_write(layer, r, k, v);
        parallel(threads, kv_heads * blocks, [&](int64_t index) {
            const int64_t i = index / blocks, r = index % blocks * block;
            const int64_t head = i * group * HEAD_DIM, page = i * PAGE * HEAD_DIM;
            static thread_local Memory memory;
            Attention attention(memory, batch, r, std::min(r + block, n), k + page, v + page, kv_heads, group,
                                layer.window, model.score_cap);
            attention.run(scattered[r / block], y + head, width, a + head, heads * HEAD_DIM);
        });
    }

    // Writes the MLP of the normalised rows `h`, without its down projection, to `a`.
    void mlp_up(const Layer& layer) {
        const int64_t step = layer.gate_up.outputs;
        linear(layer.gate_up, h, n, y, STORE, threads);
        parallel(threads, n, [&](int64_t r) {
            for (int64_t i = 0; i < mlp; i += LANES) {
                const vec active = activate(model.activation, load<vec>(y + r * step + i));
                store(a + r * mlp + i, step == mlp ? active : active * load<vec>(y + r * step + mlp + i));
            }
        });
    }

  public:
    Pass(const Model& model, const Batch& batch)
        : model(model), batch(batch), n(batch.num_rows), hidden(model.hidden), heads(model.heads),
          kv_heads(model.kv_heads), mlp(model.mlp), width((heads + 2 * kv_heads) * HEAD_DIM),
          pool(batch.num_pages * kv_heads * PAGE * HEAD_DIM),
          threads(int(model.threads)), block(std::max<int64_t>(1, std::min<int64_t>(16, n * kv_heads / threads))) {
        stream.resize(n * hidden);
        wide.resize(n * std::max({width, 2 * mlp, hidden}));
        narrow.resize(n * std::max(heads * HEAD_DIM, mlp));
        normed_rows.resize(n * hidden);
        x = stream.data(), y = wide.data(), a = narrow.data(), h = normed_rows.data();
        for (int64_t r = 0; r < n; r += block) scattered.push_back(scattered_of(batch, r, std::min(r + block, n)));
    }

    // Writes the K and V of `batch.inputs` in all layers.
    void write_context() {
        for (int64_t l = 0; l < batch.num_layers; l++) {
            linear(model.layers[l].qkv, (const scalar*)batch.inputs, n, y, STORE, threads);
            for (int64_t r = 0; r < n; r++) rotate_and_write(model.layers[l], r, keys(l), keys(l) + pool);
        }
    }

    void run() {
        embed();
        for (int64_t l = 0; l < batch.num_layers; l++) {
            const Layer& layer = model.layers[l];
            keep(l);
            if (l == 0 && batch.qkv)
                for (int64_t i = 0; i < n * width; i++) y[i] = to_float(((const scalar*)batch.qkv)[i]);
            else
                project(layer);
            attend(layer, keys(l), keys(l) + pool);
            if (model.parallel) norm(layer.mlp_norm, h);  // the input of the MLP excludes the output of attention
            add(layer.o, a, layer.attn_post_norm);
            if (!model.parallel) norm(layer.mlp_norm, h);
            mlp_up(layer);
            add(layer.down, a, layer.mlp_post_norm);
        }
        keep(batch.num_layers);
        norm(model.final_norm, (scalar*)batch.out);
    }
};

}  // namespace

extern "C" {

// Writes the rows' hidden states after the final norm to batch->out, and their K and V to their slots of the cache.
void treespec_forward(const Model* model, const Batch* batch) { Pass(*model, *batch).run(); }

// Writes the projections of batch->inputs to the rows' slots of the cache, as K and V of all layers.
void treespec_write_context(const Model* model, const Batch* batch) { Pass(*model, *batch).write_context(); }

// Writes the inputs of a draft head's pass: the residual stream before its first layer, [num_rows, hidden], and that
// layer's projections. features: [num_rows, hidden]. All in the model's dtype.
void treespec_pairs(const Pairing* pairing, const int64_t* tokens, const scalar* features, int64_t num_rows,
                    scalar* inputs, scalar* qkv, int64_t threads) {
    static thread_local std::vector<scalar> pairs;
    static thread_local std::vector<float> row;
    const int64_t hidden = pairing->hidden;
    pairs.resize(num_rows * 2 * hidden), row.resize(hidden);
    for (int64_t r = 0; r < num_rows; r++) {
        const scalar* parts[] = {pairing->embed + tokens[r] * hidden, features + r * hidden};
        for (int64_t half = 0; half < 2; half++) {
            scalar* to = pairs.data() + (2 * r + half) * hidden;
            for (int64_t i = 0; i < hidden; i++) row[i] = to_float(parts[half][i]);
            const Moments of = moments(row.data(), hidden, pairing->eps, false);
            const Norm& norm = half ? pairing->feature_norm : pairing->embed_norm;
            for (int64_t i = 0; i < hidden; i += LANES) store(to + i, normed(row.data(), of, norm, i));
        }
        const scalar* feature = pairing->residual_after_norm ? pairs.data() + (2 * r + 1) * hidden : parts[1];
        std::copy_n(feature, hidden, inputs + r * hidden);
    }
    linear(*pairing->qkv, pairs.data(), num_rows, qkv, ROUND, int(threads));
}

// Applies a linear layer: [num_rows, inputs] -> [num_rows, outputs], both in the model's dtype.
void treespec_linear(const Linear* layer, const scalar* x, int64_t num_rows, scalar* out, int64_t threads) {
    linear(*layer, x, num_rows, out, ROUND, int(threads));
}

// As treespec_linear, but writes fp32 probabilities over the outputs, whose number must be a multiple of 16.
void treespec_probs(const Linear* layer, const scalar* x, int64_t num_rows, float* out, int64_t threads) {
    linear(*layer, x, num_rows, out, STORE, int(threads));
    to_probs(out, num_rows, layer->outputs);
}

// Writes the largest logit of each row and its first token; NaN and 0 if any logit of the row is NaN.
void treespec_best(const scalar* logits, int64_t num_rows, int64_t width, float* values, int64_t* tokens,
                   int64_t threads) {
    parallel(int(threads), num_rows, [&](int64_t r) {
        const Largest found = largest(logits + r * width, width);
        values[r] = found.value, tokens[r] = found.at;
    });
}

// Reorders quantised weights for `unpack`. values: int8 [outputs, inputs], or bytes [outputs, inputs / 2] of two 4-bit
// weights plus 8, the first one in the low bits. out: [panels, inputs / 2, 16 * bits] bytes.
void treespec_pack(const uint8_t* values, int64_t outputs, int64_t inputs, int64_t bits, uint8_t* out) {
    pack(values, outputs, inputs, bits, out);
}

}  // extern "C"
