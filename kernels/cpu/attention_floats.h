// Attention over float keys and values for one instruction set: included by a source file that is compiled for
// it, after `Vector`, what it knows about float32 vectors:
//
//   kLanes                      floats in a vector, kBlockFloats a multiple of them
//   V                           the vector
//   load, store, fill           from and to any address; a vector of one number
//   multiply_add(a, b, c)       a + b * c
//   sum_each(a, b, c, d, out)   out = the sums of four vectors
#pragma once

#include "attention_kernel.h"

namespace afm {
namespace {

// Scores of kRows rows with four keys.
template <class Vector, int kRows>
inline void score_floats_of(const float* q, const float* const keys[4], int64_t dim, float* scores) {
  typename Vector::V sum[kRows][4];
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < 4; ++i) sum[r][i] = Vector::fill(0.0f);
  }
  for (int64_t d = 0; d < dim; d += Vector::kLanes) {
    typename Vector::V key[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) key[i] = Vector::load(keys[i] + d);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      typename Vector::V query = Vector::load(q + r * dim + d);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sum[r][i] = Vector::multiply_add(sum[r][i], query, key[i]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    Vector::sum_each(sum[r][0], sum[r][1], sum[r][2], sum[r][3], scores + r * kBlockFloats);
  }
}

template <class Vector>
void score_floats(const float* q, int64_t rows, const float* keys, int64_t stride, int64_t count, int64_t dim,
                  float* scores) {
  for (int64_t first = 0; first < count; first += 4) {
    const float* four[4];
    // A block's end repeats its last key: kBlockFloats is a multiple of four, and nobody reads those scores.
    for (int64_t i = 0; i < 4; ++i) four[i] = keys + (first + i < count ? first + i : count - 1) * stride;
    int64_t r = 0;
    for (; r + 3 <= rows; r += 3) {
      score_floats_of<Vector, 3>(q + r * dim, four, dim, scores + r * kBlockFloats + first);
    }
    for (; r < rows; ++r) score_floats_of<Vector, 1>(q + r * dim, four, dim, scores + r * kBlockFloats + first);
  }
}

// Two vectors of dimensions of kRows rows.
template <class Vector, int kRows>
inline void add_floats_of(const float* weights, const float* values, int64_t stride, int64_t count, int64_t dim,
                          const float* decay, float* sums) {
  typename Vector::V low[kRows], high[kRows];
  for (int r = 0; r < kRows; ++r) low[r] = high[r] = Vector::fill(0.0f);
  for (int64_t k = 0; k < count; ++k) {
    typename Vector::V first = Vector::load(values + k * stride);
    typename Vector::V second = Vector::load(values + k * stride + Vector::kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      typename Vector::V weight = Vector::fill(weights[r * kBlockFloats + k]);
      low[r] = Vector::multiply_add(low[r], weight, first);
      high[r] = Vector::multiply_add(high[r], weight, second);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    float* out = sums + r * dim;
    typename Vector::V fall = Vector::fill(decay[r]);
    Vector::store(out, Vector::multiply_add(low[r], Vector::load(out), fall));
    out += Vector::kLanes;
    Vector::store(out, Vector::multiply_add(high[r], Vector::load(out), fall));
  }
}

template <class Vector>
void add_floats(const float* weights, int64_t rows, const float* values, int64_t stride, int64_t count, int64_t dim,
                const float* decay, float* sums) {
  for (int64_t d = 0; d < dim; d += 2 * Vector::kLanes) {
    int64_t r = 0;
    for (; r + 3 <= rows; r += 3) {
      add_floats_of<Vector, 3>(weights + r * kBlockFloats, values + d, stride, count, dim, decay + r,
                               sums + r * dim + d);
    }
    for (; r < rows; ++r) {
      add_floats_of<Vector, 1>(weights + r * kBlockFloats, values + d, stride, count, dim, decay + r,
                               sums + r * dim + d);
    }
  }
}

}  // namespace
}  // namespace afm
