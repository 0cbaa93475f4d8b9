// The target's choices and log-probabilities from rows of logits, included by growth_cpu.cpp. The references are
// `Noise.choose` after `truncated_row`, and `LogprobRows.of`. MOST_CANDIDATES is defined by growth_cpu.py.

extern "C" {

struct RowLogprobs {
    const void* const* logits;  // [num_rows], rows of [width], fp32, or bf16 if is_bf16
    int64_t is_bf16, num_rows, width, count;
    const int64_t* chosen;  // [num_rows]
    int32_t* packed;        // [num_rows, 2 + 2 * count], as `LogprobRows.packed`
};

}  // extern "C"

namespace {

constexpr int64_t COLUMNS = 64;  // columns per block with a stored maximum
constexpr int64_t MOST_BEST = 4096;  // maximum top_k; beyond it, the reference chooses
constexpr double NUCLEUS_ERROR = 1e-5;  // bound of the rounding errors of a nucleus' probability, relative to the total

inline vec values_at(const float* p) { return load<vec>(p); }
inline vec values_at(const uint16_t* p) { return (vec)(__builtin_convertvector(load<hvec>(p), uvec) << 16); }
inline float value_at(const float* p) { return *p; }
inline float value_at(const uint16_t* p) {
    const uint32_t bits = uint32_t(*p) << 16;
    return load<float>(&bits);
}

template <class T> T minus_infinity();
template <> inline float minus_infinity() { return -INFINITY; }
template <> inline uint16_t minus_infinity() { return 0xFF80; }

struct Scored {
    float score;
    int64_t token;
    // Whether it precedes another one in the order of descending scores. Ties prefer lower ids.
    bool operator<(const Scored& other) const {
        return score > other.score || (score == other.score && token < other.token);
    }
};

// A row of logits in blocks of COLUMNS, padded with -inf. Scores are the logits, divided if DIVIDES.
template <class T, bool DIVIDES> class Row {
  public:
    const int64_t width, blocks;
    float most = -INFINITY;
    bool is_finite = false;     // no NaN or +inf, and not all -inf
    std::vector<float> maxima;  // [blocks]

    Row(const void* row, int64_t width, float divisor)
        : width(width), blocks((width + COLUMNS - 1) / COLUMNS), maxima(blocks), logits(static_cast<const T*>(row)),
          divisor(splat(divisor)) {
        std::fill_n(last, COLUMNS, minus_infinity<T>());
        std::copy(logits + width / COLUMNS * COLUMNS, logits + width, last);
        ivec bad = {};
        for (int64_t block = 0; block < blocks; block++) {
            const T* p = at(block);
            vec largest = values_at(p);
            for (int64_t j = 0; j < COLUMNS; j += LANES) {
                const vec x = values_at(p + j);
                bad |= ~(x < splat(INFINITY));
                largest = x > largest ? x : largest;
            }
            maxima[block] = largest_lane(largest);
        }
        for (float& largest : maxima) {
            if (DIVIDES) largest /= divisor;  // division keeps the order
            most = largest > most ? largest : most;
        }
        is_finite = !any(bad) && std::isfinite(most);
    }

    vec scores(int64_t block, int64_t j) const {  // LANES scores from column j of a block on
        const vec x = values_at(at(block) + j);
        return DIVIDES ? x / divisor : x;
    }

    // Returns the sum of exp(score - most); the order of summation depends only on the width.
    double mass() const {
        double total = 0.0;
        for (int64_t block = 0; block < blocks;) {
            Sums sums;
            for (const int64_t end = std::min(block + 16, blocks); block < end; block++)
                for (int64_t j = 0; j < COLUMNS; j += LANES) sums.add(j, exp(scores(block, j) - most));
            total += sums.total();
        }
        return total;
    }

    // Calls a function with LANES scores and the mask of those that precede a token, wherever there may be any.
    template <class F> void each_before(Scored token, F visit) const {
        ivec columns;
        for (int lane = 0; lane < LANES; lane++) columns[lane] = lane;
        for (int64_t block = 0; block < blocks; block++) {
            if (!(maxima[block] >= token.score)) continue;
            for (int64_t j = 0; j < COLUMNS; j += LANES) {
                const vec s = scores(block, j);
                const ivec lower = columns < int32_t(token.token - block * COLUMNS - j);
                visit(s, (s > token.score) | ((s == token.score) & lower));
            }
        }
    }

    int64_t rank(Scored token) const {  // starting at 0
        ivec counts = {};
        each_before(token, [&](vec, ivec before) { counts -= before; });
        int64_t count = 0;
        for (int lane = 0; lane < LANES; lane++) count += counts[lane];
        return count;
    }

    double mass_before(Scored token) const {
        double total = 0.0;
        each_before(token, [&](vec s, ivec before) {
            if (any(before)) total += sum(before ? exp(s - most) : vec{});
        });
        return total;
    }

    // Returns the `count` best tokens, best first.
    std::vector<Scored> best(int64_t count) const {
        if (!count) return {};
        float least = -INFINITY;  // at least `count` scores in the blocks with the largest maxima reach it
        if (count < blocks) {
            std::vector<float> ordered(maxima);
            std::nth_element(ordered.begin(), ordered.begin() + (count - 1), ordered.end(), std::greater<float>());
            least = ordered[count - 1];
        }
        std::vector<Scored> heap;  // heap with the last one in order on top
        for (int64_t block = 0; block < blocks; block++) {
            if (!(maxima[block] >= least)) continue;
            const int64_t end = std::min(COLUMNS, width - block * COLUMNS);
            for (int64_t j = 0; j < end; j += LANES) {
                const vec s = scores(block, j);
                for (int64_t lane = 0; lane < LANES && j + lane < end && any(s >= least); lane++) {
                    const Scored scored{s[lane], block * COLUMNS + j + lane};
                    if (!(scored.score >= least)) continue;
                    if (int64_t(heap.size()) == count) {
                        if (!(scored < heap.front())) continue;
                        std::pop_heap(heap.begin(), heap.end());
                        heap.pop_back();
                    }
                    heap.push_back(scored);
                    std::push_heap(heap.begin(), heap.end());
                    if (int64_t(heap.size()) == count) least = std::max(least, heap.front().score);
                }
            }
        }
        std::sort_heap(heap.begin(), heap.end());
        return heap;
    }

  private:
    const T* const logits;
    const vec divisor;
    T last[COLUMNS];  // the last block, if it is partial

    const T* at(int64_t block) const { return (block + 1) * COLUMNS <= width ? logits + block * COLUMNS : last; }
};

// The tokens that may have the largest score plus noise among those added so far.
class Candidates {
  public:
    struct Candidate {
        Scored scored;
        uint32_t integer;
        double value;
    };
    std::vector<Candidate> found;  // in insertion order, at most MOST_CANDIDATES
    bool complete = true;          // false if there was no room for some of them
    double best = -INFINITY;       // the largest value

