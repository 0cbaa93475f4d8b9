// Runs a decoder's pass on a CPU in one call. The file is compiled on the user's machine for one head size and dtype
// (HEAD_DIM, BF16).
//
// A row's bits depend only on the row:
//  - without -ffast-math and with -ffp-contract=off, the compiler may vectorise but not change an operation's result;
//  - an element of a matrix product has one order of summation, for any number of rows (products_cpu.h);
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
#ifndef TILES
#define TILES 0  // 1: bf16 is multiplied by AMX, if the machine has it; 2: by AMX's instructions emulated
#elif !BF16 || TILES == 1 && !defined(__AMX_BF16__)
#undef TILES
#define TILES 0
#endif
// Whether bf16 is multiplied in pairs by vdpbf16ps: twice as fast as fused multiply-adds on AMD's CPUs and half
// as fast on Intel's. Otherwise vectors of it are widened to fp32.
#if BF16 && !TILES && defined(__AVX512BF16__) && defined(__AVX512BW__) && !defined(__AMX_BF16__)
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

// Adds the products of 32-bit units x, of one fp32 or of two bf16 in order, with the factors at y.
inline vec add_products(vec acc, uvec x, const factor* y) {
#if !BF16
    return fma((vec)x, splat(*y), acc);
#elif IN_PAIRS
    return (vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)_mm512_set1_epi32(load<int32_t>(y)));
#else
    return fma((vec)(x & 0xffff0000u), splat(y[1]), fma((vec)(x << 16), splat(y[0]), acc));
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

// Stores values rounded to the model's dtype, as products read them.
inline void store_factors(factor* p, vec v) {
#if BF16 && !IN_PAIRS
    scalar rounded[LANES];
    store(rounded, v), v = widen(rounded);
#endif
    store(p, v);
}

}  // namespace

extern "C" {

struct Linear {
    const void* weight;  // [panels of 64 outputs][inputs][64], in bf16 in pairs of inputs; or as in quantized_cpu.h
    const float* bias;   // padded to whole panels, or null
    const Linear* rest;  // the next matrix of a product of several, or null
    int64_t inputs, outputs, stride;  // stride: outputs of all matrices of the product
    // Quantised weights (code 0: others): Code, inputs per scale, FactorForm, whether there are minima, index of the
    // table, and excess of all integers.
    int64_t code, group, factors, has_min, table;
    float base;
    int64_t integer;  // whether activations are quantised too (integer_cpu.h)
    int64_t narrow;   // outputs of a panel if it has fewer than 64, a multiple of 16 (unquantised weights)
    int64_t streams;  // whether the model's weights exceed the L3 cache, so that no pass finds them there
};

struct Source {  // rows of a matrix, one after another, to be packed
    const uint8_t* values;      // blocks, or integers: int8, or pairs of 4 bits plus 8
    const float *scale, *zero;  // for integers, [outputs, groups]; zero may be null
    int64_t outputs;
};

struct Norm {
    const float *weight, *bias;  // bias may be null; weight is null if the model family has no such norm
};

struct Experts {  // experts of a sparse layer, all in one form
    const Linear *gate_up, *down;  // [count]
    Linear router, shared_scale;   // [hidden] -> [count], padded to a multiple of 16; shared_scale: to 16, if any
    Linear latent_in, latent_out;  // projections before and after the experts other than the shared one, if any
    const float* correction;       // [padded count], added to the scores by which experts are chosen, or null
    int64_t count, top_k, scoring, normalized, groups, chosen_groups;  // as in `Experts` (experts.py)
    float scale;
    // Only of experts beside a dense MLP, otherwise null: factors on their weights, [count], and norms
    const float* scales;
    Norm router_norm, experts_norm, experts_post_norm, shared_post_norm;
};

struct Layer {
    Norm attn_norm, mlp_norm, attn_post_norm, mlp_post_norm;
    const float* head_norm;  // [normed_heads, head size], or null
    const float* sinks;      // [heads], or null
    Linear qkv, o, gate_up, down;  // gate_up, down: in a sparse layer, the shared expert's, if it has one
    Linear mix, mix_out;           // recurrent layer: inputs of `RecurrentRows`, and its output projection
    const Experts* experts;  // null for a dense layer
    // Convolution of a recurrent layer, [kernel, channels], null in other layers; and its bias, [channels], or null
    const float *conv, *conv_bias;
    // Layers with a state per head, [state_heads]; skip: Mamba 2 only. gain: [value_dim], for Mamba 2 of all heads
    const float *dt_bias, *rate, *skip, *gain;
    int64_t query_rope, rope;  // indices of the ropes of queries and of keys
    int64_t window;            // number of positions that a row attends to, 0: all
    // K/V: their heads, parts of HEAD_DIM of a head, first plane in the cache, and whether the layer writes them. Of the
    // heads of Q, K and V, the first `normed_heads` are normalised by `head_norm`.
    int64_t kv_heads, parts, plane, owns_kv, normed_heads;
    Linear input_gate, input_out;  // for the per-layer input, if the layer has one
    Norm input_norm;
    int64_t index;  // index in the whole model
    float scalar;   // factor on the residual stream after the layer
};

struct Update {  // low-rank update of a product W x of one matrix or several: W x + B A x
    Linear down;        // A of all matrices, concatenated; without outputs if there is no update
    const Linear* ups;  // B of each matrix, without inputs if it has no update
    int64_t count;
};

struct LayerUpdates {  // low-rank updates of an adapter (LoRA)
    Update qkv, o, gate_up, down, mix, mix_out, input_gate, input_out;
};

struct Pairing {  // how a draft head combines a token and the feature of the token before it, a pair
    // [2 * hidden] to the residual stream, or to the first layer's projections [(heads + 2 * kv_heads) * HEAD_DIM]
    const Linear* product;
    const void* embed;  // [vocab, hidden]; in blocks of a GGUF file if `embed_type` is not 0
    int64_t embed_type;
    Norm embed_norm, feature_norm;
    // stream: start of the residual stream: 0 the feature, 1 the normalised feature, 2 the product
    int64_t hidden, stream;
    float eps;
};

struct Model {
    const Layer* layers;
    const void* embed;        // [vocab, hidden]; in blocks of a GGUF file if `embed_type` is not 0
    int64_t embed_type;       // the blocks' number in GGUF files
    const scalar* positions;  // learned positions [positions, hidden], or null
    Norm final_norm;
    // Per-layer inputs: norm(product of the embedding) + row of the table times input_scale, [layers, input_size].
    const void* input_embed;
    int64_t input_type, input_size;  // input_type: as embed_type; input_size: 0 for none
    Linear input_project;
    Norm input_norm;
    float input_scale, input_eps;
    int64_t hidden, mlp, threads;
    // As in `Architecture` (decoder_cpu.py); a score_cap of 0 is none.
    int64_t num_heads, num_kv_heads, activation, layer_norm, parallel, num_ropes, output_gate;
    int64_t kernel, channels, key_heads, state_heads, key_dim, value_dim, tiled, rates, mixer_norm;
    float mixer_eps, beta_scale, step_scale, value_scale, norm_eps, query_scale, embed_scale, score_cap;
    int64_t wide_head_norm, norm_after_rope;
    int64_t widest_head;  // head size of the widest layer, a multiple of HEAD_DIM; 0: HEAD_DIM
};

}  // extern "C"

