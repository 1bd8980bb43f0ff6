// The weighted log-sum-exp of kernels/reference.py over shared candidates and mixtures of them. Vectors hold queries: the
// scores of a group stay in registers while its mixtures are made of them, and no mixture is ever stored. Logits are in
// powers of 2.

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

typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef uint8_t Marks __attribute__((vector_size(LANES)));

constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr float ALIVE = -1e15f;     // as in reference.py
constexpr double LN2 = 0.693147180559945309417;
constexpr float LOG2E = 1.44269504088896340736f;
constexpr double SMALL = 0x1p-40;   // a smaller sum of exponentials, over those of a bound, is taken over the largest
constexpr int64_t ALONE = 32768;    // pairs up to which one thread is fastest
constexpr int64_t SUMMED = 16;      // groups whose exponentials are summed in float32
constexpr int64_t DEPTH = 128;      // terms summed in registers before they join the others
constexpr int64_t QUERIES = 2 * LANES;  // of a block: the scores of 5,000 candidates stay in an L2 cache of 1 MB

struct Groups {
    const float *weights;  // (n, made, size)
    int64_t n, made;
    float offset;
    const uint8_t *out, *mixed_out;  // candidates and groups by queries that never count, or absent
    int64_t stride;                  // of both and of the exponentials
    bool convex;                     // no weight is negative, and those of a mixture add up to 1 at most
};

bool convex(const float *weights, int64_t mixtures, int64_t size) {
    for (int64_t v = 0; v < mixtures; v++) {
        float sum = 0;
        for (int64_t m = 0; m < size; m++) {
            if (!(weights[v * size + m] >= 0)) return false;
            sum += weights[v * size + m];
        }
        if (sum > 1.0001f) return false;
    }
    return true;
}

// 0 for queries that count, -inf for the others
__attribute__((always_inline)) inline Vector dropped(const uint8_t *out) {
    Marks marks;
    std::memcpy(&marks, out, sizeof(marks));
    return __builtin_convertvector(marks, Integers) != 0 ? Vector{} + NEVER : Vector{};
}

template <int SIZE>
__attribute__((always_inline)) inline Vector mixture(const float *weights, const Vector *scores, Vector sum) {
#pragma GCC unroll 8
    for (int m = 0; m < SIZE; m++) sum += weights[m] * scores[m];
    return sum;
}

// Of LANES queries: no logit is larger, whichever of them count. Mixtures with convex weights are not above their
// largest member, or 0, plus the offset.
Vector bound(const float *scores, int64_t c, float offset) {
    Vector top = load(scores);
    for (int64_t j = 1; j < c; j++) {
        const Vector s = load(scores + j * QUERIES);
        top = s > top ? s : top;
    }
    const Vector mixed = (top > 0 ? top : Vector{}) + offset;
    return mixed > top ? mixed : top;
}

// Of LANES queries from `at` on: the largest logit, and with it the sum of exponentials. `scores` has QUERIES columns;
// with `kept` or `half` the sum of the exponentials of each candidate and of its shares in those of its mixtures.
template <int SIZE>
Vector largest(const float *scores, const Groups &groups, int64_t at) {
    Vector top = Vector{} + NEVER;
    for (int64_t g = 0; g < groups.n; g++) {
        Vector score[SIZE];
#pragma GCC unroll 8
        for (int m = 0; m < SIZE; m++) {
            const int64_t j = g * SIZE + m;
            score[m] = load(scores + j * QUERIES);
            const Vector s = groups.out == nullptr ? score[m] : score[m] + dropped(groups.out + j * groups.stride + at);
            top = s > top ? s : top;
        }
        Vector start = Vector{} + groups.offset;
        if (groups.mixed_out != nullptr) start += dropped(groups.mixed_out + g * groups.stride + at);
        for (int64_t v = 0; v < groups.made; v++) {
            const Vector s = mixture<SIZE>(groups.weights + (g * groups.made + v) * SIZE, score, start);
            top = s > top ? s : top;
        }
    }
    return top > ALIVE ? top : Vector{};
}

template <int SIZE>
void exponentials(const float *scores, const Groups &groups, int64_t at, Vector top, double *total, float *kept,
                  uint16_t *half) {
    Vector sum{};
    for (int64_t g = 0; g < groups.n; g++) {
        Vector score[SIZE], e[SIZE];
#pragma GCC unroll 8
        for (int m = 0; m < SIZE; m++) {
            const int64_t j = g * SIZE + m;
            score[m] = load(scores + j * QUERIES);
            Vector s = score[m] - top;
            if (groups.out != nullptr) s += dropped(groups.out + j * groups.stride + at);
            e[m] = exp2_as<Vector, Integers>(s);
            sum += e[m];
        }
        Vector start = groups.offset - top;
        if (groups.mixed_out != nullptr) start += dropped(groups.mixed_out + g * groups.stride + at);
        for (int64_t v = 0; v < groups.made; v++) {
            const float *weights = groups.weights + (g * groups.made + v) * SIZE;
            const Vector made = exp2_as<Vector, Integers>(mixture<SIZE>(weights, score, start));
            sum += made;
#pragma GCC unroll 8
            for (int m = 0; m < SIZE; m++) e[m] += weights[m] * made;
        }
#pragma GCC unroll 8
        for (int m = 0; m < SIZE; m++) {
            const int64_t to = (g * SIZE + m) * groups.stride + at;
            if (kept != nullptr) store(kept + to, e[m]);
            if (half != nullptr) {
                float row[LANES];
                store(row, e[m]);
#pragma omp simd
                for (int l = 0; l < LANES; l++) half[to + l] = bf16_of(row[l]);
            }
        }
        if (g % SUMMED == SUMMED - 1 || g == groups.n - 1) {
            for (int l = 0; l < LANES; l++) total[l] += double(sum[l]);
            sum = Vector{};
        }
    }
}

