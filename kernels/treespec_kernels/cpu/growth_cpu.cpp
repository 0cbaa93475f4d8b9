// Grows the token trees of a batch: assigns KV slots to the frontier, runs the SSMs over it, merges their proposals
// with those of other sources into nodes, selects the next frontier, and decides whether another level pays. The
// reference is treespec_kernels/tree/tree_merge.py, and for features of the host only `ReferenceForest` in
// treespec/drafters/ssm/reference_forest.py. In numpy, a level of a small tree needs 25 calls, which take as long as a
// whole pass of an SSM; a call of this library from Python takes as long as a pass of a small SSM.

#include "vectors_cpu.h"

#include <functional>
#include <tuple>

#include "batch_cpu.h"

extern "C" {

struct SsmProbs {  // an SSM's next-token probabilities at some or all rows of the frontier
    const float* probs;     // [count, width]
    const int64_t* rows;    // [count], ascending rows of the frontier; null: all rows
    const int64_t* tokens;  // [width], ascending tokens of the columns; null: 0, 1, ...
    int64_t count, ssm, width;
    const int64_t* row_tokens;  // [count, width], tokens of each row's columns, in place of `tokens`; null: none
};

struct Growth {
    int64_t num_ssms, most_nodes;
    // Per tree. branching: number of children of a node at this depth, or 0 to select by value. best: the largest
    // values so far, descending.
    const int64_t *max_depths, *nodes, *branching, *end_tokens, *end_starts;
    int64_t *num_slots, *num_values;
    float *least, *best;  // [num_trees], [num_trees, most_nodes]
    int64_t seed_width;   // seed_children: [number of seeds + 1, seed_width], -1 for none
    const int64_t *seed_children, *seed_tokens;
    const float *seed_probs, *seed_ratios;
    // size: nodes of all trees so far. children, max_seeds: maximum numbers of proposals at a node, of an SSM and of
    // the seeds. next_width: maximum number of nodes of a tree in the next frontier.
    int64_t depth, size, children, max_seeds, next_width, num_scored;
    const SsmProbs* ssm_probs;
    const float* weights;  // [num_trees, num_ssms]
    int64_t num_rows;      // of the frontier
    const int64_t *row_nodes, *row_tokens, *row_owners, *row_seeds, *row_above;
    const float* row_values;
    // Outputs: the new nodes, ordered by tree and parent, and the next frontier. `next_above`: slot of the parent in
    // its tree.
    int64_t *tokens, *parents, *owners, *seeds;
    float *probs, *values, *draft_probs;  // draft_probs: [new nodes, num_ssms]
    uint8_t *proposed, *broken;           // [new nodes, num_ssms]; [num_rows]: an SSM's row is not finite
    int64_t num_next, *next_nodes, *next_tokens, *next_owners, *next_seeds, *next_above;
    float* next_values;
};

struct Rule {  // `LevelRule` in treespec_kernels/tree/level_rule.py, which defines the attributes
    double calibration, level_cost, marginal_cost, least_value;
    const int64_t* adaptive;      // [num_trees], whether the rule decides on the tree
    const double* token_weights;  // [num_trees]
};

}  // extern "C"

#include "drafts_cpu.h"

#include "choice_cpu.h"

namespace {

// The `wanted` largest probabilities of a row, descending; ties go to the lower index. `broken`: some value is NaN or
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

    // Returns a lower bound of the `wanted` largest values: of the largest ones of the columns with equal index modulo
    // BLOCK, the one with this rank. Without it, most blocks of a flat distribution have a value to insert.
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

class Level {
    Growth& g;
    std::vector<int64_t> probs_row;     // [num_scored, num_rows], row of an SSM's probabilities, -1: not scored
    std::vector<Candidate> candidates;  // of one tree
    std::vector<float> draft_probs;     // [candidates, num_scored]
    std::vector<uint8_t> proposed;      // [candidates, num_scored]
    std::vector<int64_t> slots;         // slots of the new nodes' parents in their trees
    int64_t count = 0;