namespace {

enum Code { INT4 = 4, INT5 = 5, INT6 = 6, INT8 = 8, TABLE = 16 };
enum FactorForm { FLOATS, HALVES, CODES };  // fp32, fp16, or int8 times an fp16 of 256 inputs

#include "linear_cpu.h"
#include "pointwise_cpu.h"
#include "attention_cpu.h"
#include "recurrent_cpu.h"
#include "experts_cpu.h"

// Dequantises a row of a table in blocks, with `width` values per row, to `to`.
void read_blocks(const void* table, int64_t type, int64_t row, int64_t width, float* to) {
    const BlockFormat& format = format_of(type);
    dequantize_row(type, (const uint8_t*)table + row * (width / format.values * format.bytes), width, to);
}

// One pass with its buffers: the residual stream `x`, fp32 [num_rows, hidden], and intermediate results.
class Pass {
    const Model& model;
    const Batch& batch;
    const int64_t n, hidden, heads, plane_heads, mlp, pool;  // pool: scalars of the keys of a plane
    const int threads;
    static inline thread_local std::vector<float> stream, wide, layer_inputs, dense;
    static inline thread_local std::vector<scalar> narrow, normed_rows, router_rows;
    static inline thread_local std::vector<float> all_scores;
    float *x, *y;
    scalar *a, *h;
    const int64_t stride;     // positions of the longest row, rounded up to whole pages
    const bool shares_heads;  // whether several threads share the attention of a head
    const int64_t block;      // rows that are processed together, so that they share the reordering of pages
    std::vector<std::vector<Scattered>> scattered;  // of each block

    // Returns the size of equal blocks of at most 16 rows, enough for all threads. While the threads have unequal
    // shares, blocks of 8 rows and more are divided.
    static int64_t block_of(int64_t rows, int64_t kv_heads, int64_t threads) {
        int64_t blocks = std::max({int64_t(1), (rows + 15) / 16, std::min(rows, (threads + kv_heads - 1) / kv_heads)});
        while (kv_heads * blocks % threads && kv_heads * blocks < 4 * threads && rows >= 4 * (blocks + 1)) blocks++;
        return (rows + blocks - 1) / blocks;
    }

    // Returns the address of a part of a layer's keys in page 0; the values are `pool` behind.
    scalar* keys(const Layer& layer, int64_t part) const {
        const int64_t plane = layer.plane + part / plane_heads;
        return (scalar*)batch.cache + 2 * plane * pool + part % plane_heads * PAGE * HEAD_DIM;
    }

