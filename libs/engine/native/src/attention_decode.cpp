// Attention of sequences with one new token: bound by reading the context, so each byte is read once.
//
// A sequence's context is cut into chunks, each of which yields, for all heads, a sum of
// values weighted by e^(score - maximum), the sum of the weights and the maximum; a second pass joins the
// chunks. Chunks are dealt out to the threads, so one long sequence keeps all of them busy, and they
// depend on the context alone: a sequence gets the same bits with any batch and number of threads.

#include <cmath>
#include <vector>

#include "attention.h"

namespace moonpool {
namespace {

// Chunks are this long, or a multiple of it where a context would have more than CHUNKS_MAX.
constexpr int64_t CHUNK_TOKENS = 64;
constexpr int64_t CHUNKS_MAX = 64;
// Partial results kept at once, or CHUNKS_MAX more: decodes beyond them are attended after the first ones.
constexpr int64_t PARTIALS_MAX = 2048;
// Tokens whose scores are weighed together; a multiple of every WIDTH.
constexpr int STEP_TOKENS = 16;
// Query heads that share one pass over keys and values; what more there are takes another pass.
constexpr int GROUP_MAX = 4;
constexpr int TOKENS_AT_ONCE = WIDTH == 16 ? 4 : 2;
constexpr int VALUE_VECTORS = WIDTH == 16 ? 4 : 2;

// One chunk's result for all heads.
struct Partial {
    float *maximum, *weight, *weighted;
    Partial(float* memory, const AttentionStep& step)
        : maximum(memory), weight(memory + step.heads), weighted(memory + 2 * step.heads) {}
    static int64_t floats(const AttentionStep& step) { return (step.dim + 2) * step.heads; }
};

// Up to STEP_TOKENS neighbouring rows of one kv head, and how far from them (in floats) the rows lie
// that are wanted next: blocks are scattered, so the hardware does not guess them.
struct Rows {
    const float* first;
    int64_t stride;
    int count;
    int64_t next;

