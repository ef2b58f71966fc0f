#include "dense.h"

#include <dlfcn.h>

#include <cstdint>

#include "pool.h"

namespace afm {
namespace {

using Piece = void (*)(void* context, int64_t i);
using Share = void (*)(int64_t count, int64_t each, Piece piece, void* context);
using Threads = int (*)();

void share(int64_t count, int64_t each, Piece piece, void* context) {
  ThreadPool::shared().parallel_for(count, 1, [=](int64_t i, int64_t) { piece(context, i); }, each);
}

int threads() { return ThreadPool::shared().threads(); }

}  // namespace

void share_with_blas() {
  using Take = void (*)(Share, Threads);
  if (auto take = reinterpret_cast<Take>(dlsym(RTLD_DEFAULT, "afm_blas_share"))) take(share, threads);
}

}  // namespace afm
