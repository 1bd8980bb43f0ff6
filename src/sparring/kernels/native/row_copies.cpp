// Rows of a table, whose memory is asked for early.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "lanes.h"

// out (n, d) = table[ids]. Returns 1, with nothing written, if an id is not in [0, limit).
extern "C" int sparring_rows(const float *table, int64_t limit, const int64_t *ids, int64_t n, float *out, int64_t d) {
    constexpr int64_t AHEAD = 8;
    bool valid = true;
    for (int64_t i = 0; i < n; i++) valid &= uint64_t(ids[i]) < uint64_t(limit);
    if (!valid) return 1;
#pragma omp parallel for schedule(static) if (n * d > 32768)
    for (int64_t i = 0; i < n; i++) {
        sparring::fetch(table + ids[std::min(i + AHEAD, n - 1)] * d, d);
        std::memcpy(out + i * d, table + ids[i] * d, size_t(d) * sizeof(float));
    }
    return 0;
}
