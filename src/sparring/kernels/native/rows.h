// Rows of a sparse gradient: the places of each row, in batch order, found by a stable radix sort.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace sparring {

struct Rows {
    std::vector<int64_t> row;    // distinct rows, ascending
    std::vector<int64_t> begin;  // where the places of each row begin in `place`; one more entry at the end
    std::vector<int32_t> place;  // places in the batch, by row and then by order
    bool valid = true;
};

// Rows of `index` (n entries); `valid` is false if one of them is not in [0, limit).
inline Rows rows_of(const int64_t *index, int64_t n, int64_t limit) {
    constexpr int BITS = 11;
    constexpr int64_t SIZE = int64_t(1) << BITS;
    Rows found;
    std::vector<int32_t> order(n), other(n);
    for (int64_t i = 0; i < n; i++) {
        order[i] = int32_t(i);
        found.valid &= index[i] >= 0 && index[i] < limit;
    }
    if (!found.valid) return found;
    int64_t count[SIZE];
    for (int shift = 0; shift == 0 || (limit - 1) >> shift; shift += BITS) {
        std::memset(count, 0, sizeof(count));
        for (int64_t i = 0; i < n; i++) count[(index[i] >> shift) & (SIZE - 1)]++;
        int64_t total = 0;
        for (int64_t d = 0; d < SIZE; d++) {
            int64_t here = count[d];
            count[d] = total;
            total += here;
        }
        for (int64_t i = 0; i < n; i++) other[count[(index[order[i]] >> shift) & (SIZE - 1)]++] = order[i];
        order.swap(other);
    }
    found.row.reserve(n);
    found.begin.reserve(n + 1);
    for (int64_t i = 0; i < n; i++) {
        if (i == 0 || index[order[i]] != index[order[i - 1]]) {
            found.row.push_back(index[order[i]]);
            found.begin.push_back(i);
        }
    }
    found.begin.push_back(n);
    found.place = std::move(order);
    return found;
}

// The sum of the gradients of row r of `rows`, in batch order; a row that occurs once is not copied.
inline const float *summed(const Rows &rows, int64_t r, const float *values, int64_t d, float *room) {
    int64_t from = rows.begin[r], to = rows.begin[r + 1];
    const float *first = values + rows.place[from] * d;
    if (to - from == 1) return first;
    std::memcpy(room, first, size_t(d) * sizeof(float));
    for (int64_t p = from + 1; p < to; p++) {
        const float *next = values + rows.place[p] * d;
        for (int64_t k = 0; k < d; k++) room[k] += next[k];
    }
    return room;
}

// Ask for the memory of row r soon: its gradient, and its place in each of the tables.
template <typename... Tables>
inline void fetch(const Rows &rows, int64_t r, const float *values, int64_t d, Tables... tables) {
    if (r >= int64_t(rows.row.size())) return;
    const float *g = values + rows.place[rows.begin[r]] * d;
    const int64_t at = rows.row[r] * d;
    for (int64_t k = 0; k < d; k += 16) {
        __builtin_prefetch(g + k);
        (__builtin_prefetch(tables + at + k, 1), ...);
    }
}

}  // namespace sparring
