// The exact GELU, x times the normal distribution's share below x, of which MLX's CPU backend computes one at a time.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention_kernel.h"
#include "pool.h"
#include "primitives.h"
#include "primitives_common.h"

namespace afm {
namespace {

constexpr int64_t kPiece = 4096;  // numbers of a piece of work: they stay in the first cache

// The share of the far side is erfc(|x| / sqrt(2)) / 2 by Abramowitz and Stegun, 7.1.26: off by 1e-7 at most.
void gelu_of(const float* __restrict x, int64_t count, float* __restrict out) {
  for (int64_t i = 0; i < count; ++i) {
    const float size = x[i] < 0.0f ? -x[i] : x[i];
    const float t = 1.0f / (1.0f + 0.231641900f * size);
    float sum = 0.530702715f;
    sum = sum * t - 0.726576013f;
    sum = sum * t + 0.710706871f;
    sum = sum * t - 0.142248368f;
    sum = sum * t + 0.127414796f;
    float exponent = -0.721347520f * size * size;  // exp(-x^2 / 2) as a power of 2
    exponent = exponent < -126.0f ? -126.0f : exponent;
    const float far = sum * t * exp2_fast(exponent);
    out[i] = x[i] * (x[i] < 0.0f ? far : 1.0f - far);
  }
}

class Gelu : public CpuPrimitive {
 public:
  using CpuPrimitive::CpuPrimitive;

  const char* name() const override { return "AfmGelu"; }

  bool is_equivalent(const mx::Primitive&) const override { return true; }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override { return {inputs[0].shape()}; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    allocate(outputs[0]);
    auto& encoder = mx::cpu::get_command_encoder(stream());
    encoder.set_input_array(inputs[0]);
    encoder.set_output_array(outputs[0]);
    encoder.dispatch(Task{View(inputs[0]), outputs[0].data<char>()});
  }

 private:
  struct Task {
    View x;
    void* out;

    void operator()() const {
      std::vector<char> copy;
      const void* numbers = x.dense(copy);
      const int64_t count = x.size();
      auto work = [&](int64_t begin, int64_t end) {
        for (int64_t first = begin * kPiece; first < std::min(end * kPiece, count); first += kPiece) {
          const int64_t here = std::min(kPiece, count - first);
          if (x.type() == Number::float32) {
            gelu_of(static_cast<const float*>(numbers) + first, here, static_cast<float*>(out) + first);
            continue;
          }
          float from[kPiece], to[kPiece];
          load_numbers(numbers, first, 1, x.type(), from, here);
          gelu_of(from, here, to);
          store_numbers(to, here, out, first, x.type());
        }
      };
      ThreadPool::shared().parallel_for((count + kPiece - 1) / kPiece, 1, work, 16 * kPiece);
    }
  };
};

}  // namespace

mx::array gelu(const mx::array& x) {
  number_type(x, "x");
  return mx::array(x.shape(), x.dtype(), std::make_shared<Gelu>(cpu_stream()), {x});
}

}  // namespace afm
