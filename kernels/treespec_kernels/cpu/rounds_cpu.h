// Consecutive rounds of a batch in one call, included by growth_cpu.cpp: each searches, grows and cuts the trees, runs
// the target's pass over them, walks, and commits. The steps are those of HostExecutor in
// treespec/engine/host_executor.py, with the planner's decisions for the first of the rounds.

#include <chrono>
#include <memory>

#include "lookup_cpu.h"

extern "C" {

struct Rounds {
    int64_t num_rounds;  // maximum number of rounds
    // Functions of the target's library, and their arguments; `walks` without logits and outputs
    int64_t (*tree_logits)(const void* model, const void* head, Batch* batch, const TreeRows* trees, void* logits);
    void (*walk)(const TreeRows* trees, const Walks* walks);
    const void *model, *head;
    Batch* batch;
    const Walks* walks;
    int64_t logit_bytes;
    // Searches without texts and outputs, [num_trees], and whether to search, [num_rounds, num_trees]. most_found:
    // maximum nodes of a search. window: last tokens of a text to search. max_seeds: maximum nodes that SSMs extend
    int64_t (*lookup)(const Search* search);
    Search* searches;
    const int64_t* searched;
    int64_t most_found, window, max_seeds;
    // Trees to grow, without tokens and seeds, by SSMs; their K and V, [num_drafts]; max_lag: number of unread tokens
    // that an SSM must read in a pass of its own
    Trees* trees;
    Draft* drafts;
    const KvPool* draft_pools;
    int64_t max_lag;
    // Per tree: rules and first_rotation as in TreeRows, depth of proposals, number of further tokens besides the next
    // one, tokens up to which the pages suffice, and the text with room for all rounds
    const int64_t *rules, *first_rotations, *search_depths, *room, *reserved;
    int64_t** texts;
    // `LevelRule` for the first level and, by number of rows, seconds of the target's pass; `rate` is their price, and
    // every `explore`-th cut keeps twice as many nodes as pay off. num_cut: number of cuts so far
    const Rule* rule;
    double first_gain, start_cost, rate;
    const double* seconds;
    int64_t num_cut, explore;
    double bias, slope, least_prob, most_prob;  // parameters of the seeds' evidence ratios
    int64_t declined;  // output, see `Batched::run`
    // Outputs, valid until the thread's next call: the rounds as `Recorded` writes them
    int64_t num_ints, num_doubles;
    const int64_t* ints;
    const double* doubles;
};

}  // extern "C"

namespace {

constexpr size_t KEPT_BYTES = 32 << 20;  // maximum size of a logit buffer to keep for the next pass

struct Columns {  // a tree before its cut
    std::vector<int64_t> tokens, parents, depths, slots, draw_nodes, draw_sources;
    std::vector<double> probs, values, draw_probs;

    int64_t size() const { return tokens.size(); }
};

struct Recorded {
    std::vector<int64_t> ints;
    std::vector<double> doubles;

    void add(std::initializer_list<int64_t> values) { ints.insert(ints.end(), values); }
    void add(const int64_t* from, int64_t count) { ints.insert(ints.end(), from, from + count); }
    void add(const std::vector<int64_t>& values) { add(values.data(), values.size()); }
    void add(const double* from, int64_t count) { doubles.insert(doubles.end(), from, from + count); }
    void add(const std::vector<double>& values) { add(values.data(), values.size()); }
};

// The batch between rounds, and the round that runs.
class Batched {
    using Time = std::chrono::steady_clock::time_point;

    Rounds& r;
    Trees& t;
    const int64_t count;  // number of trees
    Recorded& recorded;
    std::vector<int64_t> context, room;
    // As in Trees, and `valid` before the round, [num_drafts, num_trees]
    std::vector<int64_t> active, valid, read_from;
    std::vector<std::vector<int64_t>> found_ints;  // columns of `Search`, [7, most_found] by tree
    std::vector<std::vector<double>> found_floats;
    std::vector<int64_t> num_found;
    std::vector<Columns> trees;
    std::vector<std::vector<int64_t>> kept;  // nodes of each tree to verify, ascending
    struct {  // the target's pass: columns as in TreeRows, outputs as in Walks
        std::vector<int64_t> tokens, parents, depths, first_row, paths, chosen, lengths;
    } rows;
    double walked = 0.0;  // seconds of the last walk

