// The row rules of training/row_optimizers.py for one row: its gradient in, the row and its state updated.

#pragma once

#include <cmath>
#include <cstdint>

#include "lanes.h"

namespace sparring {

// The tables of a rule and its settings, laid out as `Rule` in rows.py. `first` is Adagrad's sum, or Adam's mean.
struct Rule {
    float *table, *first, *square, *count;
    int64_t rows, columns;
    double lr, eps, decay, beta1, beta2;
    int32_t adam, by_row;
};

class RowRule {
    const Rule rule;
    const float lr, eps, keep, w1, b2, w2;
    const double log1, log2;

    // 1 - beta^count, without the cancellation of a power close to 1.
    static double unbias(double beta, double log_beta, double count) {
        return beta > 0 ? -std::expm1(count * log_beta) : 1.0;
    }

  public:
    explicit RowRule(const Rule &rule)
        : rule(rule),
          lr(float(rule.lr)),
          eps(float(rule.eps)),
          keep(float(1 - rule.lr * rule.decay)),
          w1(float(1 - rule.beta1)),
          b2(float(rule.beta2)),
          w2(float(1 - rule.beta2)),
          log1(std::log(rule.beta1)),
          log2(std::log(rule.beta2)) {}

    // Ask for the memory of a row soon.
    SPARRING_INLINE void fetch(int64_t row, int64_t d) const {
        sparring::fetch(rule.table + row * d, d, true);
        if (rule.adam) {
            sparring::fetch(rule.first + row * d, d, true);
            sparring::fetch(rule.square + row * d, d, true);
        } else {
            __builtin_prefetch(rule.first + row, 1);
        }
    }

    SPARRING_INLINE void update(int64_t row, const float *g, int64_t d) const {
        if (rule.adam) adam(row, g, d);
        else adagrad(row, g, d);
    }

  private:
    SPARRING_INLINE void adagrad(int64_t row, const float *g, int64_t d) const {
        float *p = rule.table + row * d;
        const float total = rule.first[row] += dot(g, g, d) / float(d);
        const float size = -lr / (std::sqrt(total) + eps), keep = this->keep;
#pragma omp simd
        for (int64_t k = 0; k < d; k++) p[k] = keep * p[k] + size * g[k];
    }

    SPARRING_INLINE void adam(int64_t row, const float *g, int64_t d) const {
        const double t = rule.by_row ? double(rule.count[row] += 1) : double(*rule.count);
        const float size = float(-rule.lr / unbias(rule.beta1, log1, t));
        const float spread = float(1 / std::sqrt(unbias(rule.beta2, log2, t)));
        float *p = rule.table + row * d, *mu = rule.first + row * d, *nu = rule.square + row * d;
        const float keep = this->keep, w1 = this->w1, b2 = this->b2, w2 = this->w2, eps = this->eps;  // in registers
#pragma omp simd
        for (int64_t k = 0; k < d; k++) {
            const float m = mu[k] + w1 * (g[k] - mu[k]);
            const float v = b2 * nu[k] + w2 * g[k] * g[k];
            mu[k] = m;
            nu[k] = v;
            p[k] = keep * p[k] + size * m / (std::sqrt(v) * spread + eps);
        }
    }
};

}  // namespace sparring
