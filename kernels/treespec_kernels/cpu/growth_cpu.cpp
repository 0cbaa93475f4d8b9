// Grows the token trees of a batch: assigns KV slots to the frontier, runs the SSMs on it, merges their proposals and
// those of other sources into nodes, selects the next frontier, and decides whether another level pays off, until no
// tree grows. The reference is treespec_kernels/tree/tree_merge.py, and `Forest` in treespec/drafters/ssm/forest.py for
// features of the host.

#include "vectors_cpu.h"

#include <functional>
#include <numeric>
#include <tuple>

#include "batch_cpu.h"
#include "drafts_cpu.h"

#include "choice_cpu.h"

namespace {

// The `wanted` largest probabilities of a row, descending; ties go to the lower index. `broken`: a value is NaN or
// infinite.
class Top {
  public:
    std::vector<float> values;
    std::vector<int64_t> ids;
    bool broken = false;

    Top(const float* row, int64_t width, int64_t wanted) : wanted(wanted) {
        values.reserve(wanted), ids.reserve(wanted);
        const float floor = least_of_top(row, width, wanted);
        int64_t i = 0;
        for (; i + BLOCK <= width; i += BLOCK) {
            const vec least = splat(std::max(bound(), floor));
            ivec passed = {};
            // The negated comparison is also true for NaN.
            for (int64_t j = 0; j < BLOCK; j += LANES) passed |= ~(load<vec>(row + i + j) < least);
            if (any(passed))
                for (int64_t j = i; j < i + BLOCK; j++)
                    if (!(row[j] < floor)) offer(row[j], j);
        }
        for (; i < width; i++) offer(row[i], i);
    }

  private:
    static constexpr int64_t BLOCK = 4 * LANES;
    const int64_t wanted;

    // Returns a lower bound of the `wanted` largest values: the value of this rank among the maxima of columns with
    // equal index modulo BLOCK. Without it, most blocks of a flat distribution have a value to insert.
    static float least_of_top(const float* row, int64_t width, int64_t wanted) {
        if (width < 2 * BLOCK || wanted > BLOCK) return -1.0f;
        vec most[4] = {splat(-1.0f), splat(-1.0f), splat(-1.0f), splat(-1.0f)};
        for (int64_t i = 0; i + BLOCK <= width; i += BLOCK)
            for (int64_t j = 0; j < 4; j++) {
                const vec x = load<vec>(row + i + LANES * j);
                most[j] = x > most[j] ? x : most[j];
            }
        float all[BLOCK];
        std::memcpy(all, most, sizeof all);
        std::nth_element(all, all + wanted - 1, all + BLOCK, std::greater<float>());
        return all[wanted - 1];
    }

    float bound() const { return int64_t(values.size()) == wanted ? values.back() : -1.0f; }

    void offer(float value, int64_t id) {
        if (!(value < INFINITY)) broken = true;
        if (!(value > bound())) return;
        if (int64_t(values.size()) == wanted) values.pop_back(), ids.pop_back();
        size_t i = values.size();
        while (i && values[i - 1] < value) i--;
        values.insert(values.begin() + i, value), ids.insert(ids.begin() + i, id);
    }
};

struct Candidate {
    int64_t row, token, seed;  // seed: index among the seeds, or -1
    float prob, value;
    bool kept;
};

// Grows the frontier's trees by one level.
class Level {
    Growth& g;
    Trees& t;
    std::vector<int64_t> probs_row;     // [num_scored, num_rows], row of an SSM's probabilities, -1: not scored
    std::vector<Candidate> candidates;  // candidates of one tree
    std::vector<float> draft_probs;     // [candidates, num_scored]
    std::vector<uint8_t> proposed;      // [candidates, num_scored]

