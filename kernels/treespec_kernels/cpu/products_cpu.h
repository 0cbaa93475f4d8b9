// Products of activations with packed weights, included by linear_cpu.h.
//
// An element's sum has one order for any number of rows:
//  - fp32: one chain of fused multiply-adds over the inputs;
//  - bf16 with AVX512_BF16 and without AMX (Zen 4 and 5): one chain over pairs of inputs (`vdpbf16ps`);
//  - bf16 elsewhere: that of AMX's `tdpbf16ps`. For every BLOCK inputs, one chain of fused multiply-adds over the even
//    inputs and one over the odd ones, both from zero; their sum is added to the total. Denormals are read and written
//    as zero. So machines with AMX, AVX-512, AVX2 and without any of them compute the same bits.

enum Then { STORE, ADD, ROUND };
constexpr int64_t CHAINS = BF16 && !IN_PAIRS ? 2 : 1, BLOCK = 32;
// Maximum number of rows, and panel vectors, with sums in registers: 24 of AVX-512's 32 registers, 12 of AVX2's 16.
constexpr int64_t FEW = 6, COLUMNS = LANES == 16 ? VECS : 2, PARTS = VECS / COLUMNS;
constexpr int64_t MANY = 32;  // maximum number of rows that share a pass over a panel
// A panel of several parts is read in stretches of 12 KiB, which stay in the L1 cache for all parts and rows, while the
// next stretch is prefetched evenly. The next panel is prefetched in the same way for single-part panels with more than
// FEW rows, so that memory is read while all rows are multiplied: SmolLM2's passes of 8 and 16 rows take 15 and 13 %
// less time than with a prefetch distance of 4 KiB (Zen 4), which suits FEW rows.
constexpr int64_t STRETCH = 48, AHEAD = 16;  // in steps of 4 * PANEL bytes

// What a thread calls after its share of a product.
#if TILES
void release_tiles();
constexpr void (*RELEASE)() = release_tiles;
#else
constexpr void (*RELEASE)() = nullptr;
#endif

struct Share {  // a matrix, the rows that it multiplies, and the columns where its inputs and outputs begin
    const Linear* layer;
    int64_t first, rows, input = 0, output = 0;
};

inline int64_t width_of(const Linear& layer) { return layer.narrow ? layer.narrow : PANEL; }
inline int64_t panels_of(const Linear& layer) { return (layer.outputs + width_of(layer) - 1) / width_of(layer); }

// A product of rows with a matrix; or of consecutive ranges of rows with one matrix each, as those of experts, which have
// equal sizes and one form, but some may have minima and others none; or of all rows with dense matrices, each on columns
// of its own.
struct Product {
    const Share* shares;
    const int64_t count;
    const scalar* x;
    void* out;
    const Then then;
    const int threads;
    const int64_t width;  // scalars of a row of x

    const Linear& form() const { return *shares->layer; }
    int64_t rows() const { return shares[count - 1].first + shares[count - 1].rows; }
    void* row(int64_t r, int64_t column = 0) const {
        return (char*)out + (r * form().stride + column) * (then == ROUND ? sizeof(scalar) : sizeof(float));
    }
    // Calls body(share, panel) for each panel of each matrix.
    template <class Body> void each_panel(const Body& body) const {
        int64_t panels = 0;
        for (int64_t i = 0; i < count; i++) panels = std::max(panels, panels_of(*shares[i].layer));
        const auto multiply = [&](int64_t i) {
            const Share& share = shares[i / panels];
            if (i % panels < panels_of(*share.layer)) body(share, i % panels);
        };
        parallel(threads, count * panels, multiply, RELEASE);
    }
};

// Treats denormals as zero, like tdpbf16ps, during its lifetime.
class FlushDenormals {
#if defined(__SSE2__)
    const unsigned saved = _mm_getcsr();
  public:
    FlushDenormals() { if (CHAINS == 2) _mm_setcsr(saved | 0x8040); }
    ~FlushDenormals() { if (CHAINS == 2) _mm_setcsr(saved); }
#elif defined(__aarch64__)
    uint64_t saved;
  public:
    FlushDenormals() {
        asm volatile("mrs %0, fpcr" : "=r"(saved));
        if (CHAINS == 2) asm volatile("msr fpcr, %0" ::"r"(saved | 1 << 24));
    }
    ~FlushDenormals() { if (CHAINS == 2) asm volatile("msr fpcr, %0" ::"r"(saved)); }
#else
  public:
    FlushDenormals() {}
    ~FlushDenormals() {}
#endif
};

