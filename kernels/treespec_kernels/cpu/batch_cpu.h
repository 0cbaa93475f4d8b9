// Arguments of a decoder's pass. decoder_cpu.cpp runs passes, and growth_cpu.cpp calls the drafts' passes.

extern "C" {

struct UpdatedRows {  // rows that use an adapter's low-rank updates
    const void* layers;  // LayerUpdates of each layer
    int64_t first, count;
};

struct RequestState {  // a request's recurrent states, and its rows of the pass (request_state.py)
    float* matrices;  // [num_layers, state_heads, key_dim, value_dim]
    void* inputs;     // [num_layers, stored_rows, channels + rates * state_heads] in the model's dtype
    const int64_t* parents;  // [earlier + num_rows], the parent of each slot of the tree; -1 for none
    // replayed: rows that were committed since the states were stored. earlier: slots that earlier passes computed, of
    // which only the inputs are kept; nothing is replayed or committed then
    int64_t stored_rows, replayed, earlier;
    // The first `commits` rows are committed tokens. They begin at `first_row` of the pass, the others at `tree_row`
    int64_t num_rows, commits, first_row, tree_row;
};

struct Batch {
    int64_t num_rows, num_layers;
    const int64_t* tokens;             // [num_rows]
    const int64_t* learned_positions;  // [num_rows], rows of Model::positions
    const int64_t *slots;            // [num_rows], page * PAGE + offset of the row's own K and V
    const int64_t *tables, *direct;  // [num_rows]: start of the request's pages; positions read through these pages
    const int64_t *starts, *counts;  // [num_rows]: start and number of the other positions' slots in `paths`
    const int64_t *pages, *paths;
    const int64_t* positions;  // [num_rows], rows of the rotations
    const float* rotation;     // [positions, ropes, 2, widest_head]: cos, signed sin
    void* cache;               // [num_planes, 2, num_pages, kv_heads, PAGE, HEAD_DIM] in the model's dtype
    int64_t num_pages;
    void* out;  // [num_rows, hidden] in the model's dtype
    // All in the model's dtype, or null:
    const void* inputs;  // [num_rows, hidden]: the residual stream before the first layer, instead of embeddings
    const void* qkv;     // [num_rows, (heads + 2 * kv_heads) * HEAD_DIM]: the first layer's projections
    void* states;        // [num_rows, num_states, hidden]: the residual stream before the layers `state_layers`
    const int64_t* state_layers;  // [num_states]; num_layers: after the last layer
    int64_t num_states;
    const UpdatedRows* updated;  // [num_updated]
    int64_t num_updated;
    const RequestState* requests;  // [num_requests]; null without recurrent layers
    int64_t num_requests;
};

struct TreeRows {  // whole trees of a pass, one after another
    int64_t num_trees, page_size;
    const int64_t *tokens, *parents, *depths;  // [num_rows], as indices in their trees, roots first; -1: no parent
    // Per tree: start of its rows and of its pages, committed positions, and row of the rotations for position 0
    const int64_t *first_row, *first_page, *context, *first_rotation;
    // Per tree, the rule of its walk: along the largest logits (0), not at all (-1), or the address of its request's Choice
    const int64_t* rules;
    const int64_t* pages;
};

struct Choice {  // choice of a token from a row of logits, with a request's temperature, truncation and noise
    int64_t (*choose)(const Choice* choice);  // `treespec_choose`, which the decoder's library does not contain
    const void* logits;  // [width], fp32, or bf16 if is_bf16
    int64_t is_bf16, width;
    float temperature, log_min_p;  // log_min_p: -inf without min_p
    double top_p;
    int64_t top_k;  // 0: all
    int64_t seed, sample, position;
    // Outputs, [MOST_CANDIDATES]: the tokens that may be chosen, ascending, with their scores and Philox integers
    int64_t* tokens;
    float* scores;
    uint32_t* integers;
};

struct KvPool {  // [outer, num_pages, heads, page_size, row_bytes], contiguous
    char* cells;
    int64_t outer, num_pages, heads, row_bytes;
};

struct Walks {  // walks of a pass's trees
    const void* logits;  // [num_rows, width] in the model's dtype
    int64_t width, num_pools, threads;
    const KvPool* pools;    // [num_pools], to compact
    // Outputs. paths, tokens: the path of tree t, and the token after each of its nodes, from first_row[t] on; -1: the
    // caller must choose this token. lengths: nodes of the path of each tree, 0 if its logits are not finite
    int64_t *paths, *tokens, *lengths;
};

}  // extern "C"

// Moves the K and V of a path's nodes behind the committed positions (kv_commit.py). Paths ascend, so that no source is
// overwritten before it is read.
inline void commit_path(const TreeRows& trees, const KvPool& pool, int64_t tree, const int64_t* path, int64_t length) {
    const int64_t* pages = trees.pages + trees.first_page[tree];
    const auto row_of = [&](int64_t block, int64_t logical, int64_t head) {
        const int64_t page = block * pool.num_pages + pages[logical / trees.page_size];
        const int64_t row = (page * pool.heads + head) * trees.page_size + logical % trees.page_size;
        return pool.cells + row * pool.row_bytes;
    };
    const int64_t context = trees.context[tree];
    for (int64_t i = 1; i < length; i++)
        for (int64_t block = 0; path[i] != i && block < pool.outer; block++)
            for (int64_t head = 0; head < pool.heads; head++)
                std::memcpy(row_of(block, context + i, head), row_of(block, context + path[i], head), pool.row_bytes);
}
