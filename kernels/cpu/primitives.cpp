#include "primitives.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "attention.h"
#include "attention_kernel.h"
#include "mlx/allocator.h"
#include "pool.h"
#include "primitives_common.h"
#include "rope.h"

namespace afm {

const void* View::dense(std::vector<char>& copy) const {
  if (contiguous) return data;
  size_t item = dtype.size();
  int64_t count = size();
  copy.resize(static_cast<size_t>(count) * item);
  std::vector<int32_t> index(shape.size());
  const char* from = static_cast<const char*>(data);
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(copy.data() + i * item, from, item);
    for (int axis = static_cast<int>(shape.size()) - 1; axis >= 0; --axis) {
      from += strides[axis] * static_cast<int64_t>(item);
      if (++index[axis] < shape[axis]) break;
      from -= strides[axis] * static_cast<int64_t>(item) * shape[axis];
      index[axis] = 0;
    }
  }
  return copy.data();
}

std::vector<float> View::floats() const {
  std::vector<char> copy;
  std::vector<float> numbers(size());
  load_numbers(dense(copy), 0, 1, type(), numbers.data(), size());
  return numbers;
}

void allocate(mx::array& out) { out.set_data(mx::allocator::malloc(out.nbytes())); }

namespace {

// Heads of (B, n, S, head_dim) keys and values anywhere in memory, from one of them on.
Columns heads_from(const View& kv, int64_t first) {
  return {static_cast<const char*>(kv.data) + first * kv.strides[1] * static_cast<int64_t>(kv.dtype.size()),
          kv.strides[0], kv.strides[1], kv.strides[2], kv.strides[3]};
}

// Pieces of loops over heads: enough work to be worth a thread's while.
constexpr int64_t kHeadsPerPiece = 64;

// Inputs: queries, keys and values, key_scale, value_scale[, lengths[, tail, starts][, rope's weight]].
class AttentionOp : public CpuPrimitive {
 public:
  AttentionOp(mx::Stream stream, float theta = 0.0f, float eps = 0.0f)
      : CpuPrimitive(stream), theta_(theta), eps_(eps) {}

  const char* name() const override { return "AfmAttention"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    auto& op = static_cast<const AttentionOp&>(other);
    return theta_ == op.theta_ && eps_ == op.eps_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {inputs[0].shape()};
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    allocate(outputs[0]);
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (auto& input : inputs) encoder.set_input_array(input);
    encoder.set_output_array(outputs[0]);
    Task task = {View(inputs[0]), View(inputs[1]), View(inputs[2]), View(inputs[3]),       std::nullopt,
                 std::nullopt,    std::nullopt,    std::nullopt,    theta_,
                 eps_,            outputs[0].data<char>()};
    size_t count = inputs.size();
    if (count > 4) task.lengths.emplace(inputs[4]);
    if (count > 6) task.tail.emplace(inputs[5]), task.starts.emplace(inputs[6]);
    if (count == 6 || count == 8) task.weight.emplace(inputs.back());
    encoder.dispatch(std::move(task));
  }

 private:
  struct Task {
    View queries, kv, key_scale, value_scale;
    std::optional<View> lengths, tail, starts, weight;
    float theta, eps;
    void* out;

    void operator()() const {
      const mx::Shape& shape = queries.shape;
      AttentionArguments a = {};
      a.batch = shape[0], a.heads = shape[1], a.queries = shape[2], a.head_dim = shape[3];
      a.kv_heads = kv.shape[1] / 2;
      a.q = queries.data;
      std::copy_n(queries.strides.begin(), 4, a.q_strides);
      a.type = queries.type();
      std::vector<float> norm = weight ? weight->floats() : std::vector<float>();
      if (weight) a.table = &RopeTable::of(theta, static_cast<int>(a.head_dim));
      a.norm = norm.data();
      a.eps = eps;
      a.floats = kv.dtype != mx::int8;
      a.stored = kv.type();
      a.keys = heads_from(kv, 0);
      a.values = heads_from(kv, a.kv_heads);
      a.key_scale = key_scale.number();
      a.value_scale = value_scale.number();
      a.capacity = kv.shape[2];
      std::vector<char> copy, of_starts;
      a.lengths = lengths ? static_cast<const int32_t*>(lengths->dense(copy)) : nullptr;
      if (tail) {
        a.tail_keys = heads_from(*tail, 0);
        a.tail_values = heads_from(*tail, a.kv_heads);
        a.tail_capacity = tail->shape[2];
        a.starts = static_cast<const int32_t*>(starts->dense(of_starts));
      }
      a.out = out;
      attend(a);
    }
  };