    // Appends the candidates below one row, with proposals of the same token merged.
    void merge(int64_t row) {
        const float* weights = g.weights + g.row_owners[row] * g.num_ssms;
        std::vector<Top> tops;
        std::vector<int64_t> tokens;
        bool has_mixture = false;
        for (int64_t l = 0; l < g.num_scored; l++) {
            const int64_t i = probs_row[l * g.num_rows + row];
            const SsmProbs& ssm = g.ssm_probs[l];
            tops.emplace_back(ssm.probs + std::max<int64_t>(i, 0) * ssm.width, i < 0 ? 0 : ssm.width, g.children);
            Top& top = tops.back();
            if (const int64_t* columns = ssm.row_tokens ? ssm.row_tokens + i * ssm.width : ssm.tokens)
                for (int64_t& id : top.ids) id = columns[id];
            if (top.broken) g.broken[row] = 1, top.ids.clear();  // drop the proposals of an SSM that overflowed
            tokens.insert(tokens.end(), top.ids.begin(), top.ids.end());
            has_mixture |= !top.ids.empty();
        }
        const int64_t* below = g.seed_children + g.row_seeds[row] * g.seed_width;  // not read if the row is no seed
        const int64_t width = g.row_seeds[row] < 0 ? 0 : g.seed_width;
        for (int64_t j = 0; j < std::min(width, g.max_seeds); j++)
            if (below[j] >= 0) tokens.push_back(g.seed_tokens[below[j]]);
        for (size_t i = 0; i < tokens.size(); i++) {
            if (std::find(tokens.begin(), tokens.begin() + i, tokens[i]) != tokens.begin() + i) continue;
            Candidate c{row, tokens[i], -1, 0.0f, 0.0f, true};
            for (int64_t l = 0; l < g.num_scored; l++) {
                const auto& ids = tops[l].ids;
                const size_t place = std::find(ids.begin(), ids.end(), c.token) - ids.begin();
                proposed.push_back(place < ids.size());
                draft_probs.push_back(place < ids.size() ? tops[l].values[place] : 0.0f);
                c.prob += weights[g.ssm_probs[l].ssm] * draft_probs.back();
            }
            c.prob = std::min(c.prob, 1.0f);
            for (int64_t j = 0; j < width && c.seed < 0; j++)
                if (below[j] >= 0 && g.seed_tokens[below[j]] == c.token) c.seed = below[j];
            if (c.seed >= 0 && has_mixture) {
                const float prior = std::min(std::max(c.prob, MIN_MIXTURE), MAX_MIXTURE);
                const float scaled = g.seed_ratios[c.seed] * prior;
                c.prob = scaled / (scaled + (1.0f - prior));
            } else if (c.seed >= 0) {
                c.prob = g.seed_probs[c.seed];
            }
            c.value = g.row_values[row] * c.prob;
            candidates.push_back(c);
        }
    }

    // Keeps the `children` most probable candidates below every node.
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
        float* best = g.best + tree * g.most_nodes;
        const int64_t nodes = g.nodes[tree], num_best = std::min(g.num_values[tree], nodes);
        std::vector<float> all(best, best + num_best);
        for (const Candidate& c : candidates) all.push_back(c.value);
        std::sort(all.begin(), all.end(), std::greater<float>());
        std::copy_n(all.begin(), std::min<int64_t>(nodes, all.size()), best);
        g.num_values[tree] += candidates.size();
        if (g.num_values[tree] <= nodes) return;
        g.least[tree] = best[nodes - 1];
        for (Candidate& c : candidates) c.kept = c.value >= g.least[tree] || c.seed >= 0;
    }

