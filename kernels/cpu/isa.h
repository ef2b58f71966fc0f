// Kernels of the packed products, one table per instruction set; `matmul.cpp` drives them.
//
// Every isa_*.cpp is compiled with flags of its own and is empty where the compiler lacks them:
//   isa_avx512.cpp  -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mfma
//   palette_vbmi.cpp   the same and -mavx512vbmi
//   isa_avx2.cpp    -mavx2 -mfma -mf16c
//   isa_neon.cpp    -march=armv8.2-a+dotprod (nothing on macOS)
//   isa_portable.cpp, isa.cpp, matmul.cpp: nothing
// What such a unit defines has internal linkage: a function that two units share could be linked in its
// AVX-512 version and run on a machine without. Nothing of a unit runs, initializers included, before `isa.cpp` has
// asked the processor for what the unit was compiled for.
#pragma once

#include <cstdint>
#include <span>

#include "prefetch.h"
#include "matmul.h"

namespace afm {

// Order of the digits of one vector. A block is `bytes` bytes of codes; field p of its byte j holds code
// j * (8 / bits) + p, so the digits that meet field p of all bytes lie together:
//   out[((block * digits + digit) * (8 / bits) + p) * bytes + j], the high digit first.
// The last block is filled up with zeros.
// With `words`, integers of 16 bits stand in place of digits: where codes have 2 or 4 bits, integer 16 * p + j of a block
// of F * 16 columns belongs to its column F * j + p; at 8 bits they are in order.
struct Layout {
  int bits = 2;
  int bytes = 64;
  int digits = 2;
  bool words = false;
};

// Columns of a block, and bytes that the digits of `cols` of them take.
static inline int64_t block_cols(const Layout& layout) { return layout.bytes * (8 / layout.bits); }
static inline int64_t digit_bytes(const Layout& layout, int64_t cols) {
  const int64_t step = block_cols(layout);
  return (cols + step - 1) / step * step * (layout.words ? 2 : layout.digits);
}

// Rows of codes times one vector.
struct VectorJob {
  const uint8_t* codes;  // (rows, row_bytes)
  int64_t rows;
  int64_t row_bytes;
  const int8_t* x;  // digits in the layout of `vector_bytes`
  int digits;
  int bits;
  // (rows, scale_stride), one per `group_bytes` of codes, and 16 numbers that can be read behind the last row; null where
  // a row has one scale, which is then left to the caller.
  Floats scales;
  int64_t scale_stride;
  int64_t group_bytes;
  float* out;  // (rows,): sums of code * digit value; with scales, unit * scale * code * digit value + offset * group_sum
  // Unread without scales.
  Floats offsets;           // as `scales`, and of the same type
  const float* group_sums;  // one per group, and zeros up to the next multiple of 16
  float unit;
};

constexpr int64_t kScratchRows = 4;

// Rows of codes times several vectors, one scale per row (left to the caller).
struct MatrixJob {
  const uint8_t* codes;  // (rows, row_bytes)
  int64_t rows;
  int64_t row_bytes;
  const int8_t* x;  // (vectors, x_row_bytes)
  int64_t vectors;
  int64_t x_row_bytes;  // `digit_bytes`
  int digits;
  int bits;
  float* out;  // (vectors, out_stride)
  int64_t out_stride;
  uint8_t* scratch;  // kScratchRows * x_row_bytes / digits, on a boundary of 64 bytes
  PrefetchRows ahead;  // of `rows`
};

// The same with a scale for every `group_bytes` of codes: out = sums of scale * code * digit value. A group is a whole
// number of blocks of 64 codes, or a block is a whole number of groups, each of them some multiple of four bytes.
// Blocks of the vectors are 64 codes long (see Layout).
struct GroupedJob {
  MatrixJob job;
  // (rows, scale_stride), one per `group_bytes` of codes, zeros from the last one on to the next multiple of 16, and 16
  // numbers that can be read behind the last row.
  const float* scales;
  int64_t scale_stride;
  int64_t group_bytes;
};

// Bytes of a palette's table: of all numbers the high bytes, then the low ones, each filled up to a register of 16.
static constexpr int table_bytes(int bits) { return bits == 8 ? 512 : 32; }

// Codes of a palette times vectors. Its numbers are integers in [0, 65535] as well, two unsigned bytes each:
// out[v * out_stride + n] = the sum of integer * digit value.
struct PaletteJob {
  MatrixJob job;          // one vector has the layout of `vector_bytes`, several have `matrix`'s
  const uint8_t* tables;  // `table_bytes` each
  int64_t rows_per_table;
  int64_t first;          // rows of the first table that come before these
};

// Rows of an adapter's A times some vectors:
//   hidden[v * hidden_stride + r] = scale * the sum over k of numbers[start + r * cols + k] * x[v * x_stride + k]
struct ShrinkJob {
  Floats numbers;
  int64_t start;
  int64_t rows;
  int64_t cols;
  const float* x;
  int64_t x_stride;
  const int32_t* vectors;  // (count,): every v
  int64_t count;
  float scale;
  float* hidden;
  int64_t hidden_stride;
};

// Rows [begin, end) of an adapter's B, which is stored in blocks of kBlock rows (see `Adapter`), times hidden values:
//   out[v * out_stride + n - begin] += the sum over j of hidden[v * hidden_stride + j] * B[n, j]
struct ExpandJob {
  Floats numbers;
  int64_t start;
  int64_t rank;
  int64_t begin, end;
  const float* hidden;
  int64_t hidden_stride;
  const int32_t* vectors;  // (count,): every v
  int64_t count;
  float* out;
  int64_t out_stride;
};

// Some columns of rows of codes times a number each:
//   out[n] += the sum over i of values[i] * (slopes[s] * code + factor * offsets[s]),
// with the code of row n and column columns[i], and s = n * stride + columns[i] / group_cols.
struct ColumnsJob {
  const uint8_t* codes;  // (rows, row_bytes)
  int64_t rows;
  int64_t row_bytes;
  int bits;
  const int32_t* columns;  // (count,)
  const float* values;     // (count,)
  int64_t count;
  const float* slopes;
  const float* offsets;
  float factor;
  int64_t stride;
  int64_t group_cols;
  float* out;  // (rows,)
};

// Activations this small count as zero: the reciprocal of their unit overflows.
constexpr float kNegligible = 0x1p-100f;

struct Kernels {
  const char* name;

