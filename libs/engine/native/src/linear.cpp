// Products with packed weights: rows [n, in] times a matrix [out, in], with bias, and the gated pair.
//
// Each output is summed by one thread in one order, so results do not depend on the number of threads.

#include <algorithm>

#include "threads.h"
#include "weight.h"

namespace moonpool {
namespace {

// Rows are repacked in blocks of about this size: they stay in the L2 cache while panels pass by.
constexpr int64_t BLOCK_BYTES = 1 << 20;
// How far before its use a weight is fetched when nothing else hides the memory's latency.
constexpr int64_t FETCH_AHEAD_FLOATS = WIDTH == 16 ? 512 : 2048;
// A panel is fetched during the products of so many tiles with the one before.
constexpr int64_t FETCHING_TILES_MAX = 4;
// With so many tiles of rows it pays to turn a panel of quads into floats once.
constexpr int64_t EXPANDED_TILES_MIN = 3;

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

// sums · scales + bias
template <int ROWS>
MOONPOOL_INLINE void finish_sums(Sums<ROWS, PANEL_VECTORS>& sums, const Weight& weight, int64_t panel) {
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECTORS; v++) {
        const int64_t lanes = panel * PANEL + v * WIDTH;
        const Vector scale = weight.scales ? load(weight.scales + lanes) : broadcast(1.0f);
        const Vector bias = weight.bias ? load(weight.bias + lanes) : Vector{};
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) sums.at[r][v] = sums.at[r][v] * scale + bias;
    }
}

// One tile of rows (depth-major, as transpose_rows leaves it) times one panel, whose numbers are `columns`,
// or the weight's quads if that is null.
template <int ROWS>
void multiply_tile(const float* tile, const Weight& weight, const float* columns, const Output& output,
                   int64_t first_row, int64_t panel, Fetch fetch) {
    Sums<ROWS, PANEL_VECTORS> sums = {};
    if (columns == nullptr)
        multiply_quads<ROWS, PANEL_VECTORS>(sums, tile, weight.quad_panel(panel), PANEL, weight.in);
    else if (fetch.step)
        multiply<ROWS, PANEL_VECTORS, 1, ROWS>(sums, tile, columns, PANEL, weight.in, fetch.from, fetch.step);
    else
        multiply<ROWS, PANEL_VECTORS, 1, ROWS>(sums, tile, columns, PANEL, weight.in);
    if (weight.scales || weight.bias) finish_sums<ROWS>(sums, weight, panel);
    store_sums<ROWS>(sums, weight, output, first_row, panel);
}

using MultiplyTile = void (*)(const float*, const Weight&, const float*, const Output&, int64_t, int64_t, Fetch);

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
// With more, each of the first ones fetches its part of the next panel while it multiplies this one.
Fetch plan_fetch(const Weight& weight, int64_t panel, int64_t tile, int64_t tiles) {
    if (weight.quads) return {nullptr, 0};
    if (tiles == 1) return {weight.panel(panel) + FETCH_AHEAD_FLOATS, PANEL};
    const int64_t parts = std::min(tiles, FETCHING_TILES_MAX);
    if (tile >= parts) return {nullptr, 0};
    return {weight.panel(panel + 1) + weight.in * PANEL / parts * tile, (PANEL + parts - 1) / parts};
}

// Where the numbers of a panel are as floats; null if its quads are to be multiplied as they are.
const float* columns_of(const Weight& weight, int64_t panel, const Tiling& tiling, float* expanded, bool first_use) {
    if (weight.quads == nullptr) return weight.panel(panel);
    if (tiling.tiles < EXPANDED_TILES_MIN) return nullptr;
    if (first_use) expand_quads<PANEL_VECTORS>(weight.quad_panel(panel), PANEL, weight.in, expanded);
    return expanded;
}

// The calling thread's share of a block: (panel, tile) pairs in an order that reads each panel once.
void multiply_share(const float* tiles, int64_t pitch, const Tiling& tiling, const Weight& weight,
                    const Output& output, int64_t first_row) {
    thread_local Scratch scratch;
    float* expanded = weight.quads ? scratch.floats(quad_count(weight.in) * QUAD * PANEL) : nullptr;
    const Range pairs = own_share(weight.panel_count() * tiling.tiles);
    for (int64_t pair = pairs.begin; pair < pairs.end; pair++) {
        const int64_t panel = pair / tiling.tiles, index = pair % tiling.tiles;
        const bool first_use = pair == pairs.begin || index == 0;
        const float* columns = columns_of(weight, panel, tiling, expanded, first_use);
        const Range tile = tiling.tile(index);
        const auto multiply_rows =
            tile_function(int(tile.end - tile.begin), std::make_integer_sequence<int, TILE_ROWS>());
        multiply_rows(tiles + index * pitch, weight, columns, output, first_row + tile.begin, panel,
                      plan_fetch(weight, panel, index, tiling.tiles));
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

}  // namespace
}  // namespace moonpool

using namespace moonpool;

extern "C" {

// output [rows, out], or with `gated` [rows, out / 2] = silu(first half) · second half. The weight is either
// `panels`, or `quads` with `scales`.
void moonpool_linear(const float* rows, int64_t stride, int64_t count, const float* panels, const int32_t* quads,
                     const float* scales, const float* bias, int64_t in, int64_t out, int paired, int gated,
                     float* output, int64_t output_stride) {
    const Weight weight{panels, quads, scales, bias, in, out, paired != 0};
    multiply_rows(rows, stride, count, weight, Output{output, output_stride, gated != 0});
}
}
