// Exact top k of inner products, from 8-bit integers first.
//
// Vectors are rounded to 8-bit integers with one scale each: x = s xi + r, q = t qi + p. The integers give
//
//     |q.x - s t qi.xi| <= |p| |s xi| + |q| |r|        (Cauchy and Schwarz)
//
// so each item has a lower and an upper bound of its score. An item whose upper bound is below the k-th largest lower
// bound is not among the k best. The few others are scored in float64, rounded once, and ordered by score and then id:
// the lists are those of a sort of all scores. Bounds are in units of |q| times the largest norm of an item, and E, the
// allowance for rounding, covers the arithmetic here and the rounding of scores to float32.
//
// Items are sorted by norm, the largest first. So the threshold rises early, and once it exceeds the norm of the next
// items, no further item can enter the list.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define SPARRING_VNNI
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;              // items of a panel
constexpr int TILE = 12;               // queries whose sums are in registers at once, for two panels
constexpr int GROUP = 4 * TILE;        // queries that share a block of items in the cache
constexpr int64_t BLOCK = 32 << 10;    // bytes of such a block
constexpr float RELATIVE = 2e-6f;      // of a norm: more than all rounding of float32 here and of scores to float32
constexpr float ABSOLUTE = 1e-25f;     // more than numbers that float32 cannot hold, for queries in the range below
constexpr double LEAST = 1e-19, MOST = 1e37;  // |q| times the largest norm: scores neither vanish nor overflow

// The inner product in float64. Its order is fixed, so a score depends on its two vectors alone.
inline float score(const float *a, const float *b, int64_t d) {
    double lane[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    int64_t k = 0;
    for (; k + 8 <= d; k += 8)
        for (int l = 0; l < 8; l++) lane[l] += double(a[k + l]) * double(b[k + l]);
    for (int l = 0; k < d; k++, l++) lane[l] += double(a[k]) * double(b[k]);
    return float(((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7])));
}

inline double norm(const float *x, int64_t d) {
    double total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t k = 0; k < d; k++) total += double(x[k]) * x[k];
    return std::sqrt(total);
}

#ifdef SPARRING_VNNI

struct Rounded {
    double scale, size, error;  // of x = scale xi + r: scale, |scale xi|, |r|
};

// x as integers in [-127, 127], rounded to the nearest.
inline Rounded rounded(const float *x, int64_t d, int8_t *out) {
    float largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t k = 0; k < d; k++) largest = std::max(largest, std::fabs(x[k]));
    if (largest == 0) {
        std::memset(out, 0, size_t(d));
        return {0, 0, 0};
    }
    const double scale = double(largest) / 127, inverse = 127 / double(largest);
    double size = 0, error = 0;
#pragma omp simd reduction(+ : size, error)
    for (int64_t k = 0; k < d; k++) {
        const double whole = std::nearbyint(x[k] * inverse), r = x[k] - scale * whole;
        out[k] = int8_t(whole);
        size += whole * whole;
        error += r * r;
    }
    return {scale, scale * std::sqrt(size), std::sqrt(error)};
}

struct Candidate {
    float low, high;
    int32_t item;
};

// The candidates of one query.
struct List {
    std::vector<Candidate> kept;
    float threshold;  // the k-th largest lower bound so far
    size_t limit;     // candidates that are kept before the threshold is raised

    void begin(size_t k) {
        kept.clear();
        threshold = -FLT_MAX;
        limit = 3 * k + 128;
    }

    void raise(size_t k, std::vector<float> &room) {
        if (kept.size() >= k) {
            room.clear();
            for (const Candidate &c : kept) room.push_back(c.low);
            std::nth_element(room.begin(), room.begin() + (k - 1), room.end(), std::greater<float>());
            threshold = std::max(threshold, room[k - 1]);
            const float t = threshold;
            kept.erase(std::remove_if(kept.begin(), kept.end(), [t](const Candidate &c) { return c.high < t; }),
                       kept.end());
        }
        limit = std::max(3 * k + 128, 2 * kept.size());
    }
};

struct Items {
    const uint8_t *packed;  // by panel, four dimensions, item and dimension; 128 added
    const float *scale, *size, *error, *norms;
    const int32_t *order;
    int64_t panels, quads;
};

