// Linear layers: choose the products by weights and number of rows. Included by decoder_cpu.cpp.

#include "products_cpu.h"
#if TILES
#include "tiles_cpu.h"
#endif
#include "quantized_cpu.h"
#include "integer_cpu.h"
#include "blocks_cpu.h"

// Multiplies one matrix of a product.
void linear_part(const Linear& layer, const scalar* x, int64_t rows, void* out, Then then, int threads) {
    const int64_t row_bytes = layer.stride * (then == ROUND ? sizeof(scalar) : sizeof(float));
    if (layer.integer) return integer_linear(layer, x, rows, out, then, threads);
    if (layer.code) return quantized_linear(layer, x, rows, out, then, threads);
    const int64_t panels = (layer.outputs + PANEL - 1) / PANEL;
#if TILES
    if (rows >= TILED_ROWS && layer.inputs % BLOCK == 0) {
        const TiledRows tiles(rows, layer.inputs);
        parallel(threads_of_rows(rows, threads), rows, [&](int64_t r) { tiles.copy(r, x + r * layer.inputs); });
        return parallel(threads, panels, [&](int64_t panel) {
            for (int64_t r = 0; r < rows; r += MANY)
                multiply_tiles(layer, panel, tiles.data() + r * layer.inputs, std::min(MANY, rows - r),
                               (char*)out + r * row_bytes, then);
        });
    }
#endif
    const factor* factors = to_factors(x, rows * layer.inputs);
    parallel(threads, panels, [&](int64_t panel) {
        const FlushDenormals flushing;
        in_parts(rows, MANY, [&](int64_t r, int64_t count) {
            multiply(layer, panel, factors + r * layer.inputs, count, (char*)out + r * row_bytes, then);
        });
    });
}

// Applies a linear layer, [rows, inputs] -> [rows, layer.stride].
void linear(const Linear& layer, const scalar* x, int64_t rows, void* out, Then then, int threads) {
    for (const Linear* part = &layer; part; part = part->rest) {
        linear_part(*part, x, rows, out, then, threads);
        out = (char*)out + part->outputs * (then == ROUND ? sizeof(scalar) : sizeof(float));
    }
}