    static Time now() { return std::chrono::steady_clock::now(); }
    static double since(Time then) { return std::chrono::duration<double>(now() - then).count(); }

    int64_t root(int64_t tree) const { return r.texts[tree][context[tree]]; }

    // Searches continuations of a request's text.
    void search(int64_t tree, bool asked) {
        const int64_t depth = std::min(r.search_depths[tree], room[tree]), length = context[tree] + 1;
        num_found[tree] = 0;
        if (depth <= 0 || !asked) return;
        Search s = r.searches[tree];
        s.tokens = r.texts[tree] + std::max<int64_t>(length - r.window, 0), s.length = std::min(length, r.window);
        s.depth = depth;
        int64_t* ints = found_ints[tree].data();
        s.node_tokens = ints, s.parents = ints + r.most_found, s.depths = ints + 2 * r.most_found;
        for (int64_t source = 0; source < 2; source++) {
            s.classes[source] = ints + (3 + source) * r.most_found;
            s.lengths[source] = ints + (5 + source) * r.most_found;
        }
        s.probs = found_floats[tree].data(), s.values = s.probs + r.most_found;
        num_found[tree] = r.lookup(&s);
    }

    // Returns a tree of the first `most` nodes found for a request, or of its root alone.
    Columns seeds(int64_t tree, int64_t most) const {
        const int64_t n = std::min(num_found[tree], most), *ints = found_ints[tree].data();
        if (!n) return {{root(tree)}, {-1}, {0}, {-1}, {}, {}, {1.0}, {1.0}, {}};
        const double* floats = found_floats[tree].data();
        const auto column = [&](int64_t i) {
            return std::vector<int64_t>(ints + i * r.most_found, ints + i * r.most_found + n);
        };
        Columns c{column(0), column(1), column(2), std::vector<int64_t>(n, -1), {}, {}, {floats, floats + n}, {}, {}};
        c.values.assign(floats + r.most_found, floats + r.most_found + n);
        for (int64_t source = 0; source < 2; source++)
            for (int64_t node = 1; node < n; node++)
                if (ints[(3 + source) * r.most_found + node] >= 0)
                    c.draw_nodes.push_back(node), c.draw_sources.push_back(source), c.draw_probs.push_back(1.0);
        return c;
    }

    // Returns which trees are grown: fixed ones, and others whose first level is expected to pay off.
    std::vector<int64_t> drafting() const {
        std::vector<int64_t> drafts(count);
        std::vector<double> expected(count);
        const Rule& rule = *r.rule;
        double total = 0.0;
        int64_t growing = 0;
        for (int64_t tree = 0; tree < count; tree++) {
            drafts[tree] = t.num_drafts && t.max_depths[tree] > 0 && room[tree] > 0;
            if (!drafts[tree] || !rule.adaptive[tree]) continue;
            double covered = 0.0;
            for (int64_t node = 1; node < num_found[tree]; node++)
                if (!found_ints[tree][r.most_found + node]) covered += found_floats[tree][node];
            const double mass = num_found[tree] > 1 ? std::max(1.0 - covered, 0.0) : 1.0;
            expected[tree] = mass * r.first_gain * rule.token_weights[tree];
            if (expected[tree] > rule.marginal_cost) total += expected[tree], growing++;
        }
        const double further = double(std::max<int64_t>(growing - 1, 0)) * rule.marginal_cost;
        const double cost = rule.level_cost + further + r.start_cost;
        for (int64_t tree = 0; tree < count; tree++)
            if (rule.adaptive[tree]) drafts[tree] &= total > cost && expected[tree] > rule.marginal_cost;
        return drafts;
    }

