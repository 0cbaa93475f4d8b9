// Products with quantised weights in AMX tiles, included by quantized_cpu.h.
//
// Weights are widened to bf16 block by block. A block has SPAN inputs: BLOCK, or 16 where BLOCK does not divide groups.
//
// A load waits until older stores to the same offset in any page have reached the cache, and stores wait for all older
// instructions, such as a product of 50 cycles. Loads and stores between two products of a block therefore belong to
// other blocks: earlier sums are added to the totals, and the next block's weights are widened.

// Widens a quarter of the weights of SPAN inputs of a panel to bf16. to: [4 tiles of 16 outputs][TILE_ROWS][16] pairs
// of inputs. The weights of a pair are loaded once and stored to all tiles: products of 2 to 64 rows take 10 to 20 %
// less time than if each tile loads them again.
template <int CODE, int SPAN, int QUARTER>
inline __attribute__((always_inline)) void widen_quarter([[maybe_unused]] const uint8_t* from,
                                                         [[maybe_unused]] const Table* table,
                                                         [[maybe_unused]] uint32_t (*to)[TILE_ROWS * 16]) {
#if BF16
    constexpr int PAIRS = SPAN / 8, OF_UNIT = int(unit_inputs(CODE) / STEP);
    with_all<PAIRS>([&](auto n) __attribute__((always_inline)) {
        constexpr int I = QUARTER * PAIRS + decltype(n)::value, P = I % OF_UNIT;
        const uint8_t* unit = from + I / OF_UNIT * value_bytes(CODE, unit_inputs(CODE));
#if defined(__AVX512BW__)
        if constexpr (CODE != INT8) {
            const Step<CODE, P> step(unit);
            const __m512i low = load<__m512i>(step.low), high = high_bits(CODE) ? load<__m512i>(step.high) : low;
            const __m512i values = CODE == TABLE ? load<__m512i>(table->halves) : low;
            with_all<4>([&](auto j) __attribute__((always_inline)) {
                _mm512_store_si512(to[j] + I * 16, to_pairs<CODE, P, j>(low, high, values));
            });
            return;
        }
#endif
        with_all<4>([&](auto j) __attribute__((always_inline)) {
            constexpr int C = 16 / LANES;
            widened even[C], odd[C];
            unpack<CODE, P, 0, j * C>(unit, table, even);
            unpack<CODE, P, 1, j * C>(unit, table, odd);
            for (int64_t c = 0; c < C; c++) {
                const uvec units = (uvec)even[c] >> 16 | high_half((uvec)odd[c]);
                std::memcpy(to[j] + I * 16 + c * LANES, &units, sizeof units);
            }
        });
    });
#endif
}

// Sums over a group of inputs of a panel for up to 16 rows, stored as four tiles, [4][16][16].
struct GroupSums {
    const float* sums = nullptr;
    int64_t rows = 0;  // 0: the group is incomplete
    const Factors* factors;
    const float* activations;  // sums of the group's activations, rows `groups` apart; null without offsets
    int64_t groups;
    vec (*totals)[VECS];
};

// Adds the scaled sums of rows 4 * quarter .. 4 * quarter + 3 to the totals.
inline void add_quarter(const GroupSums& from, int64_t quarter) {
    const int64_t begin = 4 * quarter, end = std::min(begin + 4, from.rows);
    if (begin >= end) return;
    const Factors factors = *from.factors;
    const auto add = [&](auto has_offset) {
        for (int64_t row = begin; row < end; row++) {
            vec* const totals = from.totals[row];
            const float activations = has_offset ? from.activations[row * from.groups] : 0.0f;
            for (int64_t j = 0; j < VECS; j++) {
                const vec sum = load<vec>(from.sums + (j * LANES / 16 * TILE_ROWS + row) * 16 + j * LANES % 16);
                totals[j] = add_group(totals[j], sum, factors.scale[j], has_offset, factors.offset[j], activations);
            }
        }
    };
    from.activations ? add(std::true_type()) : add(std::false_type());
}