  float theta_, eps_;
};

void check_scales(const Scale& key_scale, const Scale& value_scale) {
  require(key_scale.has_value() == value_scale.has_value(), "keys and values must have a scale each, or none");
  if (!key_scale) return;
  number_type(*key_scale, "the keys' scale");
  number_type(*value_scale, "the values' scale");
}

// Inputs of an `AttentionOp` up to the scales.
std::vector<mx::array> attention_inputs(const mx::array& queries, const mx::array& kv, const Scale& key_scale,
                                        const Scale& value_scale) {
  number_type(queries, "queries");
  check_scales(key_scale, value_scale);
  require(queries.ndim() == 4 && kv.ndim() == 4 && kv.shape(1) > 0 && kv.shape(1) % 2 == 0,
          "queries must be (B, n_heads, L, head_dim), and keys and values (B, 2 * n_kv_heads, S, head_dim)");
  require((kv.dtype() == mx::int8) == key_scale.has_value(),
          "keys and values must be int8 codes with scales, or floats without");
  if (!key_scale) number_type(kv, "keys and values without scales");
  require(queries.shape(0) == kv.shape(0), "queries have ", queries.shape(0), " rows, keys ", kv.shape(0));
  require(queries.shape(3) == kv.shape(3), "queries have head_dim ", queries.shape(3), ", keys ", kv.shape(3));
  require(queries.shape(3) <= kMaxHeadDim, "head_dim is ", queries.shape(3), "; at most ", kMaxHeadDim);
  require(queries.shape(1) % (kv.shape(1) / 2) == 0, queries.shape(1), " query heads are no multiple of ",
          kv.shape(1) / 2, " KV heads");
  mx::array one(1.0f);
  return {queries, kv, key_scale.value_or(one), value_scale.value_or(one)};
}

// Inputs: qkv, weights of q and k[, scales of k and v][, offsets].
class RopeNormQuantize : public CpuPrimitive {
 public:
  RopeNormQuantize(mx::Stream stream, int offset, int kv_heads, float theta, float eps, bool scaled)
      : CpuPrimitive(stream), offset_(offset), kv_heads_(kv_heads), theta_(theta), eps_(eps), scaled_(scaled) {}

  const char* name() const override { return "AfmRopeNormQuantize"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    auto& op = static_cast<const RopeNormQuantize&>(other);
    return offset_ == op.offset_ && kv_heads_ == op.kv_heads_ && theta_ == op.theta_ && eps_ == op.eps_ &&
           scaled_ == op.scaled_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    int dim = inputs[1].shape(0), heads = inputs[0].shape(2) / dim - 2 * kv_heads_;
    int batch = inputs[0].shape(0), tokens = inputs[0].shape(1);
    return {{batch, heads, tokens, dim}, {batch, 2 * kv_heads_, tokens, dim}};
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (auto& input : inputs) encoder.set_input_array(input);
    for (auto& output : outputs) {
      allocate(output);
      encoder.set_output_array(output);
    }
    Task task = {View(inputs[0]), View(inputs[1]), View(inputs[2]), std::nullopt, std::nullopt,
                 std::nullopt,    offset_,         kv_heads_,       theta_,       eps_,
                 outputs[0].data<char>(), outputs[1].data<char>()};
    if (scaled_) task.key_scale.emplace(inputs[3]), task.value_scale.emplace(inputs[4]);
    if (inputs.size() % 2 == 0) task.offsets.emplace(inputs.back());
    encoder.dispatch(std::move(task));
  }

