// Prompt lookup in one call: finds earlier occurrences of a text's suffix, in the text itself and in a history of other
// requests' tokens, and builds the tree of their continuations. The references are `search` in
// treespec/drafters/lookup/lookup_drafter.py and `History` in treespec/drafters/lookup/history.py.
//
// MAX_MATCH, MATCHES, CLASSES, TEXT_CLASSES, PAST_MATCHES, SHORT, LONG and STEPS are defined by lookup_cpu.py.

#include "lookup_cpu.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace {

constexpr int64_t LENGTHS = MAX_MATCH + 1, BOTH = MATCHES + PAST_MATCHES;
constexpr int64_t ORDERS[2] = {SHORT, LONG};
enum Past { SOLE = TEXT_CLASSES, UNANIMOUS, MAJORITY, PLURALITY, SECOND, LATER };

}  // namespace

struct Counts {  // numbers of proposed and accepted tokens, [CLASSES, LENGTHS] each
    double trials[CLASSES][LENGTHS], hits[CLASSES][LENGTHS];

    double rate(int64_t kind, int64_t length, double prior, double weight) const {
        return (hits[kind][length] + weight * prior) / (trials[kind][length] + weight);
    }
};

extern "C" {

struct History {  // ring buffer of the last `capacity` tokens; token number s, from 1 on, is at s % capacity
    int64_t capacity, count, num_heads;
    int64_t *tokens, *owners, *before, *after;  // [capacity]; before, after: neighbours in the same text, 0: none
    int64_t *older;                             // [2, capacity]: previous number with the same hash of its last tokens
    int64_t *heads;                             // [2, num_heads]: latest number of each hash

    bool holds(int64_t number) const { return number > 0 && number > count - capacity; }
    int64_t at(int64_t number) const { return number & (capacity - 1); }
    int64_t previous(int64_t number) const {
        const int64_t found = before[at(number)];
        return holds(found) ? found : 0;
    }
    int64_t next(int64_t number) const { return after[at(number)]; }  // later than `number`, so not overwritten either
    int64_t& head(int order, uint64_t hash) { return heads[order * num_heads + (hash & (num_heads - 1))]; }
};

}  // extern "C"

