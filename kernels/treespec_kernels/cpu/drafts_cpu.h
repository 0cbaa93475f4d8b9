// The drafts' passes over growing trees, included by growth_cpu.cpp: the slots of nodes, the inputs of passes, and the
// features that a draft head passes on from a node to its children.

#include "sampling_cpu.h"

extern "C" {

struct Placing {  // assigns the next slots of each tree to the nodes of a level
    int64_t num_rows, depth, page_size;
    const int64_t *owners, *above;                // [num_rows]
    const int64_t *context, *first_page, *pages;  // per tree: committed positions, and the start of its pages
    int64_t *num_slots, *row_of_slot;             // per tree: slots in use, and row minus slot in the level above
    const int64_t* paths_above;                   // [rows of the level above, depth], if that are not the roots
    int64_t *paths, *slots, *rows, *positions;    // [num_rows, depth + 1], [num_rows], [4, num_rows], [num_rows]
};

struct Draft {  // an SSM or another draft; `forward`, `probs` and `pairs` are functions of the decoder's library
    void (*forward)(const void* model, const Batch* batch);
    void (*probs)(const void* head, const void* hidden, int64_t num_rows, float* out, int64_t threads);
    const void *model, *head;
    const float* rotation;
    void* cache;
    int64_t num_layers, num_pages, num_learned_positions, hidden_bytes, threads;
    int64_t ssm, width;     // width: columns of the probabilities
    const int64_t* tokens;  // tokens of the columns, as in SsmProbs
    // Of a draft head; `pairs` is null for an SSM. norm_output: what it passes on is normalised. features: [rows of the
    // first pass, hidden], of the tokens before them: first of all tokens that it reads, then of the roots.
    void (*pairs)(const void* pairing, const int64_t* tokens, const void* features, int64_t num_rows, void* inputs,
                  void* qkv, int64_t threads);
    const void* pairing;
    int64_t qkv_bytes, norm_output;
    const char* features;
    // Of a block draft, which runs no pass: the probabilities by tree and depth, [num_trees, block_depths, width].
    const float* block_probs;
    int64_t block_depths;
    // Outputs. out: [num_rows, width], the probabilities after the `num_read` committed tokens that the SSM read, if
    // they are wanted, and then of the nodes that it scored, level by level.
    float* out;
    int64_t num_read, num_rows, passes, tree_passes;  // tree_passes: passes times the trees in each
};

struct Levels {
    int64_t num_trees, max_children, reads;  // reads: whether probabilities after committed tokens are wanted
    const int64_t *tokens, *first_token;     // tree t's last committed tokens: first_token[t] to first_token[t + 1]
    const int64_t* active;  // [num_drafts, num_trees], whether the SSM drafts for the tree
    const int64_t* valid;   // [num_drafts, num_trees], number of leading positions with K and V, at most the root's
    const int64_t* first_rotations;  // [num_drafts, num_trees], row of the draft's rotations for position 0
    // By depth: maximum number of nodes of the next frontier, and per tree the `branching` of `Growth`.
    const int64_t *widths, *branching;
    int64_t num_levels, *rows, *nodes;  // outputs: number of levels, and of frontier rows and new nodes of each
    const Sampling* sampling;           // null if no request samples
};

}  // extern "C"

namespace {

// Returns the slot of a position, on a page that the tree has.
int64_t slot_at(const Placing& p, int64_t tree, int64_t position) {
    return p.pages[p.first_page[tree] + position / p.page_size] * p.page_size + position % p.page_size;
}

// Assigns the slots of a level; returns false if a tree has no page for its nodes.
bool place(Placing& p) {
    const int64_t width = p.depth + 1;
    for (int64_t first = 0, last; first < p.num_rows; first = last) {
        const int64_t tree = p.owners[first], slot = p.num_slots[tree], shift = p.row_of_slot[tree];
        for (last = first; last < p.num_rows && p.owners[last] == tree; last++) {
            const int64_t logical = p.context[tree] + slot + last - first;
            if (p.first_page[tree] + logical / p.page_size >= p.first_page[tree + 1]) return false;
            p.slots[last] = slot_at(p, tree, logical);
            if (p.depth == 1) p.paths[last * width] = slot_at(p, tree, p.context[tree]);
            else std::copy_n(p.paths_above + (p.above[last] + shift) * p.depth, p.depth, p.paths + last * width);
            p.paths[last * width + p.depth] = p.slots[last];
            p.positions[last] = p.context[tree] + p.depth;
            p.rows[last] = p.first_page[tree], p.rows[p.num_rows + last] = p.context[tree];
            p.rows[2 * p.num_rows + last] = last * width, p.rows[3 * p.num_rows + last] = width;
        }
        p.num_slots[tree] = slot + last - first, p.row_of_slot[tree] = first - slot;
    }
    return true;
}

// Slots of the nodes for the drafts with one offset: 0 for SSMs; 1 for draft heads, whose rows have the slot of the
// position before their token's.
class Places {
    Placing level;
    std::vector<int64_t> context, num_slots, row_of_slot, above, placed;

