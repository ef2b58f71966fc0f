#include "attention_kernel.h"

namespace afm {
namespace {

void score(const int16_t* q, int64_t rows, const int8_t* keys, int64_t stride, int64_t count, int64_t dim,
           int32_t* scores) {
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

}  // namespace

const AttentionKernels kAttentionPortable = {turn, to_int16, to_int8, score, weigh, add};

}  // namespace afm
