// A pairwise loss over rows of two tables, with its gradients: for each query its positive against its own negatives.
//
//     loss_i = mean_j f(s_ij - s_i+),  s = q . e / tau,  f(x) = log(1 + exp(x)) or max(0, margin + x)
//
// The mean runs over the negatives that are not excluded. An excluded one has a gradient of 0.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "exp2.h"

namespace {

constexpr float LOG2E = 1.44269504088896340736f;
enum { NOTHING = 0, POSITIVE = 1, KNOWN = 2 };

float dot(const float *a, const float *b, int64_t d) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t k = 0; k < d; k++) sum += a[k] * b[k];
    return sum;
}

// log(1 + e) for e in [0, 1]: 2 atanh(e / (2 + e)) as a series, whose next term is below 2e-8.
float log1p_of(float e) {
    const float t = e / (2.0f + e), s = t * t;
    float sum = 1.0f / 13;
    for (int k = 11; k > 0; k -= 2) sum = sum * s + 1.0f / float(k);
    return 2 * t * sum;
}

bool inside(const int64_t *ids, int64_t n, int64_t limit) {
    bool valid = true;
    for (int64_t i = 0; i < n; i++) valid &= ids[i] >= 0 && ids[i] < limit;
    return valid;
}

void fetch(const float *row, int64_t d) {
    for (int64_t k = 0; k < d; k += 16) __builtin_prefetch(row + k);
}

}  // namespace

// Tables `queries` and `items`; ids of queries (b,), positives (b,) and negatives (b, n). `start` and `known` hold the
// sorted items of each query. Gradients are those of sum_i scale_i loss_i: by_query (b, d), and by_item (b + b n, d) for
// the positives and then the negatives. Returns 1 if an id is outside its table.
extern "C" int sparring_pairwise(const float *queries, const float *items, const int64_t *q, const int64_t *positive,
                                 const int64_t *negative, int64_t b, int64_t n, int64_t d, int64_t n_queries,
                                 int64_t n_items, const int64_t *start, const int32_t *known, int exclude, float sharp,
                                 int hinge, float margin, const float *scale, float *losses, float *by_query,
                                 float *by_item) {
    if (!inside(q, b, n_queries) || !inside(positive, b, n_items) || !inside(negative, b * n, n_items)) return 1;
    constexpr int64_t AHEAD = 16;
#pragma omp parallel if (b * n * d > 32768)
    {
        std::vector<float> pull(n);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < b; i++) {
            if (i + AHEAD < b) {
                fetch(queries + q[i + AHEAD] * d, d);
                fetch(items + positive[i + AHEAD] * d, d);
                for (int64_t j = 0; j < n && j < 4; j++) fetch(items + negative[(i + AHEAD) * n + j] * d, d);
                if (exclude == KNOWN) __builtin_prefetch(known + start[q[i + AHEAD]]);
            }
            const float *u = queries + q[i] * d, *p = items + positive[i] * d;
            float *to_u = by_query + i * d, *to_p = by_item + i * d;
            const float own = dot(u, p, d);
            double total = 0;
            int64_t counts = 0;
            for (int64_t j = 0; j < n; j++) {
                const int64_t item = negative[i * n + j];
                bool out = exclude == POSITIVE && item == positive[i];
                if (exclude == KNOWN) out = std::binary_search(known + start[q[i]], known + start[q[i] + 1], int32_t(item));
                pull[j] = 0;
                if (out) continue;
                counts++;
                const float x = (dot(u, items + item * d, d) - own) * sharp;
                if (hinge) {
                    total += std::max(0.0f, margin + x);
                    pull[j] = margin + x > 0 ? 1.0f : 0.0f;
                } else {
                    const float e = sparring::exp2_of(-std::abs(x) * LOG2E);
                    total += std::max(x, 0.0f) + log1p_of(e);
                    pull[j] = (x > 0 ? 1.0f : e) / (1.0f + e);
                }
            }
            const float each = counts ? scale[i] * sharp / float(counts) : 0.0f;
            losses[i] = counts ? float(total / double(counts)) : 0.0f;
            float sum = 0;
            for (int64_t j = 0; j < n; j++) sum += pull[j] *= each;
            if (n == 1) {
                const float c = pull[0];
                const float *e = items + negative[i] * d;
                float *to_e = by_item + (b + i) * d;
#pragma omp simd
                for (int64_t k = 0; k < d; k++) {
                    const float x = u[k];
                    to_u[k] = c * (e[k] - p[k]);
                    to_p[k] = -c * x;
                    to_e[k] = c * x;
                }
                continue;
            }
#pragma omp simd
            for (int64_t k = 0; k < d; k++) {
                to_u[k] = -sum * p[k];
                to_p[k] = -sum * u[k];
            }
            for (int64_t j = 0; j < n; j++) {
                const float c = pull[j];
                const float *e = items + negative[i * n + j] * d;
                float *to_e = by_item + (b + i * n + j) * d;
#pragma omp simd
                for (int64_t k = 0; k < d; k++) {
                    to_u[k] += c * e[k];
                    to_e[k] = c * u[k];
                }
            }
        }
    }
    return 0;
}
