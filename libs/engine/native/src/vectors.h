// Vectors of floats as GCC and Clang know them on every CPU: arithmetic operators, no intrinsics.
//
// WIDTH is how many floats one register of the target holds. Everything here is inlined into the
// kernels and knows nothing of them.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

namespace moonpool {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

#define MOONPOOL_INLINE inline __attribute__((always_inline))

typedef float Vector __attribute__((vector_size(WIDTH * sizeof(float))));
typedef int32_t IntVector __attribute__((vector_size(WIDTH * sizeof(int32_t))));
typedef uint32_t BitsVector __attribute__((vector_size(WIDTH * sizeof(uint32_t))));

constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

MOONPOOL_INLINE Vector load(const float* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

MOONPOOL_INLINE void store(float* to, Vector vector) { std::memcpy(to, &vector, sizeof vector); }

MOONPOOL_INLINE Vector broadcast(float value) { return value - Vector{}; }

MOONPOOL_INLINE Vector maximum(Vector a, Vector b) { return a > b ? a : b; }

// Lane i of the result is lane i ^ DISTANCE of the argument.
template <int DISTANCE>
MOONPOOL_INLINE Vector swap_lanes(Vector vector) {
    IntVector lanes;
    for (int lane = 0; lane < WIDTH; lane++) lanes[lane] = lane ^ DISTANCE;
    return __builtin_shuffle(vector, lanes);
}

template <int DISTANCE = WIDTH / 2>
MOONPOOL_INLINE float sum_of_lanes(Vector vector) {
    vector += swap_lanes<DISTANCE>(vector);
    if constexpr (DISTANCE > 1) return sum_of_lanes<DISTANCE / 2>(vector);
    return vector[0];
}

template <int DISTANCE = WIDTH / 2>
MOONPOOL_INLINE float maximum_of_lanes(Vector vector) {
    vector = maximum(vector, swap_lanes<DISTANCE>(vector));
    if constexpr (DISTANCE > 1) return maximum_of_lanes<DISTANCE / 2>(vector);
    return vector[0];
}

// Of two vectors seen as rows of 2·DISTANCE lanes: UPPER false takes the lower half of each row of `a`
// and beside it that of `b`, UPPER true the upper halves.
template <int DISTANCE, bool UPPER>
MOONPOOL_INLINE Vector join_halves(Vector a, Vector b) {
    IntVector lanes;
    for (int lane = 0; lane < WIDTH; lane++) {
        const bool from_b = lane & DISTANCE;
        lanes[lane] = (lane & ~DISTANCE) + (UPPER ? DISTANCE : 0) + (from_b ? WIDTH : 0);
    }
    return __builtin_shuffle(a, b, lanes);
}

// Transposes WIDTH vectors in place: lane j of vector i changes places with lane i of vector j.
template <int DISTANCE = WIDTH / 2>
MOONPOOL_INLINE void transpose(Vector (&rows)[WIDTH]) {
#pragma GCC unroll 16
    for (int row = 0; row < WIDTH; row++) {
        if (row & DISTANCE) continue;
        const Vector a = rows[row], b = rows[row + DISTANCE];
        rows[row] = join_halves<DISTANCE, false>(a, b);
        rows[row + DISTANCE] = join_halves<DISTANCE, true>(a, b);
    }
    if constexpr (DISTANCE > 1) transpose<DISTANCE / 2>(rows);
}

// Lane i of the result is the sum of all lanes of vector i. Destroys `rows`.
template <int DISTANCE = WIDTH / 2>
MOONPOOL_INLINE Vector sums_of_rows(Vector (&rows)[WIDTH]) {
#pragma GCC unroll 16
    for (int row = 0; row < DISTANCE; row++) {
        const Vector a = rows[row], b = rows[row + DISTANCE];
        rows[row] = join_halves<DISTANCE, false>(a, b) + join_halves<DISTANCE, true>(a, b);
    }
    if constexpr (DISTANCE > 1) return sums_of_rows<DISTANCE / 2>(rows);
    return rows[0];
}

// e^x, relative error below 2e-7; 0 below -87.3 and infinite above 88.
MOONPOOL_INLINE Vector exponential(Vector x) {
    constexpr float LOWEST = -87.3f, HIGHEST = 88.0f;
    constexpr float LOG2_E = 1.44269504088896341f;
    constexpr float LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
    constexpr float ROUNDER = 12582912.0f;  // 1.5 · 2^23: adding it leaves an integer in the mantissa
    const Vector shifted = x * LOG2_E + ROUNDER;
    const Vector power = shifted - ROUNDER;
    const Vector rest = (x - power * LN2_HIGH) - power * LN2_LOW;
    Vector series = broadcast(1.9875691500e-4f);
    series = series * rest + 1.3981999507e-3f;
    series = series * rest + 8.3334519073e-3f;
    series = series * rest + 4.1665795894e-2f;
    series = series * rest + 1.6666665459e-1f;
    series = series * rest + 5.0000001201e-1f;
    series = series * (rest * rest) + rest + 1.0f;
    // As bits: where x is out of range they wrap around, and what comes of it is not taken.
    const BitsVector exponent = ((BitsVector)shifted - (BitsVector)broadcast(ROUNDER)) << 23;
    const Vector scaled = (Vector)((BitsVector)series + exponent);
    const Vector above = x > HIGHEST ? broadcast(-MINUS_INFINITY) : scaled;
    return x < LOWEST ? Vector{} : above;
}

// x · sigmoid(x)
MOONPOOL_INLINE Vector silu(Vector x) { return x / (1.0f + exponential(-x)); }

}  // namespace moonpool
