// Vectors of fp32 values, from the compiler's portable vector extensions. Every library includes this file first.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

// Values per vector register. GCC keeps vectors wider than the machine's registers in memory.
#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
#else
constexpr int64_t LANES = 8;
#endif
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec8 __attribute__((vector_size(32)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES)));

// Inline assembly constraint for a vector: a register, if the machine's are wide enough.
#if defined(__AVX2__)
#define WHOLE(v) "+v"(v)
#else
#define WHOLE(v) "+m"(v)
#endif

template <class V, class T> inline V load(const T* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, vec v) { std::memcpy(p, &v, sizeof v); }
inline vec splat(float x) { return x - vec{}; }

inline vec fma(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

// Combines all lanes of a vector by `op`, in halves: first lane i with lane i + LANES / 2.
template <class V, class Op> inline auto fold(V v, Op op) {
#if defined(__AVX512F__)
    v = op(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = op(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = op(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    v = op(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#else
    v = op(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
    v = op(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
    v = op(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6));
#endif
    return v[0];
}

template <class V> inline auto sum(V v) { return fold(v, [](V a, V b) { return a + b; }); }
template <class V> inline auto largest_lane(V v) { return fold(v, [](V a, V b) { return a > b ? a : b; }); }

// Sums a row with a length that is a multiple of 16, in 16 chains and in the same order for every number of lanes.
class Sums {
    vec chains[16 / LANES] = {};

  public:
    vec& at(int64_t i) { return chains[i % 16 / LANES]; }
    void add(int64_t i, vec x) { at(i) += x; }  // x: LANES values from i on
    float total() const { return sum(LANES == 16 ? chains[0] : chains[0] + chains[16 / LANES - 1]); }
};

// Returns whether any lane is set.
inline bool any(ivec lanes) {
    uint64_t words[sizeof lanes / sizeof(uint64_t)], set = 0;
    std::memcpy(words, &lanes, sizeof lanes);
    for (uint64_t word : words) set |= word;
    return set != 0;
}

// Returns a buffer's memory for at least `count` elements. It never shrinks, because `resize` clears new elements.
template <class T> inline T* at_least(std::vector<T>& buffer, int64_t count) {
    if (int64_t(buffer.size()) < count) buffer.resize(count);
    return buffer.data();
}

inline vec exp(vec x) {  // error of at most 2 units in the last place; exactly 0 below -87
    const vec z = x < -87.0f ? splat(-87.0f) : x > 88.0f ? splat(88.0f) : x;
    const vec n = (z * 1.44269504f + 12582912.0f) - 12582912.0f;  // rounded to the nearest integer
    vec r = fma(n, splat(-0.693359375f), z);
    r = fma(n, splat(2.12194440e-4f), r);
    vec y = splat(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        y = fma(y, r, splat(c));
    y = fma(y, r * r, r) + 1.0f;
    const vec power = (vec)((__builtin_convertvector(n, ivec) + 127) << 23);
    return x < -87.0f ? vec{} : y * power;
}

}  // namespace
