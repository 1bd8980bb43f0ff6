// The weighted log-sum-exp of kernels/reference.py over shared candidates, in blocks of queries that stay in the L2
// cache from their scores to their gradient by query. Logits are in powers of 2.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "exp2.h"
#include "products.h"

namespace {

using namespace sparring;

constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr double LN2 = 0.693147180559945309417;
constexpr float LOG2E = 1.44269504088896340736f;
constexpr float NORMAL = 1e-19f;         // smaller numbers have denormal squares, with which products are slow
constexpr int64_t CACHED = 1 << 17;      // scores of a block: half a megabyte
constexpr int64_t ALONE = 32768;         // pairs up to which one thread is fastest
constexpr int64_t SUMMED = 4096;         // exponentials summed in float32
constexpr int64_t PAD = 48;              // a multiple of PANEL on every processor: _PANEL in logsumexp.py
constexpr int64_t DEPTH = 128;           // terms summed in registers before they join the others

// Pairs (query, candidate) that never count: `columns` by ascending `rows`, and a mask (n, c); either may be absent.
struct Excluded {
    const int64_t *rows, *columns;
    int64_t n;
    const uint8_t *mask;
};

float finite(float top) { return top > NEVER && top < -NEVER ? top : 0.0f; }

int threads_for(int64_t pairs) {
#ifdef _OPENMP
    return pairs > ALONE ? omp_get_max_threads() : 1;
#else
    return 1;
#endif
}

int this_thread() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

// Threads of the current region.
int team() {
#ifdef _OPENMP
    return omp_get_num_threads();
#else
    return 1;
#endif
}

// Candidates as `sparring_logsumexp_pack` writes them.
struct Candidates {
    const float *panels, *rows;
    int64_t width;  // of a row
};

// scores (rows, stride) = q times the candidates
void score(const float *q, int64_t rows, const Candidates &emb, int64_t c, int64_t d, int64_t stride, float *scores) {
    for (int64_t j = 0; j < c; j += PANEL) {
        for (int64_t k = 0; k < d; k += DEPTH) {
            for (int64_t i = 0; i < rows; i += ROWS) {
                float *to = scores + i * stride + j;
                tile<WIDE, false>(q + i * d + k, d, emb.panels + j * d + k * PANEL, PANEL, std::min(DEPTH, d - k),
                                  [=](int m, int v, Vector sum) {
                                      float *at = to + m * stride + v * LANES;
                                      store(at, k == 0 ? sum : load(at) + sum);
                                  });
            }
        }
    }
}

template <int N>
void weigh(const float *e, int64_t stride, const float *emb, int64_t width, int64_t depth, float *out) {
    tile<N, false>(e, stride, emb, width, depth, [=](int m, int n, Vector sum) {
        float *at = out + m * width + n * LANES;
        store(at, load(at) + sum);
    });
}

// out (rows, d) = the exponentials e times the candidates; room for rows of whole vectors
void by_query(const float *e, int64_t stride, const Candidates &emb, int64_t rows, int64_t c, int64_t d, float *out,
              std::vector<float> &room) {
    const int64_t width = emb.width;
    room.assign(rounded_up(rows, ROWS) * width, 0.0f);
    for (int64_t j = 0; j < c; j += DEPTH) {
        const int64_t depth = std::min(DEPTH, c - j);
        for (int64_t i = 0; i < rows; i += ROWS) {
            for (int64_t k = 0; k < width; k += PANEL) {
                const float *from = e + i * stride + j, *with = emb.rows + j * width + k;
                float *to = room.data() + i * width + k;
                const int64_t vectors = (width - k) / LANES;
                if (vectors >= 3) weigh<3>(from, stride, with, width, depth, to);
                else if (vectors == 2) weigh<2>(from, stride, with, width, depth, to);
                else weigh<1>(from, stride, with, width, depth, to);
            }
        }
    }
    for (int64_t i = 0; i < rows; i++) std::copy_n(room.data() + i * width, d, out + i * d);
}

// row[j] = 2^(row[j] - top), and a copy in bfloat16 where `half` is given; returns their sum.
double exponentials(float *row, int64_t c, float top, uint16_t *half) {
    double total = 0;
    for (int64_t low = 0; low < c; low += SUMMED) {
        const int64_t high = std::min(low + SUMMED, c);
        float sum = 0;
        if (half == nullptr) {
#pragma omp simd reduction(+ : sum)
            for (int64_t j = low; j < high; j++) {
                const float e = exp2_of(row[j] - top);
                row[j] = e;
                sum += e;
            }
        } else {
#pragma omp simd reduction(+ : sum)
            for (int64_t j = low; j < high; j++) {
                const float e = exp2_of(row[j] - top);
                half[j] = bf16_of(e);
                sum += e;
            }
        }
        total += double(sum);
    }
    return total;
}

struct Sum {
    float total, result;
};

// total = sum_j 2^(s_j + w_j - top), result = its logarithm plus top, in nats. The exponentials replace the scores.
Sum summed(float *row, int64_t c, const float *log_w, uint16_t *half) {
    float top = NEVER;
#pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < c; j++) {
        const float s = row[j] + log_w[j];
        row[j] = s;
        top = s > top ? s : top;
    }
    top = finite(top);
    const double sum = exponentials(row, c, top, half);
    return {float(sum), float((double(top) + std::log2(sum)) * LN2)};
}

