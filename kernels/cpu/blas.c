/* MLX's Linux wheel computes dense products with Netlib's reference BLAS. This library, loaded before MLX
 * with its symbols global, answers for `cblas_sgemm` and passes the call on to the OpenBLAS that NumPy's
 * wheel carries. `afm_blas_bind` receives its functions; until then, and in another process that happens
 * to load this library, there is nothing to call, so Python binds them before MLX is imported.
 *
 * OpenBLAS's own threads wait for each other, and up to 100 ms for the next product, in loops that keep their
 * cores: next to one busy process they take many times as long as one thread, and they take a core from the
 * kernels' threads. So once the kernels are loaded, their threads (`pool.h`) share the tiles of a product, and
 * OpenBLAS computes each tile with one. Tiles depend on the product and the number of threads only, so that
 * results do, too.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#define API __attribute__((visibility("default")))

enum { ROW_MAJOR = 101, NO_TRANSPOSE = 111 };
enum { ALONE = 1 << 18 }; /* multiplications of a product that OpenBLAS computes with one thread by itself */

/* OpenBLAS in NumPy's wheel has 64-bit integers and a prefix of its own. */
typedef void (*sgemm64)(int order, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k,
                        float alpha, const float *a, int64_t lda, const float *b, int64_t ldb,
                        float beta, float *c, int64_t ldc);
/* Calls piece(context, i) for 0 <= i < count, each of that many multiplications, on the threads of the kernels;
 * returns when all are done. */
typedef void (*share)(int64_t count, int64_t each, void (*piece)(void *context, int64_t i), void *context);

static sgemm64 target;
static int (*get_threads)(void);
static void (*set_threads)(int count);
static share share_pieces;
static int (*pool_threads)(void);

API void afm_blas_bind(sgemm64 function, int (*get)(void), void (*set)(int)) {
  target = function;
  get_threads = get;
  set_threads = set;
}

/* ---- One thread for OpenBLAS while its products are pieces of ours: a setting of the whole process */

static pthread_mutex_t of_threads = PTHREAD_MUTEX_INITIALIZER;
static int products; /* in progress */
static int configured;

/* False if OpenBLAS is set to one thread, where ours are not used either. */
static bool take_threads(void) {
  pthread_mutex_lock(&of_threads);
  if (products == 0) configured = get_threads();
  const bool several = configured > 1;
  if (several && products++ == 0) set_threads(1);
  pthread_mutex_unlock(&of_threads);
  return several;
}

static void give_threads_back(void) {
  pthread_mutex_lock(&of_threads);
  if (--products == 0) set_threads(configured);
  pthread_mutex_unlock(&of_threads);
}

/* The products of the parent's other threads don't go on in a child. */
static void before_fork(void) { pthread_mutex_lock(&of_threads); }
static void in_parent(void) { pthread_mutex_unlock(&of_threads); }
static void in_child(void) {
  if (products > 0) set_threads(configured);
  products = 0;
  pthread_mutex_unlock(&of_threads);
}

API void afm_blas_share(share pieces, int (*threads)(void)) {
  if (share_pieces == NULL) pthread_atfork(before_fork, in_parent, in_child);
  pool_threads = threads;
  share_pieces = pieces;
}

/* ---- Tiles */

/* A row-major product, and the tiles that its threads take one by one. */
struct product {
  bool trans_a, trans_b;
  int code_a, code_b;
  int64_t m, n, k;
  float alpha, beta;
  const float *a, *b;
  float *c;
  int64_t lda, ldb, ldc;
  int64_t rows, cols; /* of a tile */
};

static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

static int64_t tiles_of(const struct product *p) { return divide_up(p->m, p->rows) * divide_up(p->n, p->cols); }

/* Tiles that OpenBLAS computes at nearly the speed of the whole; a few per thread, so that a late thread delays
 * one of them, unless they would be so small that handing them out takes longer. */
static void choose_tiles(struct product *p, int threads) {
  const int64_t largest = 256, smallest = 64, least_work = 1 << 20;
  p->rows = p->m < largest ? p->m : largest;
  p->cols = largest;
  while (tiles_of(p) < 2 * threads && (p->rows > smallest || p->cols > smallest)) {
    if (p->rows * p->cols / 2 * p->k < least_work) break;
    if (p->rows >= p->cols) {
      p->rows = divide_up(p->rows, 2);
    } else {
      p->cols = divide_up(p->cols, 2);
    }
  }
  while (p->cols < p->n && p->rows * p->cols * p->k < least_work) p->cols *= 2;
}

static void compute_tile(void *context, int64_t i) {
  const struct product *p = context;
  const int64_t across = divide_up(p->n, p->cols);
  const int64_t row = i / across * p->rows, col = i % across * p->cols;
  const int64_t rows = p->m - row < p->rows ? p->m - row : p->rows;
  const int64_t cols = p->n - col < p->cols ? p->n - col : p->cols;
  target(ROW_MAJOR, p->code_a, p->code_b, rows, cols, p->k, p->alpha, p->a + (p->trans_a ? row : row * p->lda),
         p->lda, p->b + (p->trans_b ? col * p->ldb : col), p->ldb, p->beta, p->c + row * p->ldc + col, p->ldc);
}

API void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                     const float *a, int lda, const float *b, int ldb, float beta, float *c,
                     int ldc) {
  if (!target) abort();
  struct product p = {trans_a != NO_TRANSPOSE, trans_b != NO_TRANSPOSE, trans_a, trans_b, m, n, k, alpha, beta,
                      a, b, c, lda, ldb, ldc, m, n};
  if (order != ROW_MAJOR) { /* a matrix by columns is its transpose by rows, and (A B)' is B' A' */
    p = (struct product){p.trans_b, p.trans_a, trans_b, trans_a, n, m, k, alpha, beta,
                         b, a, c, ldb, lda, ldc, n, m};
  }
  const int threads = share_pieces != NULL ? pool_threads() : 1;
  if (threads == 1 || p.m * p.n * p.k <= ALONE || !take_threads()) {
    target(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    return;
  }
  choose_tiles(&p, threads);
  share_pieces(tiles_of(&p), p.rows * p.cols * p.k, compute_tile, &p);
  give_threads_back();
}