 private:
  struct Task {
    View qkv, q_weight, k_weight;
    std::optional<View> key_scale, value_scale, offsets;
    int64_t offset, kv_heads;
    float theta, eps;
    void *q, *kv;

    void operator()() const {
      int64_t batch = qkv.shape[0], tokens = qkv.shape[1], dim = q_weight.shape[0];
      int64_t all = qkv.shape[2] / dim, heads = all - 2 * kv_heads;
      std::vector<float> of_q = q_weight.floats(), of_k = k_weight.floats();
      bool scaled = key_scale.has_value();
      float scale[2] = {scaled ? key_scale->number() : 1.0f, scaled ? value_scale->number() : 1.0f};
      std::vector<char> copy;
      auto starts = offsets ? static_cast<const int32_t*>(offsets->dense(copy)) : nullptr;
      const RopeTable& table = RopeTable::of(theta, static_cast<int>(dim));
      const AttentionKernels& kernels = attention_kernels();
      auto work = [&](int64_t begin, int64_t end) {
        std::vector<float> raw(dim), turned(dim), scratch(dim);
        for (int64_t i = begin; i < end; ++i) {
          int64_t head = i % all, token = i / all % tokens, b = i / all / tokens;
          load_numbers(qkv.data, b * qkv.strides[0] + token * qkv.strides[1] + head * dim * qkv.strides[2],
                       qkv.strides[2], qkv.type(), raw.data(), dim);
          bool is_value = head >= heads + kv_heads;
          if (!is_value) {
            int64_t position = (starts ? starts[b] : offset) + token;
            kernels.turn(raw.data(), table.row(position, scratch.data()), (head < heads ? of_q : of_k).data(), eps,
                         dim, turned.data());
          }
          if (head < heads) {
            store_numbers(turned.data(), dim, q, ((b * heads + head) * tokens + token) * dim, qkv.type());
          } else {
            int64_t at = ((b * 2 * kv_heads + head - heads) * tokens + token) * dim;
            const float* numbers = (is_value ? raw : turned).data();
            if (scaled) {
              kernels.to_int8(numbers, scale[is_value], dim, static_cast<int8_t*>(kv) + at);
            } else {
              store_numbers(numbers, dim, kv, at, qkv.type());
            }
          }
        }
      };
      ThreadPool::shared().parallel_for(batch * tokens * all, kHeadsPerPiece, work, dim);
    }
  };

  int offset_, kv_heads_;
  float theta_, eps_;
  bool scaled_;
};

// A head's numbers after their norm, where there is a weight, and RoPE by these cosines and sines. Changes `raw`.
void norm_and_turn(float* raw, const float* weight, float eps, const float* cosines, int64_t dim, float* turned) {
  if (weight != nullptr) {
    float squares = 0.0f;
    for (int64_t d = 0; d < dim; ++d) squares += raw[d] * raw[d];
    float factor = 1.0f / std::sqrt(squares / static_cast<float>(dim) + eps);
    for (int64_t d = 0; d < dim; ++d) raw[d] *= factor * weight[d];
  }
  const int64_t half = dim / 2;
  const float* sines = cosines + half;
  for (int64_t d = 0; d < half; ++d) {
    turned[d] = raw[d] * cosines[d] - raw[half + d] * sines[d];
    turned[half + d] = raw[half + d] * cosines[d] + raw[d] * sines[d];
  }
}

// Inputs: heads (B, n, L, head_dim), periods[, the norm's weight][, offsets].
class NormRope : public CpuPrimitive {
 public:
  NormRope(mx::Stream stream, int offset, float eps, bool normed, bool ragged)
      : CpuPrimitive(stream), offset_(offset), eps_(eps), normed_(normed), ragged_(ragged) {}

