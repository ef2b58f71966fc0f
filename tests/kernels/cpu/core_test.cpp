// Runs the kernels of all instruction sets that the machine has against plain loops in double, without MLX and
// without a C++ runtime library, so that they can be cross-compiled and run in an emulator. Prints what was wrong.
//
//   cpu_core_test SEED
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "isa.h"

using namespace afm;

namespace {

uint64_t state;
int failures = 0, checks = 0;

uint32_t draw() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state >> 32);
}
float draw_float() { return static_cast<float>(draw() % 20001) / 10000 - 1; }

void expect(double got, double wanted, double allowed, const char* what) {
  ++checks;
  if (fabs(got - wanted) <= allowed) return;  // false for a NaN
  if (++failures <= 10) printf("%s: got %.9g, wanted %.9g within %.3g\n", what, got, wanted, allowed);
}

template <class T>
T* array(int64_t count) {
  return static_cast<T*>(calloc(static_cast<size_t>(count) + 64, sizeof(T)));
}

int code_at(const uint8_t* row, int bits, int64_t k) {
  return (row[k * bits / 8] >> (k * bits % 8)) & ((1 << bits) - 1);
}

// Digits or integers in `layout` back to the integer of column k.
int value_at(const int8_t* x, const Layout& layout, int64_t k) {
  const int fields = 8 / layout.bits;
  const int64_t step = block_cols(layout), block = k / step, at = k % step;
  if (layout.words) {
    int16_t word;
    memcpy(&word, x + 2 * (layout.bits == 8 ? k : block * step + at % (step / 16) * 16 + at / (step / 16)), sizeof word);
    return word;
  }
  int value = 0;
  for (int d = 0; d < layout.digits; ++d) {
    value = value * 256 + x[((block * layout.digits + d) * fields + at % fields) * layout.bytes + at / fields];
  }
  return value;
}

// A few columns of the codes, with scales as offsets, too.
void test_columns(const Kernels& k, const uint8_t* codes, int64_t rows, int64_t cols, int bits, int64_t group,
                  const float* scales, int64_t stride, const float* x) {
  const int64_t row_bytes = cols * bits / 8, of_row = group > 0 ? stride : 1, group_cols = group > 0 ? group : cols;
  const int32_t columns[] = {0, static_cast<int32_t>(draw() % cols), static_cast<int32_t>(cols - 1)};
  float* out = array<float>(rows);
  for (int64_t n = 0; n < rows; ++n) out[n] = x[n % cols];
  k.add_columns({codes, rows, row_bytes, bits, columns, x, 3, scales, scales, -1.5f, of_row, group_cols, out});
  for (int64_t n = 0; n < rows; ++n) {
    double wanted = x[n % cols];
    for (int i = 0; i < 3; ++i) {
      const double scale = scales[n * of_row + columns[i] / group_cols];
      wanted += x[i] * scale * (code_at(codes + n * row_bytes, bits, columns[i]) - 1.5);
    }
    expect(out[n], wanted, 1e-6 * (1 << bits), "columns");
  }
  int64_t below = 0;
  for (int64_t i = 0; i < cols; ++i) below += fabsf(x[i]) < 0.5f;
  expect(k.count_below(x, cols, 0.5f), below, 0, "below");
  free(out);
}

