// Tree attention, included by decoder_cpu.cpp.
//
// Keys and values are cached in the model's dtype and are multiplied in units of 32 bits: two bf16 or one fp32. A page
// is reordered once for all rows and heads that attend to it: keys so that a vector holds one unit of 16 positions, and
// bf16 values so that a unit holds one dimension of two positions. A score is one chain over the units of its key. A
// sum of values is one chain over the positions of the sequence, in bf16 over pairs 2i and 2i + 1, the last of which
// may have only one position. Hence neither depends on the location of keys, or on other rows. A head wider than
// HEAD_DIM is several parts of HEAD_DIM, whose units one chain adds.

// Queries with scores of a page summed in registers, and position vectors of each: 16 or 8 sums.
constexpr int64_t STACKED = 4, SCORED = LANES == 16 ? 4 : 2;
// Queries with sums of values in registers, and vectors of each.
constexpr int64_t MOST = LANES < 16 || HEAD_VECS > 8 ? 1 : HEAD_VECS > 5 ? 2 : 4;
constexpr int64_t WEIGHED = LANES == 16 ? HEAD_VECS : HEAD_VECS % 8 == 0 ? 8 : HEAD_VECS % 4 == 0 ? 4 : 2;
// Minimum positions for several threads to share the attention of a head, and the dimensions in which one thread then
// adds the values: a cache line.
constexpr int64_t LONG = 512;
constexpr int64_t SLICE = HEAD_DIM % (64 / int64_t(sizeof(scalar))) ? HEAD_DIM : 64 / int64_t(sizeof(scalar));
constexpr int64_t SLICES = HEAD_DIM / SLICE;

// Prefetches data of the next page in portions between computations; prefetching a whole page at once gained nothing.
// The target is the L2 cache: for 1 row at a context of 1900, a pass took a quarter longer with prefetches into L1, and
// half longer without prefetches.
template <int64_t BYTES>
inline void fetch(const void* from) {
    for (int64_t i = 0; i < BYTES; i += 64) __builtin_prefetch((const char*)from + i, 0, 2);
}

// Transposes [8][8] units with row stride `step` to rows with stride PAGE.
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

// Transposes the keys of `count` positions, rounded up to a multiple of 8, to [UNITS][PAGE], and prefetches page
// `next`.
void transpose_keys(const scalar* keys, int64_t count, uint32_t* out, const scalar* next) {
    for (int64_t p = 0; p < count; p += 8)
        for (int64_t u = 0; u < UNITS; u += 8) {
            fetch<8 * 8 * sizeof(uint32_t)>((const uint32_t*)next + p * UNITS + 8 * u);
            transpose((const uint32_t*)keys + p * UNITS + u, UNITS, out + u * PAGE + p);
        }
}

// Computes scores of QUERIES queries and VECTORS * 16 positions. queries: [QUERIES][HEAD_DIM]; out: rows of `stride`
// floats, to which scores are added if `adds`.
template <int QUERIES, int VECTORS>
void dots(const factor* queries, const uint32_t* keys, float* out, int64_t stride, bool adds) {
    vec acc[QUERIES][VECTORS] = {};
    for (int64_t q = 0; adds && q < QUERIES; q++)
        for (int64_t j = 0; j < VECTORS; j++) acc[q][j] = load<vec>(out + q * stride + LANES * j);
    for (int64_t u = 0; u < UNITS; u++)
        for (int64_t q = 0; q < QUERIES; q++)
            for (int64_t j = 0; j < VECTORS; j++)
                acc[q][j] = add_products(acc[q][j], load<uvec>(keys + u * PAGE + LANES * j),
                                         queries + q * HEAD_DIM + PAIR * u);
    for (int64_t q = 0; q < QUERIES; q++)
        for (int64_t j = 0; j < VECTORS; j++) store(out + q * stride + LANES * j, acc[q][j]);
}

template <int VECTORS>
void score(int64_t count, const factor* queries, const uint32_t* keys, float* out, int64_t stride, bool adds) {
    constexpr int AT_ONCE = std::min<int64_t>(VECTORS, SCORED);
    for (int64_t j = 0; j < VECTORS; j += AT_ONCE, keys += LANES * AT_ONCE, out += LANES * AT_ONCE) {
        int64_t q = 0;
        for (; q + STACKED <= count; q += STACKED)
            dots<STACKED, AT_ONCE>(queries + q * HEAD_DIM, keys, out + q * stride, stride, adds);
        for (; q + 2 <= count; q += 2) dots<2, AT_ONCE>(queries + q * HEAD_DIM, keys, out + q * stride, stride, adds);
        for (; q < count; q++) dots<1, AT_ONCE>(queries + q * HEAD_DIM, keys, out + q * stride, stride, adds);
    }
}

