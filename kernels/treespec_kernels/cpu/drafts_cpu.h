// Growing trees and the drafts' passes over them, included by growth_cpu.cpp: the slots of nodes, the inputs of passes,
// and the features that a draft head passes from a node to its children.

#include "sampling_cpu.h"

extern "C" {

struct Rule {  // `LevelRule` in treespec_kernels/tree/level_rule.py, which defines the attributes
    double calibration, level_cost, marginal_cost, least_value;
    const int64_t* adaptive;      // [num_trees], whether the rule decides on the tree
    const double* token_weights;  // [num_trees]
};

struct Draft {  // an SSM or another draft; `forward`, `probs` and `pairs` are functions of the decoder's library
    void (*forward)(const void* model, const Batch* batch);
    void (*probs)(const void* head, const void* hidden, int64_t num_rows, float* out, int64_t threads);
    const void *model, *head;
    const float* rotation;
    void* cache;
    int64_t num_layers, num_pages, num_learned_positions, hidden_bytes, threads;
    int64_t ssm, width;     // width: number of columns of the probabilities
    const int64_t* tokens;  // [width], ascending tokens of the columns; null: 0, 1, ...
    // For a draft head; `pairs` is null for an SSM. norm_output: whether its outputs are normalised. features: [rows of
    // the first pass, hidden], of the preceding tokens: first for all tokens that it reads, then for the roots.
    void (*pairs)(const void* pairing, const int64_t* tokens, const void* features, int64_t num_rows, void* inputs,
                  void* qkv, int64_t threads);
    const void* pairing;
    int64_t qkv_bytes, norm_output;
    const char* features;
    // For a block draft, which runs no pass: probabilities by tree and depth, [num_trees, block_depths, width].
    const float* block_probs;
    int64_t block_depths;
    // By tree, recurrent states, and `replayed` for the first pass; null without recurrent layers.
    const RequestState* states;
    // Outputs. out: [num_rows, width], probabilities after the `num_read` committed tokens that the SSM read (if
    // requested), followed by those of the scored nodes, level by level.
    float* out;
    int64_t num_read, num_rows, passes, tree_passes;  // tree_passes: number of trees, summed over the passes
};

struct Trees {  // a batch of trees to grow; the nodes proposed by other sources are its seeds
    int64_t num_trees, num_ssms, num_drafts, page_size;
    int64_t max_children, num_widths;              // max_children: maximum proposals of a source at a node
    const int64_t* widths;                         // [num_widths] by depth: number of a tree's nodes to expand
    // Per tree. nodes: size after pruning. branching: null, or by depth and tree the number of children of a node, 0 to
    // select by value. context: committed positions.
    const int64_t *max_depths, *nodes, *branching, *context;
    // Parts of lists, from first_page[tree] to first_page[tree + 1]: pages, last committed tokens including the root,
    // and tokens that nothing is drafted after.
    const int64_t *first_page, *first_token, *end_starts, *pages, *tokens, *end_tokens;
    // Seeds tree by tree, roots first, parents (as indices in their trees) before children; and their draws.
    const int64_t *first_seed, *first_seed_draw;  // [num_trees + 1]
    const int64_t *seed_tokens, *seed_parents, *seed_draw_nodes, *seed_draw_sources;
    const float *seed_probs, *seed_ratios;
    const double* seed_draw_probs;
    // By draft and tree: whether it is active, number of leading positions with K and V (at most the root's), and row
    // of its rotations for position 0.
    const int64_t *active, *valid, *first_rotations;
    int64_t reads;            // whether to return probabilities after committed tokens
    const float* weights;     // [num_trees, num_ssms]
    const Rule* rule;         // null: every level pays off
    const Sampling* sampling; // null: no request samples
    // Masks a draft's probabilities at some nodes, in its outputs from `row` on; null: no request restricts tokens.
    void (*narrow)(int64_t draft, int64_t row, int64_t count, const int64_t* nodes);
    // Columns of all trees' nodes: during growth the roots first, then by level, tree and parent. slots: slots in their
    // trees, -1 for unexpanded nodes. draft_probs, proposed: [num_nodes, num_ssms].
    int64_t num_nodes, num_levels, num_rows;
    int64_t *new_tokens, *parents, *tree_ids, *seeds, *depths, *slots;
    float *probs, *values, *draft_probs;
    uint8_t *proposed, *broken;  // broken: [num_trees], whether an SSM's probabilities are not finite
    int64_t* row_trees;         // [num_rows], tree of each expanded node
    // Outputs: new_tokens, parents (in their trees), depths and slots tree by tree, with the seeds that growth did not
    // reach; probs and values as doubles; draws, those of seeds behind those of SSMs, which have the first `num_ssms`
    // sources; and where the nodes and draws of each tree begin, with their number, [num_trees + 1].
    double *node_probs, *node_values, *drawn_probs;
    int64_t *drawn_nodes, *drawn_sources, *first_node, *first_draw;
};

}  // extern "C"

