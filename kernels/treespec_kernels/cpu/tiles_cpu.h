// Products of bf16 in AMX tiles, included by linear_cpu.h.
//
// A tile has 16 rows of 64 bytes. Weights are read in place: 16 pairs of inputs of a panel, each for 16 outputs.
// With TILES == 2, the instructions are emulated, so that tests can run on machines without AMX.

#if TILES == 2
struct Tile { int64_t rows; alignas(64) uint32_t units[16][16]; };
inline thread_local Tile tiles[8];

void tile_move(Tile& tile, char* memory, int64_t step, bool storing) {
    for (int64_t r = 0; r < tile.rows; r++)
        storing ? std::memcpy(memory + r * step, tile.units[r], 64) : std::memcpy(tile.units[r], memory + r * step, 64);
}

void tile_multiply(Tile& c, const Tile& a, const Tile& b) {
    for (int64_t r = 0; r < a.rows; r++)
        for (int64_t o = 0; o < 16; o++) {
            float chains[2] = {};
            for (int64_t i = 0; i < b.rows; i++)
                for (int64_t t = 0; t < 2; t++)
                    chains[t] = __builtin_fmaf(to_float(uint16_t(a.units[r][i] >> 16 * t)),
                                               to_float(uint16_t(b.units[i][o] >> 16 * t)), chains[t]);
            const float total = as_float(c.units[r][o]) + (chains[0] + chains[1]);
            std::memcpy(&c.units[r][o], &total, sizeof total);
        }
}
#endif

// The memory of a tile whose rows are up to a row of sums apart, for the compiler's order of loads and stores.
typedef char TileBytes[16 * 64 * sizeof(float)];

template <int T> inline void tile_zero() {
#if TILES == 1
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
#else
    std::memset(tiles[T].units, 0, sizeof tiles[T].units);
#endif
}

// Loads rows of 64 bytes, `step` bytes apart.
template <int T> inline void tile_load(const void* from, int64_t step) {
#if TILES == 1
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(step), "i"(T), "m"(*(const TileBytes*)from));
#else
    tile_move(tiles[T], (char*)from, step, false);
#endif
}

template <int T> inline void tile_store(void* to, int64_t step) {
#if TILES == 1
    asm volatile("tilestored %%tmm%c3, (%1,%2,1)" : "+m"(*(TileBytes*)to) : "r"(to), "r"(step), "i"(T));
#else
    tile_move(tiles[T], (char*)to, step, true);
#endif
}

template <int C, int A, int B> inline void tile_multiply() {
#if TILES == 1
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
#else
    tile_multiply(tiles[C], tiles[A], tiles[B]);
#endif
}

// Minimum number of rows for tiles. In a prototype on Sapphire Rapids, SmolLM2's products of two rows took 8.9 ms in
// tiles and 9.5 ms by vdpbf16ps. Quantised weights must be widened for tiles: with them, products of two rows take 5.2
// ms in tiles and 5.5 ms without (4 bits), or 13.0 and 9.4 ms (8 bits; Emerald Rapids, medians of a run). Passes of one
// row take the same time in both ways (4 bits, Granite Rapids).
constexpr int64_t TILED_ROWS = 2;
constexpr int64_t tiled_rows_quantized(int64_t code) { return code == INT4 ? 2 : 3; }

inline thread_local int64_t tiles_configured = 0;  // this thread's configuration, 0 if it has released its tiles

// Configures tiles 0 to 3 for sums, 4 and 5 for activations (`low` rows in even tiles, `high` rows in odd ones), 6 and 7
// for weights of `span` inputs.
void configure_tiles(int64_t low, int64_t high, int64_t span = BLOCK) {
    struct alignas(64) Configuration {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {};
    };
    const int64_t key = (low << 8 | high) << 8 | span;
    if (tiles_configured == key) return;
    tiles_configured = key;
    Configuration configuration;
    for (int64_t t = 0; t < 8; t++) configuration.rows[t] = uint8_t(t >= 6 ? span / 2 : t % 2 ? high : low);
    for (int64_t t = 4; t < 6; t++) configuration.row_bytes[t] = uint16_t(2 * span);
#if TILES == 1
    asm volatile("ldtilecfg %0" ::"m"(configuration));
#else
    for (int64_t t = 0; t < 8; t++) tiles[t].rows = configuration.rows[t];
#endif
}

// Releases this thread's tiles after its share of a product: the kernel saves tiles in use at every thread switch.
void release_tiles() {
    if (!tiles_configured) return;
    tiles_configured = 0;
#if TILES == 1
    asm volatile("tilerelease" ::);
#endif
}

constexpr int64_t TILE_ROWS = 16, SUM_BYTES = PANEL * sizeof(float);  // rows of a tile; bytes of a row of sums
constexpr int64_t ROW_SCALARS = 32, TILE_SCALARS = TILE_ROWS * ROW_SCALARS;

// Number of groups of inputs whose sums share the rows of tiles (`multiply_merged`).
constexpr int64_t merged_groups(int64_t rows) { return rows <= 2 ? 4 : rows < 8 ? 2 : 1; }

// Activations tile by tile: [blocks of 16 rows][blocks of 32 inputs][16][32], valid until the next object exists. If
// groups of inputs are merged, each has the rows of its tiles that follow those of the group before; the others are zero.
class TiledRows {
    const int64_t blocks;
    uint16_t* tiles;

  public:
    TiledRows(int64_t rows, int64_t inputs) : blocks(inputs / BLOCK) {
        static thread_local std::vector<uint16_t> memory;
        const int64_t count = ((rows + TILE_ROWS - 1) / TILE_ROWS * blocks + 1) * TILE_SCALARS;
        tiles = (uint16_t*)((uintptr_t(at_least(memory, count)) + 63) / 64 * 64);
    }