    // Writes the kept candidates of a tree. `slot`: the slot of the tree's first row `first`.
    void write(int64_t tree, int64_t first, int64_t slot) {
        const int64_t begin = count;
        for (size_t i = 0; i < candidates.size(); i++) {
            const Candidate& c = candidates[i];
            if (!c.kept) continue;
            g.tokens[count] = c.token, g.parents[count] = g.row_nodes[c.row], g.owners[count] = tree;
            g.seeds[count] = c.seed, g.probs[count] = c.prob, g.values[count] = c.value;
            std::fill_n(g.draft_probs + count * g.num_ssms, g.num_ssms, 0.0f);
            std::fill_n(g.proposed + count * g.num_ssms, g.num_ssms, uint8_t(0));
            for (int64_t l = 0; l < g.num_scored; l++) {
                const int64_t to = count * g.num_ssms + g.ssm_probs[l].ssm, from = i * g.num_scored + l;
                g.draft_probs[to] = draft_probs[from], g.proposed[to] = proposed[from];
            }
            slots.push_back(slot + c.row - first), count++;
        }
        if (g.depth + 1 < g.max_depths[tree]) choose(tree, begin);
    }

    // Appends those of a tree's new nodes, from `begin` on, that are expanded next. Without a fixed branching, the best
    // come first.
    void choose(int64_t tree, int64_t begin) {
        const int64_t *ends = g.end_tokens + g.end_starts[tree], *stop = g.end_tokens + g.end_starts[tree + 1];
        std::vector<int64_t> order;
        for (int64_t i = begin; i < count; i++)
            if (std::find(ends, stop, g.tokens[i]) == stop) order.push_back(i);  // nothing follows an end token
        if (!g.branching[tree]) {
            std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return g.values[a] > g.values[b]; });
            if (int64_t(order.size()) > g.next_width) order.resize(g.next_width);
        }
        for (int64_t i : order) {
            if (!g.branching[tree] && !(g.values[i] > 0 && g.values[i] >= g.least[tree])) break;
            const int64_t to = g.num_next++;
            g.next_nodes[to] = g.size + i, g.next_tokens[to] = g.tokens[i], g.next_owners[to] = tree;
            g.next_seeds[to] = g.seeds[i], g.next_above[to] = slots[i], g.next_values[to] = g.values[i];
        }
    }

  public:
    explicit Level(Growth& growth) : g(growth), probs_row(g.num_scored * g.num_rows, -1) {
        for (int64_t l = 0; l < g.num_scored; l++)
            for (int64_t i = 0; i < g.ssm_probs[l].count; i++)
                probs_row[l * g.num_rows + (g.ssm_probs[l].rows ? g.ssm_probs[l].rows[i] : i)] = i;
    }

    int64_t run() {
        g.num_next = 0;
        std::fill_n(g.broken, g.num_rows, uint8_t(0));
        for (int64_t first = 0, last; first < g.num_rows; first = last) {
            const int64_t tree = g.row_owners[first], slot = g.num_slots[tree];
            candidates.clear(), draft_probs.clear(), proposed.clear();
            for (last = first; last < g.num_rows && g.row_owners[last] == tree; last++) merge(last);
            g.num_slots[tree] += last - first;
            if (g.branching[tree]) keep_children(g.branching[tree]);
            else keep_best(tree);
            write(tree, first, slot);
        }
        return count;
    }
};

// What the targets of some rows will choose, as a draft predicts it: of sampling requests by their temperature and
// noise, of others by the draft's probabilities.
struct Choices {
    std::vector<float> probs;
    std::vector<int64_t> tokens;

