#include "attention_floats.h"
#include "attention_kernel.h"

namespace afm {
namespace {

void score(const int16_t* q, int64_t rows, const int8_t* keys, int64_t stride, int64_t count, int64_t dim,
           CodesAhead, int32_t* scores) {
  for (int64_t k = 0; k < count; ++k) {
    const int8_t* key = keys + k * stride;
    for (int64_t r = 0; r < rows; ++r) {
      const int16_t* query = q + r * dim;
      int32_t sum = 0;
      for (int64_t d = 0; d < dim; ++d) sum += static_cast<int32_t>(query[d]) * key[d];
      scores[r * kBlock + k] = sum;
    }
  }
}

void add(const int16_t* weights, int64_t rows, const int8_t* values, int64_t stride, int64_t count, int64_t dim,
         const float* decay, float* sums) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t start = 0; start < dim; start += kDimStep) {
      int32_t sum[kDimStep] = {};
      for (int64_t k = 0; k < count; ++k) {
        const int8_t* value = values + k * stride + start;
        int32_t weight = weights[r * kBlock + k];
        for (int64_t d = 0; d < kDimStep; ++d) sum[d] += weight * value[d];
      }
      float* out = sums + r * dim + start;
      for (int64_t d = 0; d < kDimStep; ++d) out[d] = out[d] * decay[r] + static_cast<float>(sum[d]);
    }
  }
}

// Vectors that compilers know on every processor.
struct Floats {
  static constexpr int kLanes = 4;
  typedef float V __attribute__((vector_size(16)));
  static V load(const float* p) {
    V x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
  }
  static void store(float* p, V x) { __builtin_memcpy(p, &x, sizeof x); }
  static V fill(float x) { return V{x, x, x, x}; }
  static V multiply_add(V a, V b, V c) { return a + b * c; }
  static float sum(V x) { return (x[0] + x[1]) + (x[2] + x[3]); }
  static void sum_each(V a, V b, V c, V d, float* out) { store(out, V{sum(a), sum(b), sum(c), sum(d)}); }
};

}  // namespace

const AttentionKernels kAttentionPortable = {turn,  to_int16,             to_int8,      score,             weigh, add,
                                         widen, score_floats<Floats>, weigh_floats, add_floats<Floats>};

}  // namespace afm