  const char* name() const override { return "AfmNormRope"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    auto& op = static_cast<const NormRope&>(other);
    return offset_ == op.offset_ && eps_ == op.eps_ && normed_ == op.normed_ && ragged_ == op.ragged_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override { return {inputs[0].shape()}; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (auto& input : inputs) encoder.set_input_array(input);
    allocate(outputs[0]);
    encoder.set_output_array(outputs[0]);
    Task task = {View(inputs[0]), View(inputs[1]), std::nullopt, std::nullopt, offset_, eps_, outputs[0].data<char>()};
    if (normed_) task.weight.emplace(inputs[2]);
    if (ragged_) task.offsets.emplace(inputs.back());
    encoder.dispatch(std::move(task));
  }

 private:
  struct Task {
    View x, periods;
    std::optional<View> weight, offsets;
    int64_t offset;
    float eps;
    void* out;

    void operator()() const {
      int64_t batch = x.shape[0], heads = x.shape[1], tokens = x.shape[2], dim = x.shape[3];
      std::vector<float> of_norm = weight ? weight->floats() : std::vector<float>();
      std::vector<char> copy;
      auto starts = offsets ? static_cast<const int32_t*>(offsets->dense(copy)) : nullptr;
      const RopeTable& table = RopeTable::of(periods.floats());
      auto work = [&](int64_t begin, int64_t end) {
        std::vector<float> raw(dim), turned(dim), scratch(dim);
        for (int64_t i = begin; i < end; ++i) {
          int64_t token = i % tokens, head = i / tokens % heads, b = i / tokens / heads;
          load_numbers(x.data, b * x.strides[0] + head * x.strides[1] + token * x.strides[2], x.strides[3], x.type(),
                       raw.data(), dim);
          const float* angles = table.row((starts ? starts[b] : offset) + token, scratch.data());
          norm_and_turn(raw.data(), weight ? of_norm.data() : nullptr, eps, angles, dim, turned.data());
          store_numbers(turned.data(), dim, out, i * dim, x.type());
        }
      };
      ThreadPool::shared().parallel_for(batch * heads * tokens, kHeadsPerPiece, work, dim);
    }
  };

  int offset_;
  float eps_;
  bool normed_, ragged_;
};

// Inputs: queries, keys and values (B, 1, n * head_dim), periods, lengths, buffer, tail, starts[, norms of q and k].
// Outputs: attention (B, 1, n_heads * head_dim), and the tail with the new keys and values.
class NormRopeAttend : public CpuPrimitive {
 public:
  NormRopeAttend(mx::Stream stream, float eps) : CpuPrimitive(stream), eps_(eps) {}

  const char* name() const override { return "AfmNormRopeAttend"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return eps_ == static_cast<const NormRopeAttend&>(other).eps_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {inputs[0].shape(), inputs[6].shape()};
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const mx::array& tail = inputs[6];
    const bool taken_over = tail.is_donatable() && tail.flags().row_contiguous;
    allocate(outputs[0]);
    if (taken_over) {
      outputs[1].copy_shared_buffer(tail);
    } else {
      allocate(outputs[1]);
    }
    for (auto& input : inputs) encoder.set_input_array(input);
    for (auto& output : outputs) encoder.set_output_array(output);
    encoder.dispatch(Task{std::vector<View>(inputs.begin(), inputs.end()), View(outputs[1]), outputs[0].data<char>(),
                          outputs[1].data<char>(), eps_, taken_over});
  }

 private:
  struct Task {
    std::vector<View> inputs;
    View tail;
    char *out, *written;
    float eps;
    bool taken_over;

