// Products of bf16 in AMX tiles, included by linear_cpu.h.
//
// A tile has 16 rows of 64 bytes. Weights are read where they lie: 16 pairs of inputs of a panel, each of 16 outputs.
// With TILES == 2, the instructions are emulated, so that tests can run on machines without AMX.

#if TILES == 1
#define TILE_ZERO(t) asm volatile("tilezero %%tmm" #t ::)
#define TILE_LOAD(t, from, step) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(from), "r"(int64_t(step)) : "memory")
#define TILE_STORE(t, to, step) \
    asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"(int64_t(step)) : "memory")
#define TILE_MULTIPLY(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
#else
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

#define TILE_ZERO(t) std::memset(tiles[t].units, 0, sizeof tiles[t].units)
#define TILE_LOAD(t, from, step) tile_move(tiles[t], (char*)(from), step, false)
#define TILE_STORE(t, to, step) tile_move(tiles[t], (char*)(to), step, true)
#define TILE_MULTIPLY(c, a, b) tile_multiply(tiles[c], tiles[a], tiles[b])
#endif

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

// Adds the products of at most 16 rows with BLOCK inputs of a panel to tiles 0 to 3.
inline void multiply_wide(const uint16_t* w, const uint16_t* x, int64_t k) {
    TILE_LOAD(4, x, 2 * k);
    TILE_LOAD(6, w, 4 * PANEL);
    TILE_MULTIPLY(0, 4, 6);
    TILE_LOAD(7, w + 32, 4 * PANEL);
    TILE_MULTIPLY(1, 4, 7);
    TILE_LOAD(6, w + 64, 4 * PANEL);
    TILE_MULTIPLY(2, 4, 6);
    TILE_LOAD(7, w + 96, 4 * PANEL);
    TILE_MULTIPLY(3, 4, 7);
}

// Adds the products of 16 rows and of the further ones with one half of a panel to tiles 0 and 2, and 1 and 3.
inline void multiply_tall(const uint16_t* w, int64_t half, const uint16_t* x, int64_t k) {
    const uint16_t* further = x + 16 * k;
    w += half * PANEL;
    for (int64_t i = 0; i < k; i += BLOCK, w += BLOCK * PANEL) {
        for (int64_t j = 0; half == 0 && j < BLOCK * PANEL; j += 32) __builtin_prefetch(w + 2 * BLOCK * PANEL + j);
        TILE_LOAD(4, x + i, 2 * k);
        TILE_LOAD(5, further + i, 2 * k);
        TILE_LOAD(6, w, 4 * PANEL);
        TILE_MULTIPLY(0, 4, 6);
        TILE_MULTIPLY(1, 5, 6);
        TILE_LOAD(7, w + 32, 4 * PANEL);
        TILE_MULTIPLY(2, 4, 7);
        TILE_MULTIPLY(3, 5, 7);
    }
}

inline void zero_tiles() {
    TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
}

constexpr int64_t SUM_BYTES = PANEL * sizeof(float);  // of a row

// Loads the sums that `store_wide` stored.
inline void load_wide(const vec (*sums)[VECS]) {
    const char* from = (const char*)sums;
    TILE_LOAD(0, from, SUM_BYTES); TILE_LOAD(1, from + 64, SUM_BYTES);
    TILE_LOAD(2, from + 128, SUM_BYTES); TILE_LOAD(3, from + 192, SUM_BYTES);
}

// Stores the sums of `multiply_wide`.
inline void store_wide(vec (*sums)[VECS]) {
    char* to = (char*)sums;
    TILE_STORE(0, to, SUM_BYTES); TILE_STORE(1, to + 64, SUM_BYTES);
    TILE_STORE(2, to + 128, SUM_BYTES); TILE_STORE(3, to + 192, SUM_BYTES);
}

// Multiplies a panel with at most MANY rows; the number of inputs is a multiple of BLOCK.
void multiply_tiles(const Linear& layer, int64_t panel, const uint16_t* x, int64_t rows, void* out, Then then) {
    const int64_t k = layer.inputs, step = SUM_BYTES;
    const uint16_t* w = (const uint16_t*)layer.weight + panel * PANEL * k;
    alignas(64) vec sums[MANY][VECS];
    char* to = (char*)sums;
    if (rows <= 16) {
        const TileRows configured(rows, rows);
        zero_tiles();
        for (int64_t i = 0; i < k; i += BLOCK, w += BLOCK * PANEL) {
            for (int64_t j = 0; j < BLOCK * PANEL; j += 32) __builtin_prefetch(w + 2 * BLOCK * PANEL + j);
            multiply_wide(w, x + i, k);
        }
        store_wide(sums);
    } else {
        const TileRows configured(16, rows - 16);
        for (int64_t half = 0; half < 2; half++, to += 128) {
            zero_tiles();
            multiply_tall(w, half, x, k);
            TILE_STORE(0, to, step); TILE_STORE(2, to + 64, step);
            TILE_STORE(1, to + 16 * step, step); TILE_STORE(3, to + 16 * step + 64, step);
        }
    }
    finish(layer, panel, sums, rows, out, then);
}