    // Returns a bound below which no value can be the largest in fp32. The noise there has an error of up to 7e-6.
    double least() const { return best - 1e-4 - std::abs(best) * 0x1p-20; }

    void add(Scored scored, uint32_t integer) {
        // As in `gumbel_ref`, except for the precision of the logarithms.
        const float w = std::min((float(integer) + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
        const double value = scored.score - std::log(-std::log1p(-double(w)));
        if (!complete || value < least()) return;
        best = std::max(best, value);
        if (int64_t(found.size()) == MOST_CANDIDATES) complete = keep();
        if (complete) found.push_back({scored, integer, value});
    }

    // Drops former candidates. Returns whether there is room for another one.
    bool keep() {
        const auto lost = [&](const Candidate& candidate) { return candidate.value < least(); };
        found.erase(std::remove_if(found.begin(), found.end(), lost), found.end());
        return int64_t(found.size()) < MOST_CANDIDATES;
    }
};

// Adds the tokens of a row that precede `limit` and have scores of at least `least`.
template <class R> void search(const R& row, const Noise& noise, Scored limit, float least, Candidates& candidates) {
    const Scored first = row.best(1)[0];
    // The best token's value bounds the others: a token can be chosen only if its noise, at most 22.88 and at most
    // -log(integer * 2^-32), makes up the difference in score. In most blocks no integer is small enough.
    Candidates alone;
    alone.add(first, noise.integer(first.token));
    candidates.best = alone.best;
    least = std::max(least, limit.score);
    uint32_t integers[COLUMNS];
    for (int64_t block = 0; block < row.blocks; block++) {
        const float reach = float(candidates.least() - 1e-3 - std::abs(candidates.best) * 0x1p-20);
        if (row.maxima[block] < reach - 22.9f || row.maxima[block] < least) continue;
        noise.integers(block * (COLUMNS / 8), COLUMNS / 8, integers);
        const vec bound = exp(splat(row.maxima[block] - reach)) * (1.001f * 0x1p31f);
        ivec passed = {};
        for (int64_t j = 0; j < COLUMNS; j += LANES)  // halved, because conversion from signed integers is faster
            passed |= __builtin_convertvector((ivec)(load<uvec>(integers + j) >> 1), vec) < bound;
        if (!any(passed)) continue;
        for (int64_t j = 0; j < std::min(COLUMNS, row.width - block * COLUMNS); j++) {
            if (!(float(integers[j] >> 1) < bound[0])) continue;
            const Scored scored{row.scores(block, j / LANES * LANES)[j % LANES], block * COLUMNS + j};
            if (scored.score >= least && scored < limit) candidates.add(scored, integers[j]);
        }
    }
    candidates.keep();
}

struct Undecided {};  // thrown if the reference must choose

// Returns whether a token is in the nucleus: the probability before it is less than `wanted`.
bool in_nucleus(double before, double wanted, double total) {
    if (before && std::abs(before - wanted) <= NUCLEUS_ERROR * total) throw Undecided();
    return before < wanted || !before;  // the nucleus has at least one token
}

// Returns the candidates of a row, ascending.
template <class T> Candidates find_candidates(const Choice& c) {
    const Row<T, true> row(c.logits, c.width, c.temperature);
    const bool takes_best = c.top_k && c.top_k < c.width;
    if (!row.is_finite || (takes_best && c.top_k > MOST_BEST)) throw Undecided();
    const Noise noise(c.seed, c.sample, c.position);
    const float least = row.most + c.log_min_p;
    Candidates candidates;
    if (takes_best) {
        std::vector<Scored> best = row.best(c.top_k);
        double total = 0.0, before = 0.0;
        for (Scored scored : best) total += std::exp(double(scored.score - row.most));
        auto end = best.begin();
        for (; end != best.end() && end->score >= least; end++) {
            if (c.top_p < 1 && !in_nucleus(before, c.top_p * total, total)) break;
            before += std::exp(double(end->score - row.most));
        }
        std::sort(best.begin(), end, [](Scored a, Scored b) { return a.token < b.token; });
        std::for_each(best.begin(), end, [&](Scored scored) { candidates.add(scored, noise.integer(scored.token)); });
        candidates.keep();
    } else {
        // The best token outside the nucleus bounds it; the next search is for the best token before that one.
        const double total = c.top_p < 1 ? row.mass() : 0.0;
        for (Scored limit{-INFINITY, c.width};;) {
            candidates = Candidates();
            search(row, noise, limit, least, candidates);
            if (c.top_p >= 1 || !candidates.complete) break;
            bool is_outside = false;  // whether the best one is outside
            std::vector<Candidates::Candidate> inside;
            for (const auto& candidate : candidates.found) {
                if (in_nucleus(row.mass_before(candidate.scored), c.top_p * total, total)) inside.push_back(candidate);
                else if (candidate.value == candidates.best) limit = candidate.scored, is_outside = true;
            }
            if (!is_outside) {
                candidates.found = inside;
                break;
            }
        }
    }
    if (!candidates.complete) throw Undecided();
    return candidates;
}

template <class T> void find_logprobs(const RowLogprobs& r) {
    for (int64_t i = 0; i < r.num_rows; i++) {
        const T* logits = static_cast<const T*>(r.logits[i]);
        const Row<T, false> row(logits, r.width, 1.0f);
        const double norm = row.most + std::log(row.mass());
        int32_t* out = r.packed + i * (2 + 2 * r.count);
        const auto put = [&](int64_t place, float value) { std::memcpy(out + place, &value, sizeof value); };
        const float chosen = value_at(logits + r.chosen[i]);
        put(0, float(chosen - norm));
        out[1] = int32_t(1 + row.rank({chosen, r.chosen[i]}));
        const std::vector<Scored> best = row.best(r.count);
        for (int64_t place = 0; place < r.count; place++) {
            const Scored scored = place < int64_t(best.size()) ? best[place] : Scored{NAN, 0};  // fewer if some are NaN
            out[2 + place] = int32_t(scored.token);
            put(2 + r.count + place, float(scored.score - norm));
        }
    }
}

}  // namespace

extern "C" {

// Returns the number of candidates, or -1 if the reference must choose: a score is NaN or +inf, rounding may change the
// nucleus, or there are too many candidates.
int64_t treespec_choose(const Choice* c) {
    try {
        const Candidates candidates = c->is_bf16 ? find_candidates<uint16_t>(*c) : find_candidates<float>(*c);
        int64_t count = 0;
        for (const auto& candidate : candidates.found) {
            c->tokens[count] = candidate.scored.token, c->scores[count] = candidate.scored.score;
            c->integers[count++] = candidate.integer;
        }
        return count;
    } catch (const Undecided&) {
        return -1;
    }
}

void treespec_logprobs(const RowLogprobs* r) {
    if (r->is_bf16) find_logprobs<uint16_t>(*r);
    else find_logprobs<float>(*r);
}

}  // extern "C"
