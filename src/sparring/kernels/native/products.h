// Matrix products in tiles that stay in registers: ROWS rows by up to WIDE vectors of LANES numbers.
//
// Sizes follow the registers of the processor: 32 of 16 floats (AVX-512), 16 of 8 (AVX), 32 of 4 (NEON), else 16 of 4.

#pragma once

#include <cstdint>
#include <cstring>

namespace sparring {

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 8;
#elif defined(__AVX__)
constexpr int LANES = 8, ROWS = 4;
#elif defined(__ARM_NEON)
constexpr int LANES = 4, ROWS = 8;
#else
constexpr int LANES = 4, ROWS = 4;
#endif
constexpr int WIDE = 3;
constexpr int64_t PANEL = WIDE * LANES;  // columns of a full tile

typedef float Vector __attribute__((vector_size(LANES * sizeof(float))));

__attribute__((always_inline)) inline Vector load(const float *from) {
    Vector v;
    std::memcpy(&v, from, sizeof(v));
    return v;
}

__attribute__((always_inline)) inline void store(float *to, Vector v) { std::memcpy(to, &v, sizeof(v)); }

inline int64_t rounded_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// a_mk b_k summed over k < depth, for m < ROWS and N vectors b_k = b + k b_stride. Numbers a_mk are at
// a + m a_stride + k, or with BY_DEPTH at a + m + k a_stride. `write` takes (m, n, sum).
template <int N, bool BY_DEPTH, typename Write>
__attribute__((always_inline)) inline void tile(const float *a, int64_t a_stride, const float *b, int64_t b_stride,
                                                int64_t depth, Write write) {
    Vector sum[ROWS][N] = {};
    for (int64_t k = 0; k < depth; k++) {
        Vector right[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) right[n] = load(b + k * b_stride + n * LANES);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) {
            const Vector left = Vector{} + (BY_DEPTH ? a[k * a_stride + m] : a[m * a_stride + k]);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) sum[m][n] += left * right[n];
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) {
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) write(m, n, sum[m][n]);
    }
}

}  // namespace sparring
