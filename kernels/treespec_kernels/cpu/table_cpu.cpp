// Proposals of an n-gram table in one call: counts the new tokens of a text, and expands the tree of its most probable
// continuations. The reference is `TableDrafter` in treespec/drafters/table/table_drafter.py.
//
// CONTEXTS, SLOT and CANDIDATES are defined by table_cpu.py.

#include <algorithm>
#include <cstdint>
#include <cmath>
#include <vector>

extern "C" {

struct Table {
    int64_t vocab_size, num_slots;  // num_slots: a power of two, or 0
    const uint32_t* hashes;         // hashes of stored contexts, ascending
    const int64_t* buckets;         // [65537], first context with these upper 16 bits of the hash
    const int64_t* starts;          // [contexts + 1], bounds of their continuations
    const int32_t* tokens;
    const uint8_t* codes;           // weights of the continuations, as indices into `levels`
    const uint8_t* frequencies;     // [vocab_size], probabilities of tokens without a context, as `codes`
    const double* levels;           // [256]
    uint32_t* keys;                 // [num_slots], hashes of contexts seen while serving; 0: none
    int32_t* slot_tokens;           // [num_slots, SLOT]
    float* slot_counts;             // [num_slots, SLOT], 0: free
};

struct Expansion {
    const int64_t* text;   // [length], last tokens of a text
    int64_t length, seen;  // seen: number of its tokens counted before, or not to be counted
    int64_t depth, nodes;  // limits of the tree; nodes: including the root
    double least, power, prior;  // see `TableDrafter.expand`
    int64_t *node_tokens, *parents, *depths;  // outputs, [nodes]
    double *node_probs, *values;
};

}  // extern "C"

namespace {

struct Contexts {  // hashes of the last tokens, shortest context first
    uint32_t hashes[CONTEXTS];
    int64_t count = 0;

    uint32_t value = 0;

    void add(int64_t token) {
        value = (value ^ static_cast<uint32_t>(token)) * 0x9E3779B1u;
        value = (value ^ value >> 15) + 1;
        hashes[count++] = std::max(value, 1u);
    }
};

void count(const Table& t, uint32_t hash, int32_t token) {
    const int64_t slot = hash & (t.num_slots - 1);
    int32_t* tokens = t.slot_tokens + slot * SLOT;
    float* counts = t.slot_counts + slot * SLOT;
    if (t.keys[slot] != hash) {
        float total = 0;
        for (int64_t i = 0; i < SLOT; i++) total += counts[i] *= 0.5f;
        if (total >= 0.5f) return;
        t.keys[slot] = hash;
        std::fill(counts, counts + SLOT, 0.0f);
    }
    int64_t place = 0;
    for (int64_t i = 0; i < SLOT; i++) {
        if (counts[i] > 0 && tokens[i] == token) {
            counts[i] += 1;
            return;
        }
        if (counts[i] < counts[place]) place = i;
    }
    tokens[place] = token, counts[place] = 1;
}

// Writes the candidates after a context and their probabilities; returns their number.
int64_t children(const Table& t, const Expansion& e, const Contexts& contexts, int32_t* tokens, double* probs) {
    int64_t first[CONTEXTS], last[CONTEXTS], slots[CONTEXTS], number = 0;
    double rest[CONTEXTS];
    for (int64_t k = 0; k < contexts.count; k++) {
        const uint32_t hash = contexts.hashes[k];
        const uint32_t* end = t.hashes + t.buckets[(hash >> 16) + 1];
        const uint32_t* found = std::lower_bound(t.hashes + t.buckets[hash >> 16], end, hash);
        const bool stored = found != end && *found == hash;
        first[k] = stored ? t.starts[found - t.hashes] : 0, last[k] = stored ? t.starts[found - t.hashes + 1] : 0;
        rest[k] = 1.0;
        for (int64_t i = first[k]; i < last[k]; i++) rest[k] -= t.levels[t.codes[i]];
        rest[k] = std::max(rest[k], 0.0);
        const int64_t slot = t.num_slots ? hash & (t.num_slots - 1) : 0;
        slots[k] = t.num_slots && t.keys[slot] == hash ? slot * SLOT : -1;
    }
    const auto propose = [&](int32_t token) {
        if (number < CANDIDATES && std::find(tokens, tokens + number, token) == tokens + number) tokens[number++] = token;
    };
    for (int64_t k = contexts.count - 1; k >= 0; k--) {
        for (int64_t i = slots[k]; i >= 0 && i < slots[k] + SLOT; i++)
            if (t.slot_counts[i] > 0) propose(t.slot_tokens[i]);
        for (int64_t i = first[k]; i < last[k]; i++) propose(t.tokens[i]);
    }
    for (int64_t i = 0; i < number; i++) probs[i] = t.vocab_size ? t.levels[t.frequencies[tokens[i]]] : 0.0;
    for (int64_t k = 0; k < contexts.count; k++) {
        double total = e.prior;
        for (int64_t i = slots[k]; i >= 0 && i < slots[k] + SLOT; i++) total += t.slot_counts[i];
        for (int64_t c = 0; c < number; c++) {
            double prob = rest[k] * probs[c];
            for (int64_t i = first[k]; i < last[k]; i++)
                if (t.tokens[i] == tokens[c]) prob += t.levels[t.codes[i]];
            if (slots[k] >= 0) {
                double seen = e.prior * prob;
                for (int64_t i = slots[k]; i < slots[k] + SLOT; i++)
                    if (t.slot_counts[i] > 0 && t.slot_tokens[i] == tokens[c]) seen += t.slot_counts[i];
                prob = seen / total;
            }
            probs[c] = prob;
        }
    }
    if (e.power == 1.0) return number;
    double left = 1.0, total = 0.0;
    for (int64_t i = 0; i < number; i++) left -= probs[i], total += probs[i] = std::pow(probs[i], e.power);
    total += std::pow(std::max(left, 0.0), e.power);
    for (int64_t i = 0; i < number; i++) probs[i] /= total;
    return number;
}

struct Candidate {
    double value, prob;
    int64_t number, token, parent;  // number: in order of proposal