// Widens the blocks of a panel one after another.
template <int CODE, int SPAN> class WidenedBlocks {
    static constexpr int64_t BYTES = value_bytes(CODE, SPAN), LINES = (BYTES / 64 + 3) / 4;
    const Geometry& sizes;
    const Table* const table;
    const uint8_t *const panel, *from;  // from: weights of the block to widen
    const int64_t blocks, of_group, ring;
    int64_t block = 0, left, group = 0;
    alignas(64) uint32_t wide[8][4][TILE_ROWS * 16];

  public:
    // ring: one less than the number of blocks to keep, a power of two
    WidenedBlocks(const Linear& layer, const Geometry& sizes, const uint8_t* panel, int64_t ring)
        : sizes(sizes), table(CODE == TABLE ? &table_of(layer.table) : nullptr), panel(panel),
          from(panel + sizes.start_of(0) + sizes.factor_bytes), blocks(layer.inputs / SPAN),
          of_group(layer.group / SPAN), ring(ring), left(of_group) {
        with_all<4>([&](auto quarter) { widen(quarter); });
        advance();
    }

    // Widens a quarter of the block, unless all blocks are widened. quarter: a compile-time constant.
    template <class Quarter> __attribute__((always_inline)) void widen(Quarter quarter) {
        if (block == blocks) return;
        for (int64_t i = 0; i < LINES; i++) __builtin_prefetch(from + FETCHED + 64 * (LINES * quarter + i));
        widen_quarter<CODE, SPAN, quarter>(from, table, wide[block & ring]);
    }

    void advance() {
        if (++block >= blocks) return;
        from += BYTES;
        if (--left == 0) from = panel + sizes.start_of(++group) + sizes.factor_bytes, left = of_group;
    }

    const uint32_t* tile(int64_t index, int64_t j) const { return wide[index & ring][j]; }
};

// Reads the factors of group g of a panel.
inline void read_factors(const Linear& layer, const Geometry& sizes, const uint8_t* panel, int64_t g, Factors& to) {
    read_factors(layer, panel + (sizes.super_bytes ? sizes.super_of(g) : 0), panel + sizes.start_of(g), layer.base, to);
}

// Multiplies a panel with at most 16 / MERGED rows. The sums of MERGED groups share tiles, so that fewer tiles are
// stored: a product takes 10 cycles with up to 4 rows, 12 with 8 and 19 with 16, but storing a tile 17 with any number of
// rows (Granite Rapids). A block of INT4 weights in the L2 cache takes 57 ns with 2 rows and 67 ns with 4, by
// `multiply_tiles` 72 and 77 ns.
// x: from TiledRows, with merged groups. group_sums: [rows, groups], sums of each group's activations; null without
// offsets.
template <int CODE, int SPAN, int MERGED>
void multiply_merged(const Linear& layer, int64_t panel, const scalar* x, int64_t rows, const float* group_sums,
                     void* out, Then then) {
    constexpr int64_t PARTS_OF_TILE = BLOCK / SPAN;
    const int64_t group = layer.group / SPAN, groups = layer.inputs / layer.group;
    const Geometry sizes(layer);
    const uint8_t* w = (const uint8_t*)layer.weight + panel * sizes.panel_bytes();
    WidenedBlocks<CODE, SPAN> wide(layer, sizes, w, 1);
    alignas(64) float sums[2][4][TILE_ROWS * 16];
    alignas(64) vec totals[TILE_ROWS / MERGED][VECS];
    Factors factors[2][MERGED];
    std::fill_n(&totals[0][0], rows * VECS, vec{});
    configure_tiles(rows * MERGED, rows * MERGED, SPAN);
    // Adds the sums of the groups from `first` on in columns j.
    const auto add = [&](int64_t set, int64_t first, int64_t j) __attribute__((always_inline)) {
        const int64_t count = std::min<int64_t>(MERGED, groups - first);
        for (int64_t r = 0; r < rows; r++) {
            vec total = totals[r][j];
            for (int64_t g = 0; g < count; g++)
                total = add_group(total, load<vec>(sums[set][j * LANES / 16] + (g * rows + r) * 16 + j * LANES % 16),
                                  factors[set][g].scale[j], group_sums, factors[set][g].offset[j],
                                  group_sums ? group_sums[r * groups + first + g] : 0.0f);
            totals[r][j] = total;
        }
    };
    int64_t set = 0, before = -1;
    for (int64_t first = 0; first < groups; before = first, first += MERGED, set = 1 - set) {
        const int64_t last = std::min(first + MERGED, groups);
        with_all<4>([](auto j) { tile_zero<j>(); });
        for (int64_t block = first * group; block < last * group; block++) {
            tile_load<4>(x + block / PARTS_OF_TILE * TILE_SCALARS + block % PARTS_OF_TILE * SPAN, 64);
            with_all<4>([&](auto j) __attribute__((always_inline)) {
                tile_load<6>(wide.tile(block, j), 64);
                tile_multiply<j, 4, 6>();
                wide.widen(j);
            });
            wide.advance();
            if (block % group == 0)
                read_factors(layer, sizes, w, block / group, factors[set][block / group - first]);
            // The previous sums are added between products, in two parts if there are several blocks.
            if (before >= 0 && block == first * group)
                for (int64_t j = 0; j < VECS / 2; j++) add(1 - set, before, j);
            if (before >= 0 && block == std::min(first * group + 1, last * group - 1))
                for (int64_t j = VECS / 2; j < VECS; j++) add(1 - set, before, j);
        }
        with_all<4>([&](auto j) { tile_store<j>(sums[set][j], 64); });
    }
    for (int64_t j = 0; j < VECS; j++) add(1 - set, before, j);
    finish(layer, panel, totals, rows, out, then);
}

