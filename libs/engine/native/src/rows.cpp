// Row by row: norms, rotary embedding, and the new tokens' way into the cache.

#include <cmath>

#include "threads.h"
#include "vectors.h"

namespace moonpool {
namespace {

// Below this many numbers a second thread costs more than it saves.
constexpr int64_t PARALLEL_FLOATS_MIN = 1 << 14;

MOONPOOL_INLINE float sum_of_squares(const float* row, int64_t length) {
    Vector sums[2] = {};
    int64_t i = 0;
    for (; i + 2 * WIDTH <= length; i += 2 * WIDTH) {
        const Vector a = load(row + i), b = load(row + i + WIDTH);
        sums[0] += a * a;
        sums[1] += b * b;
    }
    float sum = sum_of_lanes(sums[0] + sums[1]);
    for (; i < length; i++) sum += row[i] * row[i];
    return sum;
}

MOONPOOL_INLINE void scale_row(const float* row, const float* weight, float factor, int64_t length, float* to) {
    for (int64_t i = 0; i < length; i++) to[i] = row[i] * factor * weight[i];
}

MOONPOOL_INLINE float norm_factor(const float* row, int64_t length, float epsilon) {
    return 1.0f / std::sqrt(sum_of_squares(row, length) / float(length) + epsilon);
}

MOONPOOL_INLINE void rotate_head(float* __restrict head, const float* __restrict cos, const float* __restrict sin,
                                 int64_t half) {
    float* __restrict other = head + half;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        const float a = head[i], b = other[i];
        head[i] = a * cos[i] - b * sin[i];
        other[i] = b * cos[i] + a * sin[i];
    }
}

}  // namespace
}  // namespace moonpool

using namespace moonpool;

extern "C" {

// Rows lie in `outer` groups of `inner` rows: [outer, inner, length] with any strides of the first two.
void moonpool_rms_norm(const float* rows, int64_t outer, int64_t outer_stride, int64_t inner,
                       int64_t inner_stride, int64_t length, const float* weight, float epsilon, float* output) {
    const int64_t count = outer * inner;
#pragma omp parallel for schedule(static) if (count * length >= PARALLEL_FLOATS_MIN)
    for (int64_t index = 0; index < count; index++) {
        const float* row = rows + index / inner * outer_stride + index % inner * inner_stride;
        scale_row(row, weight, norm_factor(row, length, epsilon), length, output + index * length);
    }
}

// residual += delta, and output = the norm of the new residual.
void moonpool_add_rms_norm(const float* delta, int64_t delta_stride, float* residual, int64_t residual_stride,
                           int64_t count, int64_t length, const float* weight, float epsilon, float* output) {
#pragma omp parallel for schedule(static) if (count * length >= PARALLEL_FLOATS_MIN)
    for (int64_t index = 0; index < count; index++) {
        const float* added = delta + index * delta_stride;
        float* row = residual + index * residual_stride;
        for (int64_t i = 0; i < length; i++) row[i] += added[i];
        scale_row(row, weight, norm_factor(row, length, epsilon), length, output + index * length);
    }
}

// Turns dimension i of each head with i + half, in place; heads of a row follow each other.
void moonpool_rotate(float* query, int64_t query_stride, int64_t query_heads, float* key, int64_t key_stride,
                     int64_t key_heads, const float* cos, const float* sin, int64_t count, int64_t half) {
#pragma omp parallel for schedule(static) if (count * half * (query_heads + key_heads) >= PARALLEL_FLOATS_MIN)
    for (int64_t row = 0; row < count; row++) {
        const float *row_cos = cos + row * half, *row_sin = sin + row * half;
        for (int64_t head = 0; head < query_heads; head++)
            rotate_head(query + row * query_stride + head * 2 * half, row_cos, row_sin, half);
        for (int64_t head = 0; head < key_heads; head++)
            rotate_head(key + row * key_stride + head * 2 * half, row_cos, row_sin, half);
    }
}

// Puts the heads of each new token into its slot (block · block_tokens + offset) of the layer's keys and values.
void moonpool_write_kv(float* keys, float* values, int64_t block_stride, int64_t head_stride, int64_t token_stride,
                       int64_t block_tokens, const float* key, int64_t key_stride, const float* value,
                       int64_t value_stride, const int64_t* slots, int64_t count, int64_t heads, int64_t dim) {
#pragma omp parallel for schedule(static) if (2 * count * heads * dim >= PARALLEL_FLOATS_MIN)
    for (int64_t row = 0; row < count; row++) {
        const int64_t block = slots[row] / block_tokens, offset = slots[row] % block_tokens;
        const int64_t place = block * block_stride + offset * token_stride;
        for (int64_t head = 0; head < heads; head++) {
            const int64_t to = place + head * head_stride;
            std::memcpy(keys + to, key + row * key_stride + head * dim, dim * sizeof(float));
            std::memcpy(values + to, value + row * value_stride + head * dim, dim * sizeof(float));
        }
    }
}
}