    bool operator<(const Candidate& other) const {
        return value < other.value || (value == other.value && number > other.number);
    }
};

}  // namespace

extern "C" {

// Counts each token of text[seen:] after its contexts.
void treespec_table_count(const Table* t, const Expansion* e) {
    for (int64_t i = std::max<int64_t>(e->seen, 1); i < e->length; i++) {
        Contexts contexts;
        for (int64_t back = 1; back <= std::min<int64_t>(CONTEXTS, i); back++) contexts.add(e->text[i - back]);
        for (int64_t k = 0; k < contexts.count; k++) count(*t, contexts.hashes[k], e->text[i]);
    }
}

// Counts as above, writes the tree, most valuable nodes first, and returns its number of nodes, including the root.
int64_t treespec_table_expand(const Table* t, const Expansion* e) {
    static thread_local std::vector<Candidate> heap;
    if (t->num_slots) treespec_table_count(t, e);
    heap.clear();
    heap.push_back({1.0, 1.0, 0, e->text[e->length - 1], -1});
    int64_t number = 0, nodes = 0;
    while (!heap.empty() && nodes < e->nodes) {
        std::pop_heap(heap.begin(), heap.end());
        const Candidate best = heap.back();
        heap.pop_back();
        const int64_t node = nodes++, depth = node ? e->depths[best.parent] + 1 : 0;
        e->node_tokens[node] = best.token, e->parents[node] = best.parent, e->depths[node] = depth;
        e->node_probs[node] = best.prob, e->values[node] = best.value;
        if (depth == e->depth) continue;
        Contexts contexts;
        int64_t above = node, back = e->length - 1;
        while (contexts.count < CONTEXTS && (above > 0 || back >= 0)) {
            contexts.add(above > 0 ? e->node_tokens[above] : e->text[back--]);
            above = above > 0 ? e->parents[above] : 0;
        }
        int32_t tokens[CANDIDATES];
        double probs[CANDIDATES];
        const int64_t found = children(*t, *e, contexts, tokens, probs);
        for (int64_t i = 0; i < found; i++) {
            const double value = best.value * probs[i];
            if (value < e->least) continue;
            heap.push_back({value, probs[i], ++number, tokens[i], node});
            std::push_heap(heap.begin(), heap.end());
        }
    }
    return nodes;
}

}  // extern "C"
