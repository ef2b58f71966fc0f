// Attention over int8 or float keys and values with grouped heads; knows nothing of MLX.
//
// Over floats it computes in float32. Over int8 codes queries become int16 with a scale per head, and a head's weights int16 relative to the largest so far, so
// that both products are exact sums of integers. Rounding moves a score by at most |q|_max |k|_1 / 65534 and a
// weight by 1 / 65534 of the largest one: less than bfloat16 activations would.
#pragma once

#include <cstdint>
#include <string>

#include "numbers.h"
#include "rope.h"

namespace afm {

// (B, n_kv_heads, S, head_dim) keys or values anywhere in memory; strides in elements.
struct Columns {
  const void* data;
  int64_t batch_stride, head_stride, token_stride, step;
};

struct AttentionArguments {
  int64_t batch, heads, kv_heads, queries, head_dim;
  const void* q;         // (B, heads, queries, head_dim) of `type` anywhere in memory
  int64_t q_strides[4];  // in elements
  Number type;           // of `q` and `out`
  const RopeTable* table;  // null: queries are turned and normalized already
  const float* norm;       // (head_dim,) weight, with a table
  float eps;
  Columns keys, values;
  bool floats;  // whether keys and values are floats, of `stored`; otherwise they are int8 codes
  Number stored;
  float key_scale, value_scale;
  int64_t capacity;        // tokens in the buffers
  Columns tail_keys, tail_values;  // with `starts`: a row's tokens from starts[row] on
  int64_t tail_capacity;
  const int32_t* starts;   // (B,) tokens of each row in the buffers; null: all of them
  const int32_t* lengths;  // (B,) tokens that the first query sees, each query after it one more; null: the last
                           // query sees `capacity` of them
  void* out;               // (B, heads, queries, head_dim)
};

constexpr int64_t kMaxHeadDim = 512;  // more could overflow the int32 sums

// Rows that see no token are zero.
void attend(const AttentionArguments& arguments);

// Uses the kernels of this instruction set, or the nearest that there are; see `matmul.h`.
void use_attention_kernels(const std::string& instruction_set);

}  // namespace afm
