// What both attention kernels work on: a layer's blocks, and the step's queries over them.
//
// Rows of keys and values are read where they lie, by block table. Only tokens that a query sees are
// ever read, so what an earlier owner left in an unused slot, NaN included, reaches no result.
#pragma once

#include <algorithm>

#include "threads.h"
#include "vectors.h"

namespace moonpool {

// One layer, [block, kv_head, token, dim]; strides in floats, the same for keys and values.
struct LayerBlocks {
    const float *keys, *values;
    int64_t block_stride, head_stride, token_stride;
    int64_t block_tokens;
};

struct AttentionStep {
    const float* query;  // [rows, heads, dim]
    int64_t query_stride;
    float* output;  // [rows, heads, dim], contiguous
    int64_t heads, kv_heads, dim;
    float scale;
    int64_t window;              // positions a token sees, itself included; 0: all
    const int32_t* query_starts;  // [sequences + 1]
    const int32_t* kv_tokens;     // [sequences]
    const int32_t* block_table;   // [sequences, table_stride]
    int64_t table_stride;
    int64_t sequences, decodes;  // the first `decodes` sequences have one row each

    int64_t group() const { return heads / kv_heads; }
    // The first position that the token at `position` sees.
    int64_t first_seen(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }
    // Where the token at `position` lies: floats from the start of keys or values, for kv head 0.
    int64_t place(const LayerBlocks& layer, int64_t sequence, int64_t position) const {
        const int64_t block = block_table[sequence * table_stride + position / layer.block_tokens];
        return block * layer.block_stride + position % layer.block_tokens * layer.token_stride;
    }
};

void attend_decodes(const LayerBlocks& layer, const AttentionStep& step);
void attend_prefills(const LayerBlocks& layer, const AttentionStep& step);

}  // namespace moonpool