struct Group {
    alignas(64) int32_t start[GROUP];  // -128 times the sum of the integers of a query
    float scale[GROUP], loss[GROUP];
    std::vector<int32_t> queries;      // by tile, four dimensions and query
    List lists[GROUP];
    std::vector<uint64_t> hidden;      // one bit per query and item
    int64_t words;
    std::vector<float> room;
};

// Sums of two panels with Q queries, (2, Q, 16). Apart from the code around it, so that they stay in registers.
template <int Q>
__attribute__((noinline)) void multiply(const uint8_t *a, const uint8_t *b, const int32_t *queries,
                                        const int32_t *start, int64_t quads, int32_t *out) {
    __m512i first[Q], second[Q];
#pragma GCC unroll 16
    for (int i = 0; i < Q; i++) first[i] = second[i] = _mm512_set1_epi32(start[i]);
    for (int64_t g = 0; g < quads; g++) {
        const __m512i x = _mm512_loadu_si512(a + g * 64), y = _mm512_loadu_si512(b + g * 64);
#pragma GCC unroll 16
        for (int i = 0; i < Q; i++) {
            const __m512i q = _mm512_set1_epi32(queries[g * Q + i]);
            first[i] = _mm512_dpbusd_epi32(first[i], x, q);
            second[i] = _mm512_dpbusd_epi32(second[i], y, q);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < Q; i++) {
        _mm512_store_si512(out + i * LANES, first[i]);
        _mm512_store_si512(out + (Q + i) * LANES, second[i]);
    }
}

// Two panels from `panel` on against Q queries from `first` on.
template <int Q>
inline void meet(const Items &items, Group &group, int64_t panel, int first, const int32_t *queries, float loss,
                 size_t k) {
    alignas(64) int32_t sums[2 * Q * LANES];
    const uint8_t *a = items.packed + panel * items.quads * 64;
    multiply<Q>(a, a + items.quads * 64, queries, group.start + first, items.quads, sums);
    __m512 scale[2], slack[2];
    for (int p = 0; p < 2; p++) {
        const int64_t at = (panel + p) * LANES;
        scale[p] = _mm512_loadu_ps(items.scale + at);
        slack[p] = _mm512_fmadd_ps(_mm512_set1_ps(loss), _mm512_loadu_ps(items.size + at),
                                   _mm512_loadu_ps(items.error + at));
    }
    for (int i = 0; i < Q; i++) {
        List &list = group.lists[first + i];
        const __m512 by = _mm512_set1_ps(group.scale[first + i]), least = _mm512_set1_ps(list.threshold);
        __m512 near[2];
        uint32_t passed = 0;
        for (int p = 0; p < 2; p++) {
            near[p] = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums + (p * Q + i) * LANES)), scale[p]);
            const __m512 high = _mm512_fmadd_ps(near[p], by, slack[p]);
            passed |= uint32_t(_mm512_cmp_ps_mask(high, least, _CMP_GE_OQ)) << (16 * p);
        }
        if (__builtin_expect(!passed, 1)) continue;
        alignas(64) float values[2 * LANES], slacks[2 * LANES];
        for (int p = 0; p < 2; p++) {
            _mm512_store_ps(values + p * LANES, _mm512_mul_ps(near[p], by));
            _mm512_store_ps(slacks + p * LANES, slack[p]);
        }
        const uint64_t *hidden = group.hidden.data() + (first + i) * group.words;
        for (; passed; passed &= passed - 1) {
            const int bit = __builtin_ctz(passed);
            const int32_t item = items.order[panel * LANES + bit];
            if (group.words && (hidden[item >> 6] >> (item & 63)) & 1) continue;
            list.kept.push_back({values[bit] - slacks[bit], values[bit] + slacks[bit], item});
        }
        if (list.kept.size() >= list.limit) list.raise(k, group.room);
    }
}

// Queries from `first` on, Q of them, against the panels from `from` to `to`.
template <int Q>
void tile(const Items &items, Group &group, int64_t from, int64_t to, int first, const int32_t *queries, size_t k) {
    float loss = 0, least = FLT_MAX;
    for (int i = first; i < first + Q; i++) {
        loss = std::max(loss, group.loss[i]);
        least = std::min(least, group.lists[i].threshold);
    }
    if (least > items.norms[from * LANES] * (1 + RELATIVE) + ABSOLUTE) return;
    for (int64_t p = from; p < to; p += 2) meet<Q>(items, group, p, first, queries, loss, k);
}