// Returns activations in the format of products, valid until the next call.
[[maybe_unused]] inline const float* to_factors(const float* x, int64_t) { return x; }
[[maybe_unused]] inline const factor* to_factors(const uint16_t* x, [[maybe_unused]] int64_t count) {
#if IN_PAIRS
    return x;
#else
    static thread_local std::vector<float> wide;
    float* const to = at_least(wide, count);
    for (int64_t i = 0; i < count; i++) to[i] = to_float(x[i]);
    return to;
#endif
}

// Number of threads for work of at most a microsecond per row: all, if there are enough rows to pay for starting them.
// On two threads of a Zen 4, SmolLM2's passes of 64 rows take 3 to 7 % less time than with one thread for such work,
// those of 32 rows the same. From 8 rows on, an Emerald Rapids gains nothing measurable in seven alternating runs.
inline int threads_of_rows(int64_t rows, int threads) { return rows < 32 ? 1 : threads; }

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

// Calls body(count) with 1 <= count <= MOST as a compile-time constant.
template <int64_t MOST, class Body> inline void with_constant(int64_t count, Body body) {
    if constexpr (MOST > 1)
        if (count < MOST) return with_constant<MOST - 1>(count, body);
    body(std::integral_constant<int, MOST>());
}

// Calls body(0), ..., body(N - 1) with compile-time constants.
template <int N, class Body> inline __attribute__((always_inline)) void with_all(Body body) {
    if constexpr (N > 0) {
        with_all<N - 1>(body);
        body(std::integral_constant<int, N - 1>());
    }
}

// Stores the sums of some rows and one panel of V vectors.
template <size_t V>
void finish(const Linear& layer, int64_t panel, const vec (*sums)[V], int64_t rows, void* out, Then then) {
    for (int64_t r = 0; r < rows; r++)
        for (size_t j = 0; j < V; j++) {
            const int64_t column = (panel * V + j) * LANES, width = std::min(LANES, layer.outputs - column);
            if (width <= 0) break;
            vec y = sums[r][j];
            if (layer.bias) y += load<vec>(layer.bias + column);
            if (then == ROUND) {
                scalar* p = (scalar*)out + r * layer.stride + column;
                scalar rounded[LANES];
                store(rounded, y);
                if (width == LANES) std::memcpy(p, rounded, sizeof rounded);  // inline, because the size is constant
                else std::memcpy(p, rounded, width * sizeof(scalar));
            } else {
                float* p = (float*)out + r * layer.stride + column;
                store(p, then == ADD ? load<vec>(p) + y : y);
            }
        }
}

// Sets sums to zero. GCC clears an array initialised by {} with `rep stos`, which took half of the time of products
// with 4-bit weights in groups of 32.
template <class V, size_t ROWS, size_t C> inline void clear(V (&sums)[ROWS][C]) {
    ivec zero = {};
    asm("" : WHOLE(zero));
    for (size_t r = 0; r < ROWS; r++)
        for (size_t j = 0; j < C; j++) sums[r][j] = (V)zero;
}

// Keeps the compiler from holding an array in registers that the next loop needs for its own sums.
template <class T> inline void keep_in_memory(T& array) { asm volatile("" : "+m"(array)); }

// Computes even + odd, the sums of a block's chains. body(first, last, acc): adds the products of chains [first, last)
// to acc[last - first]. Few rows keep both chains in registers; with more, the first one is spilled.
template <int ROWS, int C, class Body>
inline __attribute__((always_inline)) void sum_chains(Body body, vec (&sum)[ROWS][C]) {
    constexpr std::integral_constant<int, 0> EVEN;
    constexpr std::integral_constant<int, 1> ODD;
    constexpr std::integral_constant<int, 2> END;
    if constexpr (2 * ROWS <= FEW) {
        vec acc[2][ROWS][C];
        clear(acc[0]), clear(acc[1]);
        body(EVEN, END, acc);
        for (int64_t r = 0; r < ROWS; r++)
            for (int64_t j = 0; j < C; j++) sum[r][j] = acc[0][r][j] + acc[1][r][j];
    } else {
        vec acc[1][ROWS][C], even[ROWS][C];
        clear(acc[0]);
        body(EVEN, ODD, acc);
        std::memcpy(even, acc, sizeof even);
        keep_in_memory(even);
        clear(acc[0]);
        body(ODD, END, acc);
        for (int64_t r = 0; r < ROWS; r++)
            for (int64_t j = 0; j < C; j++) sum[r][j] = even[r][j] + acc[0][r][j];
    }
}