// Interleaves dimensions [first, last) of the values of two positions to units.
inline void pair_up(const scalar* even, const scalar* odd, uint32_t* out, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += LANES) {
        const uvec low = __builtin_convertvector(load<hvec>(even + i), uvec);
        const uvec pairs = low | __builtin_convertvector(load<hvec>(odd + i), uvec) << 16;
        std::memcpy(out + i, &pairs, sizeof pairs);
    }
}

// Adds `count` units of weighted values in dimensions [first, last), VECTORS vectors at a time. weights: rows of `stride`
// factors; values: [count][HEAD_DIM].
template <int QUERIES, int VECTORS>
void weigh(const factor* weights, int64_t stride, int64_t count, const uint32_t* values, float* sums, int64_t first,
           int64_t last) {
    for (; first < last; first += LANES * VECTORS) {
        vec acc[QUERIES][VECTORS];
        for (int64_t q = 0; q < QUERIES; q++) std::memcpy(acc[q], sums + q * HEAD_DIM + first, sizeof acc[q]);
        const uint32_t* from = values + first;
        for (int64_t p = 0; p < count; p++, from += HEAD_DIM)
            for (int64_t q = 0; q < QUERIES; q++)
                for (int64_t j = 0; j < VECTORS; j++)
                    acc[q][j] = add_products(acc[q][j], load<uvec>(from + LANES * j), weights + q * stride + PAIR * p);
        for (int64_t q = 0; q < QUERIES; q++) std::memcpy(sums + q * HEAD_DIM + first, acc[q], sizeof acc[q]);
    }
}

template <int VECTORS>
void weigh(int64_t queries, const factor* weights, int64_t stride, int64_t count, const uint32_t* values, float* sums,
           int64_t first, int64_t last) {
    int64_t q = 0;
    const auto next = [&](auto number) {
        weigh<number, VECTORS>(weights + q * stride, stride, count, values, sums + q * HEAD_DIM, first, last);
        q += number;
    };
    while (q + MOST <= queries) next(std::integral_constant<int, MOST>());
    while (MOST > 2 && q + 2 <= queries) next(std::integral_constant<int, 2>());
    while (q < queries) next(std::integral_constant<int, 1>());
}

// Replaces the scores of positions [begin, length) by weights, rounded to the model's dtype, and returns their sum.
// Other positions of the first page and of the last 16 get weight 0. sink: a score whose weight the sum has too, or null.
float softmax(float* s, int64_t begin, int64_t length, float cap, const float* sink) {
    const int64_t start = begin / PAGE * PAGE, end = (length + 15) / 16 * 16;
    if (cap)
        for (int64_t p = start; p < end; p += LANES) store(s + p, soft_cap(load<vec>(s + p), cap));
    std::fill(s + start, s + begin, -INFINITY);
    std::fill(s + length, s + end, -INFINITY);
    vec best = splat(-INFINITY);
    Sums mass;
    for (int64_t p = start; p < end; p += LANES) {
        const vec x = load<vec>(s + p);
        best = x > best ? x : best;
    }
    const float most = largest_lane(best);
    for (int64_t p = start; p < end; p += LANES) {
        factor* out = (factor*)s + p;
        store_factors(out, exp(load<vec>(s + p) - most));
        mass.add(p, widen(out));
    }
    return sink ? mass.total() + exp(splat(*sink - most))[0] : mass.total();
}

// Positions that rows do not read through their pages: at most PAGE different slots, each shared by any number of rows.
struct Scattered {
    struct Place { int64_t row, position, column; };
    std::vector<int64_t> slots;
    std::vector<Place> places;  // ordered by row; `column` is an index into `slots`
};

