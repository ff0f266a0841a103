// Products with packed weights: rows [n, in] times a matrix [out, in], with bias, and the gated pair.
//
// A weight is packed once into panels of PANEL outputs, depth-major, so that every product, from one row
// to thousands, reads it front to back. Two matrices packed as a pair share panels half and half: then
// gate and up of the same outputs meet in one set of registers.
//
// Each output is summed by one thread in one order, so results do not depend on the number of threads.

#include <algorithm>

#include "product.h"
#include "threads.h"

namespace moonpool {
namespace {

constexpr int HALF_VECTORS = PANEL_VECTORS / 2;
constexpr int HALF = PANEL / 2;

// Rows are repacked in blocks of about this size: they stay in the L2 cache while panels pass by.
constexpr int64_t BLOCK_BYTES = 1 << 20;
// How far before its use a weight is fetched when nothing else hides the memory's latency.
constexpr int64_t FETCH_AHEAD_FLOATS = 512;

struct Weight {
    const float* panels;
    const float* bias;  // in panel order, or null
    int64_t in, out;
    bool paired;
    int64_t half_out() const { return out / 2; }
    int64_t panel_count() const { return paired ? (half_out() + HALF - 1) / HALF : (out + PANEL - 1) / PANEL; }
};

struct Output {
    float* rows;
    int64_t stride;
    bool gated;
};

// Stores the first `count` floats of HALF_VECTORS vectors; count may be zero or less.
MOONPOOL_INLINE void store_half(float* to, const Vector* vectors, int64_t count) {
    if (count >= HALF) {
#pragma GCC unroll 4
        for (int v = 0; v < HALF_VECTORS; v++) store(to + v * WIDTH, vectors[v]);
    } else if (count > 0) {
        float all[HALF];
        for (int v = 0; v < HALF_VECTORS; v++) store(all + v * WIDTH, vectors[v]);
        std::memcpy(to, all, count * sizeof(float));
    }
}

template <int ROWS>
MOONPOOL_INLINE void store_sums(Sums<ROWS, PANEL_VECTORS>& sums, const Weight& weight, const Output& output,
                                int64_t first_row, int64_t panel) {
    float* row = output.rows + first_row * output.stride;
    if (output.gated) {
        const int64_t column = panel * HALF;
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++, row += output.stride) {
            Vector product[HALF_VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < HALF_VECTORS; v++) product[v] = silu(sums.at[r][v]) * sums.at[r][HALF_VECTORS + v];
            store_half(row + column, product, weight.half_out() - column);
        }
        return;
    }
    const int64_t step = weight.paired ? HALF : PANEL;
    const int64_t column = panel * step;
    const int64_t second = weight.paired ? weight.half_out() + column : column + HALF;
    const int64_t first_count = (weight.paired ? weight.half_out() : weight.out) - column;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++, row += output.stride) {
        store_half(row + column, sums.at[r], first_count);
        store_half(row + second, sums.at[r] + HALF_VECTORS, weight.out - second);
    }
}

struct Fetch {
    const float* from;
    int64_t step;
};

// One tile of rows (depth-major, as transpose_rows leaves it) times one panel.
template <int ROWS>
void multiply_tile(const float* tile, const Weight& weight, const Output& output, int64_t first_row,
                   int64_t panel, Fetch fetch) {
    Sums<ROWS, PANEL_VECTORS> sums;
#pragma GCC unroll 16
    for (int v = 0; v < PANEL_VECTORS; v++) {
        const Vector start = weight.bias ? load(weight.bias + panel * PANEL + v * WIDTH) : Vector{};
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) sums.at[r][v] = start;
    }
    const float* columns = weight.panels + panel * weight.in * PANEL;
    if (fetch.step)
        multiply<ROWS, PANEL_VECTORS, 1, ROWS>(sums, tile, columns, PANEL, weight.in, fetch.from, fetch.step);
    else
        multiply<ROWS, PANEL_VECTORS, 1, ROWS>(sums, tile, columns, PANEL, weight.in);
    store_sums<ROWS>(sums, weight, output, first_row, panel);
}

using MultiplyTile = void (*)(const float*, const Weight&, const Output&, int64_t, int64_t, Fetch);

template <int... ROWS>
constexpr MultiplyTile tile_function(int rows, std::integer_sequence<int, ROWS...>) {
    constexpr MultiplyTile functions[] = {multiply_tile<ROWS + 1>...};
    return functions[rows - 1];
}

// A block of rows cut into tiles of nearly equal height, at most TILE_ROWS.
struct Tiling {
    int64_t rows, tiles;
    explicit Tiling(int64_t rows) : rows(rows), tiles((rows + TILE_ROWS - 1) / TILE_ROWS) {}
    Range tile(int64_t index) const { return share(rows, index, tiles); }
};

// With one tile a panel is used once: fetch a little ahead in the same stream (panels follow each other).
// With more, the first ones fetch the next panel line by line, while this one is multiplied from the cache.
Fetch plan_fetch(const float* columns, int64_t in, int64_t tile, int64_t tiles) {
    constexpr int64_t LINE_FLOATS = CACHE_LINE_BYTES / sizeof(float);
    if (tiles == 1) return {columns + FETCH_AHEAD_FLOATS, PANEL};
    if (tile * LINE_FLOATS < PANEL) return {columns + in * PANEL + tile * LINE_FLOATS, PANEL};
    return {columns, 0};
}