namespace {

struct SsmProbs {  // an SSM's next-token probabilities at some or all rows of the frontier
    const float* probs;     // [count, width]
    const int64_t* rows;    // [count], ascending rows of the frontier; null: all rows
    const int64_t* tokens;  // see Draft
    int64_t count, ssm, width;
    const int64_t* row_tokens;  // [count, width], tokens of each row's columns, replaces `tokens`; null: none
};

struct Frontier {  // nodes to score, grouped by tree. seeds: index among the seeds, or -1
    std::vector<int64_t> nodes, tokens, tree_ids, seeds, parent_slots;
    std::vector<float> values;

    int64_t size() const { return nodes.size(); }

    void clear() { nodes.clear(), tokens.clear(), tree_ids.clear(), seeds.clear(), parent_slots.clear(), values.clear(); }

    void add(int64_t node, int64_t token, int64_t tree_id, int64_t seed, int64_t parent_slot, float value) {
        nodes.push_back(node), tokens.push_back(token), tree_ids.push_back(tree_id), seeds.push_back(seed);
        parent_slots.push_back(parent_slot), values.push_back(value);
    }

    void remove(const std::vector<uint8_t>& trees) {
        Frontier kept;
        for (int64_t i = 0; i < size(); i++)
            if (!trees[tree_ids[i]]) kept.add(nodes[i], tokens[i], tree_ids[i], seeds[i], parent_slots[i], values[i]);
        std::swap(*this, kept);
    }
};

struct Growth {
    Trees& t;
    Frontier rows, next;
    int64_t depth = 0, children = 0;  // children: maximum proposals of an SSM at a frontier node
    std::vector<SsmProbs> scored;
    const float* weights;
    int64_t seed_width = 1;              // maximum number of children of a seed
    std::vector<int64_t> seed_children;  // [number of seeds, seed_width], indices over all trees' seeds, -1 for none
    std::vector<std::vector<int64_t>> slot_parents;  // parent of each slot in use, by tree; -1 for the root
    std::vector<std::vector<float>> best;  // largest node values, by tree
    std::vector<float> least;              // smallest value among the nodes that pruning keeps, by tree

    explicit Growth(Trees& trees)
        : t(trees), weights(trees.weights), slot_parents(trees.num_trees), best(trees.num_trees, {1.0f}),
          least(trees.num_trees) {
        t.num_nodes = t.num_rows = 0;
        const int64_t num_seeds = t.first_seed[t.num_trees];
        std::vector<std::vector<int64_t>> children(num_seeds);
        for (int64_t tree = 0; tree < t.num_trees; tree++)
            for (int64_t seed = t.first_seed[tree] + 1; seed < t.first_seed[tree + 1]; seed++)
                children[t.first_seed[tree] + t.seed_parents[seed]].push_back(seed);
        for (const auto& below : children) seed_width = std::max(seed_width, int64_t(below.size()));
        seed_children.assign(num_seeds * seed_width, -1);
        for (int64_t seed = 0; seed < num_seeds; seed++)
            std::copy(children[seed].begin(), children[seed].end(), &seed_children[seed * seed_width]);
        for (int64_t tree = 0; tree < t.num_trees; tree++) {
            const int64_t token = t.tokens[t.first_token[tree + 1] - 1], seed = t.first_seed[tree];
            add(token, -1, tree, seed, 0, 1.0f, 1.0f), t.broken[tree] = 0;
            if (t.max_depths[tree]) rows.add(tree, token, tree, seed, -1, 1.0f);
        }
    }

