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

// Rows from which it pays to turn a block of keys first: no tile of a text model has as many.
constexpr int64_t kManyRows = 64;
constexpr int64_t kTurned = 64;  // dimensions that are turned at a time

// Adds the scores of kRows rows with kColumns vectors of keys to `scores`, or sets them.
template <class Vector, int kRows, int kColumns>
inline void score_turned_of(const float* q, int64_t dim, const float* turned, int64_t depth, bool add, float* scores) {
  typename Vector::V sum[kRows][kColumns];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) {
      float* out = scores + r * kBlockFloats + c * Vector::kLanes;
      sum[r][c] = add ? Vector::load(out) : Vector::fill(0.0f);
    }
  }
  for (int64_t d = 0; d < depth; ++d) {
    typename Vector::V key[kColumns];
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) key[c] = Vector::load(turned + d * kBlockFloats + c * Vector::kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      typename Vector::V query = Vector::fill(q[r * dim + d]);
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) sum[r][c] = Vector::multiply_add(sum[r][c], query, key[c]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) Vector::store(scores + r * kBlockFloats + c * Vector::kLanes, sum[r][c]);
  }
}

// Of many rows: keys are turned, so that a vector holds a dimension of several keys and no vector is summed up.
template <class Vector>
void score_many(const float* q, int64_t rows, const float* keys, int64_t stride, int64_t count, int64_t dim,
                float* scores) {
  constexpr int kRows = 6, kColumns = Vector::kLanes == 16 ? 4 : 2;
  constexpr int64_t kStep = kColumns * Vector::kLanes;
  static_assert(kBlockFloats % kStep == 0);
  float turned[kTurned * kBlockFloats];
  for (int64_t first = 0; first < dim; first += kTurned) {
    const int64_t depth = dim - first < kTurned ? dim - first : kTurned;
    for (int64_t k = 0; k < kBlockFloats; ++k) {
      const float* key = keys + (k < count ? k : count - 1) * stride + first;  // nobody reads scores past `count`
      for (int64_t d = 0; d < depth; ++d) turned[d * kBlockFloats + k] = key[d];
    }
    for (int64_t k = 0; k < count; k += kStep) {
      int64_t r = 0;
      for (; r + kRows <= rows; r += kRows) {
        score_turned_of<Vector, kRows, kColumns>(q + r * dim + first, dim, turned + k, depth, first > 0,
                                                 scores + r * kBlockFloats + k);
      }
      for (; r < rows; ++r) {
        score_turned_of<Vector, 1, kColumns>(q + r * dim + first, dim, turned + k, depth, first > 0,
                                             scores + r * kBlockFloats + k);
      }
    }
  }
}

template <class Vector>
void score_floats(const float* q, int64_t rows, const float* keys, int64_t stride, int64_t count, int64_t dim,
                  float* scores) {
  if (rows >= kManyRows) return score_many<Vector>(q, rows, keys, stride, count, dim, scores);
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
