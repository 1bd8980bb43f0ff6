// Row-wise Adagrad on the rows of a batch, as RowAdagrad in training/row_optimizers.py.

#include <cmath>

#include "rows.h"

extern "C" int sparring_row_adagrad(float *table, float *total, const int64_t *index, const float *values, int64_t n,
                                    int64_t d, int64_t limit, double lr, double eps, double decay) {
    const sparring::Rows rows = sparring::rows_of(index, n, limit);
    if (!rows.valid) return 1;
    const int64_t m = int64_t(rows.row.size());
    const float keep = float(1 - lr * decay);
#pragma omp parallel if (n * d > 32768)
    {
        std::vector<float> room(d);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < m; r++) {
            const int64_t row = rows.row[r];
            sparring::fetch(rows, r + 6, values, d, table);
            const float *g = sparring::summed(rows, r, values, d, room.data());
            float *p = table + row * d, squares = 0;
#pragma omp simd reduction(+ : squares)
            for (int64_t k = 0; k < d; k++) squares += g[k] * g[k];
            total[row] += squares / float(d);
            const float size = float(-lr / (std::sqrt(double(total[row])) + eps));
#pragma omp simd
            for (int64_t k = 0; k < d; k++) p[k] = keep * p[k] + size * g[k];
        }
    }
    return 0;
}