// Quantizes a vector, checks that, and multiplies rows of codes with it; group 0 is one scale per row. With
// `largest_codes`, all codes are, and digits: of two, the low one is -128 in all columns but the first.
void test_vector(const Kernels& k, int bits, int digits, int64_t rows, int64_t cols, int64_t group, bool largest_codes) {
  const int64_t row_bytes = cols * bits / 8, groups = group > 0 ? cols / group : 1;
  const int64_t padded = (groups + 15) / 16 * 16, stride = draw() % 2 ? groups : padded;
  uint8_t* codes = array<uint8_t>(rows * row_bytes);
  for (int64_t i = 0; i < rows * row_bytes; ++i) codes[i] = static_cast<uint8_t>(largest_codes ? 255 : draw());
  float* x = array<float>(cols);
  float largest = 0;
  const float low = digits == 2 ? -128.0f / 32639 : -1;
  for (int64_t i = 0; i < cols; ++i) x[i] = largest_codes ? (i == 0 ? 1 : low) : draw_float();
  for (int64_t i = 0; i < cols; ++i) largest = fmaxf(largest, fabsf(x[i]));
  float *scales = array<float>(rows * stride), *offsets = array<float>(rows * stride);
  for (int64_t n = 0; n < rows; ++n) {
    for (int64_t g = 0; g < groups; ++g) {
      scales[n * stride + g] = draw_float();
      offsets[n * stride + g] = draw_float();
    }
  }
  // Numbers of a type, with what is none behind the last row's.
  const Number type = static_cast<Number>(draw() % 3);
  const float none[16] = {NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN};
  float* typed[2] = {array<float>(rows * stride), array<float>(rows * stride)};
  for (int i = 0; i < 2; ++i) {
    float* numbers = i ? offsets : scales;
    k.store(numbers, rows * stride, typed[i], 0, type);
    k.load({typed[i], type}, 0, rows * stride, numbers);
    k.store(none, 16, typed[i], rows * stride, type);
  }
  const Layout layout = {bits, k.vector_bytes, digits};
  int8_t* planes = array<int8_t>(digit_bytes(layout, cols));
  float* sums = array<float>(padded);
  float unit;
  float* rest = array<float>(cols);
  memcpy(rest, x, cols * sizeof(float));
  k.quantize(rest, cols, layout, groups, planes, &unit, sums, draw() % 2 ? rest : nullptr);
  const bool kept = memcmp(rest, x, cols * sizeof(float)) == 0;
  expect(k.largest(x, cols), largest, 0, "largest");
  expect(unit, largest / (digits == 2 ? 32639 : 127), 1e-6 * unit, "unit");
  for (int64_t g = 0; g < groups; ++g) {
    double sum = 0;
    for (int64_t i = g * (cols / groups); i < (g + 1) * (cols / groups); ++i) {
      const double back = static_cast<double>(unit) * value_at(planes, layout, i);
      expect(back, x[i], unit * 0.51, "digits");  // half a unit, and float32's error at 32639 units
      if (!kept) expect(back + rest[i], x[i], 1e-7 * largest, "what is left");
      sum += back;
    }
    expect(sums[g], sum, 1e-5 * largest * cols, "sums");
  }
  float* out = array<float>(rows);
  const Floats per_group = {group > 0 ? typed[0] : nullptr, type}, added = {typed[1], type};
  k.vector({codes, rows, row_bytes, planes, digits, bits, per_group, stride, row_bytes / groups, out, added, sums, unit});
  for (int64_t n = 0; n < rows; ++n) {
    double wanted = 0, gross = group > 0 ? unit : 1;
    for (int64_t g = 0; group > 0 && g < groups; ++g) {
      const double term = static_cast<double>(offsets[n * stride + g]) * sums[g];
      wanted += term;
      gross += fabs(term);
    }
    for (int64_t i = 0; i < cols; ++i) {
      const double scale = group > 0 ? static_cast<double>(unit) * scales[n * stride + i / group] : 1;
      const double term = scale * code_at(codes + n * row_bytes, bits, i) * value_at(planes, layout, i);
      wanted += term;
      gross += fabs(term);
    }
    expect(out[n], wanted, 1e-6 * gross, "product");
  }
  test_columns(k, codes, rows, cols, bits, group, scales, stride, x);
  free(codes), free(x), free(rest), free(scales), free(offsets), free(planes), free(sums), free(out);
  free(typed[0]), free(typed[1]);
}

