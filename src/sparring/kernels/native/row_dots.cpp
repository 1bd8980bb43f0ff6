// Inner products of the rows of two matrices, and their gradients.

#include <cstdint>

extern "C" int sparring_row_dots(const float *a, const float *b, int64_t n, int64_t d, float *dots) {
#pragma omp parallel for schedule(static) if (n * d > 32768)
    for (int64_t i = 0; i < n; i++) {
        const float *x = a + i * d, *y = b + i * d;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t k = 0; k < d; k++) sum += x[k] * y[k];
        dots[i] = sum;
    }
    return 0;
}

extern "C" int sparring_row_dots_backward(const float *grad, const float *a, const float *b, int64_t n, int64_t d,
                                          float *by_a, float *by_b) {
#pragma omp parallel for schedule(static) if (n * d > 32768)
    for (int64_t i = 0; i < n; i++) {
        const float g = grad[i];
#pragma omp simd
        for (int64_t k = 0; k < d; k++) {
            by_a[i * d + k] = g * b[i * d + k];
            by_b[i * d + k] = g * a[i * d + k];
        }
    }
    return 0;
}