    void operator()() const {
      const View& buffer = inputs[5];
      const int64_t batch = tail.shape[0], kv_heads = tail.shape[1] / 2, columns = tail.shape[2], dim = tail.shape[3];
      const int64_t heads = inputs[0].shape[2] / dim, item = static_cast<int64_t>(tail.dtype.size());
      std::vector<char> copies[6];
      const auto lengths = static_cast<const int32_t*>(inputs[4].dense(copies[1]));
      const auto starts = static_cast<const int32_t*>(inputs[7].dense(copies[2]));
      const void* const of[3] = {inputs[0].dense(copies[3]), inputs[1].dense(copies[4]), inputs[2].dense(copies[5])};
      int64_t used = 1;
      for (int64_t row = 0; row < batch; ++row) used = std::max<int64_t>(used, lengths[row] - starts[row]);
      used = std::min(used, columns);
      const char* const from = static_cast<const char*>(inputs[6].dense(copies[0]));
      const bool normed = inputs.size() > 8;
      std::vector<float> norms[2];
      for (int i = 0; normed && i < 2; ++i) norms[i] = inputs[8 + i].floats();
      const RopeTable& table = RopeTable::of(inputs[3].floats());
      const Number type = tail.type();
      std::vector<char> queries(batch * heads * dim * item);
      // Heads of a row in this order: keys and values, whose columns in the tail are copied, too; queries.
      const int64_t all = 2 * kv_heads + heads, bytes = columns * dim * item, last = (used - 1) * dim * item;
      const auto work = [&](int64_t begin, int64_t end) {
        std::vector<float> raw(dim), turned(dim), scratch(dim);
        for (int64_t i = begin; i < end; ++i) {
          const int64_t row = i / all, head = i % all, position = lengths[row] - 1, column = position - starts[row];
          const int64_t at = (row * 2 * kv_heads + head) * bytes;
          const bool is_query = head >= 2 * kv_heads, is_value = !is_query && head >= kv_heads;
          if (!is_query && !taken_over) {
            // Later columns stay as they are in new memory: each is written before anybody reads it. In rows that end
            // earlier, the last one is read together with the others', so it must be a number.
            std::memcpy(written + at, from + at, last);
            std::memset(written + at + last, 0, dim * item);
          }
          // Callers make room first; where one forgot, nothing is written behind the tail.
          if (!is_query && (column < 0 || column >= columns)) continue;
          const int which = is_query ? 0 : 1 + is_value;
          const int64_t of_head = is_query ? row * heads + head - 2 * kv_heads : row * kv_heads + head % kv_heads;
          load_numbers(of[which], of_head * dim, 1, type, raw.data(), dim);
          if (!is_value) {
            const float* norm = normed ? norms[which].data() : nullptr;
            norm_and_turn(raw.data(), norm, eps, table.row(position, scratch.data()), dim, turned.data());
          }
          const float* numbers = (is_value ? raw : turned).data();
          if (is_query) {
            store_numbers(numbers, dim, queries.data(), of_head * dim, type);
          } else {
            store_numbers(numbers, dim, written + at, column * dim, type);
          }
        }
      };
      constexpr int64_t kCopiesPerPiece = 8;  // as each copies half a tail
      ThreadPool::shared().parallel_for(batch * all, kCopiesPerPiece, work, dim);
      AttentionArguments a = {};
      a.batch = batch, a.heads = heads, a.kv_heads = kv_heads, a.queries = 1, a.head_dim = dim;
      a.q = queries.data();
      const int64_t q_strides[4] = {heads * dim, dim, dim, 1};
      std::copy_n(q_strides, 4, a.q_strides);
      a.type = a.stored = type;
      a.floats = true;
      a.key_scale = a.value_scale = 1.0f;
      a.keys = heads_from(buffer, 0), a.values = heads_from(buffer, kv_heads);
      a.tail_keys = heads_from(tail, 0), a.tail_values = heads_from(tail, kv_heads);
      a.capacity = buffer.shape[2], a.tail_capacity = columns;
      a.lengths = lengths, a.starts = starts;
      a.out = out;
      attend(a);
    }
  };

