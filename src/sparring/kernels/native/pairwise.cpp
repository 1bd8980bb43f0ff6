// One step of a pairwise loss over rows of two tables: losses, and both tables updated by their row rules.
//
//     logistic, hinge:  loss_i = mean_j f(s_ij - s_i+),  s = q . e / tau,  f(x) = log(1 + exp(x)) or max(0, margin + x)
//     gBCE:             loss_i = (beta_i f(-s_i+) + sum_j f(s_ij)) / (1 + n_i),  f(x) = log(1 + exp(x))
//                       beta_i = 1 - calibration (1 - min(1, n_i / (N - 1))),  s = q . e / tau + offset
//
// j runs over the negatives of query i, or over the hardest of them; n_i are those that are not excluded, and an
// excluded one has a gradient of 0. Gradients are those of sum_i scale_i loss_i by the tables before the step.
//
// First each query: its row meets its items, is kept as it was, and updated. Then each item, with the kept rows. Every
// row belongs to one thread, and its gradient is summed in the order of the batch: results do not depend on threads.

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "exp2.h"
#include "lanes.h"
#include "row_rules.h"

namespace {

constexpr float LOG2E = 1.44269504088896340736f, NEVER = -std::numeric_limits<float>::infinity();
enum { NOTHING = 0, POSITIVE = 1, KNOWN = 2 };
enum { LOGISTIC = 0, HINGE = 1, GBCE = 2 };

// The arguments of a step, laid out as `_Step` in pairwise.py.
struct Step {
    sparring::Rule queries, items;
    int32_t *query_slot, *item_slot;    // a number for each row of the tables, 0 between steps
    const int32_t *query_of, *item_of;  // of all pairs
    const int64_t *pairs;               // (b,)
    const int64_t *negative;            // (b, n)
    const int64_t *start;               // of the sorted items of each query in `known`
    const int32_t *known;
    const uint32_t *marks;  // of `known`: see Mark
    const float *scale;     // (b,)
    float *losses;          // (b,)
    int64_t n_pairs, b, n, kept, d;
    int32_t loss, exclude, threads;
    float sharp, parameter, others, offset;  // 1 / tau; the margin, or the calibration; N - 1; of the scores of gBCE

    bool large() const { return b * (1 + n) * d >= 1 << 18; }  // enough for several threads
};

// The pairs of a batch, gathered. `valid` is false if one of them, or of the negatives, is not in its table.
struct Ids {
    std::unique_ptr<int32_t[]> query, item;
    bool valid = true;

    explicit Ids(const Step &step) : query(new int32_t[step.b]), item(new int32_t[step.b]) {
        const uint64_t queries = uint64_t(step.queries.rows), items = uint64_t(step.items.rows);
        bool good = true;
#pragma omp parallel for schedule(static) num_threads(step.threads) reduction(&& : good) if (step.large())
        for (int64_t i = 0; i < step.b; i++) {
            const int64_t pair = step.pairs[i], later = step.pairs[std::min(i + 16, step.b - 1)];
            __builtin_prefetch(step.query_of + later);
            __builtin_prefetch(step.item_of + later);
            const bool there = uint64_t(pair) < uint64_t(step.n_pairs);
            query[i] = there ? step.query_of[pair] : -1;
            item[i] = there ? step.item_of[pair] : -1;
            bool met = uint32_t(query[i]) < queries && uint32_t(item[i]) < items;
            for (int64_t j = i * step.n; j < (i + 1) * step.n; j++) met &= uint64_t(step.negative[j]) < items;
            good = good && met;
        }
        valid = good;
    }
};

// Each known item of a query sets two bits in one of the query's words, of which there is one for each of them. An item
// whose bits are not set is unknown: one look at memory that can be fetched early. Below 1 % of the others pass.
struct Mark {
    int64_t word;
    uint32_t bits;

    Mark(int64_t start, int64_t n, int32_t item) {
        const uint64_t hash = uint64_t(uint32_t(item)) * 0x9E3779B97F4A7C15u;
        word = start + int64_t(((hash >> 32) * uint64_t(n)) >> 32);
        bits = uint32_t(1) << (hash >> 27 & 31) | uint32_t(1) << (hash >> 22 & 31);
    }
};

// The known items of a query.
class Known {
    const int32_t *list = nullptr;
    const uint32_t *marks = nullptr;
    int64_t start = 0, size = 0;

  public:
    Known(const Step &step, int64_t query) {
        if (step.exclude != KNOWN) return;
        start = step.start[query];
        size = step.start[query + 1] - start;
        list = step.known + start;
        marks = step.marks;
    }

    void fetch(int32_t item) const { __builtin_prefetch(marks + Mark(start, size, item).word); }