// Returns the scattered positions of rows [first, last), which are the same for all layers and heads.
std::vector<Scattered> scattered_of(const Batch& batch, int64_t first, int64_t last) {
    std::vector<Scattered> parts;
    for (int64_t r = first; r < last; r++)
        for (int64_t d = 0; d < batch.counts[r]; d++) {
            const int64_t slot = batch.paths[batch.starts[r] + d];
            if (parts.empty()) parts.emplace_back();
            Scattered* part = &parts.back();
            int64_t column = std::find(part->slots.begin(), part->slots.end(), slot) - part->slots.begin();
            if (column == PAGE) {
                part = &parts.emplace_back();
                column = 0;
            }
            if (column == int64_t(part->slots.size())) part->slots.push_back(slot);
            part->places.push_back({r, batch.direct[r] + d, column});
        }
    return parts;
}

// Returns the number of positions of the longest of rows [first, last), rounded up to whole pages.
int64_t stride_of(const Batch& batch, int64_t first, int64_t last) {
    int64_t most = 0;
    for (int64_t r = first; r < last; r++) most = std::max(most, batch.direct[r] + batch.counts[r]);
    return (most + PAGE - 1) / PAGE * PAGE;
}

struct Memory {  // buffers of a thread
    std::vector<float> found;            // [rows, group, PAGE]
    std::vector<float> totals;           // [parts, rows, group, HEAD_DIM]
    std::vector<factor> queries;         // likewise
    std::vector<const scalar*> keys_of;  // each part's keys in page 0
    alignas(64) uint32_t keys[UNITS * PAGE], values[PAGE / PAIR * HEAD_DIM];
    alignas(64) scalar gathered[PAGE * HEAD_DIM];
};

// Attention of rows [first, last) and one KV head. Each page is processed for all rows at once, so it stays in L1.
//
// The steps are `score_pages`, `score_scattered`, `softmax` and `weigh`, one after another. Several threads may share a
// step, because pages, rows and slices of the dimensions are independent.
class Attention {
  public:
    struct Scores {
        float *values, *masses;  // [rows, group, stride] and [rows, group], the same for all threads and steps
        int64_t stride;          // from `stride_of`
    };
    struct Queries { const float* heads; int64_t step; };  // the group's scaled heads of row r are at heads + r * step
    struct Outputs { scalar* heads; int64_t step; };       // likewise

  private:
    Memory& memory;
    const Scores scores;
    const Queries queries;
    const Outputs out;
    const Batch& batch;
    const int64_t first, last, group, page_step, stride, weight_stride, window;
    const float cap;
    const float* const sinks;
    const int64_t parts, to_values;

    int64_t length_of(int64_t r) const { return batch.direct[r] + batch.counts[r]; }
    // The first position that a row attends to. Earlier positions of its page, from first_page_of on, have weight 0.
    int64_t begin_of(int64_t r) const { return window ? std::max<int64_t>(length_of(r) - window, 0) : 0; }
    int64_t first_page_of(int64_t r) const { return begin_of(r) / PAGE * PAGE; }
    bool sees(int64_t r, int64_t start) const { return first_page_of(r) <= start && start < batch.direct[r]; }
    int64_t index_of(int64_t r) const { return (r - first) * group; }
    float* scores_of(int64_t r) const { return scores.values + index_of(r) * stride; }
    int64_t index_of(int64_t part, int64_t r) const { return (part * index_of(last) + index_of(r)) * HEAD_DIM; }
    float* totals_of(int64_t part, int64_t r) const { return memory.totals.data() + index_of(part, r); }
    const factor* queries_of(int64_t part, int64_t r) const { return memory.queries.data() + index_of(part, r); }
    const scalar* k(int64_t part) const { return memory.keys_of[part]; }
    const scalar* v(int64_t part) const { return memory.keys_of[part] + to_values; }
    const factor* weights_of(int64_t r, int64_t p) const { return (const factor*)scores_of(r) + p; }
    int64_t page_of(int64_t r, int64_t start) const { return batch.pages[batch.tables[r] + start / PAGE] * page_step; }
    int64_t place_of(int64_t slot) const { return slot / PAGE * page_step + slot % PAGE * HEAD_DIM; }
    int64_t place_of(int64_t r, int64_t p) const {
        if (p < batch.direct[r]) return page_of(r, p) + p % PAGE * HEAD_DIM;
        return place_of(batch.paths[batch.starts[r] + p - batch.direct[r]]);
    }