  float eps_;
};

}  // namespace

mx::array decode_attention(const mx::array& queries, const mx::array& kv, const Scale& key_scale,
                           const Scale& value_scale, const mx::array& lengths, const std::optional<Tail>& tail,
                           const std::optional<Rope>& rope) {
  std::vector<mx::array> inputs = attention_inputs(queries, kv, key_scale, value_scale);
  require(lengths.dtype() == mx::int32 && lengths.ndim() == 1 && lengths.shape(0) == queries.shape(0),
          "lengths must be (B,) int32");
  inputs.push_back(lengths);
  if (tail) {
    const auto& [codes, starts] = *tail;
    require(codes.dtype() == kv.dtype() && codes.ndim() == 4 && codes.shape(0) == kv.shape(0) &&
                codes.shape(1) == kv.shape(1) && codes.shape(3) == kv.shape(3),
            "the tail must be (B, 2 * n_kv_heads, T, head_dim) of the keys' and values' dtype");
    require(starts.dtype() == mx::int32 && starts.shape() == lengths.shape(), "starts must be (B,) int32");
    inputs.push_back(codes);
    inputs.push_back(starts);
  }
  if (rope) {
    number_type(rope->weight, "the norm's weight");
    require(rope->weight.ndim() == 1 && rope->weight.shape(0) == queries.shape(3) && queries.shape(3) % 2 == 0,
            "the norm's weight must be (head_dim,), and head_dim even");
    inputs.push_back(rope->weight);
  }
  auto op = std::make_shared<AttentionOp>(cpu_stream(), rope ? rope->theta : 0.0f, rope ? rope->eps : 0.0f);
  return mx::array(queries.shape(), queries.dtype(), std::move(op), std::move(inputs));
}

mx::array causal_attention(const mx::array& queries, const mx::array& kv, const Scale& key_scale,
                           const Scale& value_scale) {
  std::vector<mx::array> inputs = attention_inputs(queries, kv, key_scale, value_scale);
  require(queries.shape(2) <= kv.shape(2), queries.shape(2), " queries for ", kv.shape(2), " keys");
  return mx::array(queries.shape(), queries.dtype(), std::make_shared<AttentionOp>(cpu_stream()), std::move(inputs));
}

std::vector<mx::array> rope_norm_quantize(const mx::array& qkv, const Offset& offset, const HeadOptions& options) {
  const auto& [q_weight, k_weight, key_scale, value_scale, n_kv_heads, theta, eps] = options;
  number_type(qkv, "qkv");
  number_type(q_weight, "the queries' norm");
  number_type(k_weight, "the keys' norm");
  check_scales(key_scale, value_scale);
  require(qkv.ndim() == 3, "qkv must be (B, L, (n_heads + 2 * n_kv_heads) * head_dim)");
  require(q_weight.ndim() == 1 && q_weight.shape() == k_weight.shape(), "norms must be (head_dim,) both");
  int dim = q_weight.shape(0);
  require(dim > 0 && dim % 2 == 0, "head_dim must be even, got ", dim);
  require(n_kv_heads > 0 && qkv.shape(2) % dim == 0 && qkv.shape(2) / dim > 2 * n_kv_heads, "qkv of width ",
          qkv.shape(2), " doesn't hold queries and twice ", n_kv_heads, " heads of ", dim);
  std::vector<mx::array> inputs = {qkv, q_weight, k_weight};
  if (key_scale) inputs.insert(inputs.end(), {*key_scale, *value_scale});
  int start = 0;
  if (auto array = std::get_if<mx::array>(&offset)) {
    require(array->dtype() == mx::int32 && array->ndim() == 1 && array->shape(0) == qkv.shape(0),
            "offsets must be (B,) int32");
    inputs.push_back(*array);
  } else {
    start = std::get<int>(offset);
  }
  auto op = std::make_shared<RopeNormQuantize>(cpu_stream(), start, n_kv_heads, theta, eps, key_scale.has_value());
  auto shapes = op->output_shapes(inputs);
  return mx::array::make_arrays(std::move(shapes), {qkv.dtype(), key_scale ? mx::int8 : qkv.dtype()}, op, inputs);
}

mx::array norm_rope(const mx::array& heads, const mx::array& periods, const Offset& offset,
                    const std::optional<mx::array>& weight, float eps) {
  number_type(heads, "heads");
  number_type(periods, "periods");
  require(heads.ndim() == 4 && heads.shape(3) % 2 == 0, "heads must be (B, n_heads, L, head_dim), and head_dim even");
  require(periods.ndim() == 1 && 2 * periods.shape(0) == heads.shape(3), "periods must be (head_dim / 2,)");
  std::vector<mx::array> inputs = {heads, periods};
  if (weight) {
    number_type(*weight, "the norm's weight");
    require(weight->ndim() == 1 && weight->shape(0) == heads.shape(3), "the norm's weight must be (head_dim,)");
    inputs.push_back(*weight);
  }
  int start = 0;
  auto offsets = std::get_if<mx::array>(&offset);
  if (offsets) {
    require(offsets->dtype() == mx::int32 && offsets->ndim() == 1 && offsets->shape(0) == heads.shape(0),
            "offsets must be (B,) int32");
    inputs.push_back(*offsets);
  } else {
    start = std::get<int>(offset);
  }
  auto op = std::make_shared<NormRope>(cpu_stream(), start, eps, weight.has_value(), offsets != nullptr);
  return mx::array(heads.shape(), heads.dtype(), std::move(op), std::move(inputs));
}

std::vector<mx::array> norm_rope_attend(const std::vector<mx::array>& qkv, const mx::array& periods,
                                        const mx::array& buffer, const Tail& tail, const mx::array& lengths,
                                        const std::optional<std::vector<mx::array>>& norms, float eps) {
  const auto& [columns, starts] = tail;
  number_type(qkv[0], "queries");
  number_type(periods, "periods");
  require(buffer.ndim() == 4 && columns.ndim() == 4 && buffer.shape(1) > 0 && buffer.shape(1) % 2 == 0 &&
              buffer.shape(3) > 0 && buffer.shape(3) % 2 == 0 && buffer.shape(3) <= kMaxHeadDim &&
              columns.shape(0) == buffer.shape(0) && columns.shape(1) == buffer.shape(1) &&
              columns.shape(3) == buffer.shape(3),
          "buffer and tail must be (B, 2 * n_kv_heads, S or T, head_dim), and head_dim even and at most ", kMaxHeadDim);
  const int batch = buffer.shape(0), dim = buffer.shape(3), width = buffer.shape(1) / 2 * dim;
  require(qkv[0].ndim() == 3 && qkv[0].shape(0) == batch && qkv[0].shape(1) == 1 && qkv[0].shape(2) % width == 0,
          "queries must be (B, 1, n_heads * head_dim), and n_heads a multiple of n_kv_heads");
  for (size_t i = 1; i < 3; ++i) {
    require(qkv[i].shape() == mx::Shape{batch, 1, width}, "keys and values must be (B, 1, n_kv_heads * head_dim)");
  }
  for (const mx::array& each : {qkv[1], qkv[2], buffer, columns}) {
    require(each.dtype() == qkv[0].dtype(), "queries, keys, values, buffer and tail must have one dtype");
  }
  require(periods.ndim() == 1 && 2 * periods.shape(0) == dim, "periods must be (head_dim / 2,)");
  for (const mx::array& each : {lengths, starts}) {
    require(each.dtype() == mx::int32 && each.shape() == mx::Shape{batch}, "lengths and starts must be (B,) int32");
  }
  std::vector<mx::array> inputs = {qkv[0], qkv[1], qkv[2], periods, lengths, buffer, columns, starts};
  if (norms) {
    require(norms->size() == 2, "there must be a norm of queries and one of keys");
    for (const mx::array& norm : *norms) {
      number_type(norm, "the norm's weight");
      require(norm.shape() == mx::Shape{dim}, "norms must be (head_dim,)");
      inputs.push_back(norm);
    }
  }
  auto op = std::make_shared<NormRopeAttend>(cpu_stream(), eps);
  return mx::array::make_arrays(op->output_shapes(inputs), {qkv[0].dtype(), columns.dtype()}, op, inputs);
}

}  // namespace afm