    // Appends the candidates of one row, merging proposals of the same token.
    void merge(int64_t row) {
        const int64_t tree = g.rows.tree_ids[row], seed = g.rows.seeds[row], scored = g.scored.size();
        const float* weights = g.weights + tree * t.num_ssms;
        std::vector<Top> tops;
        std::vector<int64_t> tokens;
        bool has_mixture = false;
        for (int64_t l = 0; l < scored; l++) {
            const int64_t i = probs_row[l * g.rows.size() + row];
            const SsmProbs& ssm = g.scored[l];
            tops.emplace_back(ssm.probs + std::max<int64_t>(i, 0) * ssm.width, i < 0 ? 0 : ssm.width, g.children);
            Top& top = tops.back();
            if (const int64_t* columns = ssm.row_tokens ? ssm.row_tokens + i * ssm.width : ssm.tokens)
                for (int64_t& id : top.ids) id = columns[id];
            if (top.broken) t.broken[tree] = 1, top.ids.clear();  // drops the proposals of an SSM that overflowed
            tokens.insert(tokens.end(), top.ids.begin(), top.ids.end());
            has_mixture |= !top.ids.empty();
        }
        const int64_t width = seed < 0 ? 0 : g.seed_width;
        const int64_t* below = g.seed_children.data() + std::max<int64_t>(seed, 0) * width;
        for (int64_t j = 0; j < std::min(width, t.max_children); j++)
            if (below[j] >= 0) tokens.push_back(t.seed_tokens[below[j]]);
        for (size_t i = 0; i < tokens.size(); i++) {
            if (std::find(tokens.begin(), tokens.begin() + i, tokens[i]) != tokens.begin() + i) continue;
            Candidate c{row, tokens[i], -1, 0.0f, 0.0f, true};
            for (int64_t l = 0; l < scored; l++) {
                const auto& ids = tops[l].ids;
                const size_t place = std::find(ids.begin(), ids.end(), c.token) - ids.begin();
                proposed.push_back(place < ids.size());
                draft_probs.push_back(place < ids.size() ? tops[l].values[place] : 0.0f);
                c.prob += weights[g.scored[l].ssm] * draft_probs.back();
            }
            c.prob = std::min(c.prob, 1.0f);
            for (int64_t j = 0; j < width && c.seed < 0; j++)
                if (below[j] >= 0 && t.seed_tokens[below[j]] == c.token) c.seed = below[j];
            if (c.seed >= 0 && has_mixture) {
                const float prior = std::min(std::max(c.prob, MIN_MIXTURE), MAX_MIXTURE);
                const float scaled = t.seed_ratios[c.seed] * prior;
                c.prob = scaled / (scaled + (1.0f - prior));
            } else if (c.seed >= 0) {
                c.prob = t.seed_probs[c.seed];
            }
            c.value = g.rows.values[row] * c.prob;
            candidates.push_back(c);
        }
    }

    // Keeps the `children` most probable candidates of every node.
    void keep_children(int64_t children) {
        for (size_t first = 0, last; first < candidates.size(); first = last) {
            std::vector<size_t> order;
            for (last = first; last < candidates.size() && candidates[last].row == candidates[first].row; last++)
                order.push_back(last);
            std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
                return candidates[a].value > candidates[b].value;
            });
            for (size_t i = children; i < order.size(); i++) candidates[order[i]].kept = false;
        }
    }

    // Keeps the candidates that can be among a tree's best nodes, and all seeds: a dropped seed would be added to the
    // tree later with another value.
    void keep_best(int64_t tree) {
        std::vector<float>& best = g.best[tree];
        for (const Candidate& c : candidates) best.push_back(c.value);
        if (int64_t(best.size()) <= t.nodes[tree]) return;
        std::sort(best.begin(), best.end(), std::greater<float>());
        best.resize(t.nodes[tree]);
        g.least[tree] = best.back();
        for (Candidate& c : candidates) c.kept = c.value >= g.least[tree] || c.seed >= 0;
    }

    // Writes the kept candidates of a tree, and selects the nodes to expand next, best first without a fixed
    // `branching`. End tokens are not expanded.
    void write(int64_t tree, int64_t branching) {
        const int64_t first = t.num_nodes;
        for (size_t i = 0; i < candidates.size(); i++) {
            const Candidate& c = candidates[i];
            if (!c.kept) continue;
            const int64_t node = g.add(c.token, g.rows.nodes[c.row], tree, c.seed, g.depth + 1, c.prob, c.value);
            for (size_t l = 0; l < g.scored.size(); l++) {
                const int64_t to = node * t.num_ssms + g.scored[l].ssm, from = i * g.scored.size() + l;
                t.draft_probs[to] = draft_probs[from], t.proposed[to] = proposed[from];
            }
        }
        if (g.depth + 1 >= t.max_depths[tree]) return;
        const int64_t *ends = t.end_tokens + t.end_starts[tree], *stop = t.end_tokens + t.end_starts[tree + 1];
        std::vector<int64_t> order;
        for (int64_t i = first; i < t.num_nodes; i++)
            if (std::find(ends, stop, t.new_tokens[i]) == stop) order.push_back(i);
        if (!branching) {
            const int64_t width = t.widths[std::min(g.depth, t.num_widths - 1)];
            std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return t.values[a] > t.values[b]; });
            if (int64_t(order.size()) > width) order.resize(width);
        }
        for (int64_t i : order) {
            if (!branching && !(t.values[i] > 0 && t.values[i] >= g.least[tree])) break;
            g.next.add(i, t.new_tokens[i], tree, t.seeds[i], t.slots[t.parents[i]], t.values[i]);
        }
    }

  public:
    explicit Level(Growth& growth) : g(growth), t(growth.t), probs_row(g.scored.size() * g.rows.size(), -1) {
        for (size_t l = 0; l < g.scored.size(); l++)
            for (int64_t i = 0; i < g.scored[l].count; i++)
                probs_row[l * g.rows.size() + (g.scored[l].rows ? g.scored[l].rows[i] : i)] = i;
    }

    void run() {
        g.next.clear();
        for (int64_t first = 0, last; first < g.rows.size(); first = last) {
            const int64_t tree = g.rows.tree_ids[first], branching = g.branching(tree);
            candidates.clear(), draft_probs.clear(), proposed.clear();
            for (last = first; last < g.rows.size() && g.rows.tree_ids[last] == tree; last++) {
                t.slots[g.rows.nodes[last]] = g.slot_parents[tree].size();
                g.slot_parents[tree].push_back(g.rows.parent_slots[last]);
                t.row_trees[t.num_rows++] = tree;
                merge(last);
            }
            if (branching) keep_children(branching);
            else keep_best(tree);
            write(tree, branching);
        }
    }
};

