// Arguments of a prompt lookup. lookup_cpu.cpp searches, and growth_cpu.cpp calls it for the rounds that it runs.

#include <cstdint>

struct Counts;
struct History;

extern "C" {

struct Search {
    const double* prior;  // [CLASSES, LENGTHS]
    double prior_trials, global_trials;
    const Counts *common, *counts;  // counts of all requests, and of this one (null: none)
    const int64_t* tokens;          // [length]
    int64_t length, depth;
    double least;
    int64_t looks_up;  // whether to search the text itself
    History* history;  // null: do not search a history
    int64_t owner;     // request to skip in the history
    // Outputs for at most BOTH * depth + 1 nodes. classes and lengths have a row for the text and one for the history.
    int64_t *node_tokens, *parents, *depths, *classes[2], *lengths[2];
    double *probs, *values;
};

}  // extern "C"
