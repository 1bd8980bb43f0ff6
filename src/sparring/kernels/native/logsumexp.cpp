// The log-sum-exp of rows of logits in powers of 2, and their exponentials for the backward pass: the part of
// kernels/chunked.py between its matrix products. A row stays in the L1 cache from its weights to its sums.

#include <cmath>
#include <limits>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "exp2.h"

namespace {

constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr double LN2 = 0.693147180559945309417;
constexpr float NORMAL = 1e-19f;  // smaller numbers have denormal squares, with which products are slow

// Pairs (query, candidate) that never count: `columns` by ascending `rows`, and a mask; either may be absent.
struct Excluded {
    const int64_t *rows, *columns;
    int64_t n, first;  // `first` is the query of row 0 of the block
    const uint8_t *mask;
    int64_t stride;
};

void drop_pairs(float *scores, int64_t c, const Excluded &out) {
    for (int64_t p = 0; p < out.n; p++) scores[(out.rows[p] - out.first) * c + out.columns[p]] = NEVER;
}

void drop_masked(float *row, int64_t c, const uint8_t *mask) {
#pragma omp simd
    for (int64_t j = 0; j < c; j++) row[j] = mask[j] ? NEVER : row[j];
}

float finite(float top) { return top > NEVER && top < -NEVER ? top : 0.0f; }

// row[j] = 2^(row[j] - top), and a copy in bfloat16 where `half` is given; returns their sum.
float exponentials(float *row, int64_t c, float top, uint16_t *half) {
    float sum = 0;
    if (half == nullptr) {
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < c; j++) {
            const float e = sparring::exp2_of(row[j] - top);
            row[j] = e;
            sum += e;
        }
    } else {
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < c; j++) {
            const float e = sparring::exp2_of(row[j] - top);
            half[j] = sparring::bf16_of(e);
            sum += e;
        }
    }
    return sum;
}

}  // namespace

// Of scores (rows, c): total_i = sum_j 2^(s_ij + w_ij - top_i), result_i = its logarithm plus top_i, in nats. The
// exponentials replace the scores, or go to `half` in bfloat16. Weights are (c,), or (rows, c) with w_stride = c.
extern "C" int sparring_logsumexp(float *scores, int64_t rows, int64_t c, const float *log_w, int64_t w_stride,
                                  const int64_t *ex_rows, const int64_t *ex_columns, int64_t n_ex, int64_t first,
                                  const uint8_t *mask, int64_t mask_stride, float *total, float *result,
                                  uint16_t *half) {
    const Excluded out{ex_rows, ex_columns, n_ex, first, mask, mask_stride};
    drop_pairs(scores, c, out);
#pragma omp parallel for schedule(static) if (rows * c > 32768)
    for (int64_t i = 0; i < rows; i++) {
        float *row = scores + i * c;
        if (mask != nullptr) drop_masked(row, c, mask + i * mask_stride);
        float top = NEVER;
        if (log_w == nullptr) {
#pragma omp simd reduction(max : top)
            for (int64_t j = 0; j < c; j++) top = row[j] > top ? row[j] : top;
        } else {
            const float *w = log_w + i * w_stride;
#pragma omp simd reduction(max : top)
            for (int64_t j = 0; j < c; j++) {
                const float s = row[j] + w[j];
                row[j] = s;
                top = s > top ? s : top;
            }
        }
        top = finite(top);
        const float sum = exponentials(row, c, top, half == nullptr ? nullptr : half + i * c);
        total[i] = sum;
        result[i] = float((double(top) + std::log2(double(sum))) * LN2);
    }
    return 0;
}

// The same where candidates stand for `draws` expected draws: with e_ij = 2^(s_ij - top_i) and the weight of a
// candidate as a scale, first_i = sum_j e_ij scale_j, counted_j += e_ij draws / first_i, total_i = sum_j e_ij^2 scale_j,
// and the squares replace the scores. A candidate of scale 0 never counts.
extern "C" int sparring_logsumexp_draws(float *scores, int64_t rows, int64_t c, const float *scale, double draws,
                                        const int64_t *ex_rows, const int64_t *ex_columns, int64_t n_ex, int64_t first,
                                        const uint8_t *mask, int64_t mask_stride, float *counted, float *total,
                                        float *result, uint16_t *half) {
    const Excluded out{ex_rows, ex_columns, n_ex, first, mask, mask_stride};
    drop_pairs(scores, c, out);
    int threads = 1;
#ifdef _OPENMP
    threads = omp_get_max_threads();
#endif
    std::vector<float> counts(counted == nullptr ? 0 : size_t(threads) * c, 0.0f);
#pragma omp parallel num_threads(threads) if (rows * c > 32768)
    {
        int mine = 0;
#ifdef _OPENMP
        mine = omp_get_thread_num();
#endif
        float *own = counted == nullptr ? nullptr : counts.data() + size_t(mine) * c;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; i++) {
            float *row = scores + i * c;
            if (mask != nullptr) drop_masked(row, c, mask + i * mask_stride);
            float top = NEVER;
#pragma omp simd reduction(max : top)
            for (int64_t j = 0; j < c; j++) {
                const float s = scale[j] > 0 ? row[j] : NEVER;
                row[j] = s;
                top = s > top ? s : top;
            }
            top = finite(top);
            float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum, squares)
            for (int64_t j = 0; j < c; j++) {
                float e = sparring::exp2_of(row[j] - top);
                e = e > NORMAL ? e : 0.0f;
                row[j] = e;
                const float scaled = e * scale[j];
                sum += scaled;
                squares += e * scaled;
            }
            const float share = sum > 0 ? float(draws / sum) : 0.0f;
            if (own != nullptr) {
#pragma omp simd
                for (int64_t j = 0; j < c; j++) own[j] += row[j] * share;
            }
            if (half == nullptr) {
#pragma omp simd
                for (int64_t j = 0; j < c; j++) row[j] *= row[j];
            } else {
                uint16_t *to = half + i * c;
#pragma omp simd
                for (int64_t j = 0; j < c; j++) to[j] = sparring::bf16_of(row[j] * row[j]);
            }
            total[i] = squares;
            result[i] = float((double(top) + std::log2(double(squares) * double(share))) * LN2);
        }
    }
    for (int t = 0; counted != nullptr && t < threads; t++) {
        const float *own = counts.data() + size_t(t) * c;
#pragma omp simd
        for (int64_t j = 0; j < c; j++) counted[j] += own[j];
    }
    return 0;
}