// Adds the products of a part of a panel of WIDTH outputs with inputs [begin, end), for chains [FIRST, LAST). w: the
// part's weights for the first of them. next: address to prefetch, `fetched` scalars per step of the first chain.
template <int WIDTH, int ROWS, int C, int FIRST, int LAST>
inline __attribute__((always_inline)) void accumulate(const scalar* w, const factor* x, int64_t k, int64_t begin,
                                                      int64_t end, const scalar* next, int64_t fetched,
                                                      vec (&acc)[LAST - FIRST][ROWS][C]) {
    if (begin >= end) __builtin_unreachable();  // otherwise GCC first writes the sums of an empty range to memory
    for (int64_t i = begin; i < end; i += PAIR, w += PAIR * WIDTH, next += fetched) {
        for (int64_t j = 0; FIRST == 0 && j < fetched; j += 32) __builtin_prefetch(next + j, 0, 2);
#if IN_PAIRS
        for (int64_t r = 0; r < ROWS; r++) {
            const __m512bh pair = (__m512bh)_mm512_set1_epi32(load<int32_t>(x + r * k + i));
            for (int64_t j = 0; j < C; j++)
                acc[0][r][j] = (vec)_mm512_dpbf16_ps((__m512)acc[0][r][j], load<__m512bh>(w + 2 * LANES * j), pair);
        }
#else
        for (int64_t t = FIRST; t < LAST; t++) {
            vec now[C];
            for (int64_t j = 0; j < C; j++) {
                const uvec bits = load<uvec>(w + PAIR * LANES * j);
                now[j] = (vec)(PAIR == 1 ? bits : t == 0 ? bits << 16 : high_half(bits));
            }
            for (int64_t r = 0; r < ROWS; r++) {
                const vec factors = splat(x[r * k + i + t]);
                for (int64_t j = 0; j < C; j++) acc[t - FIRST][r][j] = fma(now[j], factors, acc[t - FIRST][r][j]);
            }
        }
#endif
    }
}

// Like `accumulate` with all chains, into C vectors of each row of `sums`.
template <int WIDTH, int ROWS, int C>
inline __attribute__((always_inline)) void add_products(const scalar* w, const factor* x, int64_t k, int64_t begin,
                                                        int64_t end, const scalar* next, int64_t fetched,
                                                        vec (*sums)[WIDTH / LANES], int64_t column) {
    if constexpr (CHAINS == 1) {
        vec acc[1][ROWS][C];
        for (int64_t r = 0; r < ROWS; r++) std::memcpy(acc[0][r], sums[r] + column, sizeof acc[0][r]);
        accumulate<WIDTH, ROWS, C, 0, 1>(w, x, k, begin, end, next, fetched, acc);
        for (int64_t r = 0; r < ROWS; r++) std::memcpy(sums[r] + column, acc[0][r], sizeof acc[0][r]);
    } else {
        for (int64_t last; begin < end; begin = last) {
            last = std::min(begin + BLOCK, end);
            vec sum[ROWS][C];
            sum_chains(
                [&](auto first_chain, auto last_chain, auto& acc) {
                    accumulate<WIDTH, ROWS, C, first_chain, last_chain>(w, x, k, begin, last, next, fetched, acc);
                },
                sum);
            for (int64_t r = 0; r < ROWS; r++)
                for (int64_t j = 0; j < C; j++) sums[r][column + j] += sum[r][j];
            w += (last - begin) * WIDTH, next += (last - begin) / PAIR * fetched;
        }
    }
}

// Multiplies a panel of WIDTH outputs with at most MANY rows. step: factors between rows of x.
template <int WIDTH>
void multiply(const Linear& layer, int64_t panel, const factor* x, int64_t step, int64_t rows, void* out, Then then) {
    constexpr int C = WIDTH / LANES < COLUMNS ? WIDTH / LANES : COLUMNS, SPLITS = WIDTH / LANES / C;
    const int64_t k = layer.inputs, times = (rows + FEW - 1) / FEW;
    const scalar* w = (const scalar*)layer.weight + panel * WIDTH * k;
    const bool once = SPLITS == 1 && times == 1;  // whether the panel is read only once
    const int64_t fetched = PAIR * WIDTH / SPLITS / times;
    vec sums[MANY][WIDTH / LANES];
    std::fill_n(&sums[0][0], rows * (WIDTH / LANES), vec{});
    for (int64_t begin = 0, end; begin < k; begin = end) {
        end = SPLITS == 1 ? k : std::min(begin + PAIR * STRETCH, k);
        const scalar* next = w + end * WIDTH;
        in_parts(rows, FEW, [&](int64_t first, int64_t count) {
            with_constant<FEW>(count, [&](auto number) {
                for (int64_t part = 0; part < SPLITS; part++, next += (end - begin) / PAIR * fetched) {
                    const scalar* from = w + begin * WIDTH + part * PAIR * LANES * C;
                    const scalar* ahead = once ? w + AHEAD * PAIR * WIDTH : next;
                    add_products<WIDTH, number, C>(from, x + first * step, step, begin, end, ahead, fetched, sums + first,
                                                   part * C);
                }
            });
        });
    }
    finish(layer, panel, sums, rows, out, then);
}
