// Attention of sequences with many new tokens: bound by arithmetic, so it is made of register-blocked
// products over tiles that stay in the cache, and the scores are never written to memory as a whole.
//
// A task is a run of new tokens with the query heads of one kv head: a row is one token's one head. Its
// keys and values come in tiles of TILE_TOKENS, gathered from their blocks; keys are turned depth-major
// on the way. Tasks differ in length, so threads take them as they come; none depends on another.

#include <vector>

#include "attention.h"
#include "product.h"

namespace moonpool {
namespace {

constexpr int TILE_TOKENS = 128;  // a multiple of PANEL
constexpr int64_t TASK_ROWS_MAX = 192;
static_assert(TILE_TOKENS % PANEL == 0);

struct Task {
    int64_t sequence, kv_head;
    Range tokens;    // of the sequence's new tokens
    int64_t context;  // position of its first new token
};

// One thread's memory for a task: pointers into its scratch.
struct Workspace {
    float *query;     // [rows, dim], scaled
    float *tiles;     // the same by tiles, depth-major
    float *keys;      // [TILE_TOKENS / PANEL][dim][PANEL]
    float *values;    // [TILE_TOKENS][dim]
    float *scores;    // [TILE_ROWS][TILE_TOKENS]
    float *weighted;  // [rows, dim]
    float *maximum;   // [rows]
    float *weight;    // [rows][WIDTH]: sums still spread over lanes
    int64_t pitch;    // of tiles

    Workspace(Scratch& scratch, int64_t rows_max, int64_t dim) : pitch(TILE_ROWS * dim + WIDTH) {
        const int64_t tiles_max = (rows_max + TILE_ROWS - 1) / TILE_ROWS;
        const int64_t sizes[] = {rows_max * dim,      tiles_max * pitch,      TILE_TOKENS * dim, TILE_TOKENS * dim,
                                 TILE_ROWS * TILE_TOKENS, rows_max * dim, rows_max,          rows_max * WIDTH};
        float** const parts[] = {&query, &tiles, &keys, &values, &scores, &weighted, &maximum, &weight};
        int64_t total = 0;
        for (int64_t size : sizes) total += aligned(size);
        float* next = scratch.floats(total);
        for (int i = 0; i < 8; i++) {
            *parts[i] = next;
            next += aligned(sizes[i]);
        }
    }

    static int64_t aligned(int64_t floats) { return (floats + 15) / 16 * 16; }
};

// A tile of keys and values: positions [begin, end) of the sequence.
void gather_tile(const LayerBlocks& layer, const AttentionStep& step, const Task& task, Range positions,
                 Workspace& work) {
    const float* key_rows[TILE_TOKENS];
    const int64_t dim = step.dim, count = positions.end - positions.begin;
    for (int64_t t = 0; t < count; t++) {
        const int64_t place =
            step.place(layer, task.sequence, positions.begin + t) + task.kv_head * layer.head_stride;
        key_rows[t] = layer.keys + place;
        std::memcpy(work.values + t * dim, layer.values + place, dim * sizeof(float));
    }
    for (int64_t t = 0; t < count; t += WIDTH) {
        float* lanes = work.keys + t / PANEL * dim * PANEL + t % PANEL;
        for (int64_t d = 0; d < dim; d += WIDTH) {
            Vector block[WIDTH];
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++) block[i] = t + i < count ? load(key_rows[t + i] + d) : Vector{};
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++) store(lanes + (d + i) * PANEL, block[i]);
        }
    }
}

template <int ROWS>
void score_rows(const float* query, const Workspace& work, int64_t dim, int64_t lanes) {
    for (int64_t panel = 0; panel * PANEL < lanes; panel++) {
        Sums<ROWS, PANEL_VECTORS> sums = {};
        multiply<ROWS, PANEL_VECTORS, 1, ROWS>(sums, query, work.keys + panel * dim * PANEL, PANEL, dim);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int v = 0; v < PANEL_VECTORS; v++)
                store(work.scores + r * TILE_TOKENS + panel * PANEL + v * WIDTH, sums.at[r][v]);
    }
}

// Of `lanes` scores those outside [begin, end) become minus infinity.
MOONPOOL_INLINE void hide(float* scores, int64_t lanes, int64_t begin, int64_t end) {
    for (int64_t t = 0; t < std::min(begin, lanes); t++) scores[t] = MINUS_INFINITY;
    for (int64_t t = std::max<int64_t>(end, 0); t < lanes; t++) scores[t] = MINUS_INFINITY;
}