namespace {

uint64_t mixed(uint64_t hash, int64_t token) {
    hash = (hash ^ static_cast<uint64_t>(token)) * 0x9E3779B97F4A7C15ull;
    return hash ^ (hash >> 29);
}

int64_t add(History& h, int64_t owner, int64_t last, const int64_t* tokens, int64_t length) {
    for (int64_t i = 0; i < length; i++) {
        const int64_t number = ++h.count, slot = h.at(number);
        last = h.holds(last) ? last : 0;
        h.tokens[slot] = tokens[i], h.owners[slot] = owner, h.before[slot] = last, h.after[slot] = 0;
        if (last) h.after[h.at(last)] = number;
        last = number;
        uint64_t hash = 0;
        int64_t back = number;
        for (int64_t n = 1; n <= LONG && back; n++, back = h.previous(back)) {
            hash = mixed(hash, h.tokens[h.at(back)]);
            for (int order = 0; order < 2; order++) {
                if (n != ORDERS[order]) continue;
                int64_t& head = h.head(order, hash);
                h.older[order * h.capacity + slot] = head, head = number;
            }
        }
    }
    return last;
}

struct Match {
    int64_t end, length;  // end: a position in the text, or a number in the history
};

double rate(const Search& s, int64_t kind, int64_t length) {
    const double common = s.common->rate(kind, length, s.prior[kind * LENGTHS + length], s.prior_trials);
    return s.counts ? s.counts->rate(kind, length, common, s.global_trials) : common;
}

// Inserts a match into the `most` longest ones, after earlier matches of the same length; returns their number.
int64_t keep(Match* best, int64_t count, int64_t most, Match match) {
    if (count == most && match.length <= best[count - 1].length) return count;
    int64_t i = count < most ? count++ : count - 1;
    for (; i && best[i - 1].length < match.length; i--) best[i] = best[i - 1];
    best[i] = match;
    return count;
}

// Finds the longest matches in the text, most recent first among equally long ones; returns their number.
int64_t find(const Search& s, Match* best) {
    const int64_t last = s.length - 1, longest = std::min<int64_t>(MAX_MATCH, last);
    int64_t count = 0;
    for (int64_t end = last - 1; end >= 0; end--) {
        if (s.tokens[end] != s.tokens[last]) continue;
        int64_t length = 1;
        while (length < longest && length <= end && s.tokens[end - length] == s.tokens[last - length]) length++;
        count = keep(best, count, MATCHES, {end, length});
        if (count == MATCHES && best[count - 1].length == longest) break;
    }
    return count;
}

// Finds the longest matches in the history, among the latest STEPS occurrences of the text's last LONG tokens, or of
// its last SHORT tokens if there are none.
int64_t find_past(const Search& s, Match* best) {
    History& h = *s.history;
    int64_t count = 0;
    for (int order = 1; order >= 0 && !count; order--) {
        const int64_t least = ORDERS[order], longest = std::min<int64_t>(MAX_MATCH, s.length);
        if (s.length < least) continue;
        uint64_t hash = 0;
        for (int64_t i = 0; i < least; i++) hash = mixed(hash, s.tokens[s.length - 1 - i]);
        int64_t number = h.head(order, hash);
        for (int64_t steps = 0; steps < STEPS && h.holds(number); number = h.older[order * h.capacity + h.at(number)]) {
            int64_t length = 0;
            for (int64_t back = number; back && length < longest; back = h.previous(back), length++)
                if (h.tokens[h.at(back)] != s.tokens[s.length - 1 - length]) break;
            if (length < least) continue;  // a hash collision, or the start of the match was overwritten
            steps++;
            if (h.owners[h.at(number)] == s.owner || !h.next(number)) continue;
            count = keep(best, count, PAST_MATCHES, {number, length});
        }
    }
    return count;
}

struct Node {
    int64_t token, parent, depth, classes[2], lengths[2], votes;
    double prob, value;
};

struct Trie {
    const Search& s;
    Match matches[BOTH];
    int64_t num_text, count;  // number of matches in the text, and in text and history together
    int64_t number[BOTH];     // current token number of each match in the history
    int64_t reached[BOTH];    // current node of each match; -1: the match has ended
    std::vector<Node>& nodes;

    // Adds one level: first the nodes with the matches that propose them, then their probabilities.
    void grow(int64_t level) {
        const int64_t first = nodes.size(), last = s.length - 1;
        for (int64_t m = 0; m < count; m++) {
            if (reached[m] < 0) continue;
            const int64_t above = reached[m];
            int64_t token;
            if (m < num_text) {  // a continuation past the end of the text repeats from the match
                token = s.tokens[matches[m].end + 1 + level % (last - matches[m].end)];
            } else if ((number[m] = s.history->next(number[m]))) {
                token = s.history->tokens[s.history->at(number[m])];
            } else {
                reached[m] = -1;
                continue;
            }
            int64_t node = first, siblings = 0;
            for (; node < static_cast<int64_t>(nodes.size()); node++) {
                if (nodes[node].parent != above) continue;
                if (nodes[node].token == token) break;
                siblings++;
            }
            if (node == static_cast<int64_t>(nodes.size()))
                nodes.push_back({token, above, level + 1, {-1, -1}, {-1, -1}, 0, 0.0, 0.0});
            Node& child = nodes[node];
            const bool past = m >= num_text;
            child.votes += past;
            if (child.lengths[past] < 0) {
                child.lengths[past] = std::min<int64_t>(matches[m].length + level, MAX_MATCH);
                if (!past) child.classes[0] = std::min<int64_t>(siblings, TEXT_CLASSES - 1);
            }
            reached[m] = node;
        }
        for (size_t node = first; node < nodes.size(); node++) {
            Node& child = nodes[node];
            if (child.votes) child.classes[1] = past_class(node, first);
            for (int source = 0; source < 2; source++)
                if (child.classes[source] >= 0)
                    child.prob = std::max(child.prob, rate(s, child.classes[source], child.lengths[source]));
            child.value = child.prob * nodes[child.parent].value;
        }
    }

