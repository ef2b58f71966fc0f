// What all instruction sets share: compiled once per isa_*.cpp, with its flags, into that unit alone.
//
// The unit defines, before it includes this file, `struct Isa` in namespace afm::(anonymous):
//   kBytes, kLanes     bytes and int32 lanes of a register
//   Bytes, Lanes       a register of codes, a register of floats
//   load, load_part    codes from memory; the first `count` bytes, zeros behind
//   prefetch           asks for a line that will be read soon
//   Sums<BITS, DIGITS> clear(), add(Bytes codes, const int8_t* block), total(): per lane, the sum of
//                      code * digit value over the 4 bytes of that lane in all blocks added;
//                      products(codes, block): the same of one block
//   from_floats, from_bfloats, from_halves     kLanes numbers as floats
//   multiply_add, add, set1, zero, store, spread, reduce
//                      see the portable one, which defines them in plain C++
//   rows<BITS, DIGITS>()   matrix rows whose sums fit into the registers at once; group_rows, of rows with several scales
//   kShrinkVectors, kExpandVectors   vectors for which four sums each, or 16 numbers each, fit into them
#include <cstring>

#include "isa.h"

#if defined(__GNUC__) && !defined(__clang__)
// How a Floats16 is passed depends on the flags; no function outside this unit takes one.
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace afm {
namespace {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// 16 floats; the compiler makes of it what the flags allow.
typedef float Floats16 __attribute__((vector_size(64)));

inline Floats16 load16(const float* p) {
  Floats16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline float sum16(const Floats16& v) {
  float s[8];
  for (int i = 0; i < 8; ++i) s[i] = v[i] + v[i + 8];
  return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// ---- Element types

inline float from_bf16(uint16_t v) { return bits_as<float>(uint32_t{v} << 16); }

inline float from_f16(uint16_t v) {
  const uint32_t magnitude = uint32_t{v & 0x7fffu} << 13;
  // 2^112 moves the exponent's bias; the product is exact, for subnormal numbers too.
  const float scaled = bits_as<float>(magnitude) * 0x1p112f;
  const uint32_t special = (v & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  return bits_as<float>(bits_as<uint32_t>(scaled) | special | (uint32_t{v & 0x8000u} << 16));
}

inline uint16_t to_bf16(float value) {
  const uint32_t v = bits_as<uint32_t>(value);
  const uint32_t rounded = (v + 0x7fffu + ((v >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((v & 0x7fffffffu) > 0x7f800000u ? (v >> 16) | 0x40u : rounded);
}

inline uint16_t to_f16(float value) {
  const uint32_t v = bits_as<uint32_t>(value);
  const uint32_t a = v & 0x7fffffffu;
  const uint32_t normal = (a + 0xfffu + ((a >> 13) & 1) - 0x38000000u) >> 13;
  // Below 2^-14 the unit is 2^-24, which is float32's next to 0.5.
  const uint32_t tiny = bits_as<uint32_t>(bits_as<float>(a) + 0.5f) - 0x3f000000u;
  const uint32_t special = a > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = a < 0x38800000u ? tiny : normal;
  return static_cast<uint16_t>((a >= 0x47800000u ? special : finite) | ((v >> 16) & 0x8000u));
}

void load(Floats from, int64_t start, int64_t count, float* out) {
  if (from.type == Number::float32) {
    std::memcpy(out, static_cast<const float*>(from.data) + start, count * sizeof(float));
    return;
  }
  const uint16_t* v = static_cast<const uint16_t*>(from.data) + start;
  if (from.type == Number::bfloat16) {
    for (int64_t i = 0; i < count; ++i) out[i] = from_bf16(v[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = from_f16(v[i]);
  }
}

void store(const float* from, int64_t count, void* out, int64_t start, Number type) {
  if (type == Number::float32) {
    std::memcpy(static_cast<float*>(out) + start, from, count * sizeof(float));
    return;
  }
  uint16_t* v = static_cast<uint16_t*>(out) + start;
  if (type == Number::bfloat16) {
    for (int64_t i = 0; i < count; ++i) v[i] = to_bf16(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) v[i] = to_f16(from[i]);
  }
}

// ---- Float vectors

void rms_norm(float* x, const float* weight, float eps, int64_t count) {
  Floats16 squares[2] = {};
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    for (int j = 0; j < 2; ++j) {
      const Floats16 v = load16(x + i + 16 * j);
      squares[j] += v * v;
    }
  }
  float sum = sum16(squares[0] + squares[1]);
  for (; i < count; ++i) sum += x[i] * x[i];
  // Where the squares overflow, the root would make zeros of all numbers; NaN is seen in the logits.
  const float factor =
      __builtin_isinf(sum) ? __builtin_nanf("") : 1 / __builtin_sqrtf(sum / static_cast<float>(count) + eps);
  for (i = 0; i < count; ++i) x[i] *= factor * weight[i];
}

void finish(float* out, const float* slope, float factor, const float* offset, float sum, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = slope[i] * (factor * out[i]) + offset[i] * sum;
}

// e^x within 2 units in the last place for x <= 88, 0 from -104 on down: 2^n times a polynomial of degree 6
// on [-ln 2 / 2, ln 2 / 2] (Taylor's, whose error is below 1e-8 there).
inline float exponential(float x) {
  x = x < -104.0f ? -104.0f : (x > 88.0f ? 88.0f : x);
  const float shifted = x * 1.44269504f + 12582912.0f;  // rounds to an integer in the low bits
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // In two factors, as 2^n alone may be out of range where the result is not.
  const int32_t whole = static_cast<int32_t>(bits_as<uint32_t>(shifted) - 0x4b400000u);
  const int32_t half = whole >> 1;
  const float low = bits_as<float>(static_cast<uint32_t>(half + 127) << 23);
  const float high = bits_as<float>(static_cast<uint32_t>(whole - half + 127) << 23);
  return p * low * high;
}

void swiglu(float* gate, const float* up, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float g = gate[i];
    gate[i] = g / (1 + exponential(-g)) * up[i];
  }
}

float dot(const float* a, const float* x, int64_t count) {
  Floats16 sums[4] = {};
  int64_t i = 0;
  for (; i + 64 <= count; i += 64) {
    for (int j = 0; j < 4; ++j) sums[j] += load16(a + i + 16 * j) * load16(x + i + 16 * j);
  }
  for (; i + 16 <= count; i += 16) sums[0] += load16(a + i) * load16(x + i);
  float sum = sum16((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < count; ++i) sum += a[i] * x[i];
  return sum;
}

template <int BITS>
void typed_look_up(const uint8_t* codes, const float* table, int64_t count, float* out) {
  constexpr int kFields = 8 / BITS;
  for (int64_t i = 0; i < count / kFields; ++i) {
    for (int p = 0; p < kFields; ++p) {
      out[i * kFields + p] = table[(codes[i] >> (BITS * p)) & ((1 << BITS) - 1)];
    }
  }
}

void look_up(const uint8_t* codes, int bits, const float* table, int64_t count, float* out) {
  if (bits == 2) return typed_look_up<2>(codes, table, count, out);
  if (bits == 4) return typed_look_up<4>(codes, table, count, out);
  typed_look_up<8>(codes, table, count, out);
}

// ---- Activations to integers

// 127 * 256 + 127: the largest number whose two digits are in [-128, 127].
constexpr float kLargest16 = 32639;
constexpr float kLargest8 = 127;

float largest(const float* x, int64_t count) {
  // Bit patterns of magnitudes order like the magnitudes, NaN above all: an integer maximum, which
  // compilers vectorize without an option that excludes NaNs.
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t magnitude = bits_as<int32_t>(x[i]) & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  return bits_as<float>(largest);
}

int64_t count_below(const float* x, int64_t count, float limit) {
  const int32_t bits = bits_as<int32_t>(limit);
  int64_t below = 0;
  for (int64_t i = 0; i < count;) {
    int32_t some = 0;  // as wide as what is compared, for the vectorizer's sake
    for (const int64_t end = smaller(count, i + (int64_t{1} << 30)); i < end; ++i) {
      some += (bits_as<int32_t>(x[i]) & 0x7fffffff) < bits;
    }
    below += some;
  }
  return below;
}

// The low or the high byte of every `Word`'s p-th int16.
template <class Word>
inline void gather_bytes(const int16_t* from, int shift, int64_t count, int8_t* out) {
  for (int64_t j = 0; j < count; ++j) {
    Word word;
    std::memcpy(&word, from + j * (sizeof(Word) / 2), sizeof word);
    out[j] = static_cast<int8_t>(word >> shift);
  }
}

inline void place_digits(const int16_t* values, Layout layout, int shift, int8_t* out) {
  const int fields = 8 / layout.bits;
  for (int p = 0; p < fields; ++p, out += layout.bytes) {
    const int s = 16 * p + shift;
    if (fields == 4) gather_bytes<uint64_t>(values, s, layout.bytes, out);
    if (fields == 2) gather_bytes<uint32_t>(values, s, layout.bytes, out);
    if (fields == 1) gather_bytes<uint16_t>(values, s, layout.bytes, out);
  }
}

constexpr int kMaxBlockCols = 256;  // 64 bytes of 2-bit codes

// A block's numbers in the order of Layout::words.
inline void place_words(const int16_t* values, Layout layout, int8_t* out) {
  alignas(64) int16_t words[kMaxBlockCols];
  const int count = static_cast<int>(block_cols(layout)), fields = count / 16;
  for (int i = 0; i < count; ++i) words[i] = values[layout.bits == 8 ? i : i % 16 * fields + i / 16];
  std::memcpy(out, words, 2 * count);
}

void quantize(const float* x, int64_t cols, Layout layout, int64_t groups, int8_t* out, float* scale,
              float* sums, float* rest) {
  const float top = largest(x, cols);
  const float limit = layout.digits == 2 ? kLargest16 : kLargest8;
  // An infinity or a NaN among the inputs makes every product a NaN, by way of the scale.
  const bool usable = top >= kNegligible && __builtin_isfinite(top);
  const float inverse = usable ? limit / top : 0;
  *scale = top < kNegligible ? 0 : (usable ? top / limit : __builtin_nanf(""));

  const int64_t step = block_cols(layout);
  const int64_t group = cols / groups;
  for (int64_t g = 0; g < groups; ++g) sums[g] = 0;
  alignas(64) int16_t values[kMaxBlockCols];
  alignas(64) int16_t shifted[kMaxBlockCols];
  for (int64_t k = 0; k < cols; k += step) {
    const int64_t count = smaller(step, cols - k);
    if (count < step) std::memset(values, 0, sizeof values);
    for (int64_t i = 0; i < count; ++i) {
      // Adding 1.5 * 2^23 leaves the integer, rounded half to even, in the low bits.
      const float rounded = usable ? x[k + i] * inverse + 12582912.0f : 12582912.0f;
      values[i] = static_cast<int16_t>(bits_as<int32_t>(rounded));
    }
    if (rest != nullptr) {
      for (int64_t i = 0; i < count; ++i) rest[k + i] = x[k + i] - *scale * static_cast<float>(values[i]);
    }
    for (int64_t i = 0; i < count;) {
      const int64_t g = (k + i) / group;
      const int64_t end = smaller(count, (g + 1) * group - k);
      int32_t sum = 0;
      for (; i < end; ++i) sum += values[i];
      sums[g] += static_cast<float>(sum);
    }
    if (layout.words) {
      place_words(values, layout, out);
      out += 2 * step;
      continue;
    }
    if (layout.digits == 2) {
      // The low digit is the low byte unchanged; its offset from [0, 255] is carried into the high digit.
      for (int64_t i = 0; i < step; ++i) shifted[i] = static_cast<int16_t>(values[i] + 128);
      place_digits(shifted, layout, 8, out);
      out += step;
    }
    place_digits(values, layout, 0, out);
    out += step;
  }
  for (int64_t g = 0; g < groups; ++g) sums[g] *= *scale;
}

// ---- A few columns, in float

typedef uint32_t Words16 __attribute__((vector_size(64)));
typedef int32_t Ints16 __attribute__((vector_size(64)));

// Every `step`-th of 16 numbers from p on, or the last of `count` of them again.
template <class Vector, class T>
inline Vector strided16(const T* p, int64_t step, int64_t count) {
  Vector v = {};
  if (count < 16) {
    for (int64_t r = 0; r < 16; ++r) v[r] = p[smaller(r, count - 1) * step];
    return v;
  }
  if (step == 1) {
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  // By name: an array would be stored in parts and loaded as a whole, which processors wait for.
  return Vector{p[0],        p[step],     p[2 * step],  p[3 * step],  p[4 * step],  p[5 * step],
                p[6 * step], p[7 * step], p[8 * step],  p[9 * step],  p[10 * step], p[11 * step],
                p[12 * step], p[13 * step], p[14 * step], p[15 * step]};
}

void add_columns(const ColumnsJob& job) {
  const uint32_t mask = (1u << job.bits) - 1;
  const int64_t row_words = job.row_bytes / 4;
  // The codes of 16 rows stay in the first-level cache for all columns.
  for (int64_t row = 0; row < job.rows; row += 16) {
    const int64_t rows = smaller(16, job.rows - row);
    const uint32_t* words = reinterpret_cast<const uint32_t*>(job.codes) + row * row_words;
    const float *slopes = job.slopes + row * job.stride, *offsets = job.offsets + row * job.stride;
    Floats16 slope = strided16<Floats16>(slopes, job.stride, rows);
    Floats16 offset = job.factor * strided16<Floats16>(offsets, job.stride, rows), sums = {};
    for (int64_t i = 0; i < job.count; ++i) {
      if (job.stride > 1) {
        const int64_t group = job.columns[i] / job.group_cols;
        slope = strided16<Floats16>(slopes + group, job.stride, rows);
        offset = job.factor * strided16<Floats16>(offsets + group, job.stride, rows);
      }
      const int64_t bit = int64_t{job.columns[i]} * job.bits;
      const Words16 codes = strided16<Words16>(words + bit / 32, row_words, rows) >> uint32_t(bit % 32) & mask;
      sums += job.values[i] * (slope * __builtin_convertvector(reinterpret_cast<Ints16>(codes), Floats16) + offset);
    }
    float* out = job.out + row;
    if (rows == 16) {
      sums += load16(out);
      std::memcpy(out, &sums, sizeof sums);
    } else {
      for (int64_t r = 0; r < rows; ++r) out[r] += sums[r];
    }
  }
}

// kLanes numbers from memory as floats.
template <Number TYPE>
inline Isa::Lanes lanes_at(const void* data, int64_t index) {
  if constexpr (TYPE == Number::float32) return Isa::from_floats(static_cast<const float*>(data) + index);
  const uint16_t* p = static_cast<const uint16_t*>(data) + index;
  return TYPE == Number::bfloat16 ? Isa::from_bfloats(p) : Isa::from_halves(p);
}

// The first `count` of kLanes numbers from memory as floats, zeros in the other lanes: behind a row is another row, whose
// numbers may be NaN.
template <Number TYPE>
inline Isa::Lanes first_at(const void* data, int64_t index, int64_t count) {
  alignas(64) float numbers[Isa::kLanes] = {};
  load({data, TYPE}, index, count, numbers);
  return Isa::from_floats(numbers);
}

// One number from memory in all lanes.
template <Number TYPE>
inline Isa::Lanes lane_at(const void* data, int64_t index) {
  if constexpr (TYPE == Number::float32) return Isa::set1(static_cast<const float*>(data)[index]);
  const uint16_t v = static_cast<const uint16_t*>(data)[index];
  return Isa::set1(TYPE == Number::bfloat16 ? from_bf16(v) : from_f16(v));
}

// ---- Codes times one vector

constexpr int64_t kPrefetch = 2048;  // bytes ahead of what is being multiplied; measured

// Prefetches codes behind ROWS rows that are multiplied side by side: in the order of memory, which processors follow
// themselves, too. In the order of use, a thread got half as many bytes from memory.
template <int ROWS>
class RowsPrefetcher {
 public:
  RowsPrefetcher(const uint8_t* codes, int64_t row_bytes) : at_(codes + (ROWS - 1) * row_bytes + kPrefetch) {}

  // For the next Isa::kBytes of every row.
  void next() {
    for (int i = 0; i < ROWS * Isa::kBytes; i += 64) Isa::prefetch(at_ + i);
    at_ += ROWS * Isa::kBytes;
  }

 private:
  const uint8_t* at_;
};

template <int BITS, int DIGITS, int ROWS>
inline void multiply_rows(const VectorJob& job, int64_t row, Isa::Lanes* lanes) {
  constexpr int64_t kBlock = int64_t{Isa::kBytes} * (8 / BITS) * DIGITS;
  typename Isa::template Sums<BITS, DIGITS> sums[ROWS];
  for (int r = 0; r < ROWS; ++r) sums[r].clear();
  const uint8_t* codes = job.codes + row * job.row_bytes;
  const int8_t* x = job.x;
  RowsPrefetcher<ROWS> prefetcher(codes, job.row_bytes);
  int64_t left = job.row_bytes;
  for (; left >= Isa::kBytes; left -= Isa::kBytes, codes += Isa::kBytes, x += kBlock) {
    prefetcher.next();
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      sums[r].add(Isa::load(codes + r * job.row_bytes), x);
    }
  }
  if (left > 0) {
    for (int r = 0; r < ROWS; ++r) sums[r].add(Isa::load_part(codes + r * job.row_bytes, left), x);
  }
  for (int r = 0; r < ROWS; ++r) lanes[r] = sums[r].total();
}

// The same with scales that change along a row: a group is a whole number of registers (exactly one, if ONE), or a
// register is a whole number of groups, each of them a whole number of lanes. A group's lanes become floats unreduced.
// Scales become floats in registers: converted before, they would keep codes waiting.
template <int BITS, int DIGITS, int ROWS, bool ONE, Number TYPE>
inline void multiply_groups(const VectorJob& job, int64_t row, Isa::Lanes* out) {
  using Sums = typename Isa::template Sums<BITS, DIGITS>;
  constexpr int64_t kBlock = int64_t{Isa::kBytes} * (8 / BITS) * DIGITS;
  const uint8_t* codes = job.codes + row * job.row_bytes;
  int64_t scale = row * job.scale_stride;  // index of the first row's next scale
  const int8_t* x = job.x;
  RowsPrefetcher<ROWS> prefetcher(codes, job.row_bytes);
  Isa::Lanes lanes[ROWS];
  for (int r = 0; r < ROWS; ++r) lanes[r] = Isa::zero();
  int64_t left = job.row_bytes;
  if (ONE) {
    for (; left > 0; left -= Isa::kBytes, codes += Isa::kBytes, x += kBlock, ++scale) {
      prefetcher.next();
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) {
        const Isa::Lanes products = Sums::products(Isa::load(codes + r * job.row_bytes), x);
        lanes[r] = Isa::multiply_add(products, lane_at<TYPE>(job.scales.data, scale + r * job.scale_stride), lanes[r]);
      }
    }
  } else if (job.group_bytes >= Isa::kBytes) {
    for (; left > 0; left -= job.group_bytes, ++scale) {
      Sums sums[ROWS];
      for (int r = 0; r < ROWS; ++r) sums[r].clear();
      for (int64_t b = 0; b < job.group_bytes; b += Isa::kBytes, codes += Isa::kBytes, x += kBlock) {
        prefetcher.next();
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            sums[r].add(Isa::load(codes + r * job.row_bytes), x);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) {
        const Isa::Lanes factor = lane_at<TYPE>(job.scales.data, scale + r * job.scale_stride);
        lanes[r] = Isa::multiply_add(sums[r].total(), factor, lanes[r]);
      }
    }
  } else {
    const int count = static_cast<int>(Isa::kBytes / job.group_bytes);
    for (; left >= Isa::kBytes; left -= Isa::kBytes, codes += Isa::kBytes, x += kBlock, scale += count) {
      prefetcher.next();
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) {
        const Isa::Lanes products = Sums::products(Isa::load(codes + r * job.row_bytes), x);
        const Isa::Lanes scales = lanes_at<TYPE>(job.scales.data, scale + r * job.scale_stride);
        lanes[r] = Isa::multiply_add(products, Isa::spread(scales, count), lanes[r]);
      }
    }
    for (int r = 0; left > 0 && r < ROWS; ++r) {
      const Isa::Lanes products = Sums::products(Isa::load_part(codes + r * job.row_bytes, left), x);
      const Isa::Lanes scales = first_at<TYPE>(job.scales.data, scale + r * job.scale_stride, left / job.group_bytes);
      lanes[r] = Isa::multiply_add(products, Isa::spread(scales, count), lanes[r]);
    }
  }
  const int64_t groups = job.row_bytes / job.group_bytes;
  for (int r = 0; r < ROWS; ++r) {
    const int64_t offset = (row + r) * job.scale_stride;
    Isa::Lanes sums = Isa::zero();
    int64_t g = 0;
    for (; g + Isa::kLanes <= groups; g += Isa::kLanes) {
      const Isa::Lanes offsets = lanes_at<TYPE>(job.offsets.data, offset + g);
      sums = Isa::multiply_add(offsets, Isa::from_floats(job.group_sums + g), sums);
    }
    if (g < groups) {
      const Isa::Lanes offsets = first_at<TYPE>(job.offsets.data, offset + g, groups - g);
      sums = Isa::multiply_add(offsets, Isa::from_floats(job.group_sums + g), sums);
    }
    out[r] = Isa::multiply_add(lanes[r], Isa::set1(job.unit), sums);
  }
}

template <int BITS, int DIGITS, bool ONE, Number TYPE>
inline void multiply_grouped_rows(const VectorJob& job, int64_t row, int count, Isa::Lanes* lanes) {
  constexpr int kRows = Isa::group_rows<BITS, DIGITS>();
  int r = 0;
  for (; r + kRows <= count; r += kRows) multiply_groups<BITS, DIGITS, kRows, ONE, TYPE>(job, row + r, lanes + r);
  for (; r < count; ++r) multiply_groups<BITS, DIGITS, 1, ONE, TYPE>(job, row + r, lanes + r);
}

template <int BITS, int DIGITS, Number TYPE>
void multiply_typed_vector(const VectorJob& job) {
  constexpr int kRows = Isa::rows<BITS, DIGITS>();
  alignas(64) float out[Isa::kLanes];
  for (int64_t row = 0; row < job.rows; row += Isa::kLanes) {
    // Lanes are summed for as many rows at once as there are lanes: three operations per row.
    Isa::Lanes lanes[Isa::kLanes];
    const int count = static_cast<int>(smaller(Isa::kLanes, job.rows - row));
    int r = 0;
    if (!job.scales) {
      for (; r + kRows <= count; r += kRows) multiply_rows<BITS, DIGITS, kRows>(job, row + r, lanes + r);
      for (; r < count; ++r) multiply_rows<BITS, DIGITS, 1>(job, row + r, lanes + r);
    } else if (job.group_bytes == Isa::kBytes) {
      multiply_grouped_rows<BITS, DIGITS, true, TYPE>(job, row, count, lanes);
    } else {
      multiply_grouped_rows<BITS, DIGITS, false, TYPE>(job, row, count, lanes);
    }
    for (r = count; r < Isa::kLanes; ++r) lanes[r] = Isa::zero();
    Isa::reduce(lanes, out);
    std::memcpy(job.out + row, out, count * sizeof(float));
  }
}

template <int BITS, int DIGITS>
void multiply_vector(const VectorJob& job) {
  if (job.scales.type == Number::bfloat16) return multiply_typed_vector<BITS, DIGITS, Number::bfloat16>(job);
  if (job.scales.type == Number::float16) return multiply_typed_vector<BITS, DIGITS, Number::float16>(job);
  multiply_typed_vector<BITS, DIGITS, Number::float32>(job);
}

void vector(const VectorJob& job) {
  const bool two = job.digits == 2;
  if (job.bits == 2) return two ? multiply_vector<2, 2>(job) : multiply_vector<2, 1>(job);
  if (job.bits == 4) return two ? multiply_vector<4, 2>(job) : multiply_vector<4, 1>(job);
  return two ? multiply_vector<8, 2>(job) : multiply_vector<8, 1>(job);
}

inline const uint8_t* table_of(const PaletteJob& palette, int64_t row) {
  return palette.tables + (palette.first + row) / palette.rows_per_table * table_bytes(palette.job.bits);
}

}  // namespace
}  // namespace afm

#include "isa_low_rank.h"

namespace afm {
namespace {

inline Kernels common_kernels(const char* name) {
  Kernels k{};
  k.name = name;
  k.vector_bytes = Isa::kBytes;
  k.vector = vector;
  k.load = load;
  k.store = store;
  k.rms_norm = rms_norm;
  k.largest = largest;
  k.count_below = count_below;
  k.quantize = quantize;
  k.add_columns = add_columns;
  k.finish = finish;
  k.swiglu = swiglu;
  k.dot = dot;
  k.shrink = shrink;
  k.expand = expand;
  k.look_up = look_up;
  return k;
}

}  // namespace
}  // namespace afm
