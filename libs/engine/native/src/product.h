// The register-blocked product that everything else stands on: a few rows times a panel of columns.
//
// A panel holds VECTORS·WIDTH columns, depth-major: element (k, column) at panel[k · panel_stride + column].
// The sums of ROWS × VECTORS stay in registers over the whole depth; what to do with them is the caller's.
#pragma once

#include "vectors.h"

namespace moonpool {

// Vectors in a full panel, and rows whose sums fit in the registers beside one panel row.
#if defined(__AVX512F__)
constexpr int PANEL_VECTORS = 2, TILE_ROWS = 12;
#elif defined(__AVX2__)
constexpr int PANEL_VECTORS = 2, TILE_ROWS = 6;
#else
constexpr int PANEL_VECTORS = 4, TILE_ROWS = 4;
#endif
constexpr int PANEL = PANEL_VECTORS * WIDTH;

template <int ROWS, int VECTORS>
struct Sums {
    Vector at[ROWS][VECTORS];
};

// sums += rows · panel. Row r's element k is at rows[r · ROW_STEP + k · DEPTH_STEP]: both steps are
// constants, so that one address register serves all rows. Every depth step also fetches the lines at
// `ahead`, which moves on by `ahead_step` floats, into the cache: the panel's next user finds it there.
template <int ROWS, int VECTORS, int ROW_STEP, int DEPTH_STEP>
MOONPOOL_INLINE void multiply(Sums<ROWS, VECTORS>& sums, const float* rows, const float* panel,
                              int64_t panel_stride, int64_t depth, const float* ahead = nullptr,
                              int64_t ahead_step = 0) {
    Sums<ROWS, VECTORS> local = sums;
    for (int64_t k = 0; k < depth; k++) {
        Vector columns[VECTORS];
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; v++) columns[v] = load(panel + v * WIDTH);
        if (ahead_step) __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            const Vector element = broadcast(rows[r * ROW_STEP]);
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; v++) local.at[r][v] += element * columns[v];
        }
        rows += DEPTH_STEP;
        panel += panel_stride;
        ahead += ahead_step;
    }
    sums = local;
}

// Depths that share an int32 in a panel with 8 bits a number, and how far ahead such a panel is fetched.
constexpr int QUAD = 4;
constexpr int64_t QUADS_AHEAD = 256;

// Number `index` of each quad as floats.
MOONPOOL_INLINE Vector unpack(IntVector quads, int index) {
    const auto highest_byte = (IntVector)((BitsVector)quads << (24 - 8 * index));
    return __builtin_convertvector(highest_byte >> 24, Vector);
}

// sums += rows · panel, for a tile of rows (depth-major) and a panel of quads.
template <int ROWS, int VECTORS>
MOONPOOL_INLINE void multiply_quads(Sums<ROWS, VECTORS>& sums, const float* tile, const int32_t* panel,
                                    int64_t panel_stride, int64_t depth) {
    Sums<ROWS, VECTORS> local = sums;
    for (int64_t k = 0; k < depth; k += QUAD) {
        IntVector quads[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            std::memcpy(&quads[v], panel + v * WIDTH, sizeof quads[v]);
            __builtin_prefetch(panel + v * WIDTH + QUADS_AHEAD, 0, 2);
        }
        const int used = depth - k < QUAD ? int(depth - k) : QUAD;
#pragma GCC unroll 4
        for (int index = 0; index < QUAD; index++) {
            if (index >= used) break;
            Vector columns[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) columns[v] = unpack(quads[v], index);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                const Vector element = broadcast(tile[index * ROWS + r]);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) local.at[r][v] += element * columns[v];
            }
        }
        tile += QUAD * ROWS;
        panel += panel_stride;
    }
    sums = local;
}

// A panel of quads as floats, depth-major; writes whole quads.
template <int VECTORS>
inline void expand_quads(const int32_t* panel, int64_t panel_stride, int64_t depth, float* columns) {
    for (int64_t k = 0; k < depth; k += QUAD, panel += panel_stride) {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            IntVector quads;
            std::memcpy(&quads, panel + v * WIDTH, sizeof quads);
#pragma GCC unroll 4
            for (int index = 0; index < QUAD; index++)
                store(columns + ((k + index) * VECTORS + v) * WIDTH, unpack(quads, index));
        }
    }
}

// Copies `count` ≤ WIDTH rows of `depth` floats depth-major: element k of row r goes to
// tile[k · count + r]. Writes up to WIDTH - 1 floats beyond the tile's end.
inline void transpose_rows(const float* rows, int64_t stride, int count, int64_t depth, float* tile) {
    int64_t k = 0;
    for (; k + WIDTH <= depth; k += WIDTH) {
        Vector block[WIDTH];
#pragma GCC unroll 16
        for (int r = 0; r < WIDTH; r++) block[r] = r < count ? load(rows + r * stride + k) : Vector{};
        transpose(block);
        // Each store spills past its `count` floats; the next one overwrites what was spilled.
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++) store(tile + (k + i) * count, block[i]);
    }
    for (; k < depth; k++)
        for (int r = 0; r < count; r++) tile[k * count + r] = rows[r * stride + k];
}

}  // namespace moonpool
