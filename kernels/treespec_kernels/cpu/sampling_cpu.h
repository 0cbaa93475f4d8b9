// Drafts of sampling requests, included by drafts_cpu.h: a draft predicts the token that the target will choose from
// the request's temperature and Gumbel noise.

extern "C" {

struct Sampling {  // per tree, [num_trees]
    const double* temperatures;                     // 0: the request does not sample
    const int64_t *adds_noise, *seeds, *samples;    // adds_noise: whether the target's noise is known and added
};

}  // extern "C"

namespace {

// Candidates of a row: at most CANDIDATES tokens, with at least LEAST_SHARE of the most likely token's probability.
// Noise is computed only for them, because computing it for the whole vocabulary would take as long as a pass.
constexpr int64_t CANDIDATES = 512;
constexpr float LEAST_SHARE = 0x1p-13f;

// The integers of the noise, like `gumbel_integers_of_row` in sampling/coupled_choice.py.
class Noise {
  public:
    Noise(uint64_t seed, uint64_t sample, uint64_t position) : position(position) {
        for (auto& key : keys) {
            key[0] = seed, key[1] = sample;
            seed += 0x9E3779B97F4A7C15u, sample += 0xBB67AE8584CAA73Bu;
        }
    }

    // Writes the integers of `count` blocks of 8 tokens.
    void integers(int64_t block, int64_t count, uint32_t* out) const {
        for (int64_t i = 0; i < count; i++) {
            uint64_t counter[4] = {1 + uint64_t(block + i), 0, position, 0};
            for (const auto& key : keys) {
                const auto first = static_cast<unsigned __int128>(0xD2E7470EE14C6C93u) * counter[0];
                const auto second = static_cast<unsigned __int128>(0xCA5A826395121157u) * counter[2];
                counter[0] = uint64_t(second >> 64) ^ counter[1] ^ key[0], counter[1] = uint64_t(second);
                counter[2] = uint64_t(first >> 64) ^ counter[3] ^ key[1], counter[3] = uint64_t(first);
            }
            std::memcpy(out + 8 * i, counter, sizeof counter);  // little-endian: the low half first
        }
    }

    uint32_t integer(int64_t token) const {
        uint32_t block[8];
        integers(token / 8, 1, block);
        return block[token % 8];
    }

  private:
    uint64_t keys[10][2];  // keys by round
    const uint64_t position;
};

// Returns the number of probabilities that are at least `least`.
int64_t count_from(const float* row, int64_t width, float least) {
    int64_t i = 0, count = 0;
    ivec counts = {};
    for (; i + LANES <= width; i += LANES) counts -= load<vec>(row + i) >= splat(least);
    for (int lane = 0; lane < LANES; lane++) count += counts[lane];
    for (; i < width; i++) count += row[i] >= least;
    return count;
}

// Returns the largest probability of a row, or NaN if one is not finite.
float most_of(const float* row, int64_t width) {
    vec most = splat(0.0f);
    ivec finite = most == most;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        const vec x = load<vec>(row + i);
        finite &= x < splat(INFINITY);
        most = x > most ? x : most;
    }
    float largest = any(~finite) ? NAN : 0.0f;
    for (int lane = 0; lane < LANES; lane++) largest = most[lane] > largest ? most[lane] : largest;
    for (; i < width; i++) largest = !(row[i] < INFINITY) ? NAN : row[i] > largest ? row[i] : largest;
    return largest;
}

// Writes the candidates of a row and the probabilities that the target chooses them at `position`, [CANDIDATES] each;
// the probability is -1 for unused entries, and NaN in the first one if the row is not finite. columns: tokens of the
// row's columns, or null.
void predict_choice(const Sampling& s, int64_t tree, int64_t position, const float* row, int64_t width,
                    const int64_t* columns, float* probs, int64_t* tokens) {
    std::fill_n(probs, CANDIDATES, -1.0f);
    std::fill_n(tokens, CANDIDATES, 0);
    const float most = most_of(row, width);
    if (std::isnan(most)) {
        probs[0] = NAN;
        return;
    }
    float least = most * LEAST_SHARE;
    while (count_from(row, width, least) > CANDIDATES) least *= 4;
    const Noise noise(s.seeds[tree], s.samples[tree], position);
    int64_t count = 0;
    double sum = 0.0, values[CANDIDATES];
    for (int64_t i = 0; i < width; i++) {
        if (i + LANES <= width && !any(load<vec>(row + i) >= splat(least))) {
            i += LANES - 1;
            continue;
        }
        if (!(row[i] >= least)) continue;
        const int64_t token = columns ? columns[i] : i;
        double value = std::exp((std::log(double(row[i])) - std::log(double(most))) / s.temperatures[tree]);
        if (s.adds_noise[tree]) {  // p * exp(Gumbel noise) = p / exponential variate
            const double w = (noise.integer(token) + 0.5) * 0x1p-32;
            value /= -std::log1p(-w);
        }
        sum += values[count] = value, tokens[count++] = token;
    }
    for (int64_t i = 0; i < count; i++) probs[i] = float(values[i] / sum);
}

}  // namespace