    // Returns the fixed number of children of the tree's nodes at this depth, or 0.
    int64_t branching(int64_t tree) const { return t.branching ? t.branching[depth * t.num_trees + tree] : 0; }

    int64_t add(int64_t token, int64_t parent, int64_t tree, int64_t seed, int64_t at, float prob, float value) {
        const int64_t i = t.num_nodes++;
        t.new_tokens[i] = token, t.parents[i] = parent, t.tree_ids[i] = tree, t.seeds[i] = seed;
        t.depths[i] = at, t.slots[i] = -1, t.probs[i] = prob, t.values[i] = value;
        std::fill_n(t.draft_probs + i * t.num_ssms, t.num_ssms, 0.0f);
        std::fill_n(t.proposed + i * t.num_ssms, t.num_ssms, uint8_t(0));
        return i;
    }
};

// Slots of the newest level's nodes in the caches of drafts with one offset: 0 for SSMs; 1 for draft heads, which store
// a row in the slot of the position before its token's. The root has slot 0, further nodes the next slots.
class Places {
    const Trees& t;
    const int64_t offset;
    std::vector<int64_t> row_of_slot, paths_above;  // row_of_slot: by tree, row minus slot in the previous level

  public:
    // slots and rows of the rotations, [num_rows]; rows: `tables`, `direct`, `starts` and `counts` of a Batch; paths:
    // slots of the ancestors and of the node itself, [num_rows, depth + 1]
    std::vector<int64_t> slots, positions, rows, paths;

    Places(const Trees& trees, int64_t offset) : t(trees), offset(offset), row_of_slot(trees.num_trees) {}

    // Returns the slot of a position on a page of the tree.
    static int64_t slot_at(const Trees& t, int64_t tree, int64_t position) {
        return t.pages[t.first_page[tree] + position / t.page_size] * t.page_size + position % t.page_size;
    }

