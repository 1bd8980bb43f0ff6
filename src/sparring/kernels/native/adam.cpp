// Adam on a complete table whose gradient is zero outside some rows, as torch.optim.Adam with the dense gradient: one
// pass over the table and its moments. Each row is written by one thread, so results do not depend on their number.

#include <algorithm>
#include <cmath>

#include "rows.h"

namespace {

struct Rule {
    float w1, b2, w2, size, spread, eps, decay;

    // n numbers and their moments; without g their gradient is zero.
    void move(float *p, float *mean, float *square, const float *g, int64_t n) const {
        if (g != nullptr) {
#pragma omp simd
            for (int64_t k = 0; k < n; k++) one(p[k], mean[k], square[k], g[k]);
        } else {
#pragma omp simd
            for (int64_t k = 0; k < n; k++) one(p[k], mean[k], square[k], 0.0f);
        }
    }

    void one(float &p, float &mean, float &square, float given) const {
        const float g = given + decay * p;
        const float m = mean + w1 * (g - mean), v = b2 * square + w2 * g * g;
        mean = m;
        square = v;
        p -= size * m / (std::sqrt(v) * spread + eps);
    }
};

}  // namespace

// `index` (n,) names rows of the table (limit, d), which may repeat; `step` counts from 1.
extern "C" int sparring_adam(float *table, float *mean, float *square, const int64_t *index, const float *values,
                             int64_t n, int64_t d, int64_t limit, double lr, double beta1, double beta2, double eps,
                             double decay, double step) {
    const sparring::Rows rows = sparring::rows_of(index, n, limit);
    if (!rows.valid) return 1;
    const double first = 1 - std::pow(beta1, step), second = 1 - std::pow(beta2, step);
    const Rule rule{float(1 - beta1),    float(beta2), float(1 - beta2), float(lr / first),
                    float(1 / std::sqrt(second)), float(eps),   float(decay)};
    constexpr int64_t PART = 1024;  // rows
#pragma omp parallel if (limit * d > 32768)
    {
        std::vector<float> room(d);
#pragma omp for schedule(static)
        for (int64_t low = 0; low < limit; low += PART) {
            const int64_t high = std::min(low + PART, limit);
            int64_t r = std::lower_bound(rows.row.begin(), rows.row.end(), low) - rows.row.begin();
            for (int64_t at = low; at < high;) {
                const bool here = r < int64_t(rows.row.size()) && rows.row[r] == at;
                const int64_t next = r < int64_t(rows.row.size()) ? std::min(rows.row[r], high) : high;
                const float *g = here ? sparring::summed(rows, r, values, d, room.data()) : nullptr;
                const int64_t end = here ? at + 1 : next;
                rule.move(table + at * d, mean + at * d, square + at * d, g, (end - at) * d);
                r += here;
                at = end;
            }
        }
    }
    return 0;
}
