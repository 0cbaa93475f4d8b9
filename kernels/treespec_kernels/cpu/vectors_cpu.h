// Vectors of 16 fp32 values, from the compiler's portable vector extensions. Every library includes this file first.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t LANES = 16;
typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint32_t uvec8 __attribute__((vector_size(32)));
typedef uint16_t hvec __attribute__((vector_size(32)));

template <class V, class T> inline V load(const T* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, vec v) { std::memcpy(p, &v, sizeof v); }
inline vec splat(float x) { return x - vec{}; }

inline vec fma(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

// One level of a tree sum: adds the halves of each of two vectors, into one vector. Each shuffle is one instruction.
#define FOLD(a, b, LOW, HIGH) (__builtin_shufflevector(a, b, LOW) + __builtin_shufflevector(a, b, HIGH))
#define SINGLES_LOW 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define SINGLES_HIGH 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
#define PAIRS_LOW 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define PAIRS_HIGH 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define HALVES_LOW 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HALVES_HIGH 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define FOURS_LOW 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define FOURS_HIGH 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31

inline float sum(vec v) {
    v = FOLD(v, v, SINGLES_LOW, SINGLES_HIGH);
    v = FOLD(v, v, PAIRS_LOW, PAIRS_HIGH);
    v = FOLD(v, v, HALVES_LOW, HALVES_HIGH);
    return FOLD(v, v, FOURS_LOW, FOURS_HIGH)[0];
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