// The calling thread's share of a block: (panel, tile) pairs in an order that reads each panel once.
void multiply_share(const float* tiles, int64_t pitch, const Tiling& tiling, const Weight& weight,
                    const Output& output, int64_t first_row) {
    const Range pairs = own_share(weight.panel_count() * tiling.tiles);
    for (int64_t pair = pairs.begin; pair < pairs.end; pair++) {
        const int64_t panel = pair / tiling.tiles, index = pair % tiling.tiles;
        const Range tile = tiling.tile(index);
        const Fetch fetch =
            plan_fetch(weight.panels + panel * weight.in * PANEL, weight.in, index, tiling.tiles);
        const auto multiply_rows =
            tile_function(int(tile.end - tile.begin), std::make_integer_sequence<int, TILE_ROWS>());
        multiply_rows(tiles + index * pitch, weight, output, first_row + tile.begin, panel, fetch);
    }
}

void multiply_rows(const float* rows, int64_t stride, int64_t count, const Weight& weight, const Output& output) {
    thread_local Scratch scratch;
    if (count == 1) {  // one row lies depth-major as it is
#pragma omp parallel
        multiply_share(rows, 0, Tiling(1), weight, output, 0);
        return;
    }
    const int64_t pitch = TILE_ROWS * weight.in + WIDTH;  // transpose_rows spills
    const int64_t tiles_max = std::max<int64_t>(1, BLOCK_BYTES / (pitch * (int64_t)sizeof(float)));
    const int64_t block_rows = std::min(count, tiles_max * TILE_ROWS);
    float* tiles = scratch.floats(Tiling(block_rows).tiles * pitch);
#pragma omp parallel
    for (int64_t first = 0; first < count; first += block_rows) {
        const Tiling tiling(std::min(block_rows, count - first));
        const Range own = own_share(tiling.tiles);
        for (int64_t index = own.begin; index < own.end; index++) {
            const Range tile = tiling.tile(index);
            transpose_rows(rows + (first + tile.begin) * stride, stride, int(tile.end - tile.begin), weight.in,
                           tiles + index * pitch);
        }
#pragma omp barrier
        multiply_share(tiles, pitch, tiling, weight, output, first);
#pragma omp barrier
    }
}

// Lane `lane` of panel `panel` where output `output` of part `part` is packed.
struct Place {
    int64_t panel, lane;
};

Place place(int64_t output, int part, bool paired) {
    if (paired) return {output / HALF, part * HALF + output % HALF};
    return {output / PANEL, output % PANEL};
}

// Up to WIDTH rows of a matrix become as many neighbouring lanes of a panel.
void pack_lanes(const float* rows, int64_t stride, int count, int64_t in, float* lanes) {
    int64_t k = 0;
    for (; count == WIDTH && k + WIDTH <= in; k += WIDTH) {
        Vector block[WIDTH];
#pragma GCC unroll 16
        for (int r = 0; r < WIDTH; r++) block[r] = load(rows + r * stride + k);
        transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++) store(lanes + (k + i) * PANEL, block[i]);
    }
    for (; k < in; k++)
        for (int r = 0; r < count; r++) lanes[k * PANEL + r] = rows[r * stride + k];
}

}  // namespace
}  // namespace moonpool

using namespace moonpool;

extern "C" {

int moonpool_width() { return WIDTH; }
int moonpool_panel() { return PANEL; }

// Packs `out` rows of one part. A plain part starts at output `first`; a paired one is part 0 or 1 and
// starts at 0. The destination must have been zeroed: lanes that no output takes stay zero.
void moonpool_pack(const float* matrix, int64_t stride, int64_t out, int64_t in, int64_t first, int part,
                   int paired, float* panels) {
    const int64_t groups_begin = first / WIDTH, groups_end = (first + out + WIDTH - 1) / WIDTH;
#pragma omp parallel for schedule(static)
    for (int64_t group = groups_begin; group < groups_end; group++) {
        const int64_t begin = std::max(first, group * WIDTH), end = std::min(first + out, (group + 1) * WIDTH);
        const Place to = place(begin, part, paired);
        pack_lanes(matrix + (begin - first) * stride, stride, int(end - begin), in,
                   panels + to.panel * in * PANEL + to.lane);
    }
}

void moonpool_pack_bias(const float* bias, int64_t out, int64_t first, int part, int paired, float* packed) {
    for (int64_t output = 0; output < out; output++) {
        const Place to = place(first + output, part, paired);
        packed[to.panel * PANEL + to.lane] = bias[output];
    }
}

// output [rows, out], or with `gated` [rows, out / 2] = silu(first half) · second half.
void moonpool_linear(const float* rows, int64_t stride, int64_t count, const float* panels, const float* bias,
                     int64_t in, int64_t out, int paired, int gated, float* output, int64_t output_stride) {
    const Weight weight{panels, bias, in, out, paired != 0};
    multiply_rows(rows, stride, count, weight, Output{output, output_stride, gated != 0});
}
}
