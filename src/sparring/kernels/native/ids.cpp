// Ids of some rows; a list of ids by hash: how many are distinct, and where given ids occur. ids.py has the torch form.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

// Distinct ids of a list, each with one of its places, from 1 on.
class Places {
    const int64_t *ids;
    int shift = 64;
    std::vector<int32_t> slot;  // a place, or 0; at least half of them are free
    uint64_t last;

  public:
    Places(const int64_t *ids, int64_t n) : ids(ids) {
        for (int64_t size = 1; size < 2 * n + 2; size *= 2) shift--;
        slot.assign(std::size_t(1) << (64 - shift), 0);
        last = slot.size() - 1;
    }

    // The slot of an id, 0 until the caller puts a place there.
    int32_t &at(int64_t id) {
        uint64_t s = (uint64_t(id) * 0x9E3779B97F4A7C15u) >> shift;
        while (slot[s] && ids[slot[s] - 1] != id) s = (s + 1) & last;
        return slot[s];
    }
};

}  // namespace

// out (m,) = column[rows], whose places in memory are asked for early. Returns 1 if a row is not in [0, n).
extern "C" int sparring_ids_take(const int32_t *column, int64_t n, const int64_t *rows, int64_t m, int64_t *out) {
    constexpr int64_t AHEAD = 32;
    for (int64_t k = 0; k < m; k++) {
        __builtin_prefetch(column + rows[std::min(k + AHEAD, m - 1)]);
        if (uint64_t(rows[k]) >= uint64_t(n)) return 1;
        out[k] = column[rows[k]];
    }
    return 0;
}

// The number of distinct ids of a list goes to `count`.
extern "C" int sparring_ids_distinct(const int64_t *ids, int64_t n, int64_t *count) {
    Places places(ids, n);
    *count = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t &slot = places.at(ids[i]);
        if (slot) continue;
        slot = int32_t(i) + 1;
        ++*count;
    }
    return 0;
}

// For each of the wanted ids (m,) the first place of a list (n,) that holds it, from 1 on, or 0; `next` (n,) leads to
// the others in ascending order. `total` takes the number of all places.
extern "C" int sparring_ids_find(const int64_t *ids, int64_t n, const int64_t *wanted, int64_t m, int32_t *first,
                                 int32_t *next, int64_t *total) {
    Places places(ids, n);
    std::vector<int32_t> count(n + 1, 0);  // of an id, at its first place
    for (int64_t i = n - 1; i >= 0; i--) {
        int32_t &slot = places.at(ids[i]);
        next[i] = slot;
        count[i + 1] = count[slot] + 1;
        slot = int32_t(i) + 1;
    }
    *total = 0;
    for (int64_t k = 0; k < m; k++) *total += count[first[k] = places.at(wanted[k])];
    return 0;
}

// All pairs (row of a wanted id, place that holds the id). Rows are 0, 1, ... unless given.
extern "C" int sparring_ids_pairs(const int32_t *first, const int32_t *next, const int64_t *rows, int64_t m,
                                  int64_t *row, int64_t *place) {
    for (int64_t k = 0; k < m; k++) {
        for (int32_t at = first[k]; at; at = next[at - 1]) {
            *row++ = rows == nullptr ? k : rows[k];
            *place++ = at - 1;
        }
    }
    return 0;
}
