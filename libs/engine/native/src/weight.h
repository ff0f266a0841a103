// How a weight lies in memory once it is packed: what pack.cpp writes and linear.cpp reads.
//
// Panels of PANEL outputs follow each other, each depth-major, so that every product, from one row to
// thousands, reads a weight front to back. Two matrices packed as a pair share panels half and half: then
// gate and up of the same outputs meet in one set of registers.
//
// With 8 bits a number, four depths of an output share one int32, the first in its lowest byte, and each
// output has a scale; the last quad of a depth that is no multiple of QUAD is filled up with zeros.
#pragma once

#include "product.h"

namespace moonpool {

constexpr int HALF_VECTORS = PANEL_VECTORS / 2;
constexpr int HALF = PANEL / 2;

inline int64_t quad_count(int64_t depth) { return (depth + QUAD - 1) / QUAD; }

// Lane `lane` of panel `panel` where output `output` of part `part` is packed.
struct Place {
    int64_t panel, lane;
};

inline Place place(int64_t output, int part, bool paired) {
    if (paired) return {output / HALF, part * HALF + output % HALF};
    return {output / PANEL, output % PANEL};
}

struct Weight {
    const float* panels;   // null if the weight has 8 bits a number
    const int32_t* quads;  // null if it has 32
    const float* scales;   // in panel order; null without quads
    const float* bias;     // in panel order, or null
    int64_t in, out;
    bool paired;

    int64_t half_out() const { return out / 2; }
    int64_t panel_count() const { return paired ? (half_out() + HALF - 1) / HALF : (out + PANEL - 1) / PANEL; }
    const float* panel(int64_t index) const { return panels + index * in * PANEL; }
    const int32_t* quad_panel(int64_t index) const { return quads + index * quad_count(in) * PANEL; }
};

}  // namespace moonpool
