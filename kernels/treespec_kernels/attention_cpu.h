// Tree attention: a part of decoder_cpu.cpp, which includes it.
//
// Keys and values lie in the cache in the model's dtype. They are multiplied in units of 32 bits: two bf16, or one fp32.
// A page is brought into another order once for all rows and heads that see it: keys so that a vector holds one unit of
// 16 positions, and values in bf16 so that a unit holds two positions of one dimension. A score is one chain over the
// units of its key. A sum of values is one chain over the sequence's positions, in bf16 over pairs 2i and 2i + 1 of
// them, the last one perhaps half empty. So neither depends on where keys lie, or on the rows beside.

constexpr int64_t STACKED = 4;  // queries that share a page in registers: 16 accumulators and 4 keys
constexpr int64_t MOST = HEAD_VECS <= 5 ? 4 : HEAD_VECS <= 8 ? 2 : 1;  // the same where HEAD_VECS accumulate for each

// Brings what is needed next closer, in small portions between computations: of many at once most would be dropped. Into
// the L2 cache: fetched into the L1 cache, 1 row at a context of 1900 took a fifth longer.
template <int64_t BYTES>
inline void fetch(const void* from) {
    for (int64_t i = 0; i < BYTES; i += 64) __builtin_prefetch((const char*)from + i, 0, 2);
}

