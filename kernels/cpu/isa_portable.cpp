// Plain C++: runs everywhere, and says what the other instruction sets have to compute.
#include <cstring>

#include "isa.h"

namespace afm {
namespace {

struct Isa {
  static constexpr int kBytes = 16;
  static constexpr int kLanes = 4;
  struct Bytes {
    uint8_t v[kBytes];
  };
  struct Lanes {
    float v[kLanes];
  };

  static Bytes load(const uint8_t* p) { return load_part(p, kBytes); }
  static Bytes load_part(const uint8_t* p, int64_t count) {
    Bytes bytes{};
    std::memcpy(bytes.v, p, count);
    return bytes;
  }
  static void prefetch(const uint8_t*) {}

  // A sum grows by at most 4 * 255 * 128 per block, so 16,000 blocks fit: K = 262,144 at 8 bits.
  template <int BITS, int DIGITS>
  struct Sums {
    int32_t sums[DIGITS][kLanes];

    void clear() { std::memset(sums, 0, sizeof sums); }
    void add(const Bytes& codes, const int8_t* x) {
      for (int d = 0; d < DIGITS; ++d) {
        for (int p = 0; p < 8 / BITS; ++p, x += kBytes) {
          for (int j = 0; j < kBytes; ++j) {
            sums[d][j / 4] += ((codes.v[j] >> (BITS * p)) & ((1 << BITS) - 1)) * x[j];
          }
        }
      }
    }
    Lanes total() const {
      Lanes lanes;
      for (int i = 0; i < kLanes; ++i) {
        lanes.v[i] = static_cast<float>(sums[0][i]);
        if constexpr (DIGITS == 2) lanes.v[i] = lanes.v[i] * 256 + static_cast<float>(sums[1][i]);
      }
      return lanes;
    }
    static Lanes products(const Bytes& codes, const int8_t* x) {
      Sums sums;
      sums.clear();
      sums.add(codes, x);
      return sums.total();
    }
  };

  template <int BITS, int DIGITS>
  static constexpr int rows() {
    return 1;
  }
  template <int BITS, int DIGITS>
  static constexpr int group_rows() {
    return 1;
  }

  static constexpr int kShrinkVectors = 2, kExpandVectors = 4;

  static Lanes from_floats(const float* p) { return {{p[0], p[1], p[2], p[3]}}; }
  static Lanes from_bfloats(const uint16_t* p);
  static Lanes from_halves(const uint16_t* p);
  static void store(float* p, const Lanes& v) {
    for (int i = 0; i < kLanes; ++i) p[i] = v.v[i];
  }
  static Lanes zero() { return {}; }
  static Lanes add(const Lanes& a, const Lanes& b) {
    Lanes lanes;
    for (int i = 0; i < kLanes; ++i) lanes.v[i] = a.v[i] + b.v[i];
    return lanes;
  }
  static Lanes set1(float v) { return {{v, v, v, v}}; }
  static Lanes multiply_add(const Lanes& a, const Lanes& b, const Lanes& c) {
    Lanes lanes;
    for (int i = 0; i < kLanes; ++i) lanes.v[i] = a.v[i] * b.v[i] + c.v[i];
    return lanes;
  }
  // Lane i gets scales[i * count / kLanes].
  static Lanes spread(Lanes scales, int count) {
    Lanes lanes;
    for (int i = 0; i < kLanes; ++i) lanes.v[i] = scales.v[i * count / kLanes];
    return lanes;
  }
  // out[i] = the sum of the lanes of v[i].
  static void reduce(const Lanes* v, float* out) {
    for (int i = 0; i < kLanes; ++i) out[i] = (v[i].v[0] + v[i].v[2]) + (v[i].v[1] + v[i].v[3]);
  }
};

}  // namespace
}  // namespace afm

#include "isa_common.h"

namespace afm {
namespace {

inline Isa::Lanes Isa::from_bfloats(const uint16_t* p) {
  return {{from_bf16(p[0]), from_bf16(p[1]), from_bf16(p[2]), from_bf16(p[3])}};
}
inline Isa::Lanes Isa::from_halves(const uint16_t* p) {
  return {{from_f16(p[0]), from_f16(p[1]), from_f16(p[2]), from_f16(p[3])}};
}

}  // namespace

const Kernels* portable_kernels() {
  static const Kernels table = common_kernels("portable");
  return &table;
}

}  // namespace afm