    // Grows the trees over their seeds. Returns false if an SSM's probabilities are not finite.
    bool grow(const std::vector<int64_t>& drafts) {
        Trees g = t;
        std::vector<int64_t> depths(count), tokens, first_token{0}, first_seed{0}, first_draw{0};
        Columns all;  // the seeds of all trees
        for (int64_t tree = 0; tree < count; tree++) {
            if (drafts[tree]) depths[tree] = std::min(t.max_depths[tree], room[tree]);
            const Columns& own = trees[tree] = seeds(tree, drafts[tree] ? 1 + r.max_seeds : r.most_found);
            const auto append = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
            append(all.tokens, own.tokens), append(all.parents, own.parents), append(all.probs, own.probs);
            append(all.draw_nodes, own.draw_nodes), append(all.draw_sources, own.draw_sources);
            append(all.draw_probs, own.draw_probs);
            int64_t first = context[tree];
            for (int64_t at = tree; at < int64_t(valid.size()); at += count) {
                active[at] = drafts[tree] && t.active[at];
                read_from[at] = valid[at] = std::min(valid[at], context[tree]);
                if (active[at]) first = std::min(first, valid[at]);
            }
            const int64_t* text = r.texts[tree];
            tokens.insert(tokens.end(), text + first, text + context[tree] + 1);
            first_token.push_back(tokens.size()), first_seed.push_back(all.size());
            first_draw.push_back(all.draw_nodes.size());
        }
        std::vector<float> probs(all.probs.begin(), all.probs.end()), ratios;
        for (float prob : probs) {
            const double clipped = std::min(std::max(double(prob), r.least_prob), r.most_prob);
            ratios.push_back(float(std::exp(r.bias + r.slope * std::log(clipped / (1 - clipped)))));
        }
        g.max_depths = depths.data(), g.context = context.data(), g.active = active.data(), g.valid = valid.data();
        g.tokens = tokens.data(), g.first_token = first_token.data();
        g.first_seed = first_seed.data(), g.first_seed_draw = first_draw.data();
        g.seed_tokens = all.tokens.data(), g.seed_parents = all.parents.data();
        g.seed_draw_nodes = all.draw_nodes.data(), g.seed_draw_sources = all.draw_sources.data();
        g.seed_probs = probs.data(), g.seed_ratios = ratios.data(), g.seed_draw_probs = all.draw_probs.data();
        if (!treespec_draft(&g, r.drafts)) return false;
        t.num_levels = g.num_levels, t.num_rows = g.num_rows;
        for (int64_t tree = 0; tree < count; tree++) {
            const int64_t first = g.first_node[tree], last = g.first_node[tree + 1];
            const int64_t draw = g.first_draw[tree], end = g.first_draw[tree + 1];
            for (int64_t at = tree; at < int64_t(valid.size()); at += count)
                if (active[at]) valid[at] = context[tree];
            trees[tree] = {
                {g.new_tokens + first, g.new_tokens + last}, {g.parents + first, g.parents + last},
                {g.depths + first, g.depths + last}, {g.slots + first, g.slots + last},
                {g.drawn_nodes + draw, g.drawn_nodes + end}, {g.drawn_sources + draw, g.drawn_sources + end},
                {g.node_probs + first, g.node_probs + last}, {g.node_values + first, g.node_values + last},
                {g.drawn_probs + draw, g.drawn_probs + end}};
        }
        return std::none_of(g.broken, g.broken + count, [](uint8_t broken) { return broken; });
    }