    // row_probs: the draft's probabilities at `rows`, [len(rows), draft.width]. Other arguments as in SsmProbs.
    SsmProbs predict(const Growth& g, const Placing& p, const Sampling& sampling, const Draft& draft,
                     const std::vector<int64_t>& rows, const int64_t* at, const float* row_probs) {
        const int64_t count = rows.size(), width = std::max(CANDIDATES, g.children);
        probs.assign(count * width, -1.0f), tokens.assign(count * width, 0);
        for (int64_t i = 0; i < count; i++, row_probs += draft.width) {
            const int64_t tree = g.row_owners[rows[i]];
            if (sampling.temperatures[tree] > 0) {
                predict_choice(sampling, tree, p.context[tree] + 1 + g.depth, row_probs, draft.width, draft.tokens,
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

// Returns `Forest.open_mass` of the frontier, by tree.
std::vector<double> open_mass(const Growth& g, int64_t num_trees) {
    std::vector<double> mass(num_trees);
    for (int64_t i = 0; i < g.num_rows; i++) {
        const int64_t* below = g.seed_children + g.row_seeds[i] * g.seed_width;  // not read if the row is no seed
        float covered = 0.0f;
        for (int64_t j = 0; g.row_seeds[i] >= 0 && j < g.seed_width; j++)
            if (below[j] >= 0) covered += g.seed_probs[below[j]];
        mass[g.row_owners[i]] += double(g.row_values[i] * std::max(1.0f - covered, 0.0f));
    }
    return mass;
}

// Removes trees from the frontier, which is still in the outputs for the next one. stops: [num_trees].
void remove(Growth& g, const std::vector<uint8_t>& stops) {
    int64_t kept = 0;
    for (int64_t i = 0; i < g.num_rows; i++) {
        if (stops[g.row_owners[i]]) continue;
        g.next_nodes[kept] = g.next_nodes[i], g.next_tokens[kept] = g.next_tokens[i];
        g.next_owners[kept] = g.next_owners[i], g.next_seeds[kept] = g.next_seeds[i];
        g.next_above[kept] = g.next_above[i], g.next_values[kept++] = g.next_values[i];
    }
    g.num_rows = kept;
}

// Removes the trees from the frontier whose next level does not pay, like `stop_unprofitable` in
// treespec/drafters/ssm/levels.py, with the same operations in the same order.
//   last_open_mass: by tree, before the newest level. nodes: number of nodes of that level.
void stop_unprofitable(Growth& g, Rule& rule, std::vector<double>& last_open_mass, int64_t nodes) {
    std::vector<double> reached(last_open_mass.size()), current = open_mass(g, last_open_mass.size());
    const float least = float(rule.least_value);
    for (int64_t i = 0; i < nodes; i++)
        if (g.values[i] >= least && g.seeds[i] < 0) reached[g.owners[i]] += double(g.values[i]);
    std::vector<int64_t> trees;  // those that the rule decides on
    for (int64_t i = 0; i < g.num_rows; i++)
        if (rule.adaptive[g.row_owners[i]] && (trees.empty() || trees.back() != g.row_owners[i]))
            trees.push_back(g.row_owners[i]);
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
    remove(g, stops);
}

// Makes the next frontier the frontier.
void advance(Growth& g) {
    g.num_rows = g.num_next, g.row_nodes = g.next_nodes, g.row_tokens = g.next_tokens, g.row_owners = g.next_owners;
    g.row_seeds = g.next_seeds, g.row_above = g.next_above, g.row_values = g.next_values;
}

// Moves the outputs behind a level's `nodes` nodes, `rows` scored rows, and the `num_rows` rows of the next frontier.
void skip(Growth& g, int64_t nodes, int64_t rows) {
    g.size += nodes, g.tokens += nodes, g.parents += nodes, g.owners += nodes, g.seeds += nodes;
    g.probs += nodes, g.values += nodes, g.draft_probs += nodes * g.num_ssms, g.proposed += nodes * g.num_ssms;
    g.broken += rows, g.next_nodes += g.num_rows, g.next_tokens += g.num_rows, g.next_owners += g.num_rows;
    g.next_seeds += g.num_rows, g.next_above += g.num_rows, g.next_values += g.num_rows;
}

}  // namespace

extern "C" {

// Grows trees by one level; returns its number of nodes.
int64_t treespec_grow(Growth* growth) { return Level(*growth).run(); }

// Assigns slots to the nodes of a level; returns 0 if there is no page for them.
int64_t treespec_place(Placing* placing) { return place(*placing); }

// Grows the trees from their roots until no level is left or pays, or no draft predicts it: assigns slots, runs the
// SSMs' passes in the order of their indices, and grows a level. The outputs of all levels are consecutive. Without
// `rule`, every level pays.
// Returns 0 if there is no page for a node.
int64_t treespec_draft(Growth* growth, Placing* placing, Draft* drafts, int64_t num_drafts, Levels* levels,
                       Rule* rule) {
    Growth& g = *growth;
    std::vector<double> last_open_mass = open_mass(g, levels->num_trees);
    const bool heads = std::any_of(drafts, drafts + num_drafts, [](const Draft& draft) { return draft.pairs; });
    std::vector<Places> places;  // by offset
    for (int64_t offset = 0; offset <= heads; offset++) places.emplace_back(*placing, levels->num_trees, offset);
    std::vector<Passed> passed(num_drafts);
    std::vector<float> weights;
    int64_t& depth = levels->num_levels = 0;
    for (; g.num_rows; depth++) {
        const int64_t rows = g.num_rows;
        for (Places& offset_places : places)
            if (depth && !offset_places.extend(g, depth)) return 0;
        g.depth = depth, g.next_width = levels->widths[depth];
        g.branching = levels->branching + depth * levels->num_trees, g.children = 0;
        for (int64_t i = 0; i < rows; i++) {
            const int64_t children = g.branching[g.row_owners[i]];
            g.children = std::max(g.children, children ? children : levels->max_children);
        }
        std::vector<SsmProbs> ssm_probs;
        std::vector<std::vector<int64_t>> scored(num_drafts);
        std::vector<Choices> choices(num_drafts);
        for (int64_t i = 0; i < num_drafts; i++) {
            Draft& draft = drafts[i];
            int64_t trees;
            if (!depth) draft.num_read = draft.num_rows = draft.passes = draft.tree_passes = 0;
            std::tie(scored[i], trees) = scored_rows(g, levels->active + i * levels->num_trees);
            const int64_t count = scored[i].size();
            if (!count || (draft.block_probs && depth >= draft.block_depths)) continue;
            const int64_t* valid = levels->valid + i * levels->num_trees;
            const int64_t* first = levels->first_rotations + i * levels->num_trees;
            if (draft.block_probs) score_block(g, draft, scored[i], trees, depth);
            else if (depth) score(g, places[draft.pairs ? 1 : 0].get(), draft, first, scored[i], trees, passed[i]);
            else score_roots(g, *placing, *levels, draft, valid, first, scored[i], passed[i]);
            const int64_t* subset = count < rows ? scored[i].data() : nullptr;
            const float* probs = draft.out + (draft.num_rows - count) * draft.width;
            if (levels->sampling)
                ssm_probs.push_back(
                    choices[i].predict(g, *placing, *levels->sampling, draft, scored[i], subset, probs));
            else ssm_probs.push_back({probs, subset, draft.tokens, count, draft.ssm, draft.width, nullptr});
        }
        g.ssm_probs = ssm_probs.data(), g.num_scored = ssm_probs.size();
        const int64_t nodes = Level(g).run();
        g.ssm_probs = nullptr, g.num_scored = 0;
        levels->rows[depth] = rows, levels->nodes[depth] = nodes;
        advance(g);
        if (rule && g.num_rows) stop_unprofitable(g, *rule, last_open_mass, nodes);
        const auto ends = [&](const Draft& draft) { return draft.block_probs && draft.block_depths == depth + 1; };
        if (g.num_rows && std::any_of(drafts, drafts + num_drafts, ends))
            remove(g, end_drafts(g, drafts, num_drafts, levels->num_trees, depth + 1, weights));
        skip(g, nodes, rows);
    }
    return 1;
}

}  // extern "C"