// Codes times some vectors: as they are, with scales of groups unless these are 0, or of palettes whose first table has
// been used for one row already. Where they are `largest`, so is every number, except for signs.
void test_matrix(const Kernels& k, bool of_palette, int bits, int digits, int64_t rows, int64_t cols, int64_t vectors,
                 bool largest, int64_t group = 0) {
  const int64_t row_bytes = cols * bits / 8, rows_per_table = 3;
  uint8_t* codes = array<uint8_t>(rows * row_bytes);
  uint8_t* tables = array<uint8_t>((rows / rows_per_table + 2) * table_bytes(bits));
  for (int64_t i = 0; i < rows * row_bytes; ++i) codes[i] = static_cast<uint8_t>(largest ? 255 : draw());
  for (int64_t i = 0; i < (rows / rows_per_table + 2) * table_bytes(bits); ++i) {
    tables[i] = static_cast<uint8_t>(largest ? draw() % 2 * 255 : draw());
  }
  const bool several = vectors > 1, plain = !of_palette && group == 0;
  const bool as_vector = !several || (plain && bits <= k.matrix_as_vector);
  const bool digits_only = group > 0 && bits <= k.grouped_as_digits;
  const bool words = several && k.words && !digits_only && (digits == 2 || !as_vector);
  const Layout layout = {bits, as_vector ? k.vector_bytes : 8 * bits, digits, words};
  const int64_t x_row_bytes = digit_bytes(layout, cols);
  float *x = array<float>(cols), *out = array<float>(vectors * rows);
  int8_t* planes = static_cast<int8_t*>(aligned_alloc(64, static_cast<size_t>(vectors * x_row_bytes + 63) / 64 * 64));
  const float sign = draw() % 2 ? 1.0f : -1.0f;
  float unit, sum;
  for (int64_t v = 0; v < vectors; ++v) {
    for (int64_t i = 0; i < cols; ++i) x[i] = largest ? sign : draw_float();
    k.quantize(x, cols, layout, 1, planes + v * x_row_bytes, &unit, &sum, nullptr);
  }
  const size_t room = static_cast<size_t>(kScratchRows * x_row_bytes + 63) / 64 * 64;
  uint8_t* scratch = static_cast<uint8_t*>(aligned_alloc(64, room));
  const int64_t stride = group > 0 ? (cols / group + 15) / 16 * 16 + 16 : 0;
  float* scales = array<float>(rows * stride);
  for (int64_t i = 0; i < rows * stride; ++i) scales[i] = i % stride < cols / group ? draw_float() : 0;
  const MatrixJob job = {codes, rows, row_bytes, planes, vectors, x_row_bytes, digits, bits, out, rows, scratch, {}};
  if (of_palette) {
    (several ? k.palette_matrix : k.palette_vector)({job, tables, rows_per_table, 1});
  } else if (group > 0) {
    k.grouped_matrix({job, scales, stride, group * bits / 8});
  } else {
    k.matrix(job);
  }
  for (int64_t v = 0; v < vectors; ++v) {
    for (int64_t n = 0; n < rows; ++n) {
      const uint8_t* table = tables + (n + 1) / rows_per_table * table_bytes(bits);
      double wanted = 0, gross = 1;
      for (int64_t i = 0; i < cols; ++i) {
        const int code = code_at(codes + n * row_bytes, bits, i);
        const int value = value_at(planes + v * x_row_bytes, layout, i);
        double number = of_palette ? 256 * table[code] + table[table_bytes(bits) / 2 + code] : code;
        if (group > 0) number *= scales[n * stride + i / group];
        wanted += number * value;
        gross += (of_palette ? 32768 : fabs(number)) * abs(value);
      }
      expect(out[v * rows + n], wanted, 1e-6 * gross, of_palette ? "palette" : "matrix");
    }
  }
  free(codes), free(tables), free(x), free(out), free(planes), free(scratch), free(scales);
}