    // Records a draft's probabilities of the tokens that follow those it read, and the first slots of a tree's path.
    void record_scores(int64_t i, int64_t tree, const std::vector<int64_t>& slots, int64_t num_slots) const {
        const Draft& draft = r.drafts[i];
        const int64_t *on = active.data() + i * count, *from = read_from.data() + i * count;
        std::vector<int64_t> rows;
        int64_t read = 0, row = draft.num_read;
        for (int64_t other = 0; other < tree; other++) read += on[other] ? context[other] - from[other] : 0;
        for (int64_t position = from[tree]; position < context[tree]; position++) rows.push_back(read++);
        recorded.add({int64_t(rows.size()), num_slots});
        std::vector<int64_t> row_of_slot;
        for (int64_t j = 0; j < t.num_rows; j++) {
            if (t.row_trees[j] == tree) row_of_slot.push_back(row);
            row += on[t.row_trees[j]];
        }
        for (int64_t k = 0; k < num_slots; k++) rows.push_back(row_of_slot[slots[k]]);
        const int64_t* token = r.texts[tree] + from[tree] + 1;
        for (size_t k = 0; k < rows.size(); k++, token++) {
            const float* probs = draft.out + rows[k] * draft.width;
            if (!draft.tokens) {
                recorded.doubles.push_back(probs[*token]);
                continue;
            }
            const int64_t *end = draft.tokens + draft.width, *column = std::lower_bound(draft.tokens, end, *token);
            recorded.doubles.push_back(column < end && *column == *token ? probs[column - draft.tokens] : 0.0f);
        }
    }

