// Adam on the rows of a batch, as RowAdam in training/row_optimizers.py. Each row is read and written by one thread, so
// results do not depend on the number of threads.

#include "row_rules.h"
#include "rows.h"

extern "C" int sparring_row_adam(float *table, float *mean, float *square, float *count, int by_row,
                                 const int64_t *index, const float *values, int64_t n, int64_t d, int64_t limit,
                                 double lr, double beta1, double beta2, double eps, double decay) {
    const sparring::Rows rows = sparring::rows_of(index, n, limit);
    if (!rows.valid) return 1;
    const int64_t m = int64_t(rows.row.size());
    const sparring::RowRule rule({table, mean, square, count, limit, d, lr, eps, decay, beta1, beta2, 1, by_row});
#pragma omp parallel if (n * d > 32768)
    {
        std::vector<float> room(d);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < m; r++) {
            sparring::fetch(rows, r + 3, values, d, table, mean, square);
            rule.update(rows.row[r], sparring::summed(rows, r, values, d, room.data()), d);
        }
    }
    return 0;
}