    // Returns the number of projections of a row of a layer with attention.
    int64_t width_of(const Layer& layer) const {
        const int64_t read = heads * (model.output_gate ? 2 : 1), written = layer.owns_kv ? 2 * layer.kv_heads : 0;
        return (read + written) * layer.parts * HEAD_DIM;
    }

    // Calls body(row) for each row.
    template <class Body> void for_rows(const Body& body) const { parallel(threads_of_rows(n, threads), n, body); }

    // Returns a token's embedding, which is in blocks, valid until the next call.
    const scalar* embed_in_blocks(int64_t token) const {
        read_blocks(model.embed, model.embed_type, token, hidden, y);
        for (int64_t i = 0; i < hidden; i += LANES) store(h + i, load<vec>(y + i));
        return h;
    }

    // Computes the per-layer inputs.
    void make_inputs() const {
        const int64_t width = model.input_project.stride, size = model.input_size;
        float* const made = at_least(layer_inputs, n * width);  // taken here, because it is thread_local
        norm({}, h);
        linear(model.input_project, h, n, made, STORE, threads);
        for_rows([&](int64_t r) {
            static thread_local std::vector<float> found;
            found.resize(width);
            const int64_t token = batch.tokens[r];
            if (model.input_type) read_blocks(model.input_embed, model.input_type, token, width, found.data());
            else for (int64_t i = 0; i < width; i++) found[i] = to_float(((const scalar*)model.input_embed)[token * width + i]);
            for (float *row = made + r * width, *end = row + width; row < end; row += size) {
                const float* entry = found.data() + (row - made - r * width);
                const Moments of = moments(row, size, model.input_eps, false);
                for (int64_t i = 0; i < size; i += LANES)
                    store(row + i, normed(row, of, model.input_norm, i) + load<vec>(entry + i) * model.input_scale);
            }
        });
    }

    void embed() {
        if (batch.inputs) {
            for (int64_t i = 0; i < n * hidden; i++) x[i] = to_float(((const scalar*)batch.inputs)[i]);
            return;
        }
        for (int64_t r = 0; r < n; r++) {
            const scalar* row = (const scalar*)model.embed + batch.tokens[r] * hidden;
            if (model.embed_type) row = embed_in_blocks(batch.tokens[r]);
            for (int64_t i = 0; i < hidden; i++) {
                float value = to_float(row[i]) * model.embed_scale;
                if (model.positions) value += to_float(model.positions[batch.learned_positions[r] * hidden + i]);
                x[r * hidden + i] = value;
            }
        }
        if (model.input_size) make_inputs();
    }

    void norm(const Norm& norm, scalar* out) const {
        for_rows([&](int64_t r) {
            const float* row = x + r * hidden;
            if (!norm.weight) {
                for (int64_t i = 0; i < hidden; i += LANES) store(out + r * hidden + i, load<vec>(row + i));
                return;
            }
            const Moments of = moments(row, hidden, model.norm_eps, model.layer_norm);
            for (int64_t i = 0; i < hidden; i += LANES) store(out + r * hidden + i, normed(row, of, norm, i));
        });
    }

    // Multiplies all rows, and adds the low-rank updates of those that have any.
    void multiply(const Layer& layer, Linear Layer::*matrix, Update LayerUpdates::*update, const scalar* from,
                  float* to, Then then) const {
        static thread_local std::vector<scalar> low;
        static thread_local std::vector<Share> ups;
        linear(layer.*matrix, from, n, to, then, threads);
        for (int64_t i = 0; i < batch.num_updated; i++) {
            const UpdatedRows& rows = batch.updated[i];
            const Update& part = ((const LayerUpdates*)rows.layers)[&layer - model.layers].*update;
            if (!part.down.outputs) continue;
            const int64_t rank = part.down.outputs;
            low.resize(rows.count * rank);
            linear(part.down, from + rows.first * part.down.inputs, rows.count, low.data(), ROUND, threads);
            ups.clear();
            float* first = to + rows.first * part.ups->stride;
            const Linear *up = part.ups, *const end = up + part.count;
            for (int64_t input = 0, output = 0; up < end; input += up->inputs, output += up++->outputs) {
                if (up->inputs) ups.push_back({up, 0, rows.count, input, output});
                // A matrix that does not end with a whole vector adds zeros to outputs of the next one.
                const bool ends = up + 1 == end || up->outputs % LANES;
                if (!ends || ups.empty()) continue;
                dense_product({ups.data(), int64_t(ups.size()), low.data(), first, ADD, threads, rank});
                ups.clear();
            }
        }
    }

    // Adds a layer's output to the residual stream, after a post norm if the model family has one.
    void add(const Layer& layer, Linear Layer::*matrix, Update LayerUpdates::*update, const Norm& norm) {
        if (!norm.weight) return multiply(layer, matrix, update, a, x, ADD);
        multiply(layer, matrix, update, a, y, STORE);
        add_normed(y, norm, x);
    }