// A draft's predictions of the targets' choices: from temperature and noise for sampling requests, otherwise the
// draft's probabilities.
struct Choices {
    std::vector<float> probs;
    std::vector<int64_t> tokens;

    // row_probs: the draft's probabilities at `rows`, [len(rows), draft.width]. Other arguments as in SsmProbs.
    SsmProbs predict(const Growth& g, const Draft& draft, const std::vector<int64_t>& rows, const int64_t* at,
                     const float* row_probs) {
        const Sampling& sampling = *g.t.sampling;
        const int64_t count = rows.size(), width = std::max(CANDIDATES, g.children);
        probs.assign(count * width, -1.0f), tokens.assign(count * width, 0);
        for (int64_t i = 0; i < count; i++, row_probs += draft.width) {
            const int64_t tree = g.rows.tree_ids[rows[i]];
            if (sampling.temperatures[tree] > 0) {
                predict_choice(sampling, tree, g.t.context[tree] + 1 + g.depth, row_probs, draft.width, draft.tokens,
                               &probs[i * width], &tokens[i * width]);
                continue;
            }
            const Top top(row_probs, draft.width, g.children);
            if (top.broken) probs[i * width] = NAN;
            for (size_t j = 0; !top.broken && j < top.ids.size(); j++) {
                probs[i * width + j] = top.values[j];
                tokens[i * width + j] = draft.tokens ? draft.tokens[top.ids[j]] : top.ids[j];
            }
        }
        return {probs.data(), at, nullptr, count, draft.ssm, width, tokens.data()};
    }
};

// Returns, by tree, the probability that the frontier is reached and the next token is not among the seeds.
std::vector<double> open_mass(const Growth& g) {
    std::vector<double> mass(g.t.num_trees);
    for (int64_t i = 0; i < g.rows.size(); i++) {
        const int64_t width = g.rows.seeds[i] < 0 ? 0 : g.seed_width;
        const int64_t* below = g.seed_children.data() + std::max<int64_t>(g.rows.seeds[i], 0) * width;
        float covered = 0.0f;
        for (int64_t j = 0; j < width; j++)
            if (below[j] >= 0) covered += g.t.seed_probs[below[j]];
        mass[g.rows.tree_ids[i]] += double(g.rows.values[i] * std::max(1.0f - covered, 0.0f));
    }
    return mass;
}

