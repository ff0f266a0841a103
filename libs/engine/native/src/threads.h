// How work is shared out among OpenMP threads, and the memory a calling thread keeps for its kernels.
#pragma once

#include <omp.h>

#include <cstdint>
#include <cstdlib>
#include <new>

namespace moonpool {

constexpr int64_t CACHE_LINE_BYTES = 64;

struct Range {
    int64_t begin, end;
};

// Part `index` of `parts` of 0..total: contiguous, sizes differing by one at most.
inline Range share(int64_t total, int64_t index, int64_t parts) {
    return {total * index / parts, total * (index + 1) / parts};
}

// The share of the calling thread within a parallel region.
inline Range own_share(int64_t total) { return share(total, omp_get_thread_num(), omp_get_num_threads()); }

// Memory that grows and is kept: it belongs to one calling thread and lives as long as that thread.
class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { std::free(memory_); }

    // At least `floats` floats, aligned to a cache line; what was there before is lost.
    float* floats(int64_t floats) {
        const int64_t lines = (floats * (int64_t)sizeof(float) + CACHE_LINE_BYTES - 1) / CACHE_LINE_BYTES;
        if (lines > lines_) {
            std::free(memory_);
            lines_ = 0;
            memory_ = std::aligned_alloc(CACHE_LINE_BYTES, lines * CACHE_LINE_BYTES);
            if (memory_ == nullptr) throw std::bad_alloc();
            lines_ = lines;
        }
        return static_cast<float*>(memory_);
    }

  private:
    void* memory_ = nullptr;
    int64_t lines_ = 0;
};

}  // namespace moonpool