    // Assigns slots to the frontier's nodes; returns false if a node has no page.
    bool extend(const Growth& g) {
        const int64_t n = g.rows.size(), width = g.depth + 1;
        paths_above.swap(paths);
        slots.resize(n), positions.resize(n), rows.resize(4 * n), paths.resize(n * width);
        for (int64_t first = 0, last; first < n; first = last) {
            const int64_t tree = g.rows.tree_ids[first], slot = g.slot_parents[tree].size();
            const int64_t context = t.context[tree] - offset;
            for (last = first; last < n && g.rows.tree_ids[last] == tree; last++) {
                const int64_t logical = context + slot + last - first;
                if (t.first_page[tree] + logical / t.page_size >= t.first_page[tree + 1]) return false;
                slots[last] = slot_at(t, tree, logical);
                if (g.depth == 1) paths[last * width] = slot_at(t, tree, context);
                else std::copy_n(&paths_above[(g.rows.parent_slots[last] + row_of_slot[tree]) * g.depth], g.depth,
                                 &paths[last * width]);
                paths[last * width + g.depth] = slots[last];
                positions[last] = context + g.depth;
                rows[last] = t.first_page[tree], rows[n + last] = context;
                rows[2 * n + last] = last * width, rows[3 * n + last] = width;
            }
            row_of_slot[tree] = first - slot;
        }
        return true;
    }
};

// Features that a draft head passes from its scored nodes to their children.
struct Passed {
    std::vector<char> features;              // one per row of the draft's outputs
    std::vector<std::vector<int64_t>> rows;  // row of each slot, by tree
};

// Runs a draft's pass over `batch`, and appends the probabilities of its last `scored` rows to its outputs. features:
// features of the rows, for a draft head.
void run_pass(Draft& draft, Batch batch, int64_t scored, int64_t trees, const char* features, Passed& passed) {
    std::vector<int64_t> learned;
    if (draft.num_learned_positions) {
        for (int64_t i = 0; i < batch.num_rows; i++)
            learned.push_back(std::min(batch.positions[i], draft.num_learned_positions - 1));
        batch.learned_positions = learned.data();
    }
    static thread_local std::vector<char> hidden, inputs, qkv, states;
    const int64_t bytes = batch.num_rows * draft.hidden_bytes, skipped = (batch.num_rows - scored) * draft.hidden_bytes;
    hidden.resize(bytes);
    batch.num_layers = draft.num_layers, batch.rotation = draft.rotation;
    batch.cache = draft.cache, batch.num_pages = draft.num_pages, batch.out = hidden.data();
    if (draft.pairs) {
        inputs.resize(bytes), qkv.resize(batch.num_rows * draft.qkv_bytes);
        draft.pairs(draft.pairing, batch.tokens, features, batch.num_rows, inputs.data(), qkv.data(), draft.threads);
        batch.inputs = inputs.data(), batch.qkv = draft.qkv_bytes ? qkv.data() : nullptr;
        if (!draft.norm_output) {
            states.resize(bytes);
            batch.states = states.data(), batch.state_layers = &draft.num_layers, batch.num_states = 1;
        }
    }
    draft.forward(draft.model, &batch);
    draft.probs(draft.head, hidden.data() + skipped, scored, draft.out + draft.num_rows * draft.width, draft.threads);
    if (draft.pairs) {
        const std::vector<char>& outputs = draft.norm_output ? hidden : states;
        passed.features.insert(passed.features.end(), outputs.begin() + skipped, outputs.begin() + bytes);
    }
    draft.num_rows += scored, draft.passes++, draft.tree_passes += trees;
}

// Returns the frontier rows that a draft scores, and the number of their trees. active: [num_trees].
std::pair<std::vector<int64_t>, int64_t> scored_rows(const Growth& g, const int64_t* active) {
    std::vector<int64_t> rows;
    int64_t trees = 0;
    for (int64_t i = 0; i < g.rows.size(); i++)
        if (active[g.rows.tree_ids[i]]) {
            trees += rows.empty() || g.rows.tree_ids[rows.back()] != g.rows.tree_ids[i];
            rows.push_back(i);
        }
    return {rows, trees};
}

// Scores the roots in `rows`, in a pass that first reads the committed tokens that the draft has not read. valid,
// first_rotations: [num_trees].
void score_roots(const Growth& g, Draft& draft, const int64_t* valid, const int64_t* first_rotations,
                 const std::vector<int64_t>& rows, Passed& passed) {
    const Trees& t = g.t;
    const int64_t offset = draft.pairs ? 1 : 0;
    std::vector<int64_t> trees, positions;
    for (int64_t row : rows)
        for (int64_t tree = g.rows.tree_ids[row], position = valid[tree]; position < t.context[tree]; position++)
            trees.push_back(tree), positions.push_back(position);
    const int64_t num_read = positions.size();
    for (int64_t row : rows) trees.push_back(g.rows.tree_ids[row]), positions.push_back(t.context[g.rows.tree_ids[row]]);
    const int64_t n = positions.size();
    std::vector<int64_t> tokens, slots, tables, direct, zeros(n);
    for (int64_t i = 0; i < n; i++) {
        const int64_t tree = trees[i], position = positions[i];
        tokens.push_back(t.tokens[t.first_token[tree + 1] - 1 - (t.context[tree] - position)]);
        slots.push_back(Places::slot_at(t, tree, position - offset));
        tables.push_back(t.first_page[tree]), direct.push_back(position + 1 - offset);
        positions[i] += first_rotations[tree] - offset;
    }
    Batch batch{};
    batch.num_rows = n, batch.tokens = tokens.data(), batch.slots = slots.data(), batch.tables = tables.data();
    batch.direct = direct.data(), batch.starts = batch.counts = zeros.data(), batch.pages = t.pages;
    batch.paths = zeros.data(), batch.positions = positions.data();
    draft.num_read = t.reads ? num_read : 0;
    std::vector<RequestState> states;
    std::vector<int64_t> chain(n);
    std::iota(chain.begin(), chain.end(), -1);
    for (int64_t i = 0, first = 0; draft.states && i < int64_t(rows.size()); i++) {
        const int64_t tree = g.rows.tree_ids[rows[i]], read = t.context[tree] - valid[tree];
        RequestState state = draft.states[tree];
        state.parents = chain.data(), state.num_rows = read + 1, state.commits = read;
        state.first_row = first, state.tree_row = num_read + i, first += read;
        states.push_back(state);
    }
    batch.requests = states.data(), batch.num_requests = states.size();
    passed.rows.assign(t.num_trees, {});
    for (size_t i = 0; i < rows.size(); i++) passed.rows[g.rows.tree_ids[rows[i]]].push_back(draft.num_read + int64_t(i));
    run_pass(draft, batch, draft.num_read + int64_t(rows.size()), rows.size(), draft.features, passed);
}

// Scores the nodes in `rows`. first_rotations: [num_trees].
void score(const Growth& g, const Places& p, Draft& draft, const int64_t* first_rotations,
           const std::vector<int64_t>& rows, int64_t trees, Passed& passed) {
    const int64_t all = g.rows.size(), n = rows.size();
    Batch batch{};
    batch.num_rows = n, batch.tokens = g.rows.tokens.data(), batch.slots = p.slots.data();
    batch.tables = p.rows.data(), batch.direct = batch.tables + all, batch.starts = batch.tables + 2 * all;
    batch.counts = batch.tables + 3 * all, batch.pages = g.t.pages, batch.paths = p.paths.data();
    std::vector<int64_t> gathered, positions;
    for (int64_t i : rows) positions.push_back(p.positions[i] + first_rotations[g.rows.tree_ids[i]]);
    batch.positions = positions.data();
    gathered.reserve(6 * n);
    if (n < all)
        for (const int64_t** column : {&batch.tokens, &batch.slots, &batch.tables, &batch.direct, &batch.starts,
                                       &batch.counts}) {
            for (int64_t i : rows) gathered.push_back((*column)[i]);
            *column = gathered.data() + gathered.size() - n;
        }
    std::vector<RequestState> states;
    std::vector<std::vector<int64_t>> parents;  // parent of each slot, by tree
    for (int64_t first = 0, last; draft.states && first < n; first = last) {
        const int64_t tree = g.rows.tree_ids[rows[first]], earlier = g.slot_parents[tree].size();
        parents.push_back(g.slot_parents[tree]);
        for (last = first; last < n && g.rows.tree_ids[rows[last]] == tree; last++)
            parents.back().push_back(g.rows.parent_slots[rows[last]]);
        RequestState state = draft.states[tree];
        state.parents = parents.back().data(), state.replayed = 0, state.earlier = earlier;
        state.num_rows = last - first, state.tree_row = first;
        states.push_back(state);
    }
    batch.requests = states.data(), batch.num_requests = states.size();
    std::vector<char> features;
    for (int64_t i = 0; draft.pairs && i < n; i++) {
        std::vector<int64_t>& slots = passed.rows[g.rows.tree_ids[rows[i]]];
        const char* from = passed.features.data() + slots[g.rows.parent_slots[rows[i]]] * draft.hidden_bytes;
        features.insert(features.end(), from, from + draft.hidden_bytes);
        slots.push_back(draft.num_rows + i);
    }
    run_pass(draft, batch, n, trees, features.data(), passed);
}

// Scores the nodes in `rows` from a block draft's predictions for their depth.
void score_block(const Growth& g, Draft& draft, const std::vector<int64_t>& rows, int64_t trees) {
    for (int64_t row : rows)
        std::copy_n(draft.block_probs + (g.rows.tree_ids[row] * draft.block_depths + g.depth) * draft.width, draft.width,
                    draft.out + draft.num_rows++ * draft.width);
    draft.passes++, draft.tree_passes += trees;
}

// Sets the weights of drafts without predictions at this depth to 0, rescales the others to sum 1, and marks trees
// without any draft. weights: [num_trees, num_ssms], replaces those of `g`.
std::vector<uint8_t> end_drafts(Growth& g, const Draft* drafts, int64_t num_drafts, int64_t depth,
                                std::vector<float>& weights) {
    const int64_t num_ssms = g.t.num_ssms;
    std::vector<float> shares(g.t.num_trees * num_ssms);
    std::vector<uint8_t> stops(g.t.num_trees);
    for (int64_t tree = 0; tree < g.t.num_trees; tree++) {
        const int64_t first = tree * num_ssms;
        double sum = 0.0;
        for (int64_t i = 0; i < num_drafts; i++)
            if (!drafts[i].block_probs || depth < drafts[i].block_depths)
                sum += shares[first + drafts[i].ssm] = g.weights[first + drafts[i].ssm];
        for (int64_t i = 0; i < num_ssms; i++) shares[first + i] = float(shares[first + i] / std::max(sum, 1e-9));
        stops[tree] = sum == 0.0;
    }
    weights.swap(shares), g.weights = weights.data();
    return stops;
}

}  // namespace