int width(int left) { return left >= TILE ? TILE : left >= 4 ? 4 : 1; }

#endif

}  // namespace

// Scores (b, c) of queries (b, d) with items[ids[i, j]] of (n, d).
extern "C" int sparring_inner_products(const float *q, const float *items, const int64_t *ids, float *out, int64_t b,
                                       int64_t c, int64_t n, int64_t d) {
    for (int64_t i = 0; i < b * c; i++)
        if (ids[i] < 0 || ids[i] >= n) return 1;
#pragma omp parallel for schedule(static) if (b * c * d > 65536)
    for (int64_t i = 0; i < b; i++)
        for (int64_t j = 0; j < c; j++) out[i * c + j] = score(q + i * d, items + ids[i * c + j] * d, d);
    return 0;
}

// 1 if this processor has the instructions.
extern "C" int sparring_ranks() {
#ifdef SPARRING_VNNI
    return 1;
#else
    return 0;
#endif
}

// The norms (n) of vectors (n, d).
extern "C" int sparring_norms(const float *x, int64_t n, int64_t d, double *out) {
#pragma omp parallel for schedule(static) if (n * d > 65536)
    for (int64_t i = 0; i < n; i++) out[i] = norm(x + i * d, d);
    return 0;
}

// Items (n, d) in the given order, as 8-bit integers in panels: packed (panels, quads, 16, 4), and by place
// scale, size, error and norms, all in units of `largest`, the largest norm.
extern "C" int sparring_rank_pack(const float *x, const int32_t *order, int64_t n, int64_t d, int64_t panels,
                                  double largest, uint8_t *packed, float *scale, float *size, float *error,
                                  float *norms) {
#ifdef SPARRING_VNNI
    const int64_t quads = (d + 3) / 4;
    const double unit = largest > 0 ? 1 / largest : 0;
#pragma omp parallel
    {
        std::vector<int8_t> room(quads * 4, 0);
#pragma omp for schedule(static)
        for (int64_t p = 0; p < panels; p++) {
            for (int lane = 0; lane < LANES; lane++) {
                const int64_t at = p * LANES + lane;
                uint8_t *to = packed + p * quads * 64 + lane * 4;
                if (at >= n) {
                    for (int64_t g = 0; g < quads; g++) std::memset(to + g * 64, 128, 4);
                    scale[at] = size[at] = norms[at] = 0;
                    error[at] = -std::numeric_limits<float>::infinity();
                    continue;
                }
                const float *row = x + int64_t(order[at]) * d;
                const Rounded found = rounded(row, d, room.data());
                for (int64_t g = 0; g < quads; g++)
                    for (int l = 0; l < 4; l++) to[g * 64 + l] = uint8_t(room[g * 4 + l] + 128);
                const double own = norm(row, d) * unit;
                scale[at] = float(found.scale * unit);
                size[at] = float(found.size * unit);
                norms[at] = float(own);
                error[at] = float(found.error * unit * (1 + RELATIVE) + own * RELATIVE) + ABSOLUTE;
            }
        }
    }
    return 0;
#else
    return 2;
#endif
}

