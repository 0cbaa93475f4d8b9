// What a decoder's pass is given: decoder_cpu.cpp runs passes, growth_cpu.cpp asks for those of drafts.

extern "C" {

struct Batch {
    int64_t num_rows, num_layers;
    const int64_t *tokens, *places;  // [num_rows]; places: rows of Model::positions
    const int64_t *slots;            // [num_rows], page * PAGE + offset of the row's own K and V
    const int64_t *tables, *direct;  // [num_rows]: where its request's pages begin; how many positions they give
    const int64_t *starts, *counts;  // [num_rows]: the slots of its further positions among `paths`
    const int64_t *pages, *paths;
    const int64_t* positions;  // [num_rows]
    const float* rotation;     // by position, [ropes, 2, HEAD_DIM]: cos, signed sin
    void* cache;               // in the model's dtype, [num_layers, 2, num_pages, kv_heads, PAGE, HEAD_DIM]
    int64_t num_pages;
    void* out;  // in the model's dtype, [num_rows, hidden]
};

}  // extern "C"