// The same where candidates stand for `draws` expected draws: with e_j = 2^(s_j - top) and the weight of a candidate as
// a scale, first = sum_j e_j scale_j, counted_j += e_j draws / first, total = sum_j e_j^2 scale_j, and the squares
// replace the scores. A candidate of scale 0 never counts.
Sum drawn(float *row, int64_t c, const float *scale, double draws, float *counted, uint16_t *half) {
    float top = NEVER;
#pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < c; j++) {
        const float s = scale[j] > 0 ? row[j] : NEVER;
        row[j] = s;
        top = s > top ? s : top;
    }
    top = finite(top);
    double sum = 0, squares = 0;
    for (int64_t low = 0; low < c; low += SUMMED) {
        const int64_t high = std::min(low + SUMMED, c);
        float part = 0, part_squares = 0;
#pragma omp simd reduction(+ : part, part_squares)
        for (int64_t j = low; j < high; j++) {
            float e = exp2_of(row[j] - top);
            e = e > NORMAL ? e : 0.0f;
            row[j] = e;
            const float scaled = e * scale[j];
            part += scaled;
            part_squares += e * scaled;
        }
        sum += double(part);
        squares += double(part_squares);
    }
    const float share = sum > 0 ? float(draws / sum) : 0.0f;
    if (counted != nullptr) {
#pragma omp simd
        for (int64_t j = 0; j < c; j++) counted[j] += row[j] * share;
    }
    if (half == nullptr) {
#pragma omp simd
        for (int64_t j = 0; j < c; j++) row[j] *= row[j];
    } else {
#pragma omp simd
        for (int64_t j = 0; j < c; j++) half[j] = bf16_of(row[j] * row[j]);
    }
    return {float(squares), float((double(top) + std::log2(squares * double(share))) * LN2)};
}

}  // namespace

// The candidates emb (c, d) in panels of PANEL columns, for the scores, and in rows of whole vectors times their scale,
// for the gradient by query. What is beyond c or d is zero, c rounded up to PAD and d to `width`; rows may be absent.
extern "C" int sparring_logsumexp_pack(const float *emb, int64_t c, int64_t d, const float *scale, float *panels,
                                       float *rows, int64_t width) {
#pragma omp parallel for schedule(static) num_threads(threads_for(c * d))
    for (int64_t j = 0; j < rounded_up(c, PAD); j++) {
        float *to = panels + j / PANEL * PANEL * d + j % PANEL;
        if (j >= c) {
            for (int64_t k = 0; k < d; k++) to[k * PANEL] = 0;
            continue;
        }
        for (int64_t k = 0; k < d; k++) to[k * PANEL] = emb[j * d + k];
        if (rows == nullptr) continue;
        const float by = scale == nullptr ? 1.0f : scale[j];
        for (int64_t k = 0; k < d; k++) rows[j * width + k] = by * emb[j * d + k];
        std::fill(rows + j * width + d, rows + (j + 1) * width, 0.0f);
    }
    return 0;
}

