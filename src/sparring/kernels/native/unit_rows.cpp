// Rows scaled to length 1, with a last column of item biases or ones: gathered from a table, or taken as they are, with
// dropout before the scaling where `uniform` is given. See models/retriever.py for the torch form.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "lanes.h"

namespace {

constexpr int64_t AHEAD = 4;  // rows whose memory is asked for early
constexpr float EPS = 1e-6f;  // NORM_EPS of models/retriever.py: a shorter row is divided by this

}

// out (n, d + extra), norms (n,). The last column is bias[ids[i]], or 1 if `bias` is absent. Rows are table[ids[i]], or
// table[i] without ids. Returns 1 if an id is not in [0, limit).
extern "C" int sparring_unit_rows(const float *table, const int64_t *ids, int64_t n, int64_t d, int64_t limit,
                                  const float *bias, int extra, const float *uniform, float rate, float *out,
                                  float *norms) {
    bool valid = true;
    for (int64_t i = 0; ids != nullptr && i < n; i++) valid &= ids[i] >= 0 && ids[i] < limit;
    if (!valid) return 1;
    const float grown = 1 / (1 - rate);
#pragma omp parallel for schedule(static) if (n * d > 32768)
    for (int64_t i = 0; i < n; i++) {
        if (ids != nullptr) sparring::fetch(table + ids[std::min(i + AHEAD, n - 1)] * d, d);
        const int64_t at = ids == nullptr ? i : ids[i];
        const float *x = table + at * d;
        float *y = out + i * (d + extra), squares = 0;
        if (uniform == nullptr) {
#pragma omp simd reduction(+ : squares)
            for (int64_t k = 0; k < d; k++) squares += x[k] * x[k];
        } else {
            const float *u = uniform + i * d;
#pragma omp simd reduction(+ : squares)
            for (int64_t k = 0; k < d; k++) {
                const float kept = u[k] >= rate ? x[k] * grown : 0.0f;
                y[k] = kept;
                squares += kept * kept;
            }
            x = y;
        }
        const float norm = std::sqrt(squares), by = 1 / (norm > EPS ? norm : EPS);
        norms[i] = norm;
#pragma omp simd
        for (int64_t k = 0; k < d; k++) y[k] = x[k] * by;
        if (extra) y[d] = bias == nullptr ? 1.0f : bias[at];
    }
    return 0;
}

// The gradient (n, d) of the rows, from that of `out`.
extern "C" int sparring_unit_rows_backward(const float *grad, const float *out, const float *norms, int64_t n,
                                           int64_t d, int extra, const float *uniform, float rate, float *rows) {
    const float grown = 1 / (1 - rate);
#pragma omp parallel for schedule(static) if (n * d > 32768)
    for (int64_t i = 0; i < n; i++) {
        const float *g = grad + i * (d + extra), *y = out + i * (d + extra);
        float *to = rows + i * d, along = 0;
        if (norms[i] > EPS) {
#pragma omp simd reduction(+ : along)
            for (int64_t k = 0; k < d; k++) along += g[k] * y[k];
        }
        const float by = 1 / (norms[i] > EPS ? norms[i] : EPS);
        if (uniform == nullptr) {
#pragma omp simd
            for (int64_t k = 0; k < d; k++) to[k] = (g[k] - along * y[k]) * by;
        } else {
            const float *u = uniform + i * d;
            const float all = by * grown;
#pragma omp simd
            for (int64_t k = 0; k < d; k++) to[k] = u[k] >= rate ? (g[k] - along * y[k]) * all : 0.0f;
        }
    }
    return 0;
}