// Tails of rows, of columns and of vectors, one strip and several; groups from four bytes of codes to more than a
// strip.
void test_matrices(const Kernels& k, int bits, int digits) {
  for (const bool of_palette : {false, true}) {
    if (of_palette ? bits > k.palette_bits : k.matrix == nullptr) continue;
    for (const int64_t words : {1, 16, 37, 210}) {
      const int64_t cols = words * 32 / bits;
      for (const int64_t vectors : {1, 2, 5, 8}) {
        if (!of_palette && vectors == 1) continue;
        test_matrix(k, of_palette, bits, digits, 1 + draw() % 8, cols, vectors, false);
        test_matrix(k, of_palette, bits, digits, 8 + draw() % 8, cols, vectors, vectors % 2 == 1);
      }
    }
  }
  for (const int64_t words : {1, 2, 4, 8, 2 * bits, 4 * bits, 10 * bits, 70 * bits}) {
    if (k.grouped_matrix == nullptr || (words < 2 * bits && 2 * bits % words > 0)) continue;
    const int64_t group = words * 32 / bits, groups = words > 8 * bits ? 2 : 3 + draw() % 40;
    test_matrix(k, false, bits, digits, 1 + draw() % 20, groups * group, 2 + draw() % 6, draw() % 2 == 0, group);
  }
}

void test_floats(const Kernels& k, int64_t count) {
  float *x = array<float>(count), *y = array<float>(count), *z = array<float>(count);
  double squares = 0;
  for (int64_t i = 0; i < count; ++i) {
    x[i] = draw_float() * 30;
    y[i] = draw_float();
    squares += static_cast<double>(x[i]) * x[i];
  }
  memcpy(z, x, count * sizeof(float));
  k.rms_norm(z, y, 1e-3f, count);
  for (int64_t i = 0; i < count; ++i) expect(z[i], x[i] / sqrt(squares / count + 1e-3) * y[i], 1e-5, "norm");
  memcpy(z, x, count * sizeof(float));
  k.swiglu(z, y, count);
  for (int64_t i = 0; i < count; ++i) {
    const double silu = x[i] / (1 + exp(-static_cast<double>(x[i]))) * y[i];
    expect(z[i], silu, 2e-6 * fabs(silu) + 1e-30, "swiglu");
  }
  for (const Number type : {Number::float32, Number::bfloat16, Number::float16}) {
    const double rounding = type == Number::float32 ? 0 : (type == Number::bfloat16 ? 0x1p-9 : 0x1p-12);
    uint32_t* stored = array<uint32_t>(count);
    k.store(x, count, stored, 0, type);
    k.load({stored, type}, 0, count, z);
    for (int64_t i = 0; i < count; ++i) expect(z[i], x[i], 2 * rounding * fabs(x[i]) + 0x1p-25, "store and load");
    free(stored);
  }
  double product = 0;
  for (int64_t i = 0; i < count; ++i) product += static_cast<double>(x[i]) * y[i];
  expect(k.dot(x, y, count), product, 1e-5 * count, "dot");
  float* table = array<float>(256);
  for (int i = 0; i < 256; ++i) table[i] = draw_float();
  uint8_t* codes = array<uint8_t>(count);
  for (int64_t i = 0; i < count; ++i) codes[i] = static_cast<uint8_t>(draw());
  for (const int bits : {2, 4, 8}) {
    k.look_up(codes, bits, table, count / 4 * 4, z);
    for (int64_t i = 0; i < count / 4 * 4; ++i) expect(z[i], table[code_at(codes, bits, i)], 0, "look_up");
  }
  free(x), free(y), free(z), free(table), free(codes);
}

