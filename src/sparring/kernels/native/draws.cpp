// torch.randint on a CPU, number by number, from the state of a generator: PyTorch divides 64-bit numbers one by one,
// this kernel turns the Mersenne Twister and takes remainders of 32-bit numbers in vectors.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int N = 624, M = 397;

// The beginning of what torch.Generator.get_state() returns.
struct State {
    uint64_t seed;
    int32_t left, seeded;  // left: numbers until the next turn, plus 1
    uint64_t next;
    uint64_t word[N];
};

uint32_t twist(uint32_t u, uint32_t v) {
    return (((u & 0x80000000u) | (v & 0x7fffffffu)) >> 1) ^ (v & 1 ? 0x9908b0dfu : 0u);
}

void turn(uint32_t *w) {
#pragma omp simd safelen(16)
    for (int i = 0; i < N - M; i++) w[i] = w[i + M] ^ twist(w[i], w[i + 1]);
#pragma omp simd safelen(16)
    for (int i = N - M; i < N - 1; i++) w[i] = w[i + M - N] ^ twist(w[i], w[i + 1]);
    w[N - 1] = w[M - 1] ^ twist(w[N - 1], w[0]);
}

// Remainders by `range`, below 2^28, of n tempered words.
void remainders(const uint32_t *w, int64_t n, uint32_t range, int64_t *out) {
    const double share = 1.0 / range;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        uint32_t y = w[i];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        y ^= y >> 18;
        int32_t rest = int32_t(y - uint32_t(int64_t(double(y) * share)) * range);  // the quotient may be 1 off
        rest += rest < 0 ? int32_t(range) : 0;
        rest -= rest >= int32_t(range) ? int32_t(range) : 0;
        out[i] = rest;
    }
}

}  // namespace

// n numbers below `range`, which is below 2^28; the state moves on as PyTorch moves it.
extern "C" int sparring_randint(State *state, int64_t range, int64_t n, int64_t *out) {
    uint32_t word[N];
    std::copy_n(state->word, N, word);
    for (int64_t done = 0; done < n;) {
        if (state->left == 1) {
            turn(word);
            state->left = N + 1;
            state->next = 0;
        }
        const int64_t some = std::min<int64_t>(n - done, state->left - 1);
        remainders(word + state->next, some, uint32_t(range), out + done);
        state->left -= int32_t(some);
        state->next += uint64_t(some);
        done += some;
    }
    std::copy_n(word, N, state->word);
    return 0;
}

// The order (n,) of numbers that are not negative, first ones first among equals: a radix sort, since the bits of such
// floats ascend as their values do.
extern "C" int sparring_order(const float *x, int64_t n, int64_t *order) {
    constexpr int BITS = 11, SIZE = 1 << BITS;
    std::vector<uint32_t> key(n);
    std::vector<int32_t> from(n), to(n);
    std::memcpy(key.data(), x, size_t(n) * sizeof(float));
    for (int64_t i = 0; i < n; i++) from[i] = int32_t(i);
    for (int shift = 0; shift < 32; shift += BITS) {
        int32_t next[SIZE + 1] = {};
        for (int64_t i = 0; i < n; i++) next[(key[i] >> shift & (SIZE - 1)) + 1]++;
        for (int d = 0; d < SIZE; d++) next[d + 1] += next[d];
        for (int64_t i = 0; i < n; i++) to[next[key[from[i]] >> shift & (SIZE - 1)]++] = from[i];
        from.swap(to);
    }
    std::copy(from.begin(), from.end(), order);
    return 0;
}