    // Calls visit(first row, last row + 1, start) for each page of a share of all and each run of rows that have it at
    // position `start`.
    template <class Visit>
    void each_page(int64_t share, int64_t shares, Visit visit) const {
        int64_t least = INT64_MAX, most = 0;
        for (int64_t r = first; r < last; r++) {
            least = std::min(least, first_page_of(r));
            most = std::max(most, batch.direct[r]);
        }
        const int64_t pages = (most - least + PAGE - 1) / PAGE, past = least + PAGE * (pages * (share + 1) / shares);
        for (int64_t start = least + PAGE * (pages * share / shares); start < past; start += PAGE)
            for (int64_t r = first, end; r < last; r = end) {
                end = r + 1;
                if (!sees(r, start)) continue;
                while (end < last && sees(end, start) && page_of(end, start) == page_of(r, start)) end++;
                visit(r, end, start);
            }
    }
    const scalar* next_of(int64_t r, int64_t start, const scalar* cache, int64_t part) const {
        const bool more = start + PAGE < batch.direct[r];
        return more ? cache + page_of(r, start + PAGE) : v(part) + page_of(r, 0);
    }

    void score_scattered(const Scattered& some) {
        const int64_t count = some.slots.size(), begin = some.places.front().row, end = some.places.back().row + 1;
        float* found = memory.found.data();
        const auto compute = count <= LANES ? score<1> : count <= 2 * LANES ? score<2> : score<PAGE / LANES>;
        for (int64_t part = 0; part < parts; part++) {
            for (int64_t i = 0; i < count; i++)
                std::memcpy(memory.gathered + i * HEAD_DIM, k(part) + place_of(some.slots[i]),
                            HEAD_DIM * sizeof(scalar));
            transpose_keys(memory.gathered, count, memory.keys, memory.gathered);
            compute((end - begin) * group, queries_of(part, begin), memory.keys, found, PAGE, part);
        }
        for (const auto& place : some.places)
            for (int64_t g = 0; g < group; g++)
                scores_of(place.row)[g * stride + place.position] =
                    found[((place.row - begin) * group + g) * PAGE + place.column];
    }

    // Adds the values of pages in dimensions [begin, end) of a part, VECTORS vectors at a time.
    template <int VECTORS> void weigh_pages(int64_t part, int64_t begin, int64_t end) {
        each_page(0, 1, [&](int64_t r, int64_t past, int64_t start) {
            const int64_t most = std::min(*std::max_element(batch.direct + r, batch.direct + past) - start, PAGE);
            const int64_t least = std::min(*std::min_element(batch.direct + r, batch.direct + past) - start, PAGE);
            const scalar *page = v(part) + page_of(r, start), *next = next_of(r, start, v(part), part);
            const uint32_t* units = pair_up_page(page, most, next, begin, end);
            const auto add = [&](int64_t row, int64_t queries, int64_t count) {
                ::weigh<VECTORS>(queries, weights_of(row, start), weight_stride, count / PAIR, units,
                                 totals_of(part, row), begin, end);
            };
            if (least == most) return add(r, (past - r) * group, most);
            for (int64_t i = r; i < past; i++) add(i, group, std::min(batch.direct[i] - start, PAGE));
        });
    }

    const uint32_t* pair_up_page(const scalar* page, [[maybe_unused]] int64_t count,
                                 [[maybe_unused]] const scalar* next, [[maybe_unused]] int64_t begin,
                                 [[maybe_unused]] int64_t end) {
#if BF16
        for (int64_t p = 0; p + 2 <= count; p += 2) {
            for (int64_t i = begin; i < end; i += SLICE) {
                fetch<SLICE * sizeof(scalar)>(next + p * HEAD_DIM + i);
                fetch<SLICE * sizeof(scalar)>(next + (p + 1) * HEAD_DIM + i);
            }
            const scalar *even = page + p * HEAD_DIM, *odd = even + HEAD_DIM;
            pair_up(even, odd, memory.values + p / 2 * HEAD_DIM, begin, end);
        }
        return memory.values;
#else
        return (const uint32_t*)page;
#endif
    }

    // Adds the values of scattered positions, and the value of the last position read through a page if it completes no
    // pair, in dimensions [first_dim, last_dim).
    template <int VECTORS> void weigh_scattered(int64_t part, int64_t r, int64_t first_dim, int64_t last_dim) {
        const int64_t begin = std::max(batch.direct[r] / PAIR * PAIR, first_page_of(r));
        for (int64_t p = begin; p < length_of(r); p += PAGE) {
            const int64_t count = std::min(length_of(r) - p, PAGE);
            for (int64_t i = 0; i < count; i += PAIR) {
                const scalar* value = v(part) + place_of(r, p + i);
#if BF16
                static const scalar nothing[HEAD_DIM] = {};
                pair_up(value, i + 1 < count ? v(part) + place_of(r, p + i + 1) : nothing,
                        memory.values + i / 2 * HEAD_DIM, first_dim, last_dim);
#else
                std::memcpy(memory.values + i * HEAD_DIM, value, HEAD_DIM * sizeof(scalar));
#endif
            }
            ::weigh<VECTORS>(group, weights_of(r, p), weight_stride, (count + PAIR - 1) / PAIR, memory.values,
                             totals_of(part, r), first_dim, last_dim);
        }
    }

