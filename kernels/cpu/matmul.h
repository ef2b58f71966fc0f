// Products of packed matrices with activations: what `kernels/reference.py` defines, on plain pointers.
//
// Activations become integers once per vector: int16 by default (two int8 digits, 256 * hi + lo), int8 by
// choice, with one float scale per vector. Codes are integers already, so every processor needs nothing
// but dot products of unsigned with signed bytes, and those and their sums are exact. An int16 unit is
// max|x| / 32639; each element moves by at most half of it, a vector of K by sqrt(K / 12) of it in the l2 norm (the
// errors being spread evenly). At least 5/8 of the elements that are not 0 are 1/128 of max|x| or more, as outliers are
// multiplied apart (see outliers.h): that is at most 0.0015 of the vector's norm, and far less of most vectors, where
// bfloat16 rounds by 0.0017 in the mean.
// A palette's numbers become integers as well where there is a kernel (see palette.h), or stay in float32.
//
// All arrays are row-major, and contiguous except for the named strides. Nothing here checks shapes: the
// callers do. Work is shared among the threads of `ThreadPool::shared()`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "numbers.h"

namespace afm {

// An array of floating-point numbers; without data, an argument that is left out.
struct Floats {
  const void* data = nullptr;
  Number type = Number::float32;

  explicit operator bool() const { return data != nullptr; }
};

enum class Mode : uint8_t { balanced, affine, palette };

// A matrix of `rows` (N) outputs and `cols` (K) inputs; see `PackedWeight` in `kernels/operands.py`.
struct PackedMatrix {
  const uint32_t* codes = nullptr;  // (N, K * bits / 32)
  int64_t rows = 0;
  int64_t cols = 0;
  int bits = 2;  // 2, 4 or 8
  Mode mode = Mode::balanced;
  int64_t groups = 1;   // scales per row: 0 for one of the whole matrix
  Floats scales;        // (), (N,) or (N, groups); absent in a palette
  Floats biases;        // of an affine matrix, as `scales`
  Floats table;         // (tables, 2**bits) of a palette
  int64_t tables = 0;   // N / tables rows share a table
};

constexpr int64_t kBlock = 16;
constexpr int64_t kMaxAdapters = 8;

// What one LoRA adapter has for a matrix; see `Part` in `kernels/operands.py`. Without a rank, nothing.
struct Adapter {
  Floats numbers;
  int64_t a = 0;  // first number of A (sections * rank, K)
  int64_t b = 0;  // of B (N / kBlock, rank, kBlock), the last block filled up: B[n, j] is at
                  // b + (n / kBlock * rank + j) * kBlock + n % kBlock
  int64_t rank = 0;
};

// LoRA adapters of one matrix; see `LowRank` in `kernels/operands.py`.
struct Adapters {
  Adapter list[kMaxAdapters];
  int64_t count = 0;
  const float* scales = nullptr;      // (count,)
  const int32_t* slots = nullptr;     // (batch,); what is no index of an adapter means none
  int64_t batch = 1;                  // vectors m * batch / M share slot m
  const int64_t* sections = nullptr;  // last row + 1 of every section
  int64_t n_sections = 1;
};

// M vectors, and what happens to them before they are multiplied.
struct Activations {
  Floats x;            // (M, K)
  int64_t rows = 1;    // M
  int64_t stride = 0;  // elements from one vector to the next
  Floats norm;         // (K,) weight of an RMSNorm, or absent
  float eps = 0;
  int digits = 2;  // 2: int16 activations; 1: int8
  const int64_t* order = nullptr;  // (M,) place of every vector in x; null where they stand in order
};

// One of the products of the same vectors, (M, N).
struct Product {
  PackedMatrix weight;
  Adapters adapters;
  void* y;
};

// For each product, y of `type` = residual + x' W^T + scale B A x'. A single product may have a `residual` (M, N).
// Matrices are alike in all but their rows and their numbers.
void matmul(const Activations& x, const std::vector<Product>& products, Floats residual, Number type);

// y (M, N) of `type` = silu(x' G^T) * (x' U^T), each with its adapters. G and U have one shape.
void swiglu(const Activations& x, const PackedMatrix& gate, const PackedMatrix& up,
            const Adapters& of_gate, const Adapters& of_up, void* y, Number type);

// The largest of each vector's N >= 1 products and its row, the lowest on a tie; a NaN counts as infinity.
// indices and values are (M,).
void argmax(const Activations& x, const PackedMatrix& weight, uint32_t* indices, float* values);

// y (pairs, N / experts) of `type`: vector p * M / pairs times the matrix of expert indices[p], of which `weight` has
// `experts`, one after the other. An index beyond them counts as the nearest, a negative one from the end.
void gather(const Activations& x, const PackedMatrix& weight, int64_t experts, const int32_t* indices, int64_t pairs,
            void* y, Number type);

// The K numbers that row `row` stands for. For one thread: callers share rows among threads.
void dequantize_row(const PackedMatrix& weight, int64_t row, void* out, Number type);

}  // namespace afm
