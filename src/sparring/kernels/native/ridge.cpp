// Ridge regressions of many rows on one table by conjugate gradients, as Rows.solve in models/least_squares.py.
//
//     (diag(shared + added_r) + sum_j w_j x_j x_j^T) u_r = sum_j w_j x_j     over the pairs j of row r
//
// The diagonal of the whole matrix preconditions. A step costs one pass over the vectors of a row, where the matrix
// itself would cost one for every dimension; a start near the solution needs few of them. One thread works on a row, so
// results do not depend on the number of threads.

#include <cmath>
#include <cstdint>
#include <vector>

namespace {

inline float dot(const float *a, const float *b, int64_t d) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t k = 0; k < d; k++) sum += a[k] * b[k];
    return sum;
}

}  // namespace

// out (n, D) holds the start and takes the solutions; explained (n) takes u . sum_j w_j x_j + u . residual.
extern "C" int sparring_ridge(const float *table, const int64_t *start, const int32_t *others, const float *weight,
                              const float *shared, const float *added, float *out, double *explained, int64_t n,
                              int64_t d, int64_t most, double tolerance) {
#pragma omp parallel
    {
        std::vector<float> room(6 * d);
        float *right = room.data(), *left = right + d, *p = left + d, *ap = p + d, *scale = ap + d, *z = scale + d;
#pragma omp for schedule(dynamic, 16)
        for (int64_t row = 0; row < n; row++) {
            const int64_t begin = start[row], end = start[row + 1];
            float *u = out + row * d;
            explained[row] = 0;
            if (begin == end) {
                for (int64_t k = 0; k < d; k++) u[k] = 0;
                continue;
            }
            const float lift = added[row];
#pragma omp simd
            for (int64_t k = 0; k < d; k++) {
                scale[k] = shared[k] + lift;
                left[k] = -scale[k] * u[k];
                right[k] = 0;
            }
            for (int64_t at = begin; at < end; at++) {
                const float *x = table + int64_t(others[at]) * d, w = weight ? weight[at] : 1.0f;
                const float missing = w * (1.0f - dot(x, u, d));
#pragma omp simd
                for (int64_t k = 0; k < d; k++) {
                    right[k] += w * x[k];
                    left[k] += missing * x[k];
                    scale[k] += w * x[k] * x[k];
                }
            }
            float square = 0, whole = 0;
#pragma omp simd reduction(+ : square, whole)
            for (int64_t k = 0; k < d; k++) {
                scale[k] = 1.0f / scale[k];
                p[k] = scale[k] * left[k];
                square += left[k] * p[k];
                whole += right[k] * right[k] * scale[k];
            }
            const float enough = float(tolerance * tolerance) * whole;
            for (int64_t step = 0; step < most && square > enough; step++) {
#pragma omp simd
                for (int64_t k = 0; k < d; k++) ap[k] = (shared[k] + lift) * p[k];
                for (int64_t at = begin; at < end; at++) {
                    const float *x = table + int64_t(others[at]) * d;
                    const float along = (weight ? weight[at] : 1.0f) * dot(x, p, d);
#pragma omp simd
                    for (int64_t k = 0; k < d; k++) ap[k] += along * x[k];
                }
                const float size = square / dot(p, ap, d);
                float next = 0;
#pragma omp simd reduction(+ : next)
                for (int64_t k = 0; k < d; k++) {
                    u[k] += size * p[k];
                    left[k] -= size * ap[k];
                    z[k] = scale[k] * left[k];
                    next += left[k] * z[k];
                }
                const float turn = next / square;
                square = next;
#pragma omp simd
                for (int64_t k = 0; k < d; k++) p[k] = z[k] + turn * p[k];
            }
            explained[row] = double(dot(u, right, d)) + double(dot(u, left, d));
        }
    }
    return 0;
}
