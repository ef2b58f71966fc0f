// The operations of `kernels/reference.py` as nodes of MLX's graph that run on the CPU.
//
// Each function checks what would otherwise read or write where it must not, and returns arrays whose numbers
// are computed when MLX evaluates them, on the stream's thread and the threads of `ThreadPool`.
#pragma once

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "mlx/array.h"
#include "mlx/utils.h"

namespace afm {

namespace mx = mlx::core;

// Offsets of the rows of a batch: one for all, or an array (B,) int32.
using Offset = std::variant<int, mx::array>;

struct Rope {
  mx::array weight;
  float theta, eps;
};

// The newest columns of a cache, see `KeyValues` in `kernels/operands.py`.
struct Tail {
  mx::array codes, starts;
};

using Scale = std::optional<mx::array>;

// `kv`: keys, then values, (B, 2 * n_kv_heads, S, head_dim), floats, or int8 codes with scales. `lengths`: (B,) tokens
// that a row's first query sees, each one after it one more.
mx::array decode_attention(const mx::array& queries, const mx::array& kv, const Scale& key_scale,
                           const Scale& value_scale, const mx::array& lengths, const std::optional<Tail>& tail,
                           const std::optional<Rope>& rope);

// The queries are the last tokens of the keys and values, and look at none after their own.
mx::array causal_attention(const mx::array& queries, const mx::array& kv, const Scale& key_scale,
                           const Scale& value_scale);

// See `HeadOptions` in `kernels/operands.py`.
struct HeadOptions {
  mx::array q_weight, k_weight;
  Scale key_scale, value_scale;
  int n_kv_heads;
  float theta, eps;
};

// Queries, and keys and values as in `decode_attention`.
std::vector<mx::array> rope_norm_quantize(const mx::array& qkv, const Offset& offset, const HeadOptions& options);

// See `norm_rope` in `kernels/reference.py`.
mx::array norm_rope(const mx::array& heads, const mx::array& periods, const Offset& offset,
                    const std::optional<mx::array>& weight, float eps);

// See `norm_rope_attend` in `kernels/reference.py`. `qkv`: queries, keys, values; `norms`: of queries and of keys.
std::vector<mx::array> norm_rope_attend(const std::vector<mx::array>& qkv, const mx::array& periods,
                                        const mx::array& buffer, const Tail& tail, const mx::array& lengths,
                                        const std::optional<std::vector<mx::array>>& norms, float eps);

// Columns [lengths - L, lengths) of a buffer (B, heads, capacity, head_dim) become tokens (B, heads, L, head_dim).
mx::array write_tokens(const mx::array& buffer, const mx::array& tokens, const mx::array& lengths);

// See `PackedWeight`, `LowRank` and `ProductOptions` in `kernels/operands.py`.
struct Packed {
  mx::array codes;
  int bits;
  std::string mode;
  std::optional<mx::array> scales, biases, table;
};

struct Part {
  int64_t a, b, rank;
};

struct LowRank {
  std::vector<mx::array> numbers;
  std::vector<Part> parts;
  mx::array scales, slots;
  std::vector<int64_t> sections;
};

struct ProductOptions {
  std::optional<mx::array> norm;
  float eps;
  std::optional<mx::array> residual;
  std::vector<LowRank> adapters;
  int activation_bits;
};

// The product with each of the matrices, which are alike in all but their rows; a residual with a single one only.
std::vector<mx::array> packed_matmul(const mx::array& x, const std::vector<Packed>& weights,
                                     const ProductOptions& options);

mx::array packed_swiglu(const mx::array& x, const Packed& gate, const Packed& up, const ProductOptions& options);

// Indices and products.
std::vector<mx::array> packed_argmax(const mx::array& x, const Packed& weight, const ProductOptions& options);

mx::array packed_gather(const mx::array& x, const Packed& weight, const mx::array& indices, int experts,
                        int activation_bits);

// See `gelu` in `kernels/reference.py`.
mx::array gelu(const mx::array& x);

mx::array packed_embedding(const mx::array& tokens, const Packed& weight, mx::Dtype dtype);

}  // namespace afm
