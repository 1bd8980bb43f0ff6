// 2^x for x <= 0, as a polynomial that compilers vectorise.
//
// x = n + f with n an integer and |f| <= 1/2; 2^f is a polynomial of degree 6 and 2^n is written into the exponent. The
// relative error is below 1.2e-7 (a test measures it). Below -126, where float32 has only denormal numbers, it is 0.

#pragma once

#include <cstdint>
#include <cstring>

namespace sparring {

// Of a number, or of a vector of them with as many integers in an Int.
template <typename Float, typename Int>
__attribute__((always_inline)) inline Float exp2_as(Float x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, held in the last bits
    const Float zero{}, least = zero - 126.0f;
    const Float low = x > least ? x : least;
    const Float shifted = low + magic;
    const Float f = low - (shifted - magic);
    Float y = f * 1.535336188319500e-4f + 1.339887440266574e-3f;
    y = y * f + 9.618437357674640e-3f;
    y = y * f + 5.550332471162809e-2f;
    y = y * f + 2.402264791363012e-1f;
    y = y * f + 6.931472028550421e-1f;
    y = y * f + 1.0f;
    Int n, bits;
    std::memcpy(&n, &shifted, sizeof(n));
    std::memcpy(&bits, &y, sizeof(bits));
    bits += n << 23;  // the low bits of `shifted` hold n; the others leave the word
    Float power;
    std::memcpy(&power, &bits, sizeof(power));
    return x > least ? power : zero;
}

inline float exp2_of(float x) { return exp2_as<float, int32_t>(x); }

// The nearest bfloat16, ties to even; for finite numbers.
inline uint16_t bf16_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace sparring
