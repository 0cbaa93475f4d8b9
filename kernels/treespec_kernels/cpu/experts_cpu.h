// Experts of sparse layers, included by decoder_cpu.cpp.
//
// A row's experts depend only on its router's outputs, and their outputs are added in the order of their scores. Rows are
// ordered by expert, so that one product per expert reads its weights once; a product's sums do not depend on its rows.

enum Scoring { SOFTMAX, SOFTMAX_OF_CHOSEN, SIGMOID };  // as SCORINGS in compiled_experts.py

inline float exp(float x) { return exp(splat(x))[0]; }

// Sets the groups of experts that a row may not choose from to -infinity: all but those with the largest sums of their two
// best scores.
void mask_groups(const Experts& of, float* choice) {
    const int64_t size = of.count / of.groups;
    std::vector<float> best(of.groups);
    for (int64_t g = 0; g < of.groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int64_t i = g * size; i < (g + 1) * size; i++)
            if (choice[i] > first) second = first, first = choice[i];
            else second = std::max(second, choice[i]);
        best[g] = first + second;
    }
    for (int64_t left = of.groups - of.chosen_groups; left > 0; left--) {
        int64_t worst = 0;  // the last one of equal groups
        for (int64_t g = 1; g < of.groups; g++)
            if (best[g] <= best[worst]) worst = g;
        best[worst] = INFINITY;
        std::fill_n(choice + worst * size, size, -INFINITY);
    }
}

// Writes a row's experts, best first, and their weights. scores: the router's outputs, overwritten; choice: a buffer of
// the same size.
void choose_experts(const Experts& of, float* scores, float* choice, int64_t* chosen, float* weights) {
    const int64_t width = of.router.stride;
    std::fill(scores + of.count, scores + width, of.scoring == SIGMOID ? 0.0f : -INFINITY);  // padding
    if (of.scoring == SOFTMAX) to_probs(scores, 1, width);
    for (int64_t i = 0; i < width; i += LANES) {
        vec score = load<vec>(scores + i);
        if (of.scoring == SIGMOID) store(scores + i, score = 1.0f / (1.0f + exp(-score)));
        store(choice + i, of.correction ? score + load<vec>(of.correction + i) : score);
    }
    std::fill(choice + of.count, choice + width, -INFINITY);
    if (of.groups > 1) mask_groups(of, choice);
    float total = 1e-20f;
    for (int64_t j = 0; j < of.top_k; j++) {
        chosen[j] = largest(choice, width).index;
        choice[chosen[j]] = -INFINITY;
        weights[j] = scores[chosen[j]];
        if (of.scoring == SOFTMAX_OF_CHOSEN) weights[j] = exp(weights[j] - scores[chosen[0]]);
        total += weights[j];
    }
    const bool divides = of.normalized || of.scoring == SOFTMAX_OF_CHOSEN;
    for (int64_t j = 0; j < of.top_k; j++) {
        weights[j] = (divides ? weights[j] / total : weights[j]) * of.scale;
        if (of.scales) weights[j] *= of.scales[chosen[j]];
    }
}

// The rows of a pass ordered by expert, with the buffers of their products.
struct Routed {
    std::vector<float> scores, choice, weights, outputs;
    std::vector<int64_t> chosen, places, starts, next;  // by row and rank: expert, and place in the order
    std::vector<scalar> inputs, inner, latent;
    std::vector<Share> shares;

    void order(const Experts& of, int64_t rows) {
        starts.assign(of.count + 1, 0), places.resize(rows * of.top_k);
        for (int64_t i = 0; i < rows * of.top_k; i++) starts[chosen[i] + 1]++;
        for (int64_t e = 0; e < of.count; e++) starts[e + 1] += starts[e];
        next.assign(starts.begin(), starts.end() - 1);
        for (int64_t i = 0; i < rows * of.top_k; i++) places[i] = next[chosen[i]]++;
    }

    // Multiplies the rows of each expert with its matrix.
    void multiply(const Linear* matrices, const scalar* x, int threads) {
        shares.clear();
        for (int64_t e = 0; e + 1 < int64_t(starts.size()); e++)
            if (starts[e] < starts[e + 1]) shares.push_back({matrices + e, starts[e], starts[e + 1] - starts[e]});
        linear(shares.data(), shares.size(), x, outputs.data(), STORE, threads);
    }
};