// Removes trees whose next level does not pay off from the frontier, like `stop_unprofitable` in
// treespec/drafters/ssm/levels.py, with the same operations in the same order.
//   last_open_mass: by tree, before the newest level. first: the first node of that level.
void stop_unprofitable(Growth& g, const Rule& rule, std::vector<double>& last_open_mass, int64_t first) {
    std::vector<double> reached(last_open_mass.size()), current = open_mass(g);
    const float least = float(rule.least_value);
    for (int64_t i = first; i < g.t.num_nodes; i++)
        if (g.t.values[i] >= least && g.t.seeds[i] < 0) reached[g.t.tree_ids[i]] += double(g.t.values[i]);
    std::vector<int64_t> trees;  // trees that the rule decides on
    for (int64_t tree : g.rows.tree_ids)
        if (rule.adaptive[tree] && (trees.empty() || trees.back() != tree)) trees.push_back(tree);
    std::vector<double> expected;
    double all = 0.0, factor = rule.calibration;
    for (int64_t level = 0; level <= g.depth; level++) factor *= rule.calibration;
    int64_t growing = 0;
    for (int64_t tree : trees) {
        const double share = std::min(reached[tree] / std::max(last_open_mass[tree], 1e-9), 1.0);
        expected.push_back(factor * current[tree] * share * rule.token_weights[tree]);
        if (expected.back() > rule.marginal_cost) all += expected.back(), growing++;
    }
    last_open_mass = current;
    const double cost = rule.level_cost + double(std::max<int64_t>(growing - 1, 0)) * rule.marginal_cost;
    std::vector<uint8_t> stops(current.size());
    for (size_t i = 0; i < trees.size(); i++) stops[trees[i]] = !(all > cost && expected[i] > rule.marginal_cost);
    g.rows.remove(stops);
}

// Sets the outputs that are grouped by tree, as `GrowingTree` in treespec/drafters/ssm/forest.py does. Trees of fixed
// branching that have grown omit the seeds that growth did not reach.
void group_by_tree(const Growth& g) {
    struct Node { int64_t token, parent, depth, slot; float prob, value; };
    Trees& t = g.t;
    std::vector<Node> nodes;
    std::vector<int64_t> place(t.num_nodes), node_of_seed;  // indices in their trees
    std::vector<std::vector<int64_t>> of_tree(t.num_trees);
    for (int64_t i = 0; i < t.num_nodes; i++) of_tree[t.tree_ids[i]].push_back(i);
    int64_t draws = 0;
    const auto draw = [&](int64_t node, int64_t source, double prob) {
        t.drawn_nodes[draws] = node, t.drawn_sources[draws] = source, t.drawn_probs[draws++] = prob;
    };
    for (int64_t tree = 0; tree < t.num_trees; tree++) {
        const int64_t first = nodes.size(), first_seed = t.first_seed[tree], last_seed = t.first_seed[tree + 1];
        const bool complete = !(t.branching && t.branching[tree]) || t.slots[of_tree[tree][0]] < 0;
        t.first_node[tree] = first, t.first_draw[tree] = draws;
        node_of_seed.assign(last_seed - first_seed, -1);
        for (int64_t i : of_tree[tree]) {
            const int64_t node = place[i] = int64_t(nodes.size()) - first;
            if (t.seeds[i] >= 0) node_of_seed[t.seeds[i] - first_seed] = node;
            for (int64_t ssm = 0; ssm < t.num_ssms; ssm++)
                if (t.proposed[i * t.num_ssms + ssm]) draw(node, ssm, t.draft_probs[i * t.num_ssms + ssm]);
            const int64_t parent = t.parents[i] < 0 ? -1 : place[t.parents[i]];
            nodes.push_back({t.new_tokens[i], parent, t.depths[i], t.slots[i], t.probs[i], t.values[i]});
        }
        for (int64_t seed = first_seed; complete && seed < last_seed; seed++) {
            if (node_of_seed[seed - first_seed] >= 0) continue;
            const int64_t parent = node_of_seed[t.seed_parents[seed]];
            const Node above = nodes[first + parent];
            const float prob = t.seed_probs[seed];
            node_of_seed[seed - first_seed] = int64_t(nodes.size()) - first;
            nodes.push_back({t.seed_tokens[seed], parent, above.depth + 1, -1, prob, above.value * prob});
        }
        for (int64_t i = t.first_seed_draw[tree]; i < t.first_seed_draw[tree + 1]; i++)
            if (const int64_t node = node_of_seed[t.seed_draw_nodes[i]]; node >= 0)
                draw(node, t.num_ssms + t.seed_draw_sources[i], t.seed_draw_probs[i]);
    }
    t.num_nodes = t.first_node[t.num_trees] = nodes.size(), t.first_draw[t.num_trees] = draws;
    for (int64_t i = 0; i < t.num_nodes; i++) {
        t.new_tokens[i] = nodes[i].token, t.parents[i] = nodes[i].parent;
        t.depths[i] = nodes[i].depth, t.slots[i] = nodes[i].slot;
        t.node_probs[i] = nodes[i].prob, t.node_values[i] = nodes[i].value;
    }
}

}  // namespace