    const float* row(int index) const { return first + index * stride; }
};

MOONPOOL_INLINE Vector load_and_fetch(const float* from, int64_t next) {
    __builtin_prefetch(from + next, 0, 2);
    return load(from);
}

// Products of GROUP query heads with TOKENS rows of keys, their sums still spread over the lanes.
template <int GROUP, int TOKENS>
MOONPOOL_INLINE void multiply_rows(const float* query, int64_t dim, Rows keys, int first,
                                   Vector (*products)[STEP_TOKENS]) {
    Vector sums[GROUP][TOKENS] = {};
    for (int64_t d = 0; d < dim; d += WIDTH) {
        Vector rows[TOKENS];
#pragma GCC unroll 4
        for (int t = 0; t < TOKENS; t++) rows[t] = load_and_fetch(keys.row(first + t) + d, keys.next);
#pragma GCC unroll 4
        for (int g = 0; g < GROUP; g++) {
            const Vector part = load(query + g * dim + d);
#pragma GCC unroll 4
            for (int t = 0; t < TOKENS; t++) sums[g][t] += part * rows[t];
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < GROUP; g++)
#pragma GCC unroll 4
        for (int t = 0; t < TOKENS; t++) products[g][first + t] = sums[g][t];
}

// Scores of GROUP query heads with the rows; those of missing rows are minus infinity.
template <int GROUP>
MOONPOOL_INLINE void score(const float* query, int64_t dim, float scale, Rows keys,
                           float (*scores)[STEP_TOKENS]) {
    Vector products[GROUP][STEP_TOKENS];
    int t = 0;
    for (; t + TOKENS_AT_ONCE <= keys.count; t += TOKENS_AT_ONCE)
        multiply_rows<GROUP, TOKENS_AT_ONCE>(query, dim, keys, t, products);
    for (; t < keys.count; t++) multiply_rows<GROUP, 1>(query, dim, keys, t, products);
    for (; t < STEP_TOKENS; t++)
        for (int g = 0; g < GROUP; g++) products[g][t] = Vector{};
    for (int g = 0; g < GROUP; g++) {
        for (int lanes = 0; lanes < STEP_TOKENS; lanes += WIDTH) {
            Vector block[WIDTH];
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++) block[i] = products[g][lanes + i];
            store(scores[g] + lanes, sums_of_rows(block) * scale);
        }
        for (t = keys.count; t < STEP_TOKENS; t++) scores[g][t] = MINUS_INFINITY;
    }
}

// Turns scores into weights in place, books their sum and returns what earlier sums must be scaled by.
MOONPOOL_INLINE float weigh(float* scores, float& maximum_so_far, float& weight) {
    constexpr int VECTORS = STEP_TOKENS / WIDTH;
    Vector highest = load(scores);
#pragma GCC unroll 4
    for (int v = 1; v < VECTORS; v++) highest = maximum(highest, load(scores + v * WIDTH));
    const float updated = std::max(maximum_so_far, maximum_of_lanes(highest));
    Vector sum = {};
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
        const Vector weights = exponential(load(scores + v * WIDTH) - updated);
        store(scores + v * WIDTH, weights);
        sum += weights;
    }
    const float factor = exponential(broadcast(maximum_so_far - updated))[0];
    weight = weight * factor + sum_of_lanes(sum);
    maximum_so_far = updated;
    return factor;
}

// weighted = weighted · factor + weights · values, for GROUP heads and VECTORS·WIDTH dimensions.
template <int GROUP, int VECTORS>
MOONPOOL_INLINE void add_values(float* weighted, int64_t dim, const float (&factors)[GROUP],
                                const float (*weights)[STEP_TOKENS], Rows values) {
    Vector sums[GROUP][VECTORS];
#pragma GCC unroll 4
    for (int g = 0; g < GROUP; g++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums[g][v] = load(weighted + g * dim + v * WIDTH) * factors[g];
    for (int t = 0; t < values.count; t++) {
        Vector row[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) row[v] = load_and_fetch(values.row(t) + v * WIDTH, values.next);
#pragma GCC unroll 4
        for (int g = 0; g < GROUP; g++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[g][v] += weights[g][t] * row[v];
    }
#pragma GCC unroll 4
    for (int g = 0; g < GROUP; g++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store(weighted + g * dim + v * WIDTH, sums[g][v]);
}

// Adds up to STEP_TOKENS rows of one kv head to the partial results of GROUP query heads from `head` on.
template <int GROUP>
void attend_rows(const float* query, const AttentionStep& step, Partial partial, int64_t head, Rows keys,
                 Rows values) {
    float weights[GROUP][STEP_TOKENS];
    float factors[GROUP];
    score<GROUP>(query + head * step.dim, step.dim, step.scale, keys, weights);
    for (int g = 0; g < GROUP; g++)
        factors[g] = weigh(weights[g], partial.maximum[head + g], partial.weight[head + g]);
    float* weighted = partial.weighted + head * step.dim;
    int64_t d = 0;
    for (; d + VALUE_VECTORS * WIDTH <= step.dim; d += VALUE_VECTORS * WIDTH)
        add_values<GROUP, VALUE_VECTORS>(weighted + d, step.dim, factors, weights,
                                         {values.first + d, values.stride, values.count, values.next});
    for (; d < step.dim; d += WIDTH)
        add_values<GROUP, 1>(weighted + d, step.dim, factors, weights,
                             {values.first + d, values.stride, values.count, values.next});
}

void attend_group(const float* query, const AttentionStep& step, Partial partial, int64_t kv_head, Rows keys,
                  Rows values) {
    const int64_t end = (kv_head + 1) * step.group();
    for (int64_t head = kv_head * step.group(); head < end; head += GROUP_MAX) {
        switch (std::min<int64_t>(end - head, GROUP_MAX)) {
            case 1: attend_rows<1>(query, step, partial, head, keys, values); break;
            case 2: attend_rows<2>(query, step, partial, head, keys, values); break;
            case 3: attend_rows<3>(query, step, partial, head, keys, values); break;
            default: attend_rows<4>(query, step, partial, head, keys, values); break;
        }
    }
}

// All heads over the positions of one chunk, block by block in the order of memory.
void attend_chunk(const LayerBlocks& layer, const AttentionStep& step, int64_t sequence, Range positions,
                  Partial partial) {
    const int64_t context_end = step.kv_tokens[sequence];
    std::fill(partial.maximum, partial.maximum + step.heads, -std::numeric_limits<float>::max());
    std::fill(partial.weight, partial.weight + step.heads, 0.0f);
    std::fill(partial.weighted, partial.weighted + step.heads * step.dim, 0.0f);
    const float* query = step.query + step.query_starts[sequence] * step.query_stride;
    for (int64_t position = positions.begin; position < positions.end;) {
        const int64_t in_block = layer.block_tokens - position % layer.block_tokens;
        const int count = int(std::min({in_block, positions.end - position, int64_t(STEP_TOKENS)}));
        const int64_t place = step.place(layer, sequence, position);
        position += count;
        const int64_t next = position < context_end ? step.place(layer, sequence, position) - place : 0;
        for (int64_t kv_head = 0; kv_head < step.kv_heads; kv_head++) {
            const int64_t first = place + kv_head * layer.head_stride;
            attend_group(query, step, partial, kv_head, {layer.keys + first, layer.token_stride, count, next},
                         {layer.values + first, layer.token_stride, count, next});
        }
    }
}

// Joins the `count` partial results of a sequence, `pitch` floats apart, for one head.
void join_chunks(float* partials, int64_t count, int64_t pitch, const AttentionStep& step, int64_t head,
                 float* output) {
    float highest = MINUS_INFINITY, weight = 0.0f;
    for (int64_t chunk = 0; chunk < count; chunk++)
        highest = std::max(highest, Partial(partials + chunk * pitch, step).maximum[head]);
    std::fill(output, output + step.dim, 0.0f);
    for (int64_t chunk = 0; chunk < count; chunk++) {
        const Partial partial(partials + chunk * pitch, step);
        const float factor = std::exp(partial.maximum[head] - highest);
        const float* weighted = partial.weighted + head * step.dim;
        weight += factor * partial.weight[head];
        for (int64_t d = 0; d < step.dim; d++) output[d] += factor * weighted[d];
    }
    for (int64_t d = 0; d < step.dim; d++) output[d] /= weight;
}

// The positions a sequence's new token sees, and how they are cut.
struct Context {
    int64_t begin, end, chunk_tokens;
    Context(const AttentionStep& step, int64_t sequence)
        : begin(step.first_seen(step.kv_tokens[sequence] - 1)), end(step.kv_tokens[sequence]) {
        const int64_t units = (end - begin + CHUNK_TOKENS - 1) / CHUNK_TOKENS;
        chunk_tokens = CHUNK_TOKENS * ((units + CHUNKS_MAX - 1) / CHUNKS_MAX);
    }
    int64_t chunks() const { return (end - begin + chunk_tokens - 1) / chunk_tokens; }
    Range chunk(int64_t index) const {
        const int64_t start = begin + index * chunk_tokens;
        return {start, std::min(end, start + chunk_tokens)};
    }
};

// The decodes `sequences` of a step; chunk c of the i-th is the partial result number firsts[i] + c.
void attend_group(const LayerBlocks& layer, const AttentionStep& step, Range sequences, const int64_t* firsts,
                  float* partials) {
    const int64_t count = sequences.end - sequences.begin, pitch = Partial::floats(step);
#pragma omp parallel
    {
        const Range own = own_share(firsts[count]);
        int64_t index = std::upper_bound(firsts, firsts + count + 1, own.begin) - firsts - 1;
        for (int64_t chunk = own.begin; chunk < own.end; chunk++) {
            while (chunk >= firsts[index + 1]) index++;
            const int64_t sequence = sequences.begin + index;
            const Range positions = Context(step, sequence).chunk(chunk - firsts[index]);
            attend_chunk(layer, step, sequence, positions, Partial(partials + chunk * pitch, step));
        }
#pragma omp barrier
        const Range joined = own_share(count * step.heads);
        for (int64_t pair = joined.begin; pair < joined.end; pair++) {
            const int64_t of = pair / step.heads, head = pair % step.heads;
            const int64_t row = step.query_starts[sequences.begin + of];
            float* output = step.output + (row * step.heads + head) * step.dim;
            join_chunks(partials + firsts[of] * pitch, firsts[of + 1] - firsts[of], pitch, step, head, output);
        }
    }
}

}  // namespace

void attend_decodes(const LayerBlocks& layer, const AttentionStep& step) {
    thread_local Scratch scratch;
    thread_local std::vector<int64_t> firsts;
    int64_t begin = 0;
    while (begin < step.decodes) {
        firsts.assign(1, 0);
        int64_t end = begin;
        while (end < step.decodes && firsts.back() < PARTIALS_MAX)
            firsts.push_back(firsts.back() + Context(step, end++).chunks());
        float* partials = scratch.floats(firsts.back() * Partial::floats(step));
        attend_group(layer, step, {begin, end}, firsts.data(), partials);
        begin = end;
    }
}

}  // namespace moonpool