    // Selects the nodes to verify, like `Planner.cut`.
    void cut() {
        const Rule& rule = *r.rule;
        std::vector<int64_t> sizes(count), adaptive;
        int64_t rows = 0;
        for (int64_t tree = 0; tree < count; tree++) {
            sizes[tree] = std::min(trees[tree].size(), t.nodes[tree]);
            if (rule.adaptive[tree] && sizes[tree] > 1) adaptive.push_back(tree), rows++;
            else rows += sizes[tree];
        }
        std::vector<std::vector<double>> values(count);
        std::vector<std::pair<double, int64_t>> nodes;
        for (int64_t tree = 0; tree < count; tree++) {
            const Columns& own = trees[tree];
            const double calibration = rule.adaptive[tree] ? rule.calibration : 1.0;
            for (int64_t i = 0; i < own.size(); i++)
                values[tree].push_back(own.values[i] * std::pow(calibration, double(own.depths[i])));
        }
        for (int64_t tree : adaptive) {
            std::vector<double> weighted;
            for (size_t i = 1; i < values[tree].size(); i++)
                weighted.push_back(rule.token_weights[tree] * values[tree][i]);
            std::sort(weighted.begin(), weighted.end(), std::greater<double>());
            for (int64_t i = 0; i < sizes[tree] - 1; i++) nodes.emplace_back(weighted[i], tree);
            sizes[tree] = 1;
        }
        if (!adaptive.empty()) {
            std::stable_sort(nodes.begin(), nodes.end(), [](auto& a, auto& b) { return a.first > b.first; });
            size_t most = 0;
            double gain = 0.0, best = 0.0;
            for (size_t k = 0; k < nodes.size(); k++) {
                gain += nodes[k].first - r.rate * (r.seconds[rows + k + 1] - r.seconds[rows + k]);
                if (gain > best) best = gain, most = k + 1;
            }
            if (++r.num_cut % r.explore == 0) most = 2 * most + 1;
            for (size_t k = 0; k < std::min(most, nodes.size()); k++) sizes[nodes[k].second]++;
        }
        for (int64_t tree = 0; tree < count; tree++) {
            std::vector<int64_t>& order = kept[tree];
            const std::vector<double>& own = values[tree];
            order.resize(own.size()), std::iota(order.begin(), order.end(), 0);
            if (sizes[tree] == int64_t(order.size())) continue;
            std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return own[a] > own[b]; });
            order.resize(sizes[tree]), std::sort(order.begin(), order.end());
        }
    }

    // Sets the rows of the target's pass: the kept nodes of all trees.
    void lay_out() {
        rows.tokens.clear(), rows.parents.clear(), rows.depths.clear(), rows.first_row = {0};
        for (int64_t tree = 0; tree < count; tree++) {
            const Columns& own = trees[tree];
            std::vector<int64_t> place(own.size());
            for (size_t i = 0; i < kept[tree].size(); i++) {
                const int64_t node = kept[tree][i];
                place[node] = i, rows.tokens.push_back(own.tokens[node]), rows.depths.push_back(own.depths[node]);
                rows.parents.push_back(node ? place[own.parents[node]] : -1);
            }
            rows.first_row.push_back(rows.tokens.size());
        }
        rows.paths.resize(rows.tokens.size()), rows.chosen.resize(rows.tokens.size()), rows.lengths.assign(count, 0);
    }

    TreeRows tree_rows() const {
        return {count, t.page_size, rows.tokens.data(), rows.parents.data(), rows.depths.data(), rows.first_row.data(),
                t.first_page, context.data(), r.first_rotations, r.rules, t.pages};
    }

    // Runs the target's pass and walks the trees. Returns whether all tokens are chosen and all logits finite.
    bool verify() {
        static thread_local std::unique_ptr<char[]> memory;
        static thread_local size_t held = 0;
        const size_t bytes = rows.tokens.size() * r.logit_bytes + 63;
        if (held < bytes || held > KEPT_BYTES) memory.reset(new char[bytes]), held = bytes;
        void* logits = (void*)((uintptr_t(memory.get()) + 63) / 64 * 64);
        const TreeRows batch = tree_rows();
        if (!r.tree_logits(r.model, r.head, r.batch, &batch, logits)) return false;
        Walks walks = *r.walks;
        walks.logits = logits, walks.paths = rows.paths.data();
        walks.tokens = rows.chosen.data(), walks.lengths = rows.lengths.data();
        const Time passed = now();
        r.walk(&batch, &walks);
        walked = since(passed);
        for (int64_t tree = 0; tree < count; tree++)
            if (!rows.lengths[tree] || rows.chosen[rows.first_row[tree] + rows.lengths[tree] - 1] < 0) return false;
        return true;
    }

    bool decline(int64_t reason) {
        r.declined = reason;
        return false;
    }

    // Records a tree: what the search found, the columns of a tree that was grown beside it, the kept nodes, the path
    // among them and the chosen tokens.
    void record(int64_t tree, bool drafts, bool grows) const {
        const Columns& own = trees[tree];
        const int64_t first = rows.first_row[tree], length = rows.lengths[tree], found = num_found[tree];
        const int64_t nodes = grows ? own.size() : 0, draws = grows ? int64_t(own.draw_nodes.size()) : 0;
        recorded.add({drafts, found, nodes, draws, int64_t(kept[tree].size()), length});
        for (int64_t column = 0; column < 7; column++)
            recorded.add(found_ints[tree].data() + column * r.most_found, found);
        for (int64_t column = 0; column < 2; column++)
            recorded.add(found_floats[tree].data() + column * r.most_found, found);
        if (grows) {
            for (const auto* column : {&own.tokens, &own.parents, &own.depths, &own.slots}) recorded.add(*column);
            for (const auto* column : {&own.draw_nodes, &own.draw_sources}) recorded.add(*column);
            for (const auto* column : {&own.probs, &own.values, &own.draw_probs}) recorded.add(*column);
        }
        recorded.add(kept[tree]), recorded.add(&rows.paths[first], length), recorded.add(&rows.chosen[first], length);
    }

    // Appends the chosen tokens to a tree's text, and compacts the K and V of the SSMs that drafted it. Returns whether
    // one of the tokens ends the request.
    bool commit(int64_t tree, bool drafts) {
        const int64_t first = rows.first_row[tree], length = rows.lengths[tree];
        const int64_t *ends = t.end_tokens + t.end_starts[tree], *stop = t.end_tokens + t.end_starts[tree + 1];
        bool ended = false;
        for (int64_t i = 0; i < length; i++) {
            r.texts[tree][context[tree] + 1 + i] = rows.chosen[first + i];
            ended |= std::find(ends, stop, rows.chosen[first + i]) != stop;
        }
        // Slots of these tokens' nodes that SSMs expanded, as by `TokenTree.match`; the last one may have been cut
        const Columns& own = trees[tree];
        std::vector<int64_t> slots(1);
        for (int64_t node = 1, end = 0; drafts && node < own.size() && int64_t(slots.size()) <= length; node++) {
            if (own.parents[node] != end || own.tokens[node] != rows.chosen[first + slots.size() - 1]) continue;
            if (own.slots[node] < 0) break;
            slots.push_back(own.slots[node]), end = node;
        }
        for (int64_t i = 0; drafts && i < t.num_drafts; i++) {
            if (!active[i * count + tree]) continue;
            commit_path(tree_rows(), r.draft_pools[i], tree, slots.data(), slots.size());
            valid[i * count + tree] = context[tree] + int64_t(slots.size());
            if (t.reads) record_scores(i, tree, slots, std::min<int64_t>(slots.size(), length));
        }
        return ended;
    }

  public:
    Batched(Rounds& rounds, Recorded& recorded)
        : r(rounds), t(*rounds.trees), count(t.num_trees), recorded(recorded), context(t.context, t.context + count),
          room(r.room, r.room + count), active(t.num_drafts * count), valid(t.valid, t.valid + t.num_drafts * count),
          read_from(t.num_drafts * count), found_ints(count, std::vector<int64_t>(7 * r.most_found)),
          found_floats(count, std::vector<double>(2 * r.most_found)), num_found(count), trees(count), kept(count) {}

    // Runs and records a round; returns whether another one may follow. Declines a round in which an SSM must read a
    // text first (1), or an SSM's probabilities are not finite (2). One in which logits are not finite, or the caller
    // must choose a token, is declined (1), too, but recorded without being committed.
    bool run(int64_t round) {
        const Time began = now();
        r.declined = t.num_levels = 0;
        for (int64_t tree = 0; tree < count; tree++) {
            if (round && (room[tree] < 0 || context[tree] + 2 > r.reserved[tree])) return false;
            search(tree, r.searched[round * count + tree]);
        }
        const std::vector<int64_t> drafts = drafting();
        for (int64_t at = 0; at < int64_t(valid.size()); at++)
            if (drafts[at % count] && t.active[at] && context[at % count] - valid[at] >= r.max_lag) return decline(1);
        const bool grows = std::find(drafts.begin(), drafts.end(), 1) != drafts.end();
        const Time searched = now();
        if (grows && !grow(drafts)) return decline(2);
        const double draft = since(searched);
        for (int64_t tree = 0; !grows && tree < count; tree++) trees[tree] = seeds(tree, r.most_found);
        cut();
        lay_out();
        const Time grown = now();
        const bool decided = verify();
        const double forward = since(grown);
        r.declined = !decided;
        int64_t passes = 0, tree_passes = 0;
        for (int64_t i = 0; grows && i < t.num_drafts; i++)
            passes += r.drafts[i].passes, tree_passes += r.drafts[i].tree_passes;
        recorded.add({decided, t.num_levels, passes, tree_passes});
        bool ended = false;
        for (int64_t tree = 0; tree < count; tree++) {
            record(tree, drafts[tree], grows);
            if (decided) ended |= commit(tree, drafts[tree]);
        }
        for (int64_t tree = 0; decided && tree < count; tree++)
            context[tree] += rows.lengths[tree], room[tree] -= rows.lengths[tree];
        for (double seconds : {draft, forward, walked, since(began)}) recorded.doubles.push_back(seconds);
        return decided && !ended;
    }
};

}  // namespace

extern "C" {

// Runs up to `num_rounds` rounds, fewer if a request ends or a round is declined, and records them.
void treespec_rounds(Rounds* rounds) {
    static thread_local Recorded recorded;
    recorded.ints.clear(), recorded.doubles.clear();
    Batched batched(*rounds, recorded);
    for (int64_t round = 0; round < rounds->num_rounds && batched.run(round); round++) {}
    recorded.add({-1}), recorded.doubles.push_back(0.0);  // so that neither is empty
    rounds->num_ints = recorded.ints.size(), rounds->num_doubles = recorded.doubles.size();
    rounds->ints = recorded.ints.data(), rounds->doubles = recorded.doubles.data();
}

}  // extern "C"