    bool has(int32_t item) const {
        const Mark mark(start, size, item);
        if (size == 0 || (marks[mark.word] & mark.bits) != mark.bits) return false;
        return std::binary_search(list, list + size, item);
    }
};

// Ask for the memory of a place of the batch soon.
void fetch(const Step &step, const sparring::RowRule &rule, const Ids &ids, int64_t i, int64_t d) {
    const Known known(step, ids.query[i]);
    rule.fetch(ids.query[i], d);
    sparring::fetch(step.items.table + ids.item[i] * d, d);
    for (int64_t j = i * step.n; j < (i + 1) * step.n; j++) {
        sparring::fetch(step.items.table + step.negative[j] * d, d);
        if (step.exclude == KNOWN) known.fetch(int32_t(step.negative[j]));
    }
}

// The places of the highest scores, first ones first among equals.
void hardest(const std::vector<float> &scores, std::vector<int32_t> &chosen, int64_t kept) {
    std::iota(chosen.begin(), chosen.end(), 0);
    std::partial_sort(chosen.begin(), chosen.begin() + kept, chosen.end(), [&](int32_t a, int32_t b) {
        return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
    });
}

// The thread of a row: rows that are neighbours in memory share one.
int64_t thread_of(int32_t row, uint64_t threads) {
    return int64_t((uint64_t(uint32_t(row >> 4) * 2654435761u) * threads) >> 32);
}

// The places of the rows of a thread, by row, in the order of the batch.
struct Groups {
    std::unique_ptr<int32_t[]> order, begin;  // places; where the places of each row begin, and one entry more
    int64_t size = 0;

    Groups(const int32_t *rows, int64_t n, int32_t *slot, int64_t thread, int64_t threads)
        : order(new int32_t[n]), begin(new int32_t[n + 1]) {
        std::unique_ptr<int32_t[]> next(new int32_t[n]), mine(new int32_t[n]);
        int64_t from = n;  // of the places in `mine`
        for (int64_t i = n - 1; i >= 0; i--) {  // no branch: which thread a row has cannot be predicted
            mine[from - 1] = int32_t(i);
            from -= thread_of(rows[i], uint64_t(threads)) == thread;
        }
        for (int64_t k = n - 1; k >= from; k--) {
            const int32_t i = mine[k], row = rows[i];
            next[i] = slot[row];
            slot[row] = i + 1;
        }
        int32_t at = 0;
        for (; from < n; from++) {
            const int32_t i = mine[from], row = rows[i];
            if (slot[row] != i + 1) continue;  // not its first place
            slot[row] = 0;
            begin[size++] = at;
            for (int32_t place = i + 1; place; place = next[place - 1]) order[at++] = place - 1;
        }
        begin[size] = at;
    }
};

int64_t whole_lanes(int64_t n) { return (n + 15) / 16 * 16; }

// log(1 + exp(x)), or max(0, margin + x), of n numbers, and the derivatives; of -infinity both are 0. Arrays have room
// for whole lanes: what follows the last of them would be computed by other instructions.
void penalties(float *x, float *slope, int64_t n, bool hinge, float margin) {
    n = whole_lanes(n);
    if (hinge) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) {
            const float y = margin + x[i];
            slope[i] = y > 0 ? 1.0f : 0.0f;
            x[i] = y < 0 ? 0.0f : y;
        }
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const float e = sparring::exp2_of(-std::abs(x[i]) * LOG2E);
        slope[i] = (x[i] > 0 ? 1.0f : e) / (1.0f + e);
        // log(1 + e) is 2 atanh(t): a series whose next term is below 2e-8
        const float t = e / (2.0f + e), s = t * t;
        float sum = 1.0f / 13;
        sum = sum * s + 1.0f / 11;
        sum = sum * s + 1.0f / 9;
        sum = sum * s + 1.0f / 7;
        sum = sum * s + 1.0f / 5;
        sum = sum * s + 1.0f / 3;
        sum = sum * s + 1.0f;
        x[i] = (x[i] < 0 ? 0.0f : x[i]) + 2 * t * sum;
    }
}

