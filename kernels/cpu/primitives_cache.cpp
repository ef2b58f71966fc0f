#include <cstring>

#include "primitives.h"
#include "primitives_common.h"

namespace afm {
namespace {

// Inputs: buffer, tokens, lengths. Takes the buffer over when nobody else holds it.
class WriteTokens : public CpuPrimitive {
 public:
  using CpuPrimitive::CpuPrimitive;

  const char* name() const override { return "AfmWriteTokens"; }

  bool is_equivalent(const mx::Primitive&) const override { return true; }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override { return {inputs[0].shape()}; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const mx::array& buffer = inputs[0];
    mx::array& out = outputs[0];
    bool taken_over = buffer.is_donatable() && buffer.flags().row_contiguous;
    if (taken_over) {
      out.copy_shared_buffer(buffer);
    } else {
      allocate(out);
    }
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (auto& input : inputs) encoder.set_input_array(input);
    encoder.set_output_array(out);
    encoder.dispatch(Task{View(buffer), View(inputs[1]), View(inputs[2]), out.data<char>(), taken_over});
  }

 private:
  struct Task {
    View buffer, tokens, lengths;
    char* out;
    bool taken_over;

    void operator()() const {
      std::vector<char> copy, of_lengths;
      if (!taken_over) {
        std::memcpy(out, buffer.dense(copy), static_cast<size_t>(buffer.size()) * buffer.dtype.size());
      }
      const char* from = static_cast<const char*>(tokens.dense(copy));
      const int32_t* length = static_cast<const int32_t*>(lengths.dense(of_lengths));
      int64_t heads = buffer.shape[1], capacity = buffer.shape[2], count = tokens.shape[2];
      int64_t column = buffer.shape[3] * static_cast<int64_t>(buffer.dtype.size());
      for (int64_t row = 0; row < buffer.shape[0]; ++row) {
        int64_t first = length[row] - count;
        // Callers make room first; where one forgot, nothing is written behind the buffer.
        bool fits = first >= 0 && length[row] <= capacity;
        for (int64_t head = 0; head < heads; ++head, from += count * column) {
          if (fits) std::memcpy(out + ((row * heads + head) * capacity + first) * column, from, count * column);
        }
      }
    }
  };
};

}  // namespace

mx::array write_tokens(const mx::array& buffer, const mx::array& tokens, const mx::array& lengths) {
  require(buffer.ndim() == 4 && tokens.ndim() == 4 && buffer.dtype() == tokens.dtype() &&
              buffer.shape(0) == tokens.shape(0) && buffer.shape(1) == tokens.shape(1) &&
              buffer.shape(3) == tokens.shape(3),
          "buffer and tokens must be (B, heads, capacity, head_dim) and (B, heads, L, head_dim) of one dtype");
  require(lengths.ndim() == 1 && lengths.shape(0) == buffer.shape(0) && lengths.dtype() == mx::int32,
          "lengths must be (B,) int32");
  return mx::array(buffer.shape(), buffer.dtype(), std::make_shared<WriteTokens>(cpu_stream()),
                   {buffer, tokens, lengths});
}

}  // namespace afm
