// Norms, activations and probabilities, included by decoder_cpu.cpp. Each value depends only on its own row.

enum Activation { SILU, GELU, GELU_TANH, RELU, RELU2, CLAMPED_SWIGLU };  // in the order of ACTIVATIONS in decoder_cpu.py

// The error is at most 1.5e-7 (Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26).
inline vec erf(vec x) {
    const vec a = x < 0.0f ? -x : x, t = 1.0f / (1.0f + 0.3275911f * a);
    vec y = splat(1.061405429f);
    for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) y = fma(y, t, splat(c));
    y = 1.0f - y * t * exp(-a * a);
    return x < 0.0f ? -y : y;
}

inline vec activate(int64_t activation, vec x) {
    switch (activation) {
        case SILU: return x / (1.0f + exp(-x));
        case GELU: return 0.5f * x * (1.0f + erf(x * 0.70710678f));
        case GELU_TANH: return x / (1.0f + exp(-1.5957691216f * (x + 0.044715f * x * x * x)));
        case RELU2: return x < 0.0f ? vec{} : x * x;
        default: return x < 0.0f ? vec{} : x;  // keeps NaN
    }
}

// Returns the activated gate times the up projection.
inline vec gated(int64_t activation, vec gate, vec up) {
    if (activation != CLAMPED_SWIGLU) return activate(activation, gate) * up;
    const vec g = gate > 7.0f ? splat(7.0f) : gate, u = up > 7.0f ? splat(7.0f) : up < -7.0f ? splat(-7.0f) : up;
    return g / (1.0f + exp(-1.702f * g)) * (u + 1.0f);
}

inline vec soft_cap(vec x, float cap) {  // cap tanh(x / cap)
    return cap * (2.0f / (1.0f + exp(-2.0f / cap * x)) - 1.0f);
}

struct Moments { float mean, scale; };

// Moments for LayerNorm if `centred`, otherwise for RMSNorm.
Moments moments(const float* x, int64_t size, float eps, bool centred) {
    Sums values, squares;
    if (centred)
        for (int64_t i = 0; i < size; i += LANES) values.add(i, load<vec>(x + i));
    const float mean = values.total() / float(size);
    for (int64_t i = 0; i < size; i += LANES) {
        const vec off = load<vec>(x + i) - mean;
        squares.at(i) = fma(off, off, squares.at(i));
    }
    return {mean, 1.0f / std::sqrt(squares.total() / float(size) + eps)};
}

inline vec normed(const float* x, Moments of, const Norm& norm, int64_t i) {
    const vec y = (load<vec>(x + i) - of.mean) * of.scale * load<vec>(norm.weight + i);
    return norm.bias ? y + load<vec>(norm.bias + i) : y;
}

// Rotates a head of `size` dimensions in place.
void rotate(float* x, const float* __restrict cos, const float* __restrict sin, int64_t size) {
    const int64_t half = size / 2;
    float *__restrict first = x, *__restrict second = x + half;  // without aliases, so that the loop is vectorised
    for (int64_t i = 0; i < half; i++) {
        const float low = first[i], high = second[i];
        first[i] = low * cos[i] + high * sin[i];
        second[i] = high * cos[i + half] + low * sin[i + half];
    }
}

struct Largest { float value; int64_t index; };

// Returns the largest value of a row and its first index; NaN and index 0 if any value is NaN. Four independent chains
// hide the latency of the comparisons.
template <class T>
Largest largest(const T* row, int64_t width) {
    vec most[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
    ivec broken = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES)
        for (int64_t j = 0; j < 4; j++) {
            const vec x = widen(row + i + LANES * j);
            most[j] = x > most[j] ? x : most[j], broken |= x != x;
        }
    float value = -INFINITY;
    for (const vec& chain : most)
        for (int64_t j = 0; j < LANES; j++) value = std::max(value, chain[j]);
    bool undefined = any(broken);
    for (; i < width; i++) {
        const float x = to_float(row[i]);
        value = std::max(value, x), undefined |= x != x;
    }
    if (undefined) return {NAN, 0};
    for (i = 0; i + 4 * LANES <= width; i += 4 * LANES) {
        ivec equal = {};
        for (int64_t j = 0; j < 4; j++) equal |= widen(row + i + LANES * j) == value;
        if (any(equal)) break;
    }
    while (to_float(row[i]) != value) i++;
    return {value, i};
}

// Replaces logits by probabilities in place; [num_rows, width], with a width that is a multiple of 16.
void to_probs(float* rows, int64_t num_rows, int64_t width) {
    for (float* row = rows; row < rows + num_rows * width; row += width) {
        const float most = largest(row, width).value;
        Sums sums;
        for (int64_t i = 0; i < width; i += LANES) {
            const vec e = exp(load<vec>(row + i) - most);
            store(row + i, e), sums.add(i, e);
        }
        const float scale = 1.0f / sums.total();
        for (int64_t i = 0; i < width; i++) row[i] *= scale;
    }
}