// D is the number of dimensions, or 0 for any.
template <int64_t D>
void take(const Step &step, const Ids &ids) {
    using sparring::add, sparring::dot, sparring::scaled;
    const int64_t b = step.b, n = step.n, kept = step.kept, d = D ? D : step.d, each = 1 + kept;
    const float *users = step.queries.table, *items = step.items.table;
    const sparring::RowRule query_rule(step.queries), item_rule(step.items);
    const bool gbce = step.loss == GBCE;
    // For each query its positive and the negatives it meets: item, factor of its gradient, the query's old row.
    std::unique_ptr<int32_t[]> touched(new int32_t[b * each]), owner(new int32_t[b * each]);
    std::unique_ptr<float[]> factor(new float[b * each]), old(new float[b * d]);
    const int64_t block = std::max<int64_t>(1, std::min<int64_t>(32, 512 / each));
    const int64_t ahead = std::max<int64_t>(1, 16 / (1 + n));

#pragma omp parallel num_threads(step.threads) if (step.large())
    {
#ifdef _OPENMP
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
#else
        const int64_t thread = 0, threads = 1;
#endif
        std::vector<float> scores(n), x(whole_lanes(block * each)), slope(x.size()), counts(block), gradient(d);
        std::vector<int32_t> chosen(n);
        float *g = gradient.data();
        {
            const Groups groups(ids.query.get(), b, step.query_slot, thread, threads);
            const int64_t size = groups.begin[groups.size];
            int64_t group = 0;
            for (int64_t from = 0; from < size; from += block) {
                const int64_t to = std::min(size, from + block);
                for (int64_t at = from; at < to; at++) {
                    if (step.exclude == KNOWN && at + 32 < size)
                        __builtin_prefetch(step.start + ids.query[groups.order[at + 32]]);
                    if (at + ahead < size) fetch(step, query_rule, ids, groups.order[at + ahead], d);
                    const int64_t i = groups.order[at];
                    const float *u = users + ids.query[i] * d;
                    const int64_t *negative = step.negative + i * n;
                    const float own = dot(u, items + ids.item[i] * d, d) * step.sharp;
                    const Known known(step, ids.query[i]);
                    int64_t left = 0;
                    for (int64_t j = 0; j < n; j++) {
                        const int32_t item = int32_t(negative[j]);
                        const bool out = step.exclude == KNOWN ? known.has(item) :
                                         step.exclude == POSITIVE && item == ids.item[i];
                        left += !out;
                        scores[j] = out ? NEVER : dot(u, items + item * d, d) * step.sharp;
                    }
                    float *mine = x.data() + (at - from) * each;
                    int32_t *met = touched.get() + i * each;
                    mine[0] = gbce ? -(own + step.offset) : NEVER;
                    met[0] = ids.item[i];
                    if (kept < n) hardest(scores, chosen, kept);
                    for (int64_t j = 0; j < kept; j++) {
                        const int64_t which = kept < n ? chosen[j] : j;
                        mine[1 + j] = scores[which] + (gbce ? step.offset : -own);
                        met[1 + j] = int32_t(negative[which]);
                    }
                    counts[at - from] = float(std::min(left, kept));
                }
                penalties(x.data(), slope.data(), (to - from) * each, step.loss == HINGE, step.parameter);
                for (int64_t at = from; at < to; at++) {
                    const int64_t i = groups.order[at], head = groups.order[groups.begin[group]];
                    const float *value = x.data() + (at - from) * each, *by = slope.data() + (at - from) * each;
                    const float share = 1 / (gbce ? 1 + counts[at - from] : std::max(counts[at - from], 1.0f));
                    const float scale = step.scale[i] * step.sharp * share;
                    float *c = factor.get() + i * each, sum = 0, total = 0;
                    const int32_t *met = touched.get() + i * each;
                    for (int64_t j = 1; j < each; j++) {
                        total += value[j];
                        // the positive against itself has no gradient; Adagrad would scale up one of rounding
                        sum += c[j] = met[j] == met[0] && !gbce ? 0.0f : by[j] * scale;
                    }
                    c[0] = -sum;
                    if (gbce) {
                        const float beta = 1 - step.parameter * (1 - std::min(1.0f, counts[at - from] / step.others));
                        total += beta * value[0];
                        c[0] = -beta * by[0] * scale;
                    }
                    step.losses[i] = total * share;
                    if (at == groups.begin[group]) scaled(g, c[0], items + met[0] * d, d);
                    else add(g, c[0], items + met[0] * d, d);
                    owner[i * each] = int32_t(head);
                    for (int64_t j = 1; j < each; j++) {
                        add(g, c[j], items + met[j] * d, d);
                        owner[i * each + j] = int32_t(head);
                    }
                    if (at + 1 < groups.begin[group + 1]) continue;
                    const int64_t row = ids.query[i];
                    std::memcpy(old.get() + head * d, users + row * d, size_t(d) * sizeof(float));
                    query_rule.update(row, g, d);
                    group++;
                }
            }
        }
#pragma omp barrier
        const Groups groups(touched.get(), b * each, step.item_slot, thread, threads);
        for (int64_t r = groups.size - 1; r >= 0; r--) {  // from the end: its rows have been read last
            if (r >= 8) item_rule.fetch(touched[groups.order[groups.begin[r - 8]]], d);
            const int64_t first = groups.order[groups.begin[r]];
            scaled(g, factor[first], old.get() + owner[first] * d, d);
            for (int64_t at = groups.begin[r] + 1; at < groups.begin[r + 1]; at++) {
                const int64_t entry = groups.order[at];
                add(g, factor[entry], old.get() + owner[entry] * d, d);
            }
            item_rule.update(touched[first], g, d);
        }
    }
}

}  // namespace

// Sets the bits of all known items, in zeroed words: see Mark.
extern "C" int sparring_pairwise_marks(const int64_t *start, const int32_t *known, int64_t queries, uint32_t *marks) {
    for (int64_t q = 0; q < queries; q++) {
        for (int64_t k = start[q]; k < start[q + 1]; k++) {
            const Mark mark(start[q], start[q + 1] - start[q], known[k]);
            marks[mark.word] |= mark.bits;
        }
    }
    return 0;
}

// Returns 1, with nothing changed, if an id is outside its table.
extern "C" int sparring_pairwise(const Step *step) {
    const Ids ids(*step);
    if (!ids.valid) return 1;
    if (step->d == 64) take<64>(*step, ids);
    else take<0>(*step, ids);
    return 0;
}