  public:
    Places(const Placing& from, int64_t trees, int64_t offset)
        : level(from), context(from.context, from.context + trees), num_slots(from.num_slots, from.num_slots + trees),
          row_of_slot(from.row_of_slot, from.row_of_slot + trees) {
        for (int64_t& positions : context) positions -= offset;
        level.context = context.data(), level.num_slots = num_slots.data(), level.row_of_slot = row_of_slot.data();
    }
    Places(Places&&) = default;

    // Assigns slots to the nodes of the frontier, of this depth; returns false if there is no page for a node.
    bool extend(const Growth& g, int64_t depth) {
        above.swap(placed);
        if (depth > 1) level.paths_above = above.data() + 6 * level.num_rows;
        placed.resize(g.num_rows * (depth + 7));
        level.num_rows = g.num_rows, level.depth = depth, level.owners = g.row_owners, level.above = g.row_above;
        level.slots = placed.data(), level.positions = level.slots + g.num_rows;
        level.rows = level.positions + g.num_rows, level.paths = level.rows + 4 * g.num_rows;
        return place(level);
    }

    const Placing& get() const { return level; }
};

// What a draft head passes on from the nodes that it scored.
struct Passed {
    std::vector<char> features;              // of each row of the draft's outputs
    std::vector<std::vector<int64_t>> rows;  // by tree: that row of each slot
};

// Runs a draft's pass over `batch`, and appends the probabilities after its last `scored` rows to its outputs. features:
// of the rows, for a draft head.
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
        batch.inputs = inputs.data(), batch.qkv = qkv.data();
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

// Returns the rows of the frontier that a draft scores, and the number of their trees. active: [num_trees].
std::pair<std::vector<int64_t>, int64_t> scored_rows(const Growth& g, const int64_t* active) {
    std::vector<int64_t> rows;
    int64_t trees = 0;
    for (int64_t i = 0; i < g.num_rows; i++)
        if (active[g.row_owners[i]]) {
            trees += rows.empty() || g.row_owners[rows.back()] != g.row_owners[i];
            rows.push_back(i);
        }
    return {rows, trees};
}

// Scores the roots of `rows`, in a pass that first reads the committed tokens before them that the draft has not read.
// valid, first_rotations: [num_trees].
void score_roots(const Growth& g, const Placing& p, const Levels& levels, Draft& draft, const int64_t* valid,
                 const int64_t* first_rotations, const std::vector<int64_t>& rows, Passed& passed) {
    const int64_t offset = draft.pairs ? 1 : 0;
    std::vector<int64_t> trees, positions;
    for (int64_t row : rows)
        for (int64_t position = valid[g.row_owners[row]]; position < p.context[g.row_owners[row]]; position++)
            trees.push_back(g.row_owners[row]), positions.push_back(position);
    const int64_t num_read = positions.size();
    for (int64_t row : rows) trees.push_back(g.row_owners[row]), positions.push_back(p.context[g.row_owners[row]]);
    const int64_t n = positions.size();
    std::vector<int64_t> tokens, slots, tables, direct, zeros(n);
    for (int64_t i = 0; i < n; i++) {
        const int64_t tree = trees[i], position = positions[i];
        tokens.push_back(levels.tokens[levels.first_token[tree + 1] - 1 - (p.context[tree] - position)]);
        slots.push_back(slot_at(p, tree, position - offset));
        tables.push_back(p.first_page[tree]), direct.push_back(position + 1 - offset);
        positions[i] += first_rotations[tree] - offset;
    }
    Batch batch{};
    batch.num_rows = n, batch.tokens = tokens.data(), batch.slots = slots.data(), batch.tables = tables.data();
    batch.direct = direct.data(), batch.starts = batch.counts = zeros.data(), batch.pages = p.pages;
    batch.paths = zeros.data(), batch.positions = positions.data();
    draft.num_read = levels.reads ? num_read : 0;
    passed.rows.assign(levels.num_trees, {});
    for (size_t i = 0; i < rows.size(); i++) passed.rows[g.row_owners[rows[i]]].push_back(draft.num_read + int64_t(i));
    run_pass(draft, batch, draft.num_read + int64_t(rows.size()), rows.size(), draft.features, passed);
}

// Scores the nodes of `rows`. first_rotations: [num_trees].
void score(const Growth& g, const Placing& p, Draft& draft, const int64_t* first_rotations,
           const std::vector<int64_t>& rows, int64_t trees, Passed& passed) {
    const int64_t all = p.num_rows, n = rows.size();
    Batch batch{};
    batch.num_rows = n, batch.tokens = g.row_tokens, batch.slots = p.slots, batch.tables = p.rows;
    batch.direct = p.rows + all, batch.starts = p.rows + 2 * all, batch.counts = p.rows + 3 * all;
    batch.pages = p.pages, batch.paths = p.paths;
    std::vector<int64_t> gathered, positions;
    for (int64_t i : rows) positions.push_back(p.positions[i] + first_rotations[g.row_owners[i]]);
    batch.positions = positions.data();
    gathered.reserve(6 * n);
    if (n < all)
        for (const int64_t** column : {&batch.tokens, &batch.slots, &batch.tables, &batch.direct, &batch.starts,
                                       &batch.counts}) {
            for (int64_t i : rows) gathered.push_back((*column)[i]);
            *column = gathered.data() + gathered.size() - n;
        }
    std::vector<char> features;
    for (int64_t i = 0; draft.pairs && i < n; i++) {
        std::vector<int64_t>& slots = passed.rows[g.row_owners[rows[i]]];
        const char* from = passed.features.data() + slots[g.row_above[rows[i]]] * draft.hidden_bytes;
        features.insert(features.end(), from, from + draft.hidden_bytes);
        slots.push_back(draft.num_rows + i);
    }
    run_pass(draft, batch, n, trees, features.data(), passed);
}

// Scores the nodes of `rows` by what a block draft predicts of their depth.
void score_block(const Growth& g, Draft& draft, const std::vector<int64_t>& rows, int64_t trees, int64_t depth) {
    for (int64_t row : rows)
        std::copy_n(draft.block_probs + (g.row_owners[row] * draft.block_depths + depth) * draft.width, draft.width,
                    draft.out + draft.num_rows++ * draft.width);
    draft.passes++, draft.tree_passes += trees;
}

// Leaves out the weights of drafts that predict no nodes of this depth, so that the others' sum is 1, and marks trees
// without any other. weights: [num_trees, num_ssms], replaces those of `g`.
std::vector<uint8_t> end_drafts(Growth& g, const Draft* drafts, int64_t num_drafts, int64_t num_trees, int64_t depth,
                                std::vector<float>& weights) {
    std::vector<float> shares(num_trees * g.num_ssms);
    std::vector<uint8_t> stops(num_trees);
    for (int64_t tree = 0; tree < num_trees; tree++) {
        const int64_t first = tree * g.num_ssms;
        double sum = 0.0;
        for (int64_t i = 0; i < num_drafts; i++)
            if (!drafts[i].block_probs || depth < drafts[i].block_depths)
                sum += shares[first + drafts[i].ssm] = g.weights[first + drafts[i].ssm];
        for (int64_t i = 0; i < g.num_ssms; i++) shares[first + i] = float(shares[first + i] / std::max(sum, 1e-9));
        stops[tree] = sum == 0.0;
    }
    weights.swap(shares), g.weights = weights.data();
    return stops;
}

}  // namespace
