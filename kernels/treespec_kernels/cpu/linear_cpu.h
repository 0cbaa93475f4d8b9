// Linear layers: choose the products by weights and number of rows. Included by decoder_cpu.cpp.

#include "products_cpu.h"
#if TILES
#include "tiles_cpu.h"
#endif
#include "quantized_cpu.h"
#include "integer_cpu.h"

void linear(const Linear& layer, const scalar* x, int64_t rows, void* out, Then then, int threads) {
    const int64_t row_bytes = layer.outputs * (then == ROUND ? sizeof(scalar) : sizeof(float));
    if (layer.integer) return integer_linear(layer, x, rows, out, then, threads);
    if (layer.bits) return quantized_linear(layer, x, rows, out, then, threads);
#if TILES
    const bool tiled = rows >= TILED_ROWS && layer.inputs % BLOCK == 0;
#else
    constexpr bool tiled = false;
#endif
    const factor* factors = tiled ? nullptr : to_factors(x, rows * layer.inputs);
    parallel(threads, (layer.outputs + PANEL - 1) / PANEL, [&](int64_t panel) {
        const FlushDenormals flushing;
        in_parts(rows, MANY, [&](int64_t r, int64_t count) {
            void* to = (char*)out + r * row_bytes;
#if TILES
            if (tiled) return multiply_tiles(layer, panel, x + r * layer.inputs, count, to, then);
#endif
            multiply(layer, panel, factors + r * layer.inputs, count, to, then);
        });
    });
}
