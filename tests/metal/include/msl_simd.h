// What threads do together: barriers, simdgroup and quadgroup functions, simdgroup matrices.
//
// Every lane hands its argument to the emulator at the place of the call, and the result is computed once all
// lanes that exist have arrived there; anything else is reported as divergence.
#pragma once

#include "msl_math.h"

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

inline void threadgroup_barrier(mem_flags flags, Site site = Site::here()) {
  emulator::emulator_barrier("threadgroup_barrier", site, uint(flags));
}
inline void simdgroup_barrier(mem_flags, Site site = Site::here()) {
  emulator::emulator_collective("simdgroup_barrier", site, nullptr, nullptr);
}

// The emulator's own work on lanes' arguments isn't an access of the kernel.
#ifdef MSL_OPAQUE
#define MSL_UNCHECKED inline
#else
#define MSL_UNCHECKED __attribute__((no_sanitize("thread"), noinline))
#endif

namespace collective {

template <typename T>
struct Lane {
  T value, result;
  uint operand;
};

constexpr const uint MAX_LANES = 32;

/// What a lane gets that reads one which doesn't exist.
template <typename T>
MSL_UNCHECKED T undefined() {
  T r;
  __builtin_memset(&r, 0xff, sizeof r);
  return r;
}

struct Sum {
  template <typename T> static T apply(T a, T b) { return a + b; }
};
struct Min {
  template <typename T> static T apply(T a, T b) { return b < a ? b : a; }
};
struct Max {
  template <typename T> static T apply(T a, T b) { return a < b ? b : a; }
};
/// True if the order in which an operation is applied to numbers of a type changes the result.
template <typename Op, typename T>
constexpr bool is_rounded =
    is_floating_point_v<typename shape_of<T>::element> && __is_same(Op, Sum);

/// Reduction over each group of `width` lanes: as a tree, or, where that shows, in a random order, since Metal
/// promises none.
template <typename Op, typename T, uint width>
MSL_UNCHECKED void reduce(void** arguments, uint lanes) {
  Lane<T>** lane = reinterpret_cast<Lane<T>**>(arguments);
  for (uint begin = 0; begin < lanes; begin += width) {
    uint n = lanes - begin < width ? lanes - begin : width;
    T values[width];
    for (uint i = 0; i < n; ++i) values[i] = lane[begin + i]->value;
    if constexpr (is_rounded<Op, T>) {
      for (uint left = n; left > 1; --left) {
        uint i = emulator::emulator_draw() % left, j = emulator::emulator_draw() % (left - 1);
        T last = values[i];
        values[i] = values[left - 1];
        values[j] = Op::apply(values[j], last);
      }
    } else {
      for (uint step = width / 2; step; step /= 2)
        for (uint i = 0; i < step && i + step < n; ++i) values[i] = Op::apply(values[i], values[i + step]);
    }
    for (uint i = 0; i < n; ++i) lane[begin + i]->result = values[0];
  }
}

template <typename T>
MSL_UNCHECKED void inclusive_sum(void** arguments, uint lanes) {
  Lane<T>** lane = reinterpret_cast<Lane<T>**>(arguments);
  T sum = T(0);
  for (uint i = 0; i < lanes; ++i) lane[i]->result = sum = sum + lane[i]->value;
}

struct Direct {
  static uint source(uint, uint operand, uint) { return operand; }
};
struct ByXor {
  static uint source(uint lane, uint operand, uint) { return lane ^ operand; }
};
// Lanes at the edge keep their own value.
struct Up {
  static uint source(uint lane, uint operand, uint) { return lane >= operand ? lane - operand : lane; }
};
struct Down {
  static uint source(uint lane, uint operand, uint width) {
    return lane + operand < width ? lane + operand : lane;
  }
};
struct RotateUp {
  static uint source(uint lane, uint operand, uint width) { return (lane + width - operand % width) % width; }
};
template <typename From, typename T, uint width>
MSL_UNCHECKED void shuffle(void** arguments, uint lanes) {
  Lane<T>** lane = reinterpret_cast<Lane<T>**>(arguments);
  for (uint i = 0; i < lanes; ++i) {
    uint begin = i / width * width;
    uint source = From::source(i - begin, lane[i]->operand, width);
    lane[i]->result = source < width && begin + source < lanes ? lane[begin + source]->value : undefined<T>();
  }
}

#ifdef MSL_OPAQUE

/// An instruction that is known by its name alone, and reads and writes no memory.
template <typename T, typename... Args>
__attribute__((const, convergent)) T opaque(const char* name, Args... args);

template <typename T>
inline T run(const char* name, Site, T value, uint operand, emulator::Resolve) {
  return opaque<T>(name, value, operand);
}

#else

template <typename T>
MSL_UNCHECKED T run(const char* name, Site site, T value, uint operand, emulator::Resolve resolve) {
  Lane<T> lane;
  lane.value = value;
  lane.operand = operand;
  emulator::emulator_collective(name, site, &lane, resolve);
  return lane.result;
}

#endif

}  // namespace collective