    // Adds normalised rows to others.
    void add_normed(const float* rows, const Norm& norm, float* sums) const {
        for_rows([&](int64_t r) {
            const float* row = rows + r * hidden;
            float* to = sums + r * hidden;
            const Moments of = moments(row, hidden, model.norm_eps, model.layer_norm);
            for (int64_t i = 0; i < hidden; i += LANES) store(to + i, load<vec>(to + i) + normed(row, of, norm, i));
        });
    }

    // Normalises the heads of a row's projections.
    void norm_heads(const Layer& layer, float* row) const {
        const int64_t dim = layer.parts * HEAD_DIM;
        for (int64_t first = 0, step; first < layer.normed_heads; first += step) {
            step = !model.wide_head_norm ? 1 : first ? layer.kv_heads : heads;
            float* from = row + first * dim;
            const Moments of = moments(from, step * dim, model.norm_eps, false);
            const Norm norm = {layer.head_norm + first * dim, nullptr};
            for (int64_t i = 0; i < step * dim; i += LANES) store(from + i, normed(from, of, norm, i));
        }
    }

    // Normalises, rotates and scales a row's heads, and writes its K and V to the cache.
    void rotate_and_write(const Layer& layer, int64_t r) {
        const int64_t dim = layer.parts * HEAD_DIM, kv_heads = layer.owns_kv ? layer.kv_heads : 0;
        float* const row = y + r * width_of(layer);
        if (layer.head_norm && !model.norm_after_rope) norm_heads(layer, row);
        for (int64_t i = 0; model.num_ropes && i < heads + kv_heads; i++) {
            const int64_t angle = batch.positions[r] * model.num_ropes + (i < heads ? layer.query_rope : layer.rope);
            const int64_t step = model.widest_head ? model.widest_head : HEAD_DIM;
            const float* cos = batch.rotation + angle * 2 * step;
            rotate(row + i * dim, cos, cos + step, dim);
        }
        if (layer.head_norm && model.norm_after_rope) norm_heads(layer, row);
        for (int64_t i = 0; i < heads * dim; i += LANES) store(row + i, load<vec>(row + i) * model.query_scale);
        const int64_t slot = batch.slots[r], first = (slot / PAGE * plane_heads * PAGE + slot % PAGE) * HEAD_DIM;
        for (int64_t i = 0; i < kv_heads * layer.parts; i++) {
            const float *key = row + heads * dim + i * HEAD_DIM, *value = key + kv_heads * dim;
            scalar *const to = keys(layer, i) + first;
            for (int64_t j = 0; j < HEAD_DIM; j += LANES) store(to + j, load<vec>(key + j));
            for (int64_t j = 0; j < HEAD_DIM; j += LANES) store(to + pool + j, load<vec>(value + j) * model.value_scale);
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

    // Adds the output of a recurrent layer, the `index`-th one, for the normalised rows `h` to the residual stream.
    void mix(const Layer& layer, RecurrentRows& recurrent, int64_t index) {
        multiply(layer, &Layer::mix, &LayerUpdates::mix, h, y, STORE);
        if (layer.gain) recurrent.mix_heads(layer, index, y, layer.mix.stride, a, threads);
        else recurrent.mix_conv(layer, index, y, layer.mix.stride, a, threads);
        add(layer, &Layer::mix_out, &LayerUpdates::mix_out, layer.attn_post_norm);
    }

    // Writes the attention of the projections in `y` to `a`.
    void attend(const Layer& layer) {
        const int64_t dim = layer.parts * HEAD_DIM, group = heads / layer.kv_heads, size = heads * dim;
        const int64_t blocks = scattered.size(), width = width_of(layer), jobs = layer.kv_heads * blocks;
        const int64_t queries = block * group;
        float* const shared = shares_heads ? at_least(all_scores, jobs * queries * (stride + 1)) : nullptr;
        for_rows([&](int64_t r) { rotate_and_write(layer, r); });
        // Calls body(attention, first row, step) for `steps` steps of each KV head and block of rows.
        const auto each = [&](int64_t steps, const auto& body) {
            parallel(threads, jobs * steps, [&](int64_t index) {
                static thread_local Memory memory;
                static thread_local std::vector<float> scores_of_job;
                const int64_t job = index / steps, i = job / blocks, r = job % blocks * block, head = i * group;
                const int64_t end = std::min(r + block, n), columns = shared ? stride : stride_of(batch, r, end);
                const int64_t count = queries * (columns + 1);
                float* const scores = shared ? shared + job * count : at_least(scores_of_job, count);
                memory.keys_of.resize(layer.parts);
                for (int64_t part = 0; part < layer.parts; part++)
                    memory.keys_of[part] = keys(layer, i * layer.parts + part);
                Attention attention(memory, {scores, scores + queries * columns, columns}, {y + head * dim, width},
                                    {a + head * dim, size}, batch, r, end, pool, plane_heads, group, layer.window,
                                    model.score_cap, layer.sinks ? layer.sinks + head : nullptr);
                body(attention, r, index % steps);
            });
        };
        if (shared) {  // one block
            each(threads, [&](Attention& of, int64_t, int64_t share) { of.score_pages(share, threads); });
            each(1, [&](Attention& of, int64_t, int64_t) { of.score_scattered(scattered[0]); });
            each(n, [](Attention& of, int64_t, int64_t r) { of.softmax(r); });
            each(SLICES, [](Attention& of, int64_t, int64_t slice) { of.weigh(slice); });
        } else
            each(1, [&](Attention& of, int64_t first, int64_t) {
                of.score_pages(0, 1), of.score_scattered(scattered[first / block]);
                for (int64_t r = first; r < std::min(first + block, n); r++) of.softmax(r);
                of.weigh(-1);
            });
        if (!model.output_gate) return;
        for_rows([&](int64_t r) {
            const float* gate = y + (r + 1) * width - size;
            for (int64_t i = 0; i < size; i += LANES)
                store(a + r * size + i, widen(a + r * size + i) * sigmoid(load<vec>(gate + i)));
        });
    }

    // Applies the activation of an MLP to the outputs of its first product: [rows, size or 2 * size] -> [rows, size].
    void activate_rows(const float* from, int64_t rows, int64_t step, int64_t size, scalar* to) const {
        parallel(threads, rows, [&](int64_t r) {
            const float* row = from + r * step;
            for (int64_t i = 0; i < size; i += LANES)
                store(to + r * size + i, step == size ? activate(model.activation, load<vec>(row + i))
                                                      : gated(model.activation, load<vec>(row + i),
                                                              load<vec>(row + size + i)));
        });
    }

    // Adds the MLP of the normalised rows `h` to the residual stream; in a sparse layer that of the shared expert.
    void add_mlp(const Layer& layer) {
        multiply(layer, &Layer::gate_up, &LayerUpdates::gate_up, h, y, STORE);
        activate_rows(y, n, layer.gate_up.stride, layer.down.inputs, a);
        if (layer.experts && layer.experts->scales) return add_beside(layer);
        if (!layer.experts || !layer.experts->shared_scale.weight)
            return add(layer, &Layer::down, &LayerUpdates::down, layer.mlp_post_norm);
        static thread_local std::vector<float> memory;
        const Linear& scale = layer.experts->shared_scale;
        float* const scales = at_least(memory, n * scale.stride);  // taken here, because it is thread_local
        linear(scale, h, n, scales, STORE, threads);
        multiply(layer, &Layer::down, &LayerUpdates::down, a, y, STORE);
        for_rows([&](int64_t r) {
            const float by = 1.0f / (1.0f + exp(-scales[r * scale.stride]));
            float* to = x + r * hidden;
            for (int64_t i = 0; i < hidden; i += LANES)
                store(to + i, load<vec>(to + i) + by * load<vec>(y + r * hidden + i));
        });
    }

    // Adds the experts beside a dense MLP to the residual stream, and this MLP, whose activations are in `a`.
    void add_beside(const Layer& layer) {
        const Experts& of = *layer.experts;
        multiply(layer, &Layer::down, &LayerUpdates::down, a, y, STORE);
        dense.assign(2 * n * hidden, 0.0f);
        float *const sums = dense.data(), *const routed = sums + n * hidden;  // taken here, because it is thread_local
        add_normed(y, of.shared_post_norm, sums);
        router_rows.resize(n * hidden);
        norm(of.router_norm, router_rows.data());
        norm(of.experts_norm, h);
        add_experts(of, router_rows.data(), routed);
        add_normed(routed, of.experts_post_norm, sums);
        add_normed(sums, layer.mlp_post_norm, x);
    }

    // Adds the outputs of the experts of the normalised rows `h`, which the router chooses by other rows, to `sums`.
    void add_experts(const Experts& of, const scalar* router_rows, float* sums) {
        static thread_local Routed routed;
        Routed& to = routed;  // taken here, because it is thread_local
        const int64_t k = of.top_k, size = of.down->inputs, step = of.gate_up->stride, outputs = of.router.stride;
        const int64_t ends = of.gate_up->inputs;  // width of an expert's inputs and outputs
        const bool latent = of.latent_in.weight;
        to.scores.resize(n * outputs), to.choice.resize(n * outputs);
        to.chosen.resize(n * k), to.weights.resize(n * k);
        linear(of.router, router_rows, n, to.scores.data(), STORE, threads);
        for_rows([&](int64_t r) {
            choose_experts(of, to.scores.data() + r * outputs, to.choice.data() + r * outputs, to.chosen.data() + r * k,
                           to.weights.data() + r * k);
        });
        to.order(of, n);
        to.inputs.resize(n * k * ends), to.inner.resize(n * k * size), to.latent.resize(latent ? n * ends : 0);
        to.outputs.resize(n * k * std::max(step, ends));
        if (latent) linear(of.latent_in, h, n, to.latent.data(), ROUND, threads);
        for_rows([&](int64_t r) {
            const scalar* from = (latent ? to.latent.data() : h) + r * ends;
            for (int64_t j = 0; j < k; j++)
                std::copy_n(from, ends, to.inputs.data() + to.places[r * k + j] * ends);
        });
        to.multiply(of.gate_up, to.inputs.data(), threads);
        activate_rows(to.outputs.data(), n * k, step, size, to.inner.data());
        to.multiply(of.down, to.inner.data(), threads);
        for_rows([&](int64_t r) {
            for (int64_t i = 0; i < ends; i += LANES) {
                vec total = {};
                for (int64_t j = 0; j < k; j++)
                    total += to.weights[r * k + j] * load<vec>(to.outputs.data() + to.places[r * k + j] * ends + i);
                if (latent) store(to.latent.data() + r * ends + i, total);
                else store(sums + r * hidden + i, load<vec>(sums + r * hidden + i) + total);
            }
        });
        if (latent) linear(of.latent_out, to.latent.data(), n, sums, ADD, threads);
    }

    // Adds the output for a layer's per-layer input to the residual stream, and scales the stream.
    void finish(const Layer& layer) {
        if (const int64_t size = layer.input_out.weight ? model.input_size : 0) {
            norm({}, h);
            multiply(layer, &Layer::input_gate, &LayerUpdates::input_gate, h, y, STORE);
            const float* own = layer_inputs.data() + layer.index * size;
            for_rows([&](int64_t r) {
                for (int64_t i = 0; i < size; i += LANES)
                    store(a + r * size + i, activate(model.activation, load<vec>(y + r * size + i)) *
                                                load<vec>(own + r * model.input_project.stride + i));
            });
            multiply(layer, &Layer::input_out, &LayerUpdates::input_out, a, y, STORE);
            add_normed(y, layer.input_norm, x);
        }
        if (layer.scalar == 1.0f) return;
        for (int64_t i = 0; i < n * hidden; i += LANES) store(x + i, load<vec>(x + i) * layer.scalar);
    }

  public:
    Pass(const Model& model, const Batch& batch)
        : model(model), batch(batch), n(batch.num_rows), hidden(model.hidden), heads(model.num_heads),
          plane_heads(model.num_kv_heads), mlp(model.mlp), pool(batch.num_pages * plane_heads * PAGE * HEAD_DIM),
          threads(int(model.threads)), stride(stride_of(batch, 0, n)),
          shares_heads(threads > 1 && plane_heads < 4 * threads && stride >= LONG && n <= 16),
          block(shares_heads ? n : block_of(n, plane_heads, threads)) {
        int64_t widest = std::max({2 * mlp, hidden, model.input_size}), mixed = std::max(mlp, model.input_size);
        for (int64_t l = 0; l < batch.num_layers; l++) {
            const Layer& layer = model.layers[l];
            widest = std::max({widest, width_of(layer), layer.mix.stride});
            mixed = std::max({mixed, layer.o.inputs, layer.mix_out.inputs});
        }
        x = at_least(stream, n * hidden), y = at_least(wide, n * widest);
        a = at_least(narrow, n * mixed), h = at_least(normed_rows, n * hidden);
        for (int64_t r = 0; r < n; r += block) scattered.push_back(scattered_of(batch, r, std::min(r + block, n)));
    }

    // Writes the K and V of `batch.inputs` in all layers.
    void write_context() {
        for (int64_t l = 0; l < batch.num_layers; l++) {
            linear(model.layers[l].qkv, (const scalar*)batch.inputs, n, y, STORE, threads);
            for_rows([&](int64_t r) { rotate_and_write(model.layers[l], r); });
        }
    }

    void run() {
        embed();
        RecurrentRows recurrent(model, batch);
        for (int64_t l = 0, states = 0; l < batch.num_layers; l++) {
            const Layer& layer = model.layers[l];
            keep(l);
            const bool given = l == 0 && batch.qkv;
            if (!given && (layer.o.weight || layer.conv)) norm(layer.attn_norm, h);  // otherwise the layer is an MLP
            if (layer.conv) mix(layer, recurrent, states++);
            if (layer.o.weight) {
                if (given)
                    for (int64_t i = 0; i < n * width_of(layer); i++) y[i] = to_float(((const scalar*)batch.qkv)[i]);
                else
                    multiply(layer, &Layer::qkv, &LayerUpdates::qkv, h, y, STORE);
                attend(layer);
                if (model.parallel) norm(layer.mlp_norm, h);  // the input of the MLP excludes the output of attention
                add(layer, &Layer::o, &LayerUpdates::o, layer.attn_post_norm);
            }
            if (!model.parallel && (layer.experts || layer.down.weight)) norm(layer.mlp_norm, h);
            if (layer.experts && !layer.experts->scales) add_experts(*layer.experts, h, x);
            if (layer.down.weight) add_mlp(layer);
            finish(layer);
        }
        keep(batch.num_layers);
        norm(model.final_norm, (scalar*)batch.out);
    }
};

// Lays out the rows of whole trees: their slots, and those they attend to. Node i has logical slot context + i. A tree
// of one row reads all its positions through the pages, like a step of plain decoding.
class TreeLayout {
    std::vector<int64_t> columns, paths{0};

  public:
    bool fits = true;  // whether every node has a page

    TreeLayout(const TreeRows& trees, Batch& batch) {
        const int64_t n = trees.first_row[trees.num_trees];
        columns.resize(6 * n);
        int64_t *slots = columns.data(), *tables = slots + n, *direct = tables + n, *starts = direct + n;
        int64_t *counts = starts + n, *positions = counts + n;
        for (int64_t t = 0; t < trees.num_trees; t++) {
            const int64_t first = trees.first_row[t], last = trees.first_row[t + 1], context = trees.context[t];
            const int64_t* pages = trees.pages + trees.first_page[t];
            const int64_t slots_held = (trees.first_page[t + 1] - trees.first_page[t]) * trees.page_size;
            if (!(fits &= context + last - first <= slots_held)) return;
            for (int64_t i = first; i < last; i++) {
                const int64_t logical = context + i - first, parent = trees.parents[i];
                slots[i] = pages[logical / trees.page_size] * trees.page_size + logical % trees.page_size;
                tables[i] = trees.first_page[t], positions[i] = trees.first_rotation[t] + context + trees.depths[i];
                direct[i] = context + (last - first == 1), starts[i] = paths.size(), counts[i] = 0;
                if (last - first == 1) continue;
                if (parent >= 0)
                    for (int64_t j = 0; j < counts[first + parent]; j++)
                        paths.push_back(paths[starts[first + parent] + j]);
                paths.push_back(slots[i]), counts[i] = trees.depths[i] + 1;
            }
        }
        batch.num_rows = n, batch.tokens = trees.tokens, batch.slots = slots, batch.tables = tables;
        batch.direct = direct, batch.starts = starts, batch.counts = counts, batch.positions = positions;
        batch.pages = trees.pages, batch.paths = paths.data();
    }
};

}  // namespace

extern "C" {

// Writes the rows' hidden states after the final norm to batch->out, and their K and V to their slots of the cache.
void treespec_forward(const Model* model, const Batch* batch) { Pass(*model, *batch).run(); }

// Runs a pass over whole trees, and writes the logits [num_rows, outputs of the head]. batch: the cache and the rotations.
// Returns 0, without a pass, if a node has no page.
int64_t treespec_tree_logits(const Model* model, const Linear* head, Batch* batch, const TreeRows* trees, scalar* logits) {
    static thread_local std::vector<scalar> hidden;
    const TreeLayout layout(*trees, *batch);
    if (!layout.fits) return 0;
    batch->out = at_least(hidden, batch->num_rows * model->hidden);
    Pass(*model, *batch).run();
    linear(*head, (const scalar*)batch->out, batch->num_rows, logits, ROUND, int(model->threads));
    return 1;
}

// Writes the projections of batch->inputs to the rows' slots of the cache, as K and V of all layers.
void treespec_write_context(const Model* model, const Batch* batch) { Pass(*model, *batch).write_context(); }

// Writes the inputs of a draft head's pass: the residual stream before its first layer, [num_rows, hidden], and that
// layer's projections, unless they are those of the stream. features: [num_rows, hidden]. All in the model's dtype.
void treespec_pairs(const Pairing* pairing, const int64_t* tokens, const scalar* features, int64_t num_rows,
                    scalar* inputs, scalar* qkv, int64_t threads) {
    static thread_local std::vector<scalar> pairs;
    static thread_local std::vector<float> row;
    const int64_t hidden = pairing->hidden;
    pairs.resize(num_rows * 2 * hidden), row.resize(hidden);
    for (int64_t r = 0; r < num_rows; r++) {
        const scalar* feature = features + r * hidden;
        for (int64_t half = 0; half < 2; half++) {
            scalar* to = pairs.data() + (2 * r + half) * hidden;
            if (!half && pairing->embed_type)
                read_blocks(pairing->embed, pairing->embed_type, tokens[r], hidden, row.data());
            else {
                const scalar* from = half ? feature : (const scalar*)pairing->embed + tokens[r] * hidden;
                for (int64_t i = 0; i < hidden; i++) row[i] = to_float(from[i]);
            }
            const Moments of = moments(row.data(), hidden, pairing->eps, false);
            const Norm& norm = half ? pairing->feature_norm : pairing->embed_norm;
            for (int64_t i = 0; i < hidden; i += LANES) store(to + i, normed(row.data(), of, norm, i));
        }
        if (pairing->stream < 2)
            std::copy_n(pairing->stream ? pairs.data() + (2 * r + 1) * hidden : feature, hidden, inputs + r * hidden);
    }
    linear(*pairing->product, pairs.data(), num_rows, pairing->stream < 2 ? qkv : inputs, ROUND, int(threads));
}

// Applies a linear layer: [num_rows, inputs] -> [num_rows, outputs], both in the model's dtype.
void treespec_linear(const Linear* layer, const scalar* x, int64_t num_rows, scalar* out, int64_t threads) {
    linear(*layer, x, num_rows, out, ROUND, int(threads));
}

// As treespec_linear, but writes fp32 probabilities over the outputs, whose number must be a multiple of 16.
void treespec_probs(const Linear* layer, const scalar* x, int64_t num_rows, float* out, int64_t threads) {
    linear(*layer, x, num_rows, out, STORE, int(threads));
    to_probs(out, num_rows, layer->stride);
}

// Writes the largest logit of each row and its first token; NaN and 0 if any logit of the row is NaN.
void treespec_best(const scalar* logits, int64_t num_rows, int64_t width, float* values, int64_t* tokens,
                   int64_t threads) {
    parallel(int(threads), num_rows, [&](int64_t r) {
        const Largest best = largest(logits + r * width, width);
        values[r] = best.value, tokens[r] = best.index;
    });
}

// Walks the trees along the largest logits (`TokenTree.follow`) or sampled tokens (`Sampler.walk`), and compacts the pools
// to the paths, unless the caller must choose a token. Of trees that are not greedy, only the first logit of each row is
// checked: a hidden state that is not finite makes all of its logits so.
void treespec_walk(const TreeRows* trees, const Walks* walks) {
    static thread_local std::vector<Largest> memory;
    const int64_t num_rows = trees->first_row[trees->num_trees], width = walks->width;
    std::vector<uint8_t> greedy(num_rows);
    for (int64_t t = 0; t < trees->num_trees; t++)
        std::fill_n(greedy.begin() + trees->first_row[t], trees->first_row[t + 1] - trees->first_row[t], !trees->rules[t]);
    Largest* const best = at_least(memory, num_rows);  // taken here, because it is thread_local
    parallel(int(walks->threads), num_rows, [&](int64_t r) {
        const scalar* row = (const scalar*)walks->logits + r * width;
        best[r] = greedy[r] ? largest(row, width) : Largest{to_float(row[0]), 0};
    });
    parallel(int(walks->threads), trees->num_trees, [&](int64_t t) {
        const int64_t first = trees->first_row[t], count = trees->first_row[t + 1] - first;
        const int64_t *parents = trees->parents + first, *tokens = trees->tokens + first;
        int64_t *path = walks->paths + first, *chosen = walks->tokens + first, length = 1;
        Choice* const sampled = trees->rules[t] > 0 ? (Choice*)trees->rules[t] : nullptr;
        const auto token_after = [&](int64_t node, int64_t depth) -> int64_t {
            if (!sampled) return trees->rules[t] ? -1 : best[first + node].index;
            sampled->logits = (const scalar*)walks->logits + (first + node) * width;
            sampled->is_bf16 = sizeof(scalar) == 2, sampled->width = width;
            sampled->position = trees->context[t] + 1 + depth;
            return sampled->choose(sampled) == 1 ? sampled->tokens[0] : -1;
        };
        path[0] = 0, walks->lengths[t] = 0;
        if (!std::all_of(best + first, best + first + count, [](const Largest& x) { return std::isfinite(x.value); }))
            return;
        chosen[0] = token_after(0, 0);
        for (int64_t i = 1; i < count; i++)
            if (parents[i] == path[length - 1] && tokens[i] == chosen[length - 1])
                path[length] = i, chosen[length] = token_after(i, length), length++;
        walks->lengths[t] = length;
        for (int64_t pool = 0; pool < walks->num_pools && chosen[length - 1] >= 0; pool++)
            commit_path(*trees, walks->pools[pool], t, path, length);
    });
}

// Fills in a layer's format, that of blocks of a type; -1 and -2: int8 and int4 with fp32 scales. Returns the bytes of
// a packed panel.
int64_t treespec_format(Linear* layer, int64_t type) {
    if (type < 0) {
        layer->code = type == -1 ? INT8 : INT4, layer->factors = FLOATS;
        layer->base = type == -1 ? 0.0f : 24.0f;
    } else {
        const BlockFormat& format = format_of(type);
        layer->code = format.code, layer->group = format.group, layer->factors = format.factors;
        layer->has_min = format.has_min, layer->table = format.table;
        layer->base = float(format.zero + (format.code < INT8 ? 1 << format.code : 0));
    }
    return Geometry(*layer).panel_bytes();
}

// Packs the rows of matrices one after another: blocks of a type, or integers as in `treespec_format`. Writes the panels
// from `first` up to `last` to their places in `out`.
void treespec_pack(const Linear* layer, int64_t type, const Source* sources, int64_t num_sources, uint8_t* out,
                   int64_t first, int64_t last, int64_t threads) {
    const int64_t bytes = Geometry(*layer).panel_bytes();
    parallel(int(threads), last - first, [&](int64_t index) {
        const int64_t panel = first + index;
        if (type < 0) pack_integers(*layer, sources, num_sources, panel, out + panel * bytes);
        else pack_blocks(*layer, type, sources, num_sources, panel, out + panel * bytes);
    });
}

// Converts a row of blocks to fp32.
void treespec_dequantize_row(int64_t type, const uint8_t* from, int64_t inputs, float* to) {
    dequantize_row(type, from, inputs, to);
}

}  // extern "C"
