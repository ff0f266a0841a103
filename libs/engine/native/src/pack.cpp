// Packing of weights and biases into panels, see weight.h. Destinations must have been zeroed: lanes that no
// output takes stay zero.

#include <algorithm>
#include <cmath>

#include "threads.h"
#include "weight.h"

namespace moonpool {
namespace {

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

// One row of a matrix becomes one lane of quads. Returns the scale that turns them back, which is no number
// where one of the row is none: the products then show it, as those of the row itself would.
float quantise_lane(const float* row, int64_t in, int32_t* lane) {
    constexpr double STEPS = 127.0;
    float largest = 0.0f;
    for (int64_t k = 0; k < in; k++) {
        if (!std::isfinite(row[k])) return std::numeric_limits<float>::quiet_NaN();
        largest = std::max(largest, std::fabs(row[k]));
    }
    if (largest == 0.0f) return 0.0f;
    for (int64_t first = 0; first < in; first += QUAD) {
        uint32_t quad = 0;
        for (int64_t k = first; k < std::min(first + QUAD, in); k++) {
            const auto steps = int32_t(std::nearbyint(row[k] * (STEPS / largest)));
            quad |= (uint32_t(steps) & 0xff) << (8 * (k - first));
        }
        lane[first / QUAD * PANEL] = int32_t(quad);
    }
    return float(largest / STEPS);
}

}  // namespace
}  // namespace moonpool

using namespace moonpool;

extern "C" {

int moonpool_width() { return WIDTH; }
int moonpool_panel() { return PANEL; }

// Packs `out` rows of one part. A plain part starts at output `first`; a paired one is part 0 or 1 and
// starts at 0.
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

// The same with 8 bits a number; scales are in panel order.
void moonpool_pack_int8(const float* matrix, int64_t stride, int64_t out, int64_t in, int64_t first, int part,
                        int paired, int32_t* quads, float* scales) {
#pragma omp parallel for schedule(static)
    for (int64_t output = 0; output < out; output++) {
        const Place to = place(first + output, part, paired);
        int32_t* lane = quads + to.panel * quad_count(in) * PANEL + to.lane;
        scales[to.panel * PANEL + to.lane] = quantise_lane(matrix + output * stride, in, lane);
    }
}
}