// What a simdgroup's functions take: numbers of 8 to 32 bits (section 6.9.2 of the specification). MLX has overloads
// of its own for bool, 64 bits and, here in the shim, bfloat.
template <typename T>
inline constexpr bool is_simd_operand =
    sizeof(typename shape_of<T>::element) < 8 && !__is_same(typename shape_of<T>::element, bool);
#define MSL_OPERAND typename T, typename = enable_if_t<is_simd_operand<T>>

#define MSL_REDUCTION(name, Op) \
  template <MSL_OPERAND> \
  inline T simd_##name(T x, Site site = Site::here()) { \
    return collective::run<T>("simd_" #name, site, x, 0, collective::reduce<collective::Op, T, 32>); \
  } \
  template <MSL_OPERAND> \
  inline T quad_##name(T x, Site site = Site::here()) { \
    return collective::run<T>("quad_" #name, site, x, 0, collective::reduce<collective::Op, T, 4>); \
  }
MSL_REDUCTION(sum, Sum)
MSL_REDUCTION(min, Min)
MSL_REDUCTION(max, Max)
#undef MSL_REDUCTION

template <MSL_OPERAND>
inline T simd_prefix_inclusive_sum(T x, Site site = Site::here()) {
  return collective::run<T>("simd_prefix_inclusive_sum", site, x, 0, collective::inclusive_sum<T>);
}

#define MSL_SHUFFLE(name, From) \
  template <MSL_OPERAND> \
  inline T simd_##name(T x, ushort n, Site site = Site::here()) { \
    return collective::run<T>("simd_" #name, site, x, n, collective::shuffle<collective::From, T, 32>); \
  } \
  template <MSL_OPERAND> \
  inline T quad_##name(T x, ushort n, Site site = Site::here()) { \
    return collective::run<T>("quad_" #name, site, x, n, collective::shuffle<collective::From, T, 4>); \
  }
MSL_SHUFFLE(shuffle, Direct)
MSL_SHUFFLE(broadcast, Direct)
MSL_SHUFFLE(shuffle_xor, ByXor)
MSL_SHUFFLE(shuffle_up, Up)
MSL_SHUFFLE(shuffle_down, Down)
#undef MSL_SHUFFLE

template <MSL_OPERAND>
inline T simd_shuffle_and_fill_up(T x, T filling, ushort n, Site site = Site::here()) {
  auto resolve = collective::shuffle<collective::RotateUp, T, 32>;
  T inside = collective::run<T>("simd_shuffle_and_fill_up", site, x, n, resolve);
  T outside = collective::run<T>("simd_shuffle_and_fill_up", site, filling, n, resolve);
  return emulator::emulator_lane() >= n ? inside : outside;
}
#undef MSL_OPERAND

// ---- 8 x 8 matrices over a simdgroup ------------------------------------------------------------------------

/// Lane `l` holds columns `column` and `column + 1` of one row, in the layout that MLX's kernels rely on.
inline uint matrix_row(uint lane) { return ((lane / 4) & 4) + (lane / 2) % 4; }
inline uint matrix_column(uint lane) { return ((lane / 4) & 2) * 2 + (lane % 2) * 2; }

template <typename T, int Columns, int Rows>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup_matrix: 8 x 8 only");
  typedef vec<T, 2> storage_type;
  storage_type elements;

  simdgroup_matrix() = default;
  /// The diagonal matrix.
  explicit simdgroup_matrix(T diagonal) {
    uint lane = emulator::emulator_lane(), row = matrix_row(lane), column = matrix_column(lane);
    elements[0] = row == column ? diagonal : T(0);
    elements[1] = row == column + 1 ? diagonal : T(0);
  }
  thread storage_type& thread_elements() { return elements; }
  const thread storage_type& thread_elements() const { return elements; }
};

typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