// The k best items of queries q (b, d): scores and ids (b, k), and sure (b), which is 0 where the numbers are out of
// range and nothing was ranked. start, seen and who are null or the items to leave out: seen[start[w] : start[w + 1]].
extern "C" int sparring_rank(const float *q, const float *x, int64_t b, int64_t n, int64_t d, int64_t k,
                             const uint8_t *packed, const float *scale, const float *size, const float *error,
                             const float *norms, const int32_t *order, int64_t panels, double largest,
                             const int64_t *start, const int32_t *seen, const int64_t *who, float *scores,
                             int64_t *ids, uint8_t *sure) {
#ifdef SPARRING_VNNI
    const Items items{packed, scale, size, error, norms, order, panels, (d + 3) / 4};
    const int64_t quads = items.quads;
    const int64_t step = std::max<int64_t>(2, BLOCK / (quads * 64) / 2 * 2);
#ifdef _OPENMP
    const int64_t threads = omp_get_max_threads();
#else
    const int64_t threads = 1;
#endif
    const int64_t share = (b + threads - 1) / threads;  // few queries: smaller groups, one for each thread
    const int64_t members = std::min<int64_t>(GROUP, std::max<int64_t>(1, (share + TILE - 1) / TILE) * TILE);
    const int64_t groups = (b + members - 1) / members;
    bool valid = true;
#pragma omp parallel if (groups > 1) reduction(&& : valid)
    {
        Group group;
        group.queries.resize(GROUP * quads);
        group.words = start ? (n + 63) / 64 : 0;
        group.hidden.assign(std::min<int64_t>(b, members) * group.words, 0);
        std::vector<int8_t> room(quads * 4, 0);
        std::vector<std::pair<float, int32_t>> best;
#pragma omp for schedule(dynamic)
        for (int64_t at = 0; at < groups; at++) {
            const int64_t low = at * members;
            const int count = int(std::min<int64_t>(members, b - low));
            for (int first = 0; first < count; first += width(count - first)) {
                const int w = width(count - first);
                int32_t *to = group.queries.data() + first * quads;
                for (int i = 0; i < w; i++) {
                    const float *own = q + (low + first + i) * d;
                    const double length = norm(own, d), unit = length > 0 ? 1 / length : 0;
                    const Rounded found = rounded(own, d, room.data());
                    int32_t total = 0;
                    for (int64_t g = 0; g < quads; g++) {
                        std::memcpy(to + g * w + i, room.data() + g * 4, 4);
                        for (int l = 0; l < 4; l++) total += room[g * 4 + l];
                    }
                    group.start[first + i] = -128 * total;
                    group.scale[first + i] = float(found.scale * unit);
                    group.loss[first + i] = float(found.error * unit * (1 + RELATIVE)) + RELATIVE;
                    group.lists[first + i].begin(size_t(k));
                    const double reach = length * largest;
                    const bool ranked = reach > LEAST && reach < MOST;
                    sure[low + first + i] = ranked || reach == 0;
                    if (!ranked) group.lists[first + i].threshold = FLT_MAX;  // no item passes
                }
            }
            if (start)
                for (int i = 0; i < count; i++)
                    for (int64_t s = start[who[low + i]]; s < start[who[low + i] + 1]; s++)
                        if (seen[s] >= 0 && seen[s] < n)
                            group.hidden[i * group.words + (seen[s] >> 6)] |= uint64_t(1) << (seen[s] & 63);
                        else
                            valid = false;
            for (int64_t from = 0; from < panels; from += step) {
                const int64_t to = std::min(panels, from + step);
                for (int first = 0; first < count; first += width(count - first)) {
                    const int32_t *own = group.queries.data() + first * quads;
                    switch (width(count - first)) {
                        case TILE: tile<TILE>(items, group, from, to, first, own, size_t(k)); break;
                        case 4: tile<4>(items, group, from, to, first, own, size_t(k)); break;
                        default: tile<1>(items, group, from, to, first, own, size_t(k));
                    }
                }
            }
            for (int i = 0; i < count; i++) {
                const int64_t row = low + i;
                uint64_t *hidden = group.hidden.data() + i * group.words;
                List &list = group.lists[i];
                best.clear();
                if (sure[row] && list.threshold == FLT_MAX) {  // all scores are zero
                    for (int32_t item = 0; item < n && int64_t(best.size()) < k; item++)
                        if (!group.words || !((hidden[item >> 6] >> (item & 63)) & 1)) best.push_back({0.0f, item});
                } else {
                    list.raise(size_t(k), group.room);
                    for (const Candidate &c : list.kept)
                        for (int64_t k = 0; k < d; k += 16) __builtin_prefetch(x + int64_t(c.item) * d + k);
                    for (const Candidate &c : list.kept)
                        best.push_back({score(q + row * d, x + int64_t(c.item) * d, d), c.item});
                }
                if (start)
                    for (int64_t s = start[who[row]]; s < start[who[row] + 1]; s++)
                        if (seen[s] >= 0 && seen[s] < n) hidden[seen[s] >> 6] = 0;
                const int64_t m = std::min<int64_t>(k, int64_t(best.size()));
                std::partial_sort(best.begin(), best.begin() + m, best.end(), [](const auto &a, const auto &b) {
                    return a.first > b.first || (a.first == b.first && a.second < b.second);
                });
                for (int64_t j = 0; j < k; j++) {
                    scores[row * k + j] = j < m ? best[j].first : -std::numeric_limits<float>::infinity();
                    ids[row * k + j] = j < m ? best[j].second : -1;
                }
            }
        }
    }
    return valid ? 0 : 1;
#else
    return 2;
#endif
}