// Of queries q (n, d) and candidates (c, d) as packed: total and result (n,) as in `summed`, or with draws > 0 as in
// `drawn`. In that case `weights` is the scale of each candidate, else its logarithm to base 2: (c,), or (n, c) with
// w_stride = c.
// The exponentials go to `kept`, with `stride` columns and n rounded up to ROWS rows, or to `half` (n, c) in bfloat16,
// or nowhere; gradient (n, d) takes the sums of candidates weighted by them, and counted (c,) the sum of all draws.
extern "C" int sparring_logsumexp(const float *q, const float *panels, const float *rows, int64_t n, int64_t c,
                                  int64_t d, int64_t width, const float *weights, int64_t w_stride, double draws,
                                  const int64_t *ex_rows, const int64_t *ex_columns, int64_t n_ex, int64_t first, const uint8_t *mask,
                                  float *kept, int64_t stride, uint16_t *half, float *gradient, float *counted,
                                  float *total, float *result) {
    const Excluded out{ex_rows, ex_columns, n_ex, mask};
    const Candidates candidates{panels, rows, width};
    const int64_t block = std::max<int64_t>(1, CACHED / stride / ROWS) * ROWS, tiles = (n + ROWS - 1) / ROWS;
    const int threads = int(std::min<int64_t>(threads_for(n * c), std::max<int64_t>(1, tiles)));
    std::vector<float> counts(counted == nullptr ? 0 : size_t(threads) * c, 0.0f);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> scaled(block * d), room(kept == nullptr ? block * stride : 0), sums;
        float *own = counted == nullptr ? nullptr : counts.data() + size_t(this_thread()) * c;
        const int64_t mine = this_thread(), end = std::min(n, tiles * (mine + 1) / team() * ROWS);
        for (int64_t low = tiles * mine / team() * ROWS; low < end; low += block) {
            const int64_t high = std::min(low + block, end);
            float *scores = kept == nullptr ? room.data() : kept + low * stride;
            for (int64_t k = 0; k < (high - low) * d; k++) scaled[k] = q[low * d + k] * LOG2E;
            std::fill(scaled.begin() + (high - low) * d, scaled.end(), 0.0f);
            score(scaled.data(), high - low, candidates, c, d, stride, scores);
            const int64_t *last = out.rows + out.n;
            for (const int64_t *p = std::lower_bound(out.rows, last, first + low); p < last && *p < first + high; p++) {
                scores[(*p - first - low) * stride + out.columns[p - out.rows]] = NEVER;
            }
            for (int64_t i = low; i < high; i++) {
                float *row = scores + (i - low) * stride;
                uint16_t *to = half == nullptr ? nullptr : half + i * c;
                for (int64_t j = 0; mask != nullptr && j < c; j++) row[j] = mask[i * c + j] ? NEVER : row[j];
                const Sum sum = draws > 0 ? drawn(row, c, weights, draws, own, to)
                                          : summed(row, c, weights + i * w_stride, to);
                total[i] = sum.total;
                result[i] = sum.result;
            }
            if (gradient != nullptr) {
                by_query(scores, stride, candidates, high - low, c, d, gradient + low * d, sums);
            }
        }
    }
    for (int t = 0; counted != nullptr && t < threads; t++) {
        const float *own = counts.data() + size_t(t) * c;
#pragma omp simd
        for (int64_t j = 0; j < c; j++) counted[j] += own[j];
    }
    return 0;
}

// columns (width, stride) += the transpose of rows (n, width) times e (n, stride). The width is a multiple of ROWS, the
// stride one of PANEL. Each number is summed by one thread, so results do not depend on the number of threads.
extern "C" int sparring_logsumexp_columns(const float *e, const float *rows, int64_t n, int64_t stride, int64_t width,
                                          float *columns) {
#pragma omp parallel num_threads(threads_for(n * stride))
    for (int64_t low = 0; low < n; low += DEPTH) {
        const int64_t depth = std::min(DEPTH, n - low);
#pragma omp for collapse(2) schedule(static) nowait
        for (int64_t j = 0; j < stride; j += PANEL) {
            for (int64_t k = 0; k < width; k += ROWS) {
                const float *part = e + low * stride + j;
                for (int64_t i = 0; k == 0 && j + PANEL < stride && i < depth; i++) {
                    for (int64_t v = 0; v < PANEL; v += 16) __builtin_prefetch(part + i * stride + PANEL + v);
                }
                float *to = columns + k * stride + j;
                tile<WIDE, true>(rows + low * width + k, width, part, stride, depth, [=](int m, int v, Vector sum) {
                    float *at = to + m * stride + v * LANES;
                    store(at, load(at) + sum);
                });
            }
        }
    }
    return 0;
}

// out (c, d) = the transpose of columns (d or more, stride), each row times its scale, if there is one.
extern "C" int sparring_logsumexp_rows(const float *columns, int64_t stride, int64_t c, int64_t d, const float *scale,
                                       float *out) {
#pragma omp parallel for schedule(static) num_threads(threads_for(c * d))
    for (int64_t j = 0; j < c; j++) {
        const float by = scale == nullptr ? 1.0f : scale[j];
        for (int64_t k = 0; k < d; k++) out[j * d + k] = by * columns[k * stride + j];
    }
    return 0;
}