extern "C" {

// Grows the trees from their roots until no level is left or pays off, or no draft predicts it; runs the drafts' passes
// in index order. Returns 0 if a node has no page.
int64_t treespec_draft(Trees* trees, Draft* drafts) {
    Growth g(*trees);
    Trees& t = *trees;
    const int64_t num_drafts = t.num_drafts;
    std::vector<double> last_open_mass = open_mass(g);
    const bool heads = std::any_of(drafts, drafts + num_drafts, [](const Draft& draft) { return draft.pairs; });
    std::vector<Places> places;  // one per offset
    for (int64_t offset = 0; offset <= heads; offset++) places.emplace_back(t, offset);
    std::vector<Passed> passed(num_drafts);
    std::vector<float> weights;
    for (; g.rows.size(); g.depth++) {
        const int64_t depth = g.depth, rows = g.rows.size();
        for (Places& offset_places : places)
            if (depth && !offset_places.extend(g)) return 0;
        g.children = 0;
        for (int64_t tree : g.rows.tree_ids) {
            const int64_t children = g.branching(tree);
            g.children = std::max(g.children, children ? children : t.max_children);
        }
        g.scored.clear();
        std::vector<std::vector<int64_t>> scored(num_drafts);
        std::vector<Choices> choices(num_drafts);
        for (int64_t i = 0; i < num_drafts; i++) {
            Draft& draft = drafts[i];
            int64_t count, of_trees;
            if (!depth) draft.num_read = draft.num_rows = draft.passes = draft.tree_passes = 0;
            std::tie(scored[i], of_trees) = scored_rows(g, t.active + i * t.num_trees);
            if (!(count = scored[i].size()) || (draft.block_probs && depth >= draft.block_depths)) continue;
            const int64_t* first = t.first_rotations + i * t.num_trees;
            if (draft.block_probs) score_block(g, draft, scored[i], of_trees);
            else if (depth) score(g, places[draft.pairs ? 1 : 0], draft, first, scored[i], of_trees, passed[i]);
            else score_roots(g, draft, t.valid + i * t.num_trees, first, scored[i], passed[i]);
            const int64_t* subset = count < rows ? scored[i].data() : nullptr;
            const float* probs = draft.out + (draft.num_rows - count) * draft.width;
            if (t.narrow) {
                std::vector<int64_t> nodes;
                for (int64_t row : scored[i]) nodes.push_back(g.rows.nodes[row]);
                t.narrow(i, draft.num_rows - count, count, nodes.data());
            }
            if (t.sampling) g.scored.push_back(choices[i].predict(g, draft, scored[i], subset, probs));
            else g.scored.push_back({probs, subset, draft.tokens, count, draft.ssm, draft.width, nullptr});
        }
        const int64_t first = t.num_nodes;
        Level(g).run();
        std::swap(g.rows, g.next);
        if (t.rule && g.rows.size()) stop_unprofitable(g, *t.rule, last_open_mass, first);
        const auto ends = [&](const Draft& draft) { return draft.block_probs && draft.block_depths == depth + 1; };
        if (g.rows.size() && std::any_of(drafts, drafts + num_drafts, ends))
            g.rows.remove(end_drafts(g, drafts, num_drafts, depth + 1, weights));
    }
    t.num_levels = g.depth;
    group_by_tree(g);
    return 1;
}

}  // extern "C"

#include "rounds_cpu.h"
