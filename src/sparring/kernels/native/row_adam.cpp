// Adam on the rows of a batch, as RowAdam in training/row_optimizers.py. Each row is read and written by one thread, so
// results do not depend on the number of threads.

#include <cmath>

#include "rows.h"

namespace {

// 1 - beta^count, without the cancellation of a power close to 1.
double unbias(double beta, double count) { return beta > 0 ? -std::expm1(count * std::log(beta)) : 1.0; }

}  // namespace

extern "C" int sparring_row_adam(float *table, float *mean, float *square, float *count, int by_row,
                                 const int64_t *index, const float *values, int64_t n, int64_t d, int64_t limit,
                                 double lr, double beta1, double beta2, double eps, double decay) {
    const sparring::Rows rows = sparring::rows_of(index, n, limit);
    if (!rows.valid) return 1;
    const int64_t m = int64_t(rows.row.size());
    const float w1 = float(1 - beta1), b2 = float(beta2), w2 = float(1 - beta2), e = float(eps);
    const float keep = float(1 - lr * decay);
#pragma omp parallel if (n * d > 32768)
    {
        std::vector<float> room(d);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < m; r++) {
            const int64_t row = rows.row[r];
            sparring::fetch(rows, r + 3, values, d, table, mean, square);
            const float *g = sparring::summed(rows, r, values, d, room.data());
            const double t = by_row ? double(count[row] += 1) : double(*count);
            const float size = float(-lr / unbias(beta1, t)), spread = float(1 / std::sqrt(unbias(beta2, t)));
            float *p = table + row * d, *mu = mean + row * d, *nu = square + row * d;
#pragma omp simd
            for (int64_t k = 0; k < d; k++) {
                const float m1 = mu[k] + w1 * (g[k] - mu[k]);
                const float v = b2 * nu[k] + w2 * g[k] * g[k];
                mu[k] = m1;
                nu[k] = v;
                p[k] = keep * p[k] + size * m1 / (std::sqrt(v) * spread + e);
            }
        }
    }
    return 0;
}