// Turns a row's `lanes` scores, a multiple of PANEL, into weights in place; returns what the row's earlier
// sums must be scaled by.
MOONPOOL_INLINE float weigh_row(float* scores, int64_t lanes, float& maximum_so_far, float* weight) {
    Vector highest = load(scores);
    for (int64_t t = WIDTH; t < lanes; t += WIDTH) highest = maximum(highest, load(scores + t));
    const float updated = std::max(maximum_so_far, maximum_of_lanes(highest));
    Vector sum = {};
    for (int64_t t = 0; t < lanes; t += WIDTH) {
        const Vector weights = exponential(load(scores + t) - updated);
        store(scores + t, weights);
        sum += weights;
    }
    const Vector factor = exponential(broadcast(maximum_so_far - updated));
    store(weight, load(weight) * factor + sum);
    maximum_so_far = updated;
    return factor[0];
}

// weighted = weighted · factors + weights · values over `tokens` rows of values.
template <int ROWS, int VECTORS>
MOONPOOL_INLINE void add_values(float* weighted, const float (&factors)[ROWS], const float* weights,
                                const float* values, int64_t dim, int64_t tokens) {
    Sums<ROWS, VECTORS> sums;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums.at[r][v] = load(weighted + r * dim + v * WIDTH) * factors[r];
    multiply<ROWS, VECTORS, TILE_TOKENS, 1>(sums, weights, values, dim, tokens);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store(weighted + r * dim + v * WIDTH, sums.at[r][v]);
}

// One tile of rows over one tile of keys and values, `positions`.
template <int ROWS>
void attend_tile(const AttentionStep& step, const Task& task, const float* query, int64_t first_row,
                 Range positions, Workspace& work) {
    const int64_t group = step.group(), dim = step.dim;
    const int64_t task_position = task.context + task.tokens.begin;
    const int64_t first_position = task_position + first_row / group;
    const int64_t last_position = task_position + (first_row + ROWS - 1) / group;
    if (positions.begin > last_position || positions.end <= step.first_seen(first_position)) return;
    const int64_t tokens = std::min(positions.end, last_position + 1) - positions.begin;
    const int64_t lanes = (tokens + PANEL - 1) / PANEL * PANEL;
    score_rows<ROWS>(query, work, dim, lanes);
    const bool all_seen = positions.begin + lanes - 1 <= first_position &&
                          positions.begin >= step.first_seen(last_position);
    float factors[ROWS];
    for (int r = 0; r < ROWS; r++) {
        float* scores = work.scores + r * TILE_TOKENS;
        if (!all_seen) {
            const int64_t position = task_position + (first_row + r) / group;
            hide(scores, lanes, step.first_seen(position) - positions.begin, position + 1 - positions.begin);
        }
        factors[r] = weigh_row(scores, lanes, work.maximum[first_row + r], work.weight + (first_row + r) * WIDTH);
    }
    float* weighted = work.weighted + first_row * dim;
    int64_t d = 0;
    for (; d + PANEL <= dim; d += PANEL)
        add_values<ROWS, PANEL_VECTORS>(weighted + d, factors, work.scores, work.values + d, dim, tokens);
    for (; d < dim; d += WIDTH)
        add_values<ROWS, 1>(weighted + d, factors, work.scores, work.values + d, dim, tokens);
}

using AttendTile = void (*)(const AttentionStep&, const Task&, const float*, int64_t, Range, Workspace&);

template <int... ROWS>
AttendTile tile_function(int64_t rows, std::integer_sequence<int, ROWS...>) {
    constexpr AttendTile functions[] = {attend_tile<ROWS + 1>...};
    return functions[rows - 1];
}

struct TaskRows {
    int64_t count, tiles;
    explicit TaskRows(int64_t count) : count(count), tiles((count + TILE_ROWS - 1) / TILE_ROWS) {}
    Range tile(int64_t index) const { return share(count, index, tiles); }
};

