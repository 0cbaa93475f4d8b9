// Prompt lookup in one call: where the end of a text occurred before, and the tree of what followed there. The
// specification is `search` in treespec/drafters/lookup.py, which takes numpy many calls.
//
// MAX_MATCH, MATCHES and PLACES are defined by lookup_cpu.py.

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace {

constexpr int64_t LENGTHS = MAX_MATCH + 1;

struct Counts {  // guesses and how many of them held, [PLACES, LENGTHS] each
    double trials[PLACES][LENGTHS], hits[PLACES][LENGTHS];

    double rate(int64_t place, int64_t length, double prior, double weight) const {
        return (hits[place][length] + weight * prior) / (trials[place][length] + weight);
    }
};

struct Search {
    const double* prior;  // [PLACES, LENGTHS]
    double prior_trials, global_trials;
    const Counts *common, *own;  // of all requests and of this one; own: null where nothing was counted
    const int64_t* tokens;       // [length]
    int64_t length, depth;
    double least;
    // What is written, of MATCHES * depth + 1 nodes at most.
    int64_t *node_tokens, *parents, *depths, *places, *lengths;
    double *probs, *values;
};

struct Match {
    int64_t end, length;
};

double rate(const Search& s, int64_t place, int64_t length) {
    const double common = s.common->rate(place, length, s.prior[place * LENGTHS + length], s.prior_trials);
    return s.own ? s.own->rate(place, length, common, s.global_trials) : common;
}

// The longest matches, of equally long ones the most recent first; returns how many.
int64_t find(const Search& s, Match* best) {
    const int64_t last = s.length - 1, longest = std::min<int64_t>(MAX_MATCH, last);
    int64_t found = 0;
    for (int64_t end = last - 1; end >= 0; end--) {
        if (s.tokens[end] != s.tokens[last]) continue;
        int64_t length = 1;
        while (length < longest && length <= end && s.tokens[end - length] == s.tokens[last - length]) length++;
        if (found == MATCHES && length <= best[found - 1].length) continue;
        int64_t at = found < MATCHES ? found++ : found - 1;
        for (; at && best[at - 1].length < length; at--) best[at] = best[at - 1];
        best[at] = {end, length};
        if (found == MATCHES && best[found - 1].length == longest) break;
    }
    return found;
}

struct Node {
    int64_t token, parent, depth, place, length;
    double prob, value;
};

// All guesses, by level, and within one in the order of the matches.
void grow(const Search& s, const Match* matches, int64_t count, std::vector<Node>& nodes) {
    const int64_t last = s.length - 1;
    int64_t at[MATCHES] = {};  // the node that each match has reached
    nodes.push_back({s.tokens[last], -1, 0, 0, 0, 1.0, 1.0});
    for (int64_t level = 0; level < s.depth; level++) {
        int64_t above[MATCHES], token[MATCHES];
        const int64_t first = nodes.size();
        for (int64_t m = 0; m < count; m++) {
            const int64_t end = matches[m].end;  // a continuation that reaches the end of the text goes on as a loop
            above[m] = at[m], token[m] = s.tokens[end + 1 + level % (last - end)];
            int64_t same = 0, siblings = 0;
            while (same < m && !(above[same] == above[m] && token[same] == token[m])) same++;
            if (same < m) {
                at[m] = at[same];
                continue;
            }
            for (size_t node = first; node < nodes.size(); node++) siblings += nodes[node].parent == above[m];
            const int64_t place = std::min<int64_t>(siblings, PLACES - 1);
            const int64_t length = std::min<int64_t>(matches[m].length + level, MAX_MATCH);
            const double prob = rate(s, place, length);
            at[m] = nodes.size();
            nodes.push_back({token[m], above[m], level + 1, place, length, prob, prob * nodes[above[m]].value});
        }
    }
}

int64_t search(const Search& s) {
    Match matches[MATCHES];
    const int64_t count = find(s, matches);
    if (!count || rate(s, 0, matches[0].length) < s.least) return 0;
    static thread_local std::vector<Node> nodes;
    static thread_local std::vector<int64_t> order, place;
    nodes.clear();
    grow(s, matches, count, nodes);
    order.resize(nodes.size()), place.resize(nodes.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [](int64_t a, int64_t b) { return nodes[a].value > nodes[b].value; });
    for (size_t i = 0; i < order.size(); i++) {
        const Node& node = nodes[order[i]];
        place[order[i]] = i;
        s.node_tokens[i] = node.token, s.parents[i] = i ? place[node.parent] : -1, s.depths[i] = node.depth;
        s.places[i] = node.place, s.lengths[i] = node.length, s.probs[i] = node.prob, s.values[i] = node.value;
    }
    return nodes.size();
}

}  // namespace

extern "C" {

// Writes the tree and returns how many nodes it has, the root included; 0 without a match, or where the best first
// guess is less probable than `least`.
int64_t treespec_lookup(const Search* s) { return search(*s); }

// Counts the guesses below every node of a path: one of them held, or none.
void treespec_lookup_count(const int64_t* parents, const int64_t* places, const int64_t* lengths, int64_t nodes,
                           const int64_t* path, int64_t path_length, Counts* common, Counts* own) {
    std::vector<uint8_t> on_path(nodes, 0);
    for (int64_t i = 0; i < path_length; i++) on_path[path[i]] = 1;
    int64_t trials[PLACES][LENGTHS] = {}, hits[PLACES][LENGTHS] = {};
    for (int64_t node = 1; node < nodes; node++) {
        if (!on_path[parents[node]]) continue;
        trials[places[node]][lengths[node]]++;
        hits[places[node]][lengths[node]] += on_path[node];
    }
    for (Counts* counts : {common, own})
        for (int64_t place = 0; place < PLACES; place++)
            for (int64_t length = 0; length < LENGTHS; length++) {
                counts->trials[place][length] += trials[place][length];
                counts->hits[place][length] += hits[place][length];
            }
}

}  // extern "C"