    // Returns the class of a candidate from the votes of matches in the history.
    int64_t past_class(int64_t node, int64_t first) const {
        const int64_t votes = nodes[node].votes;
        int64_t total = 0, rank = 0;
        for (int64_t other = first; other < static_cast<int64_t>(nodes.size()); other++) {
            if (nodes[other].parent != nodes[node].parent) continue;
            total += nodes[other].votes;
            rank += nodes[other].votes > votes || (nodes[other].votes == votes && other < node);
        }
        if (votes == total) return total == 1 ? SOLE : UNANIMOUS;
        if (rank == 0) return 3 * votes >= 2 * total ? MAJORITY : PLURALITY;
        return rank == 1 ? SECOND : LATER;
    }
};

int64_t search(const Search& s) {
    static thread_local std::vector<Node> nodes;
    static thread_local std::vector<int64_t> order, rank;
    nodes.clear();
    Trie trie{s, {}, 0, 0, {}, {}, nodes};
    trie.num_text = s.looks_up ? find(s, trie.matches) : 0;
    trie.count = trie.num_text + (s.history ? find_past(s, trie.matches + trie.num_text) : 0);
    if (!trie.count) return 0;
    for (int64_t m = trie.num_text; m < trie.count; m++) trie.number[m] = trie.matches[m].end;
    nodes.push_back({s.tokens[s.length - 1], -1, 0, {0, 0}, {0, 0}, 0, 1.0, 1.0});
    for (int64_t level = 0; level < s.depth; level++) {
        trie.grow(level);
        if (level == 0) {
            double best = 0.0;
            for (const Node& node : nodes) best = node.parent == 0 ? std::max(best, node.prob) : best;
            if (best < s.least) return 0;
        }
    }
    order.resize(nodes.size()), rank.resize(nodes.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [](int64_t a, int64_t b) { return nodes[a].value > nodes[b].value; });
    for (size_t i = 0; i < order.size(); i++) {
        const Node& node = nodes[order[i]];
        rank[order[i]] = i;
        s.node_tokens[i] = node.token, s.parents[i] = i ? rank[node.parent] : -1, s.depths[i] = node.depth;
        s.probs[i] = node.prob, s.values[i] = node.value;
        for (int source = 0; source < 2; source++)
            s.classes[source][i] = node.classes[source], s.lengths[source][i] = node.lengths[source];
    }
    return nodes.size();
}

}  // namespace

extern "C" {

// Appends tokens to a text after its token number `last` (0: a new text); returns the number of the last one.
int64_t treespec_history_add(History* h, int64_t owner, int64_t last, const int64_t* tokens, int64_t length) {
    return add(*h, owner, last, tokens, length);
}

// Writes the tree and returns its number of nodes, including the root; 0 without a match, or if the root's most
// probable child is less probable than `least`.
int64_t treespec_lookup(const Search* s) { return search(*s); }

// Counts the children of every node of an accepted path as proposed, and those on the path as accepted. classes and
// lengths: [2, nodes], -1 where the source did not propose the node.
void treespec_lookup_count(const int64_t* parents, const int64_t* classes, const int64_t* lengths, int64_t nodes,
                           const int64_t* path, int64_t path_length, Counts* common, Counts* request_counts) {
    std::vector<uint8_t> on_path(nodes, 0);
    for (int64_t i = 0; i < path_length; i++) on_path[path[i]] = 1;
    int64_t trials[CLASSES][LENGTHS] = {}, hits[CLASSES][LENGTHS] = {};
    for (int64_t node = 1; node < nodes; node++) {
        if (!on_path[parents[node]]) continue;
        for (int64_t cell = node; cell < 2 * nodes; cell += nodes) {
            if (classes[cell] < 0) continue;
            trials[classes[cell]][lengths[cell]]++;
            hits[classes[cell]][lengths[cell]] += on_path[node];
        }
    }
    for (Counts* counts : {common, request_counts})
        for (int64_t kind = 0; kind < CLASSES; kind++)
            for (int64_t length = 0; length < LENGTHS; length++) {
                counts->trials[kind][length] += trials[kind][length];
                counts->hits[kind][length] += hits[kind][length];
            }
}

}  // extern "C"