    template <int VECTORS> void weigh(int64_t begin, int64_t end) {
        for (int64_t part = 0; part < parts; part++) {
            weigh_pages<VECTORS>(part, begin, end);
            for (int64_t r = first; r < last; r++) {
                weigh_scattered<VECTORS>(part, r, begin, end);
                for (int64_t g = 0; g < group; g++) {
                    const float* total = totals_of(part, r) + g * HEAD_DIM;
                    const vec mass = splat(scores.masses[index_of(r) + g]);
                    scalar* to = out.heads + r * out.step + (g * parts + part) * HEAD_DIM;
                    for (int64_t i = begin; i < end; i += LANES) store(to + i, load<vec>(total + i) / mass);
                }
            }
        }
    }

    // Copies the queries of all rows and parts to `memory`, as products read them.
    void read_queries() {
        const int64_t count = index_of(last);
        factor* to = at_least(memory.queries, parts * count * HEAD_DIM);
        for (int64_t i = 0; i < parts * count; i++, to += HEAD_DIM) {
            const int64_t index = i % count, head = index % group * parts + i / count;
            const float* from = queries.heads + (first + index / group) * queries.step + head * HEAD_DIM;
            for (int64_t j = 0; j < HEAD_DIM; j += LANES) store_factors(to + j, load<vec>(from + j));
        }
    }

  public:
    // memory: with the keys of the head's parts, whose values are `to_values` behind them. plane_heads: heads in a page.
    // window, cap, sinks: as in Layer and Model, sinks those of the group.
    Attention(Memory& memory, Scores scores, Queries queries, Outputs out, const Batch& batch, int64_t first, int64_t last,
              int64_t to_values, int64_t plane_heads, int64_t group, int64_t window, float cap, const float* sinks)
        : memory(memory), scores(scores), queries(queries), out(out), batch(batch), first(first), last(last), group(group),
          page_step(plane_heads * PAGE * HEAD_DIM), stride(scores.stride),
          weight_stride(stride * sizeof(float) / sizeof(factor)), window(window), cap(cap), sinks(sinks),
          parts(memory.keys_of.size()), to_values(to_values) {}

    // Scores a share of the pages. May write scores past the positions that a row reads through its pages; later steps
    // overwrite them.
    void score_pages(int64_t share, int64_t shares) {
        read_queries();
        each_page(share, shares, [&](int64_t r, int64_t end, int64_t start) {
            const int64_t most = *std::max_element(batch.direct + r, batch.direct + end) - start;
            for (int64_t part = 0; part < parts; part++) {
                const scalar *page = k(part) + page_of(r, start), *next = next_of(r, start, k(part), part);
                transpose_keys(page, std::min(most, PAGE), memory.keys, next);
                score<PAGE / LANES>((end - r) * group, queries_of(part, r), memory.keys, scores_of(r) + start, stride,
                                    part);
            }
        });
    }

    void score_scattered(const std::vector<Scattered>& scattered) {
        if (scattered.empty()) return;
        read_queries();
        at_least(memory.found, index_of(last) * PAGE);
        for (const Scattered& some : scattered) score_scattered(some);
    }

    // Replaces the scores of a row by weights.
    void softmax(int64_t r) {
        for (int64_t g = 0; g < group; g++)
            scores.masses[index_of(r) + g] = ::softmax(scores_of(r) + g * stride, begin_of(r), length_of(r), cap,
                                                sinks ? sinks + g : nullptr);
    }

    // Adds the weighted values of one of SLICES slices of the dimensions, or of all (-1).
    void weigh(int64_t slice) {
        memory.totals.assign(parts * index_of(last) * HEAD_DIM, 0.0f);
        if (slice < 0) weigh<WEIGHED>(0, HEAD_DIM);
        else weigh<std::min(WEIGHED, SLICE / LANES)>(slice * SLICE, (slice + 1) * SLICE);
    }
};