// Both matrices of an adapter, for a few or many of 23 vectors: rows [begin, end) of B.
void test_low_rank(const Kernels& k, Number type, int64_t rank, int64_t cols, int64_t begin, int64_t end) {
  const int64_t vectors = 23, of_a = rank * cols, of_b = (end + kBlock - 1) / kBlock * kBlock * rank;
  float *plain = array<float>(of_a + of_b), *x = array<float>(vectors * cols), *hidden = array<float>(vectors * rank);
  for (int64_t i = 0; i < of_a + of_b; ++i) plain[i] = draw_float();
  for (int64_t i = 0; i < vectors * cols; ++i) x[i] = draw_float();
  uint32_t* stored = array<uint32_t>(of_a + of_b);
  k.store(plain, of_a + of_b, stored, 0, type);
  k.load({stored, type}, 0, of_a + of_b, plain);
  float *out = array<float>(vectors * (end - begin)), *before = array<float>(vectors * (end - begin));
  for (int64_t i = 0; i < vectors * (end - begin); ++i) out[i] = before[i] = draw_float();
  const int32_t all = static_cast<int32_t>(draw() % 2 ? 1 + draw() % 4 : 8 + draw() % 14);
  int32_t chosen[22];
  for (int32_t i = 0; i < 22; ++i) chosen[i] = (3 + 7 * i) % 23;
  k.shrink({{stored, type}, 0, rank, cols, x, cols, chosen, all, 0.5f, hidden, rank});
  k.expand({{stored, type}, of_a, rank, begin, end, hidden, rank, chosen, all, out, end - begin});
  for (int32_t v = 0; v < vectors; ++v) {
    bool used = false;
    for (int i = 0; i < all; ++i) used = used || chosen[i] == v;
    for (int64_t r = 0; r < rank; ++r) {
      double wanted = 0;
      for (int64_t c = 0; used && c < cols; ++c) wanted += 0.5 * plain[r * cols + c] * x[v * cols + c];
      expect(hidden[v * rank + r], wanted, 1e-6 * (cols + 10), "A");
    }
    for (int64_t n = begin; n < end; ++n) {
      const int64_t at = v * (end - begin) + n - begin;
      double wanted = before[at], gross = 1;
      for (int64_t j = 0; used && j < rank; ++j) {
        const double b = plain[of_a + (n / kBlock * rank + j) * kBlock + n % kBlock];
        wanted += hidden[v * rank + j] * b;
        gross += fabs(hidden[v * rank + j] * b);
      }
      expect(out[at], wanted, 1e-6 * gross, "B");
    }
  }
  free(plain), free(x), free(hidden), free(stored), free(out), free(before);
}

void test_all(const Kernels& k) {
  for (const int bits : {2, 4, 8}) {
    for (const int digits : {1, 2}) {
      test_matrices(k, bits, digits);
      for (const int64_t rows : {1, 4, 16, 27}) {
        for (const int64_t words : {1, 3, 16, 37, 160}) {
          test_vector(k, bits, digits, rows, words * 32 / bits, 0, draw() % 3 == 0);
        }
        // Groups of one word, of two, of a register of each size and of four.
        for (const int64_t words : {1, 2, 4, 8, 16}) {
          test_vector(k, bits, digits, rows, 48 * 32 / bits, words * 32 / bits, draw() % 3 == 0);
        }
      }
    }
  }
  for (const int64_t count : {4, 16, 79, 640}) test_floats(k, count);
  for (const Number type : {Number::float32, Number::bfloat16, Number::float16}) {
    for (const int64_t rank : {1, 4, 7, 16}) {
      test_low_rank(k, type, rank, 300, 0, 48);
      test_low_rank(k, type, rank, 21, 5, 12);  // within a block
      test_low_rank(k, type, rank, 3, 9, 41);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  state = argc > 1 ? strtoull(argv[1], nullptr, 10) : 1;
  int of_all = 0;
  for (const Kernels* k : usable_kernels()) {
    checks = failures = 0;
    test_all(*k);
    printf("%s: %d checks, %d failures\n", k->name, checks, failures);
    of_all += failures;
  }
  return of_all != 0;
}
