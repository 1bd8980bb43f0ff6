// Row-wise Adagrad on the rows of a batch, as RowAdagrad in training/row_optimizers.py.

#include "row_rules.h"
#include "rows.h"

extern "C" int sparring_row_adagrad(float *table, float *total, const int64_t *index, const float *values, int64_t n,
                                    int64_t d, int64_t limit, double lr, double eps, double decay) {
    const sparring::Rows rows = sparring::rows_of(index, n, limit);
    if (!rows.valid) return 1;
    const int64_t m = int64_t(rows.row.size());
    const sparring::RowRule rule({table, total, nullptr, nullptr, limit, d, lr, eps, decay, 0, 0, 0, 0});
#pragma omp parallel if (n * d > 32768)
    {
        std::vector<float> room(d);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < m; r++) {
            sparring::fetch(rows, r + 6, values, d, table);
            rule.update(rows.row[r], sparring::summed(rows, r, values, d, room.data()), d);
        }
    }
    return 0;
}
