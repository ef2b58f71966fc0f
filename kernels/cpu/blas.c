/* MLX's Linux wheel computes dense products with Netlib's reference BLAS. This library, loaded before MLX
 * with its symbols global, answers for `cblas_sgemm` and passes the call on to the OpenBLAS that NumPy's
 * wheel carries. `afm_blas_bind` receives that function; until then, and in another process that happens
 * to load this library, there is nothing to call, so Python binds it before MLX is imported.
 */
#include <stdint.h>
#include <stdlib.h>

#define API __attribute__((visibility("default")))

/* OpenBLAS in NumPy's wheel has 64-bit integers and a prefix of its own. */
typedef void (*sgemm64)(int order, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k,
                        float alpha, const float *a, int64_t lda, const float *b, int64_t ldb,
                        float beta, float *c, int64_t ldc);

static sgemm64 target;

API void afm_blas_bind(sgemm64 function) { target = function; }

API void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                     const float *a, int lda, const float *b, int ldb, float beta, float *c,
                     int ldc) {
  if (!target) abort();
  target(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
