// Products of bf16 in AMX tiles, included by linear_cpu.h.
//
// A tile has 16 rows of 64 bytes. Weights are read where they lie: 16 pairs of inputs of a panel, each of 16 outputs.
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
            for (int64_t i = 0; i < 16; i++)
                for (int64_t t = 0; t < 2; t++)
                    chains[t] = __builtin_fmaf(to_float(uint16_t(a.units[r][i] >> 16 * t)),
                                               to_float(uint16_t(b.units[i][o] >> 16 * t)), chains[t]);
            const float total = as_float(c.units[r][o]) + (chains[0] + chains[1]);
            std::memcpy(&c.units[r][o], &total, sizeof total);
        }
}
#endif

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
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(step), "i"(T) : "memory");
#else
    tile_move(tiles[T], (char*)from, step, false);
#endif
}

template <int T> inline void tile_store(void* to, int64_t step) {
#if TILES == 1
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(step), "i"(T) : "memory");
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

// Number of rows from which on tiles are used. In a prototype on Sapphire Rapids, SmolLM2's products of two rows took
// 8.9 ms in tiles and 9.5 ms by vdpbf16ps; with 4-bit weights, which have to be widened for tiles, 3.6 ms by either.
constexpr int64_t TILED_ROWS = 2, TILED_ROWS_QUANTIZED = 3;

// Configures the tiles 0 to 3 for sums and 4 and 5 for activations of `low` rows, or of `high` rows where odd; 6 and 7
// for weights. Releases them at its end: the kernel saves tiles in use whenever it switches threads.
class TileRows {
    struct alignas(64) Configuration {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {};
    };

  public:
    TileRows(int64_t low, int64_t high) {
        Configuration configuration;
        for (int64_t t = 0; t < 8; t++) configuration.rows[t] = uint8_t(t >= 6 ? 16 : t % 2 ? high : low);
#if TILES == 1
        asm volatile("ldtilecfg %0" ::"m"(configuration) : "memory");
#else
        for (int64_t t = 0; t < 8; t++) tiles[t].rows = configuration.rows[t];
#endif
    }
    ~TileRows() {
#if TILES == 1
        asm volatile("tilerelease" ::);
#endif
    }
};

constexpr int64_t TILE_ROWS = 16, SUM_BYTES = PANEL * sizeof(float);  // rows of a tile, and bytes of a row of sums
constexpr int64_t ROW_SCALARS = 32, TILE_SCALARS = TILE_ROWS * ROW_SCALARS;

// Copies activations tile by tile: [blocks of 16 rows][blocks of 32 inputs][16][32], valid until the next call. The
// `sharing` groups of inputs, `group` blocks each, whose rows share a tile lie below each other in it, and zeros beside
// them.
inline const uint16_t* to_tiles(const uint16_t* x, int64_t rows, int64_t inputs, int64_t group = 1,
                                int64_t sharing = 1) {
    static thread_local std::vector<uint16_t> memory;
    const int64_t blocks = inputs / BLOCK, row_blocks = (rows + TILE_ROWS - 1) / TILE_ROWS;
    memory.resize((row_blocks * blocks + 1) * TILE_SCALARS);
    if (sharing > 1) std::fill(memory.begin(), memory.end(), 0);
    uint16_t* tiled = (uint16_t*)((uintptr_t(memory.data()) + 63) / 64 * 64);
    uint16_t* tile = tiled;
    for (int64_t first = 0; first < rows; first += TILE_ROWS)
        for (int64_t b = 0; b < blocks; b++, tile += TILE_SCALARS) {
            const int64_t count = std::min(TILE_ROWS, rows - first);
            uint16_t* to = tile + b / group % sharing * (TILE_SCALARS / sharing);
            for (int64_t r = 0; r < count; r++)
                std::memcpy(to + r * ROW_SCALARS, x + (first + r) * inputs + b * BLOCK, ROW_SCALARS * sizeof *x);
        }
    return tiled;
}

// Adds the products of a block of rows and BLOCK inputs of a panel to tiles 0 to 3.
inline void multiply_wide(const void* w, const uint16_t* x) {
    tile_load<4>(x, 64);
    with_all<4>([&](auto j) {
        tile_load<6 + j % 2>((const char*)w + 64 * j, 4 * PANEL);
        tile_multiply<j, 4, 6 + j % 2>();
    });
}

// Adds the products of two blocks of rows, `further` scalars apart, and BLOCK inputs of half of a panel: of the first
// block to tiles 0 and 2, of the second one to 1 and 3.
inline void multiply_tall(const void* w, const uint16_t* x, int64_t further) {
    tile_load<4>(x, 64);
    tile_load<5>(x + further, 64);
    with_all<2>([&](auto j) {
        tile_load<6 + j>((const char*)w + 64 * j, 4 * PANEL);
        tile_multiply<2 * j, 4, 6 + j>();
        tile_multiply<2 * j + 1, 5, 6 + j>();
    });
}

// Stores the sums of `multiply_wide`, [16, PANEL].
inline void store_wide(void* sums) {
    with_all<4>([&](auto j) { tile_store<j>((char*)sums + 64 * j, SUM_BYTES); });
}

// Stores the sums of `multiply_tall`, [32, PANEL].
inline void store_tall(void* sums, int64_t half) {
    with_all<4>([&](auto j) {
        tile_store<j>((char*)sums + j % 2 * TILE_ROWS * SUM_BYTES + 128 * half + j / 2 * 64, SUM_BYTES);
    });
}

inline void zero_tiles() {
    with_all<4>([](auto j) { tile_zero<j>(); });
}

// Loads the sums of `multiply_tall`, or of `multiply_wide`.
inline void load_tiles(const void* sums, bool is_tall, int64_t half) {
    if (is_tall)
        with_all<4>([&](auto j) {
            tile_load<j>((const char*)sums + j % 2 * TILE_ROWS * SUM_BYTES + 128 * half + j / 2 * 64, SUM_BYTES);
        });
    else with_all<4>([&](auto j) { tile_load<j>((const char*)sums + 64 * j, SUM_BYTES); });
}

// Multiplies a panel with at most MANY rows; the number of inputs is a multiple of BLOCK. x: from `to_tiles`.
void multiply_tiles(const Linear& layer, int64_t panel, const uint16_t* x, int64_t rows, void* out, Then then) {
    const int64_t k = layer.inputs;
    const uint16_t* w = (const uint16_t*)layer.weight + panel * PANEL * k;
    alignas(64) vec sums[MANY][VECS];
    const auto fetch = [&](const uint16_t* from) {
        for (int64_t j = 0; j < BLOCK * PANEL; j += 32) __builtin_prefetch(from + 2 * BLOCK * PANEL + j);
    };
    if (rows <= TILE_ROWS) {
        const TileRows configured(rows, rows);
        zero_tiles();
        for (int64_t i = 0; i < k; i += BLOCK, w += BLOCK * PANEL, x += TILE_SCALARS) {
            fetch(w);
            multiply_wide(w, x);
        }
        store_wide(sums);
    } else {
        const TileRows configured(TILE_ROWS, rows - TILE_ROWS);
        for (int64_t half = 0; half < 2; half++) {
            zero_tiles();
            for (int64_t i = 0; i < k; i += BLOCK) {
                if (half == 0) fetch(w + i * PANEL);
                multiply_tall(w + i * PANEL + half * PANEL, x + i * TILE_ROWS, k * TILE_ROWS);
            }
            store_tall(sums, half);
        }
    }
    finish(layer, panel, sums, rows, out, then);
}