// Multiplies a panel with at most 64 rows; arguments as above. A step computes the tiles of one block of rows and
// `length` blocks of a group's inputs. Its sums are stored in the next step and added in the one after it.
template <int CODE, int SPAN>
void multiply_tiles(const Linear& layer, int64_t panel, const scalar* x, int64_t rows, const float* group_sums,
                    void* out, Then then) {
    constexpr int64_t PARTS_OF_TILE = BLOCK / SPAN;
    const int64_t blocks = layer.inputs / SPAN, row_blocks = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t group = layer.group / SPAN, groups = blocks / group, length = std::min<int64_t>(group, 4);
    const int64_t ring = row_blocks == 1 || length == 1 ? 1 : 7;  // few blocks, which stay in the L1 cache
    const Geometry sizes(layer);
    const uint8_t* w = (const uint8_t*)layer.weight + panel * sizes.panel_bytes();
    WidenedBlocks<CODE, SPAN> wide(layer, sizes, w, ring);
    alignas(64) float sums[4][4][TILE_ROWS * 16];
    alignas(64) vec totals[4 * TILE_ROWS][VECS];
    Factors factors[4];  // factors of the latest groups
    std::fill_n(&totals[0][0], rows * VECS, vec{});

    configure_tiles(std::min(rows, TILE_ROWS), std::min(rows, TILE_ROWS), SPAN);
    const bool is_partial = group > length;  // whether a step covers only a part of a group
    GroupSums last, before;  // sums of the previous two steps
    int64_t g = 0, turn = 0;
    for (int64_t begin = 0, end; begin < blocks; begin = end) {
        const int64_t group_end = (g + 1) * group;
        end = std::min(begin + length, group_end);
        const bool starts = begin == g * group, ends = end == group_end;
        for (int64_t t = 0; t < row_blocks; t++) {
            const int64_t row = t * TILE_ROWS;
            float(*const own)[TILE_ROWS * 16] = sums[is_partial ? t : turn];
            const bool stays = !starts && row_blocks == 1;  // the sums stay in their tiles
            for (int64_t block = begin; block < end; block++) {
                const int64_t tile = (t * blocks + block) / PARTS_OF_TILE, part = block % PARTS_OF_TILE;
                tile_load<4>(x + tile * TILE_SCALARS + part * SPAN, 64);
                with_all<4>([&](auto j) {
                    if (block == begin && !stays) {
                        if (last.sums) tile_store<j>((char*)last.sums + j * 1024, 64);
                        if (starts) tile_zero<j>();
                        else tile_load<j>(own[j], 64);
                    }
                    tile_load<6>(wide.tile(block, j), 64);
                    tile_multiply<j, 4, 6>();
                    tile_free<6>();
                    if (t == 0) wide.widen(j);
                    if (block == begin) add_quarter(before, j);
                });
                if (t == 0) wide.advance();
                tile_free<4>();
            }
            if (ends && t == 0) read_factors(layer, sizes, w, g, factors[g & 3]);
            before = last;
            last = {own[0], ends ? std::min(TILE_ROWS, rows - row) : 0, &factors[g & 3],
                    group_sums ? group_sums + row * groups + g : nullptr, groups, totals + row};
            turn = 1 - turn;
        }
        g += ends;
    }
    for (int64_t j = 0; j < 4; j++) add_quarter(before, j);
    with_all<4>([&](auto j) { tile_store<j>((char*)last.sums + j * 1024, 64); });
    for (int64_t j = 0; j < 4; j++) add_quarter(last, j);
    finish(layer, panel, totals, rows, out, then);
}
