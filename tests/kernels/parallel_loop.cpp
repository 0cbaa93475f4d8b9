// Loops of parallel_cpu.h for tests/kernels/test_parallel_cpu.py.

#include <cstdint>

#include "parallel_cpu.h"

extern "C" {

// Adds 1 to each of `counts`, `loops` times.
void run_loops(int threads, int64_t count, int64_t loops, int64_t* counts) {
    for (int64_t loop = 0; loop < loops; loop++) parallel(threads, count, [&](int64_t i) { counts[i]++; });
}

// A thread that takes index `stuck` holds it until all others are done, as one does that has lost its core.
void run_with_stuck_thread(int threads, int64_t count, int64_t stuck) {
    std::atomic<int64_t> others{0};
    parallel(threads, count, [&](int64_t i) {
        if (i != stuck) others++;
        else while (others < count - 1) std::this_thread::yield();
    });
}
}
