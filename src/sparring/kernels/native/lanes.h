// Rows of float32 in lanes of 16, which compilers keep in vector registers of any width.

#pragma once

#include <cstdint>
#include <cstring>

#define SPARRING_INLINE __attribute__((always_inline))  // loops over rows of a length that the caller knows

namespace sparring {

typedef float Lanes __attribute__((vector_size(64)));

SPARRING_INLINE inline Lanes load(const float *x) {
    Lanes lanes;
    std::memcpy(&lanes, x, sizeof(lanes));
    return lanes;
}

SPARRING_INLINE inline void store(float *x, const Lanes &lanes) { std::memcpy(x, &lanes, sizeof(lanes)); }

// The sum of all lanes, by halves: compilers without -ffast-math would add them one after the other.
SPARRING_INLINE inline float sum(const Lanes &lanes) {
    typedef float Eight __attribute__((vector_size(32)));
    typedef float Four __attribute__((vector_size(16)));
    Eight eight[2];
    std::memcpy(eight, &lanes, sizeof(lanes));
    eight[0] += eight[1];
    Four four[2];
    std::memcpy(four, eight, sizeof(four));
    four[0] += four[1];
    return (four[0][0] + four[0][2]) + (four[0][1] + four[0][3]);
}

// Ask for the memory of a row soon, to read it or to write to it too.
SPARRING_INLINE inline void fetch(const float *row, int64_t d, bool write = false) {
    for (int64_t k = 0; k < d; k += 16) {
        if (write) __builtin_prefetch(row + k, 1);
        else __builtin_prefetch(row + k, 0);
    }
}

SPARRING_INLINE inline void scaled(float *to, float c, const float *x, int64_t d) {
#pragma omp simd
    for (int64_t k = 0; k < d; k++) to[k] = c * x[k];
}

SPARRING_INLINE inline void add(float *to, float c, const float *x, int64_t d) {
#pragma omp simd
    for (int64_t k = 0; k < d; k++) to[k] += c * x[k];
}

SPARRING_INLINE inline float dot(const float *a, const float *b, int64_t d) {
    Lanes even{}, odd{};
    int64_t k = 0;
    for (; k + 32 <= d; k += 32) {
        even += load(a + k) * load(b + k);
        odd += load(a + k + 16) * load(b + k + 16);
    }
    if (k + 16 <= d) {
        even += load(a + k) * load(b + k);
        k += 16;
    }
    float rest = 0;
    for (; k < d; k++) rest += a[k] * b[k];
    return sum(even + odd) + rest;
}

}  // namespace sparring