void start_task(const AttentionStep& step, const Task& task, const TaskRows& rows, Workspace& work) {
    const int64_t group = step.group(), dim = step.dim;
    const int64_t first = step.query_starts[task.sequence] + task.tokens.begin;
    for (int64_t row = 0; row < rows.count; row++) {
        const int64_t head = task.kv_head * group + row % group;
        const float* from = step.query + (first + row / group) * step.query_stride + head * dim;
        for (int64_t d = 0; d < dim; d++) work.query[row * dim + d] = from[d] * step.scale;
    }
    for (int64_t index = 0; index < rows.tiles; index++) {
        const Range tile = rows.tile(index);
        transpose_rows(work.query + tile.begin * dim, dim, int(tile.end - tile.begin), dim,
                       work.tiles + index * work.pitch);
    }
    std::fill(work.maximum, work.maximum + rows.count, -std::numeric_limits<float>::max());
    std::fill(work.weight, work.weight + rows.count * WIDTH, 0.0f);
    std::fill(work.weighted, work.weighted + rows.count * dim, 0.0f);
}

void finish_task(const AttentionStep& step, const Task& task, const TaskRows& rows, const Workspace& work) {
    const int64_t group = step.group(), dim = step.dim;
    const int64_t first = step.query_starts[task.sequence] + task.tokens.begin;
    for (int64_t row = 0; row < rows.count; row++) {
        const int64_t head = task.kv_head * group + row % group;
        float* to = step.output + ((first + row / group) * step.heads + head) * dim;
        const float factor = 1.0f / sum_of_lanes(load(work.weight + row * WIDTH));
        for (int64_t d = 0; d < dim; d++) to[d] = work.weighted[row * dim + d] * factor;
    }
}

void attend_task(const LayerBlocks& layer, const AttentionStep& step, const Task& task, Workspace& work) {
    const TaskRows rows((task.tokens.end - task.tokens.begin) * step.group());
    start_task(step, task, rows, work);
    const int64_t seen_begin = step.first_seen(task.context + task.tokens.begin);
    const int64_t seen_end = task.context + task.tokens.end;
    for (int64_t begin = seen_begin; begin < seen_end; begin += TILE_TOKENS) {
        const Range positions{begin, std::min(begin + TILE_TOKENS, seen_end)};
        gather_tile(layer, step, task, positions, work);
        for (int64_t index = 0; index < rows.tiles; index++) {
            const Range tile = rows.tile(index);
            const auto attend =
                tile_function(tile.end - tile.begin, std::make_integer_sequence<int, TILE_ROWS>());
            attend(step, task, work.tiles + index * work.pitch, tile.begin, positions, work);
        }
    }
    finish_task(step, task, rows, work);
}

}  // namespace

void attend_prefills(const LayerBlocks& layer, const AttentionStep& step) {
    const int64_t task_tokens = std::max<int64_t>(1, TASK_ROWS_MAX / step.group());
    const int64_t rows_max = task_tokens * step.group();
    thread_local std::vector<Task> tasks;
    tasks.clear();
    for (int64_t sequence = step.decodes; sequence < step.sequences; sequence++) {
        const int64_t tokens = step.query_starts[sequence + 1] - step.query_starts[sequence];
        const int64_t context = step.kv_tokens[sequence] - tokens;
        // The last tokens see most: their tasks, the longest, are taken first.
        for (int64_t end = tokens; end > 0; end -= std::min(end, task_tokens))
            for (int64_t kv_head = 0; kv_head < step.kv_heads; kv_head++)
                tasks.push_back({sequence, kv_head, {std::max<int64_t>(0, end - task_tokens), end}, context});
    }
    const Task* first = tasks.data();
    const int64_t count = int64_t(tasks.size());
#pragma omp parallel
    {
        thread_local Scratch scratch;
        Workspace work(scratch, rows_max, step.dim);
#pragma omp for schedule(dynamic, 1)
        for (int64_t index = 0; index < count; index++) attend_task(layer, step, first[index], work);
    }
}

}  // namespace moonpool

using namespace moonpool;

extern "C" {

void moonpool_attend(const float* query, int64_t query_stride, const float* keys, const float* values,
                     int64_t block_stride, int64_t head_stride, int64_t token_stride, int64_t block_tokens,
                     const int32_t* query_starts, const int32_t* kv_tokens, const int32_t* block_table,
                     int64_t table_stride, int64_t sequences, int64_t decodes, int64_t heads, int64_t kv_heads,
                     int64_t dim, float scale, int64_t window, float* output) {
    const LayerBlocks layer{keys, values, block_stride, head_stride, token_stride, block_tokens};
    const AttentionStep step{query,        query_stride, output,      heads,        kv_heads,  dim,    scale, window,
                             query_starts, kv_tokens,    block_table, table_stride, sequences, decodes};
    if (decodes > 0) attend_decodes(layer, step);
    if (sequences > decodes) attend_prefills(layer, step);
}
}
