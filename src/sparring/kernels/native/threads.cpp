// The number of threads that kernels use: torch's, since they share its OpenMP runtime.

#ifdef _OPENMP
#include <omp.h>
#endif

extern "C" int sparring_threads() {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}