    // Copies a row. rows: rows of its share, less than 8 if groups of `group` inputs, a multiple of 16, are merged.
    void copy(int64_t row, const uint16_t* x, int64_t rows, int64_t merged, int64_t group) const {
        static const uint16_t zeros[BLOCK] = {};
        const int64_t span = merged == 1 ? BLOCK : std::min(group, BLOCK);
        uint16_t* const first = tiles + (row / TILE_ROWS * blocks * TILE_ROWS + row % TILE_ROWS) * ROW_SCALARS;
        for (int64_t i = 0; i < blocks * BLOCK; i += span)
            for (int64_t m = 0; m < merged; m++) {
                uint16_t* to = first + i / BLOCK * TILE_SCALARS + i % BLOCK + m * rows * ROW_SCALARS;
                const uint16_t* from = merged == 1 || i / group % merged == m ? x + i : zeros;
                span == BLOCK ? std::memcpy(to, from, 2 * BLOCK) : std::memcpy(to, from, BLOCK);
            }
    }

    const uint16_t* data() const { return tiles; }
};

// The activations of a product's shares of `least` rows and more. Each share begins with a block of tiles. group: the
// inputs of groups to be merged, or 0.
class TiledShares {
    const Product& product;
    int64_t total = 0;
    std::vector<int64_t> starts;  // by share: its first row in the tiles, or -1
    const scalar* tiles = nullptr;

  public:
    bool has_all = true;

    TiledShares(const Product& product, int64_t least, int64_t group = 0) : product(product) {
        const int64_t k = product.form().inputs;
        for (int64_t i = 0; i < product.count; i++) {
            const bool tiled = product.shares[i].rows >= least;
            starts.push_back(tiled ? total : -1), has_all &= tiled;
            if (tiled) total += (product.shares[i].rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
        }
        if (!total) return;
        const TiledRows rows(total, k);
        tiles = rows.data();
        for (int64_t i = 0; i < product.count; i++) {
            const Share& share = product.shares[i];
            if (starts[i] >= 0)
                parallel(threads_of_rows(share.rows, product.threads), share.rows, [&](int64_t r) {
                    rows.copy(starts[i] + r, product.x + (share.first + r) * k, share.rows,
                              group ? merged_groups(share.rows) : 1, group);
                });
        }
    }

    // Returns the tiles of a share, or null.
    const scalar* of(const Share& share) const {
        const int64_t start = starts[&share - product.shares];
        return start < 0 ? nullptr : tiles + start * product.form().inputs;
    }
};

// Frees the register of a tile that is not read again. The fewer tiles are in use, the more physical registers remain
// for later instructions. On an Emerald Rapids shared with other machines, the products of a block took 97 ns with
// seven tiles in use, and 53 ns with four, two of them freed after each use, in phases that a busy hyperthread would
// explain; at other times 29 ns in both cases.
template <int T> inline void tile_free() {
#if TILES == 1
    tile_zero<T>();
#endif
}

inline void zero_tiles() {
    with_all<4>([](auto j) { tile_zero<j>(); });
}

// Multiplies a panel with at most MANY rows; the number of inputs is a multiple of BLOCK. x: from TiledRows.
void multiply_tiles(const Linear& layer, int64_t panel, const uint16_t* x, int64_t rows, void* out, Then then) {
    const int64_t k = layer.inputs, further = k * TILE_ROWS;  // stride in scalars between blocks of rows
    const uint16_t* w = (const uint16_t*)layer.weight + panel * PANEL * k;
    alignas(64) vec sums[MANY][VECS];
    // Each tile of the first pass over the panel also prefetches a part of a later block.
    const auto fetch = [&](int64_t i, int64_t first, int64_t lines) {
        const uint16_t* from = w + (i + 2 * BLOCK) * PANEL;
        for (int64_t line = first; line < first + lines; line++) __builtin_prefetch(from + 32 * line);
    };
    if (rows <= TILE_ROWS) {
        configure_tiles(rows, rows);
        zero_tiles();
        for (int64_t i = 0; i < k; i += BLOCK) {
            tile_load<4>(x + i * TILE_ROWS, 64);
            with_all<4>([&](auto j) {
                tile_load<6>(w + i * PANEL + 32 * j, 4 * PANEL);
                fetch(i, 16 * j, 16);
                tile_multiply<j, 4, 6>();
                tile_free<6>();
            });
            tile_free<4>();
        }
        with_all<4>([&](auto j) { tile_store<j>((char*)sums + 64 * j, SUM_BYTES); });
    } else {
        configure_tiles(TILE_ROWS, rows - TILE_ROWS);
        for (int64_t half = 0; half < 2; half++) {
            zero_tiles();
            for (int64_t i = 0; i < k; i += BLOCK) {
                tile_load<4>(x + i * TILE_ROWS, 64);
                tile_load<5>(x + i * TILE_ROWS + further, 64);
                with_all<2>([&](auto j) {
                    tile_load<6>(w + i * PANEL + 64 * half + 32 * j, 4 * PANEL);
                    if (half == 0) fetch(i, 32 * j, 32);
                    tile_multiply<2 * j, 4, 6>();
                    tile_multiply<2 * j + 1, 5, 6>();
                    tile_free<6>();
                });
                tile_free<4>(), tile_free<5>();
            }
            with_all<4>([&](auto j) {
                tile_store<j>((char*)sums + j % 2 * TILE_ROWS * SUM_BYTES + 128 * half + j / 2 * 64, SUM_BYTES);
            });
        }
    }
    finish(layer, panel, sums, rows, out, then);
}