// scores (c, QUERIES) = the candidates times a block of queries, plus a weight for each candidate
void score(const float *emb, const float *block, const float *log_w, int64_t c, int64_t d, float *scores) {
    for (int64_t j = 0; j < c; j += ROWS) {
        tile<2, false>(emb + j * d, d, block, QUERIES, d, [=](int m, int v, Vector sum) {
            store(scores + (j + m) * QUERIES + v * LANES, sum + log_w[j + m]);
        });
    }
}

template <int SIZE>
void run(const float *q, const float *emb, const float *log_w, int64_t n, int64_t c, int64_t d, const Groups &groups,
         float *kept, uint16_t *half, float *total, float *result) {
    const bool parallel = n * c > ALONE;
#pragma omp parallel if (parallel)
    {
        std::vector<float> block(d * QUERIES), scores(c * QUERIES);
#pragma omp for schedule(static)
        for (int64_t low = 0; low < n; low += QUERIES) {
            for (int64_t i = 0; i < QUERIES; i++) {
                for (int64_t k = 0; k < d; k++) block[k * QUERIES + i] = low + i < n ? q[(low + i) * d + k] * LOG2E : 0;
            }
            score(emb, block.data(), log_w, c, d, scores.data());
            for (int64_t at = low; at < std::min(low + QUERIES, n); at += LANES) {
                const float *part = scores.data() + at - low;
                double sum[LANES] = {};
                Vector top = groups.convex ? bound(part, groups.n * SIZE, groups.offset) : Vector{};
                if (groups.convex) exponentials<SIZE>(part, groups, at, top, sum, kept, half);
                if (!groups.convex || *std::min_element(sum, sum + LANES) < SMALL) {
                    std::fill_n(sum, LANES, 0.0);
                    top = largest<SIZE>(part, groups, at);
                    exponentials<SIZE>(part, groups, at, top, sum, kept, half);
                }
                for (int64_t i = at; i < std::min(at + LANES, n); i++) {
                    total[i] = float(sum[i - at]);
                    result[i] = float((double(top[i - at]) + std::log2(sum[i - at])) * LN2);
                }
            }
        }
    }
}

}  // namespace

// Of queries q (n, d), candidates emb (c, d) with weights log_w (c,) in powers of 2, and mixtures of the first
// groups * size candidates: total (n,) = the sum of the exponentials over the largest, and result (n,) = its logarithm
// in nats. c is a multiple of ROWS. Where they are given, `kept` in float32 or `half` in bfloat16 takes for each
// candidate and query the sum of its exponential and of its shares in those of its mixtures. Candidates and groups with
// a mark in `out` and `mixed_out` never count for a query. All four have `stride` columns, a multiple of QUERIES. Returns 1
// where a group has more members than there are registers for.
extern "C" int sparring_mixtures(const float *q, const float *emb, const float *log_w, int64_t n, int64_t c, int64_t d,
                                 const float *weights, int64_t groups, int64_t made, int64_t size, float offset,
                                 const uint8_t *out, const uint8_t *mixed_out, int64_t stride, float *kept,
                                 uint16_t *half, float *total, float *result) {
    const Groups all{weights, groups, made, offset, out, mixed_out, stride, convex(weights, groups * made, size)};
    constexpr decltype(&run<1>) RUN[] = {run<1>, run<2>, run<3>, run<4>, run<5>, run<6>, run<7>, run<8>};
    if (size < 1 || size > 8) return 1;
    RUN[size - 1](q, emb, log_w, n, c, d, all, kept, half, total, result);
    return 0;
}

// of_query (n, width) += the transpose of the pull (c, n) times emb (c, width), and of_candidate (c, width) += the pull
// times rows (n, width). The width is a multiple of QUERIES. The pull has `stride` columns and c rounded up to ROWS rows,
// and the sums have n and c rounded up to ROWS rows, of which the last are left undefined. Each row is summed by one
// thread, so results do not depend on the number of threads.
extern "C" int sparring_mixtures_gradients(const float *pull, const float *emb, const float *rows, int64_t n,
                                           int64_t c, int64_t stride, int64_t width, float *of_query,
                                           float *of_candidate) {
    const auto onto = [=](float *to) {
        return [=](int m, int v, Vector sum) {
            float *at = to + m * width + v * LANES;
            store(at, load(at) + sum);
        };
    };
    const bool parallel = n * c > ALONE;
#pragma omp parallel if (parallel)
    {
        for (int64_t k = 0; k < c; k += DEPTH) {
#pragma omp for schedule(static) nowait
            for (int64_t i = 0; i < n; i += ROWS) {
                for (int64_t w = 0; w < width; w += QUERIES) {
                    tile<2, true>(pull + k * stride + i, stride, emb + k * width + w, width, std::min(DEPTH, c - k),
                                  onto(of_query + i * width + w));
                }
            }
        }
        for (int64_t k = 0; k < n; k += DEPTH) {
#pragma omp for schedule(static) nowait
            for (int64_t j = 0; j < c; j += ROWS) {
                for (int64_t w = 0; w < width; w += QUERIES) {
                    tile<2, false>(pull + j * stride + k, stride, rows + k * width + w, width,
                                   std::min(DEPTH, n - k), onto(of_candidate + j * width + w));
                }
            }
        }
    }
    return 0;
}