  // Bytes of a block that `vector` works on.
  int vector_bytes;
  void (*vector)(const VectorJob& job);

  // For two vectors and more; null where `vector` is called for each. Blocks are 64 codes long, or have
  // `vector_bytes` of codes that have at most `matrix_as_vector` bits.
  void (*matrix)(const MatrixJob& job);
  int matrix_as_vector;

  // True if the kernels of several vectors want `Layout::words`; of one digit not in blocks of `vector_bytes`, and
  // `grouped_matrix` not for codes of at most `grouped_as_digits` bits.
  bool words;
  int grouped_as_digits;

  // For two vectors and more where rows have several scales; null where `vector` is called for each.
  void (*grouped_matrix)(const GroupedJob& job);

  // Palettes with one vector, and with several: the largest number of bits, 0 if no palette is taken.
  // Rows of others are turned into float32.
  int palette_bits;
  void (*palette_vector)(const PaletteJob& job);
  void (*palette_matrix)(const PaletteJob& job);

  // Element types from and to float32; indices count elements.
  void (*load)(Floats from, int64_t start, int64_t count, float* out);
  void (*store)(const float* from, int64_t count, void* out, int64_t start, Number type);

  // x *= weight / sqrt(mean(x^2) + eps)
  void (*rms_norm)(float* x, const float* weight, float eps, int64_t count);

  // The largest magnitude, and how many are below `limit`; a NaN is above all.
  float (*largest)(const float* x, int64_t count);
  int64_t (*count_below)(const float* x, int64_t count, float limit);
  // Digits of x in `layout`, the value of one unit in `scale`, sums[g] = scale * the sum of group g, and in `rest`
  // (cols,), unless null, what rounding left of x; it may be x itself.
  void (*quantize)(const float* x, int64_t cols, Layout layout, int64_t groups, int8_t* out, float* scale,
                   float* sums, float* rest);
  void (*add_columns)(const ColumnsJob& job);

  // out[i] = slope[i] * factor * out[i] + offset[i] * sum
  void (*finish)(float* out, const float* slope, float factor, const float* offset, float sum,
                 int64_t count);
  // gate[i] = silu(gate[i]) * up[i]
  void (*swiglu)(float* gate, const float* up, int64_t count);
  // The sum of a[i] * x[i].
  float (*dot)(const float* a, const float* x, int64_t count);
  // A and B of adapters; each vector's numbers come out the same whatever other vectors there are.
  void (*shrink)(const ShrinkJob& job);
  void (*expand)(const ExpandJob& job);
  // out[i] = table[code i], the codes of a row from its first on.
  void (*look_up)(const uint8_t* codes, int bits, const float* table, int64_t count, float* out);
};

// The tables; null where the unit was compiled for another processor. They run as little as the kernels themselves on
// a machine without the instructions: ask `usable_kernels`.
const Kernels* avx512_kernels();
const Kernels* avx2_kernels();
const Kernels* neon_kernels();
const Kernels* portable_kernels();

// Those that this machine runs, best first: of "avx512", "avx2", "neon", "portable".
std::span<const Kernels* const> usable_kernels();

// The one in use: the first of those, or what was chosen.
const Kernels& kernels();

// Uses another of `usable_kernels()` from now on; false when the machine doesn't run it. Call it while no product is
// computed.
bool use_kernels(const char* name);

}  // namespace afm
