// Linear layers: choose the products by weights and number of rows. Included by decoder_cpu.cpp.

#include "products_cpu.h"
#if TILES
#include "tiles_cpu.h"
#endif
#include "quantized_cpu.h"
#include "integer_cpu.h"
#include "blocks_cpu.h"

void dense_product(const Product& product) {
    const int64_t width = product.width;
#if TILES
    const int64_t k = product.form().inputs;
    // Low-rank products have too few numbers for tiles.
    const TiledShares tiled(product, k % BLOCK || k != width || product.form().narrow ? INT64_MAX : TILED_ROWS);
    const factor* factors = tiled.has_all ? nullptr : to_factors(product.x, product.rows() * width);
#else
    const factor* factors = to_factors(product.x, product.rows() * width);
#endif
    product.each_panel([&](const Share& share, int64_t panel) {
#if TILES
        if (const scalar* x = tiled.of(share)) {
            for (int64_t r = 0; r < share.rows; r += MANY)
                multiply_tiles(*share.layer, panel, x + r * k, std::min(MANY, share.rows - r),
                               product.row(share.first + r, share.output), product.then);
            return;
        }
#endif
        const FlushDenormals flushing;
        in_parts(share.rows, MANY, [&](int64_t r, int64_t count) {
            const int64_t row = share.first + r;
            with_constant<PANEL / 16>(width_of(*share.layer) / 16, [&](auto parts) {
                multiply<16 * parts>(*share.layer, panel, factors + row * width + share.input, width, count,
                                     product.row(row, share.output), product.then);
            });
        });
    });
}

// Multiplies the rows of each share with its matrix, [rows, inputs] -> [rows, stride]. Shares follow one another.
void linear(const Share* shares, int64_t count, const scalar* x, void* out, Then then, int threads) {
    std::vector<Share> rest;
    for (;;) {
        const Product product{shares, count, x, out, then, threads, shares->layer->inputs};
        const Linear& form = product.form();
        if (form.integer) integer_product(product);
        else if (form.code) quantized_product(product);
        else dense_product(product);
        if (!form.rest) return;
        out = (char*)out + form.outputs * (then == ROUND ? sizeof(scalar) : sizeof(float));
        if (rest.empty()) rest.assign(shares, shares + count);
        for (Share& share : rest) share.layer = share.layer->rest;
        shares = rest.data();
    }
}

// Applies a linear layer, [rows, inputs] -> [rows, layer.stride].
void linear(const Linear& layer, const scalar* x, int64_t rows, void* out, Then then, int threads) {
    const Share whole{&layer, 0, rows};
    linear(&whole, 1, x, out, then, threads);
}