// [8][8] units, rows `step` apart -> the transpose, rows PAGE apart.
inline void transpose(const uint32_t* from, int64_t step, uint32_t* to) {
    uvec8 a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = load<uvec8>(from + i * step);
    for (int i = 0; i < 8; i += 2) {
        b[i] = __builtin_shufflevector(a[i], a[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        b[i + 1] = __builtin_shufflevector(a[i], a[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = __builtin_shufflevector(b[i + j], b[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            a[i + 2 * j + 1] = __builtin_shufflevector(b[i + j], b[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; i++) {
        const uvec8 low = __builtin_shufflevector(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        const uvec8 high = __builtin_shufflevector(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
        std::memcpy(to + i * PAGE, &low, sizeof low);
        std::memcpy(to + (i + 4) * PAGE, &high, sizeof high);
    }
}

// Keys of `count` positions -> [UNITS][PAGE]; reads whole eights of positions. Meanwhile the page `next` is fetched.
void transpose_keys(const scalar* keys, int64_t count, uint32_t* out, const scalar* next) {
    for (int64_t p = 0; p < count; p += 8)
        for (int64_t u = 0; u < UNITS; u += 8) {
            fetch<8 * 8 * sizeof(uint32_t)>((const uint32_t*)next + p * UNITS + 8 * u);
            transpose((const uint32_t*)keys + p * UNITS + u, UNITS, out + u * PAGE + p);
        }
}

// Scores of QUERIES queries and VECTORS * 16 positions. queries: [QUERIES][UNITS]; out: rows `stride` apart.
template <int QUERIES, int VECTORS>
void dots(const uint32_t* queries, const uint32_t* keys, float* out, int64_t stride) {
    vec acc[QUERIES][VECTORS] = {};
    for (int64_t u = 0; u < UNITS; u++)
        for (int64_t q = 0; q < QUERIES; q++)
            for (int64_t j = 0; j < VECTORS; j++)
                acc[q][j] = add_products(acc[q][j], load<uvec>(keys + u * PAGE + LANES * j), queries[q * UNITS + u]);
    for (int64_t q = 0; q < QUERIES; q++)
        for (int64_t j = 0; j < VECTORS; j++) store(out + q * stride + LANES * j, acc[q][j]);
}

template <int VECTORS>
void dots(int64_t count, const uint32_t* queries, const uint32_t* keys, float* out, int64_t stride) {
    int64_t q = 0;
    for (; q + STACKED <= count; q += STACKED) dots<STACKED, VECTORS>(queries + q * UNITS, keys, out + q * stride, stride);
    for (; q + 2 <= count; q += 2) dots<2, VECTORS>(queries + q * UNITS, keys, out + q * stride, stride);
    for (; q < count; q++) dots<1, VECTORS>(queries + q * UNITS, keys, out + q * stride, stride);
}

// Values of two positions -> [HEAD_DIM] units.
inline void pair_up(const scalar* even, const scalar* odd, uint32_t* out) {
    for (int64_t i = 0; i < HEAD_DIM; i += LANES) {
        const uvec low = __builtin_convertvector(load<hvec>(even + i), uvec);
        const uvec pairs = low | __builtin_convertvector(load<hvec>(odd + i), uvec) << 16;
        std::memcpy(out + i, &pairs, sizeof pairs);
    }
}

// Adds `count` units of weighted values. weights: rows `stride` units apart; values: [count][HEAD_DIM].
template <int QUERIES>
void weigh(const uint32_t* weights, int64_t stride, int64_t count, const uint32_t* values, float* sums) {
    vec acc[QUERIES][HEAD_VECS];
    std::memcpy(acc, sums, sizeof acc);
    for (int64_t p = 0; p < count; p++)
        for (int64_t q = 0; q < QUERIES; q++)
            for (int64_t j = 0; j < HEAD_VECS; j++)
                acc[q][j] = add_products(acc[q][j], load<uvec>(values + p * HEAD_DIM + LANES * j), weights[q * stride + p]);
    std::memcpy(sums, acc, sizeof acc);
}

void weigh(int64_t queries, const uint32_t* weights, int64_t stride, int64_t count, const uint32_t* values, float* sums) {
    int64_t q = 0;
    for (; q + MOST <= queries; q += MOST) weigh<MOST>(weights + q * stride, stride, count, values, sums + q * HEAD_DIM);
    for (; MOST > 2 && q + 2 <= queries; q += 2)
        weigh<2>(weights + q * stride, stride, count, values, sums + q * HEAD_DIM);
    for (; q < queries; q++) weigh<1>(weights + q * stride, stride, count, values, sums + q * HEAD_DIM);
}

// Scores -> weights in the model's dtype, in their place; zeros fill up the last 16. Returns their sum.
float softmax(float* s, int64_t length) {
    const int64_t end = (length + LANES - 1) / LANES * LANES;
    std::fill(s + length, s + end, -INFINITY);
    vec best = splat(-INFINITY), mass = {};
    for (int64_t p = 0; p < end; p += LANES) {
        const vec x = load<vec>(s + p);
        best = x > best ? x : best;
    }
    float most = best[0];
    for (int64_t i = 1; i < LANES; i++) most = std::max(most, best[i]);
    for (int64_t p = 0; p < end; p += LANES) {
        scalar* out = (scalar*)s + p;
        store(out, exp(load<vec>(s + p) - most));
        mass += widen(out);
    }
    return sum(mass);
}

// Rows [first, last) and one KV head, a page after the other for all of them: it stays in the L1 cache.
// q: row r's heads of the group at q + r * q_step, scaled; out likewise. k, v: of the head, in page 0.
void attend(const Batch& batch, int64_t first, int64_t last, const scalar* k, const scalar* v, int64_t kv_heads,
            int64_t group, const float* q, int64_t q_step, scalar* out, int64_t out_step) {
    static thread_local std::vector<float> scores, totals, masses;
    static thread_local std::vector<uint32_t> queries;
    alignas(64) static thread_local uint32_t turned[UNITS * PAGE];
    alignas(64) static thread_local uint32_t values[PAGE / PAIR * HEAD_DIM];
    const int64_t page_step = kv_heads * PAGE * HEAD_DIM, rows = last - first;
    int64_t longest = 0, most_direct = 0;
    for (int64_t r = first; r < last; r++) {
        longest = std::max(longest, batch.direct[r] + batch.counts[r]);
        most_direct = std::max(most_direct, batch.direct[r]);
    }
    const int64_t stride = (longest + PAGE - 1) / PAGE * PAGE;
    scores.resize(rows * group * stride);
    masses.resize(rows * group);
    queries.resize(rows * group * UNITS);
    totals.assign(rows * group * HEAD_DIM, 0.0f);
    for (int64_t i = 0; i < rows * group; i++)
        for (int64_t j = 0; j < HEAD_DIM; j += LANES)
            store((scalar*)(queries.data() + i * UNITS) + j,
                  load<vec>(q + (first + i / group) * q_step + i % group * HEAD_DIM + j));
    const auto scores_of = [&](int64_t r) { return scores.data() + (r - first) * group * stride; };
    const auto weights_of = [&](int64_t r, int64_t position) { return (uint32_t*)scores_of(r) + position / PAIR; };
    const auto totals_of = [&](int64_t r) { return totals.data() + (r - first) * group * HEAD_DIM; };
    const auto queries_of = [&](int64_t r) { return queries.data() + (r - first) * group * UNITS; };
    const auto page_of = [&](int64_t r, int64_t start) {
        return batch.pages[batch.tables[r] + start / PAGE] * page_step;
    };
    const auto find = [&](const scalar* cache, int64_t r, int64_t p) {  // where a row's position lies
        if (p < batch.direct[r]) return cache + page_of(r, p) + p % PAGE * HEAD_DIM;
        const int64_t slot = batch.paths[batch.starts[r] + p - batch.direct[r]];
        return cache + slot / PAGE * page_step + slot % PAGE * HEAD_DIM;
    };
    const auto next_of = [&](int64_t r, int64_t start, const scalar* cache, const scalar* then) {
        const bool more = start + PAGE < batch.direct[r];
        return more ? cache + page_of(r, start + PAGE) : then + page_of(r, 0);
    };
    const auto sharing = [&](int64_t r, int64_t start) {  // the first row behind r with another page at `start`
        int64_t end = r + 1;
        while (end < last && batch.direct[end] > start && page_of(end, start) == page_of(r, start)) end++;
        return end;
    };

    for (int64_t start = 0; start < most_direct; start += PAGE)
        for (int64_t r = first, end; r < last; r = end) {
            end = r + 1;
            if (batch.direct[r] <= start) continue;
            end = sharing(r, start);
            const int64_t count = std::min(*std::max_element(batch.direct + r, batch.direct + end) - start, PAGE);
            transpose_keys(k + page_of(r, start), count, turned, next_of(r, start, k, v));
            dots<PAGE / LANES>((end - r) * group, queries_of(r), turned, scores_of(r) + start, stride);
        }
    for (int64_t r = first; r < last; r++) {
        const int64_t direct = batch.direct[r], length = direct + batch.counts[r];
        for (int64_t p = direct; p < length; p += LANES) {
            scalar keys[LANES * HEAD_DIM];
            float chunk[8 * LANES];
            const int64_t width = std::min(LANES, length - p);
            for (int64_t i = 0; i < width; i++)
                std::memcpy(keys + i * HEAD_DIM, find(k, r, p + i), HEAD_DIM * sizeof(scalar));
            std::memset(keys + width * HEAD_DIM, 0, (LANES - width) * HEAD_DIM * sizeof(scalar));
            transpose_keys(keys, LANES, turned, keys);
            for (int64_t g = 0; g < group; g++) {
                dots<1, 1>(queries_of(r) + g * UNITS, turned, chunk, LANES);
                std::memcpy(scores_of(r) + g * stride + p, chunk, width * sizeof(float));
            }
        }
        for (int64_t g = 0; g < group; g++) masses[(r - first) * group + g] = softmax(scores_of(r) + g * stride, length);
    }
    for (int64_t start = 0; start < most_direct; start += PAGE)
        for (int64_t r = first, end; r < last; r = end) {
            end = r + 1;
            if (batch.direct[r] <= start) continue;
            end = sharing(r, start);
            const int64_t most = std::min(*std::max_element(batch.direct + r, batch.direct + end) - start, PAGE);
            const int64_t least = std::min(*std::min_element(batch.direct + r, batch.direct + end) - start, PAGE);
            const scalar* page = v + page_of(r, start);
            const uint32_t* units = (const uint32_t*)page;
#if BF16
            const scalar* next = next_of(r, start, v, v);
            for (int64_t p = 0; p + 2 <= most; p += 2) {
                fetch<2 * HEAD_DIM * sizeof(scalar)>(next + p * HEAD_DIM);
                pair_up(page + p * HEAD_DIM, page + (p + 1) * HEAD_DIM, values + p / 2 * HEAD_DIM);
            }
            units = values;
#endif
            if (least == most) {
                weigh((end - r) * group, weights_of(r, start), stride, most / PAIR, units, totals_of(r));
            } else {
                for (int64_t i = r; i < end; i++)
                    weigh(group, weights_of(i, start), stride, std::min(batch.direct[i] - start, PAGE) / PAIR, units,
                          totals_of(i));
            }
        }
    for (int64_t r = first; r < last; r++) {
        const int64_t length = batch.direct[r] + batch.counts[r];
        static const scalar nothing[HEAD_DIM] = {};
        for (int64_t p = batch.direct[r] / PAIR * PAIR; p < length; p += PAGE) {
            const int64_t width = std::min(length - p, PAGE), units = (width + PAIR - 1) / PAIR;
            for (int64_t i = 0; i < units; i++)
#if BF16
                pair_up(find(v, r, p + 2 * i), 2 * i + 1 < width ? find(v, r, p + 2 * i + 1) : nothing,
                        values + i * HEAD_DIM);
#else
                std::memcpy(values + i * HEAD_DIM, find(v, r, p + i), sizeof nothing);
#endif
            weigh(group, weights_of(r, p), stride, units, values, totals_of(r));
        }
        for (int64_t g = 0; g < group; g++) {
            const vec total = splat(masses[(r - first) * group + g]);
            for (int64_t i = 0; i < HEAD_DIM; i += LANES)
                store(out + r * out_step + g * HEAD_DIM + i, load<vec>(totals_of(r) + g * HEAD_DIM + i) / total);
        }
    }
}