namespace collective {

template <typename D, typename A, typename B, typename C>
struct MultiplyArguments {
  vec<A, 2> a;
  vec<B, 2> b;
  vec<C, 2> c;
  vec<D, 2> d;
  Site site;
};

template <typename D, typename A, typename B, typename C>
MSL_UNCHECKED void multiply(void** arguments, uint lanes) {
  typedef MultiplyArguments<D, A, B, C> Lane;
  Lane** lane = reinterpret_cast<Lane**>(arguments);
  if (lanes != MAX_LANES) emulator::emulator_fail("a simdgroup matrix needs 32 lanes", lane[0]->site);
  float a[8][8], b[8][8];
  for (uint l = 0; l < MAX_LANES; ++l)
    for (uint i = 0; i < 2; ++i) {
      a[matrix_row(l)][matrix_column(l) + i] = float(lane[l]->a[i]);
      b[matrix_row(l)][matrix_column(l) + i] = float(lane[l]->b[i]);
    }
  // Metal promises no order of the sum; this is one of many.
  ulong order = emulator::emulator_draw();
  uint start = order % 8, stride = (order >> 3) % 8 | 1;
  bool is_first = (order >> 6) % 2;
  for (uint l = 0; l < MAX_LANES; ++l)
    for (uint i = 0; i < 2; ++i) {
      float sum = is_first ? float(lane[l]->c[i]) : 0.0f;
      for (uint j = 0; j < 8; ++j) {
        uint k = (start + stride * j) % 8;
        sum += a[matrix_row(l)][k] * b[k][matrix_column(l) + i];
      }
      lane[l]->d[i] = D(is_first ? sum : sum + float(lane[l]->c[i]));
    }
}

struct Place {
  ulong pointer, stride, x, y, is_transposed;
  Site site;
};

/// All lanes must pass the same arguments.
MSL_UNCHECKED inline void same(void** arguments, uint lanes) {
  const Place& a = *static_cast<const Place*>(arguments[0]);
  if (lanes != MAX_LANES) emulator::emulator_fail("a simdgroup matrix needs 32 lanes", a.site);
  for (uint i = 1; i < lanes; ++i) {
    const Place& b = *static_cast<const Place*>(arguments[i]);
    bool is_same = a.pointer == b.pointer && a.stride == b.stride && a.x == b.x && a.y == b.y;
    if (!is_same || a.is_transposed != b.is_transposed)
      emulator::emulator_fail("the lanes disagree on where the simdgroup matrix lies", a.site);
  }
}

/// Offset of the lane's element `i`, once all lanes have arrived.
template <typename P>
MSL_UNCHECKED inline ulong matrix_offset(
    const char* name, Site site, P pointer, ulong stride, ulong2 origin, bool is_transposed) {
#ifndef MSL_OPAQUE
  Place place = {ulong(pointer), stride, origin.x, origin.y, is_transposed, site};
  emulator::emulator_collective(name, site, &place, same);
#endif
  uint lane = emulator::emulator_lane(), row = matrix_row(lane), column = matrix_column(lane);
  if (is_transposed) return (origin.y + column) * stride + origin.x + row;
  return (origin.y + row) * stride + origin.x + column;
}

}  // namespace collective

template <typename D, typename A, typename B, typename C>
inline void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<D, 8, 8>& d,
    thread simdgroup_matrix<A, 8, 8>& a,
    thread simdgroup_matrix<B, 8, 8>& b,
    thread simdgroup_matrix<C, 8, 8>& c,
    Site site = Site::here()) {
#ifdef MSL_OPAQUE
  d.elements = collective::opaque<vec<D, 2>>(
      "simdgroup_multiply_accumulate", a.elements, b.elements, c.elements);
#else
  collective::MultiplyArguments<D, A, B, C> lane = {a.elements, b.elements, c.elements, vec<D, 2>(D(0)), site};
  emulator::emulator_collective("simdgroup_multiply_accumulate", site, &lane, collective::multiply<D, A, B, C>);
  d.elements = lane.d;
#endif
}

// Pointers of every address space: a template on the pointer keeps its qualifier.
template <typename T, typename P>
inline void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& m, P source, ulong elements_per_row = 8,
                           ulong2 origin = ulong2(0), bool transpose = false, Site site = Site::here()) {
  ulong at = collective::matrix_offset("simdgroup_load", site, source, elements_per_row, origin, transpose);
  m.elements[0] = source[at];
  m.elements[1] = source[at + (transpose ? elements_per_row : 1)];
}

template <typename T, typename P>
inline void simdgroup_store(const thread simdgroup_matrix<T, 8, 8>& m, P target, ulong elements_per_row = 8,
                            ulong2 origin = ulong2(0), bool transpose = false, Site site = Site::here()) {
  ulong at = collective::matrix_offset("simdgroup_store", site, target, elements_per_row, origin, transpose);
  target[at] = m.elements[0];
  target[at + (transpose ? elements_per_row : 1)] = m.elements[1];
}

#undef MSL_UNCHECKED

}  // namespace metal
