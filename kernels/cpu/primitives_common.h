// What the sources of primitives share; see `primitives.h`.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "numbers.h"

namespace afm {

namespace mx = mlx::core;

// Throws what Python sees as ValueError.
template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

inline Number number_type(const mx::array& a, const char* name) {
  if (a.dtype() == mx::float32) return Number::float32;
  if (a.dtype() == mx::bfloat16) return Number::bfloat16;
  if (a.dtype() == mx::float16) return Number::float16;
  throw std::invalid_argument(std::string(name) + " must be float32, bfloat16 or float16");
}

// An evaluated array's place in memory, for the task that runs later; MLX keeps its buffer until then.
struct View {
  const void* data;
  mx::Dtype dtype;
  mx::Shape shape;
  mx::Strides strides;
  bool contiguous;

  View(const mx::array& a)
      : data(a.data<char>()),
        dtype(a.dtype()),
        shape(a.shape()),
        strides(a.strides()),
        contiguous(a.flags().row_contiguous) {}

  int64_t size() const {
    int64_t size = 1;
    for (auto n : shape) size *= n;
    return size;
  }

  Number type() const {
    return dtype == mx::float32 ? Number::float32 : dtype == mx::bfloat16 ? Number::bfloat16 : Number::float16;
  }

  // A number of a 0-d or one-element array.
  float number() const { return load_number(data, 0, type()); }

  // The data in row-major order: in place, or copied into `copy`.
  const void* dense(std::vector<char>& copy) const;

  // All numbers in row-major order as float32.
  std::vector<float> floats() const;
};

// Allocates an output and says that it is written.
void allocate(mx::array& out);

// A node of the graph that runs on the CPU only; subclasses define `eval_cpu`.
class CpuPrimitive : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error(std::string(name()) + " runs on the CPU only");
  }
};

// The stream of operations that run on the CPU.
inline mx::Stream cpu_stream() { return mx::to_stream(mx::Device(mx::Device::cpu)); }

}  // namespace afm
