// Products of packed matrices: `matmul.h` as nodes of MLX's graph.
#include <algorithm>
#include <cstring>
#include <memory>

#include "matmul.h"
#include "pool.h"
#include "primitives.h"
#include "primitives_common.h"

namespace afm {
namespace {

Floats numbers(const View& view, std::vector<char>& copy) {
  return {view.dense(copy), view.type()};
}

// Collects the inputs of an operation; what adds one returns its index.
class Inputs {
 public:
  std::vector<mx::array> arrays;

  int add(const mx::array& a) {
    arrays.push_back(a);
    return static_cast<int>(arrays.size()) - 1;
  }
  // As `add`, but an array that is there already isn't added again.
  int add_once(const mx::array& a) {
    for (size_t i = 0; i < arrays.size(); ++i) {
      if (arrays[i].id() == a.id()) return static_cast<int>(i);
    }
    return add(a);
  }
  int add_numbers(const std::optional<mx::array>& a, const char* name) {
    if (!a) return -1;
    number_type(*a, name);
    return add(*a);
  }
};

// The inputs of a running task, in row-major order; index -1 is an argument that was left out.
class Data {
 public:
  explicit Data(const std::vector<View>& views) : views_(views), copies_(views.size()) {}

  Floats floats(int index) { return index < 0 ? Floats{} : numbers(views_[index], copies_[index]); }
  template <class T>
  const T* integers(int index) {
    return index < 0 ? nullptr : static_cast<const T*>(views_[index].dense(copies_[index]));
  }
  const View& view(int index) const { return views_[index]; }

 private:
  const std::vector<View>& views_;
  std::vector<std::vector<char>> copies_;
};

// A packed matrix whose arrays are indices of inputs.
struct MatrixPlace {
  PackedMatrix shape;
  int codes, scales, biases, table;

  bool same(const MatrixPlace& other) const {
    return shape.bits == other.shape.bits && shape.mode == other.shape.mode && scales == other.scales &&
           biases == other.biases && table == other.table;
  }

  PackedMatrix matrix(Data& data) const {
    PackedMatrix matrix = shape;
    matrix.codes = data.integers<uint32_t>(codes);
    matrix.scales = data.floats(scales);
    matrix.biases = data.floats(biases);
    matrix.table = data.floats(table);
    return matrix;
  }
};

Mode mode_of(const std::string& name) {
  if (name == "balanced") return Mode::balanced;
  if (name == "affine") return Mode::affine;
  require(name == "palette", "mode is ", name, "; it must be balanced, affine or palette");
  return Mode::palette;
}

MatrixPlace place(const Packed& weight, Inputs& inputs) {
  require(weight.bits == 2 || weight.bits == 4 || weight.bits == 8, "bits are ", weight.bits, "; 2, 4 or 8 can run");
  require(weight.codes.dtype() == mx::uint32 && weight.codes.ndim() == 2, "codes must be (N, K * bits / 32) uint32");
  MatrixPlace place = {};
  PackedMatrix& shape = place.shape;
  shape.rows = weight.codes.shape(0);
  shape.cols = static_cast<int64_t>(weight.codes.shape(1)) * 32 / weight.bits;
  shape.bits = weight.bits;
  shape.mode = mode_of(weight.mode);
  shape.groups = 0;
  if (shape.mode == Mode::palette) {
    require(weight.table && weight.table->ndim() == 2 && weight.table->shape(1) == 1 << weight.bits,
            "a palette's table must be (T, 2**bits)");
    shape.tables = weight.table->shape(0);
    require(shape.tables > 0 && shape.rows % shape.tables == 0, shape.rows, " rows can't share ", shape.tables,
            " tables");
  } else {
    require(weight.scales.has_value(), weight.mode, " needs scales");
    const mx::array& scales = *weight.scales;
    require(scales.ndim() == 0 || (scales.ndim() <= 2 && scales.shape(0) == shape.rows),
            "scales must be (), (N,) or (N, G)");
    if (scales.ndim() > 0) shape.groups = scales.ndim() == 1 ? 1 : scales.shape(1);
    require(shape.groups == 0 || shape.cols % shape.groups == 0, shape.cols, " inputs aren't a multiple of ",
            shape.groups, " groups");
    if (shape.mode == Mode::affine) {
      require(weight.biases && weight.biases->shape() == scales.shape(), "biases must have the scales' shape");
    }
  }
  bool palette = shape.mode == Mode::palette;
  place.codes = inputs.add(weight.codes);
  place.scales = palette ? -1 : inputs.add_numbers(weight.scales, "scales");
  place.biases = shape.mode == Mode::affine ? inputs.add_numbers(weight.biases, "biases") : -1;
  place.table = palette ? inputs.add_numbers(weight.table, "a palette's table") : -1;
  return place;
}

// Adapters whose arrays are indices of inputs; empty without adapters.
struct AdaptersPlace {
  std::vector<int> numbers;
  std::vector<Part> parts;
  int scales = -1, slots = -1;
  int64_t batch = 1;
  std::vector<int64_t> sections;

  bool same(const AdaptersPlace& other) const {
    auto equal = [](const Part& p, const Part& q) { return p.a == q.a && p.b == q.b && p.rank == q.rank; };
    return numbers == other.numbers && scales == other.scales && slots == other.slots && sections == other.sections &&
           std::equal(parts.begin(), parts.end(), other.parts.begin(), other.parts.end(), equal);
  }

  Adapters adapters(Data& data) const {
    Adapters adapters;
    adapters.count = static_cast<int64_t>(numbers.size());
    for (size_t i = 0; i < numbers.size(); ++i) {
      adapters.list[i] = {data.floats(numbers[i]), parts[i].a, parts[i].b, parts[i].rank};
    }
    adapters.scales = data.integers<float>(scales);
    adapters.slots = data.integers<int32_t>(slots);
    adapters.batch = batch;
    adapters.sections = sections.data();
    adapters.n_sections = static_cast<int64_t>(sections.size());
    return adapters;
  }
};

// True if `count` numbers from `first` on are in an array of `size`.
bool inside(int64_t first, int64_t count, int64_t size) {
  return first >= 0 && first % kBlock == 0 && count <= size && first <= size - count;
}

void check(const mx::array& numbers, const Part& part, int64_t sections, const PackedMatrix& weight, size_t adapter) {
  number_type(numbers, "adapters' numbers");
  require(numbers.ndim() == 1, "adapter ", adapter, " must be a flat array, not one of ", numbers.ndim(), " axes");
  constexpr int64_t kMaxRank = 1 << 20;  // products of what follows fit into 64 bits
  require(part.rank >= 0 && part.rank <= kMaxRank, "adapter ", adapter, " has rank ", part.rank);
  if (part.rank == 0) return;
  const int64_t size = static_cast<int64_t>(numbers.size()), blocks = (weight.rows + kBlock - 1) / kBlock;
  const int64_t of_a = sections * part.rank * weight.cols, of_b = blocks * part.rank * kBlock;
  require(inside(part.a, of_a, size), "A of adapter ", adapter, ", ", of_a, " numbers from ", part.a,
          " on, must start at a multiple of ", kBlock, " and end within its ", size, " numbers");
  require(inside(part.b, of_b, size), "B of adapter ", adapter, ", ", of_b, " numbers from ", part.b,
          " on, must start at a multiple of ", kBlock, " and end within its ", size, " numbers");
}

// The adapters of one of the matrices.
AdaptersPlace place(const ProductOptions& options, size_t matrix, const mx::array& x, const PackedMatrix& weight,
                    Inputs& inputs) {
  AdaptersPlace place;
  if (options.adapters.empty()) return place;
  const auto& [numbers, parts, scales, slots, sections] = options.adapters[matrix];
  const size_t count = numbers.size();
  require(count >= 1 && count <= kMaxAdapters, count, " adapters; from 1 to ", kMaxAdapters, " can run at once");
  require(parts.size() == count, count, " adapters need as many parts, not ", parts.size());
  int64_t before = 0;
  for (int64_t end : sections) {
    require(end > before, "adapters' sections must ascend");
    before = end;
  }
  require(before == weight.rows, "adapters' sections end at row ", before, " of ", weight.rows);
  for (size_t i = 0; i < count; ++i) {
    check(numbers[i], parts[i], static_cast<int64_t>(sections.size()), weight, i);
    place.numbers.push_back(inputs.add_once(numbers[i]));
  }
  require(scales.dtype() == mx::float32 && scales.ndim() == 1 && scales.shape(0) == static_cast<int>(count),
          "adapters' scales must be (", count, ",) float32");
  place.batch = x.ndim() > 1 ? x.shape(0) : 1;
  require(slots.dtype() == mx::int32 && slots.ndim() == 1 && slots.shape(0) == place.batch,
          "adapters' slots must be (B,) int32, B = ", place.batch);
  place.parts = parts;
  place.sections = sections;
  place.scales = inputs.add_once(scales);
  place.slots = inputs.add_once(slots);
  return place;
}

struct ActivationsPlace {
  int x, norm;
  float eps;
  int digits;

  bool same(const ActivationsPlace& other) const {
    return norm == other.norm && eps == other.eps && digits == other.digits;
  }

  Activations activations(Data& data) const {
    Floats all = data.floats(x);
    const mx::Shape& shape = data.view(x).shape;
    int64_t cols = shape.back();
    return {all, data.view(x).size() / cols, cols, data.floats(norm), eps, digits};
  }
};

// For a product with one or more matrices of the width of `weight`.
ActivationsPlace place(const mx::array& x, const ProductOptions& options, size_t matrices, const PackedMatrix& weight,
                       Inputs& inputs) {
  const auto& [norm, eps, residual, adapters, activation_bits] = options;
  require(x.ndim() > 0 && x.shape(-1) == weight.cols, "x has ", x.ndim() > 0 ? x.shape(-1) : 0,
          " inputs, the matrix ", weight.cols);
  require(!norm || (norm->ndim() == 1 && norm->shape(0) == weight.cols),
          "the norm's weight must be (K,), K = ", weight.cols);
  require(activation_bits == 16 || activation_bits == 8, "activation_bits are ", activation_bits,
          "; 16 or 8 can run");
  require(adapters.empty() || adapters.size() == matrices, "adapters of ", adapters.size(), " matrices, not of ",
          matrices);
  return {inputs.add_numbers(x, "x"), inputs.add_numbers(norm, "the norm's weight"), eps, activation_bits / 8};
}

// An operation whose task reads its inputs through `Data`.
class MatmulPrimitive : public CpuPrimitive {
 public:
  using CpuPrimitive::CpuPrimitive;

 protected:
  // Runs `work(data, outputs)` on the stream's thread when the inputs are there.
  template <class Work>
  void dispatch(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, Work work) {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    std::vector<View> views;
    views.reserve(inputs.size());
    for (auto& input : inputs) {
      encoder.set_input_array(input);
      views.emplace_back(input);
    }
    std::vector<char*> out;
    for (auto& output : outputs) {
      allocate(output);
      encoder.set_output_array(output);
      out.push_back(output.data<char>());
    }
    if (outputs[0].size() == 0) return;
    encoder.dispatch([views = std::move(views), out = std::move(out), work = std::move(work)] {
      Data data(views);
      work(data, out);
    });
  }
};

struct ProductPlace {
  MatrixPlace weight;
  AdaptersPlace adapters;
};

class Matmul : public MatmulPrimitive {
 public:
  Matmul(mx::Stream stream, ActivationsPlace x, std::vector<ProductPlace> products, int residual)
      : MatmulPrimitive(stream),
        x_(x),
        products_(std::make_shared<const std::vector<ProductPlace>>(std::move(products))),
        residual_(residual) {}

  const char* name() const override { return "AfmPackedMatmul"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    auto& op = static_cast<const Matmul&>(other);
    auto same = [](const ProductPlace& p, const ProductPlace& q) {
      return p.weight.same(q.weight) && p.adapters.same(q.adapters);
    };
    return x_.same(op.x_) && residual_ == op.residual_ &&
           std::equal(products_->begin(), products_->end(), op.products_->begin(), op.products_->end(), same);
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    std::vector<mx::Shape> shapes;
    for (const ProductPlace& product : *products_) {
      shapes.push_back(inputs[x_.x].shape());
      shapes.back().back() = inputs[product.weight.codes].shape(0);
    }
    return shapes;
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch(inputs, outputs, [x = x_, places = products_, residual = residual_](Data& data, auto& out) {
      Activations input = x.activations(data);
      std::vector<Product> products;
      for (size_t i = 0; i < places->size(); ++i) {
        const auto& [weight, adapters] = (*places)[i];
        products.push_back({weight.matrix(data), adapters.adapters(data), out[i]});
      }
      matmul(input, products, data.floats(residual), input.x.type);
    });
  }

 private:
  ActivationsPlace x_;
  std::shared_ptr<const std::vector<ProductPlace>> products_;
  int residual_;
};

class Swiglu : public MatmulPrimitive {
 public:
  Swiglu(mx::Stream stream, ActivationsPlace x, MatrixPlace gate, MatrixPlace up, AdaptersPlace of_gate,
         AdaptersPlace of_up)
      : MatmulPrimitive(stream),
        x_(x),
        gate_(gate),
        up_(up),
        of_gate_(std::move(of_gate)),
        of_up_(std::move(of_up)) {}

  const char* name() const override { return "AfmPackedSwiglu"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    auto& op = static_cast<const Swiglu&>(other);
    return x_.same(op.x_) && gate_.same(op.gate_) && up_.same(op.up_) && of_gate_.same(op.of_gate_) &&
           of_up_.same(op.of_up_);
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    mx::Shape shape = inputs[x_.x].shape();
    shape.back() = inputs[gate_.codes].shape(0);
    return {shape};
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch(inputs, outputs,
             [x = x_, gate = gate_, up = up_, of_gate = of_gate_, of_up = of_up_](Data& data, auto& out) {
               Activations input = x.activations(data);
               swiglu(input, gate.matrix(data), up.matrix(data), of_gate.adapters(data), of_up.adapters(data), out[0],
                      input.x.type);
             });
  }

 private:
  ActivationsPlace x_;
  MatrixPlace gate_, up_;
  AdaptersPlace of_gate_, of_up_;
};

class Argmax : public MatmulPrimitive {
 public:
  Argmax(mx::Stream stream, ActivationsPlace x, MatrixPlace weight) : MatmulPrimitive(stream), x_(x), weight_(weight) {}

  const char* name() const override { return "AfmPackedArgmax"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    auto& op = static_cast<const Argmax&>(other);
    return x_.same(op.x_) && weight_.same(op.weight_);
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    mx::Shape shape = inputs[x_.x].shape();
    shape.pop_back();
    return {shape, shape};
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch(inputs, outputs, [x = x_, weight = weight_](Data& data, auto& out) {
      argmax(x.activations(data), weight.matrix(data), reinterpret_cast<uint32_t*>(out[0]),
             reinterpret_cast<float*>(out[1]));
    });
  }

 private:
  ActivationsPlace x_;
  MatrixPlace weight_;
};

class Gather : public MatmulPrimitive {
 public:
  Gather(mx::Stream stream, ActivationsPlace x, MatrixPlace weight, int indices, int experts)
      : MatmulPrimitive(stream), x_(x), weight_(weight), indices_(indices), experts_(experts) {}

  const char* name() const override { return "AfmPackedGather"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    auto& op = static_cast<const Gather&>(other);
    return x_.same(op.x_) && weight_.same(op.weight_) && experts_ == op.experts_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {{inputs[indices_].shape(0), inputs[weight_.codes].shape(0) / experts_}};
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch(inputs, outputs,
             [x = x_, weight = weight_, indices = indices_, experts = experts_](Data& data, auto& out) {
               Activations input = x.activations(data);
               gather(input, weight.matrix(data), experts, data.integers<int32_t>(indices), data.view(indices).size(),
                      out[0], input.x.type);
             });
  }

 private:
  ActivationsPlace x_;
  MatrixPlace weight_;
  int indices_, experts_;
};

class Embedding : public MatmulPrimitive {
 public:
  Embedding(mx::Stream stream, int tokens, MatrixPlace weight, Number type)
      : MatmulPrimitive(stream), tokens_(tokens), weight_(weight), type_(type) {}

  const char* name() const override { return "AfmPackedEmbedding"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    auto& op = static_cast<const Embedding&>(other);
    return weight_.same(op.weight_) && type_ == op.type_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    mx::Shape shape = inputs[tokens_].shape();
    shape.push_back(static_cast<int>(inputs[weight_.codes].shape(1) * 32 / weight_.shape.bits));
    return {shape};
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch(inputs, outputs, [tokens = tokens_, place = weight_, type = type_](Data& data, auto& out) {
      PackedMatrix weight = place.matrix(data);
      const int32_t* index = data.integers<int32_t>(tokens);
      int64_t row_bytes = weight.cols * size_of(type);
      ThreadPool::shared().parallel_for(data.view(tokens).size(), 8, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          // As in MLX, a negative index counts from the end; no index may lead out of the matrix.
          int64_t row = index[i] < 0 ? index[i] + weight.rows : index[i];
          row = row < 0 ? 0 : row < weight.rows ? row : weight.rows - 1;
          dequantize_row(weight, row, out[0] + i * row_bytes, type);
        }
      }, weight.cols);
    });
  }

 private:
  int tokens_;
  MatrixPlace weight_;
  Number type_;
};

}  // namespace

std::vector<mx::array> packed_matmul(const mx::array& x, const std::vector<Packed>& weights,
                                     const ProductOptions& options) {
  require(!weights.empty(), "there is no matrix");
  require(!options.residual || weights.size() == 1, "products with ", weights.size(), " matrices take no residual");
  Inputs inputs;
  std::vector<ProductPlace> products;
  for (const Packed& weight : weights) products.push_back({place(weight, inputs), {}});
  const PackedMatrix& first = products[0].weight.shape;
  for (const ProductPlace& product : products) {
    const PackedMatrix& shape = product.weight.shape;
    require(shape.cols == first.cols && shape.bits == first.bits && shape.mode == first.mode &&
                shape.groups == first.groups,
            "matrices must have the same inputs, bits, mode and groups");
  }
  ActivationsPlace activations = place(x, options, weights.size(), first, inputs);
  mx::Shape shape = x.shape();
  shape.back() = weights[0].codes.shape(0);
  require(!options.residual || options.residual->shape() == shape, "the residual must have the result's shape");
  int residual = inputs.add_numbers(options.residual, "the residual");
  for (size_t i = 0; i < weights.size(); ++i) {
    products[i].adapters = place(options, i, x, products[i].weight.shape, inputs);
  }
  auto op = std::make_shared<Matmul>(cpu_stream(), activations, std::move(products), residual);
  auto shapes = op->output_shapes(inputs.arrays);
  if (shapes.size() == 1) return {mx::array(std::move(shapes[0]), x.dtype(), std::move(op), std::move(inputs.arrays))};
  const std::vector<mx::Dtype> types(weights.size(), x.dtype());
  return mx::array::make_arrays(std::move(shapes), types, op, inputs.arrays);
}

mx::array packed_swiglu(const mx::array& x, const Packed& gate, const Packed& up, const ProductOptions& options) {
  Inputs inputs;
  MatrixPlace gates = place(gate, inputs), ups = place(up, inputs);
  require(gates.shape.rows == ups.shape.rows && gates.shape.cols == ups.shape.cols,
          "gate and up must have one shape");
  ActivationsPlace activations = place(x, options, 2, gates.shape, inputs);
  AdaptersPlace of_gate = place(options, 0, x, gates.shape, inputs);
  AdaptersPlace of_up = place(options, 1, x, ups.shape, inputs);
  mx::Shape shape = x.shape();
  shape.back() = gate.codes.shape(0);
  auto op = std::make_shared<Swiglu>(cpu_stream(), activations, gates, ups, std::move(of_gate), std::move(of_up));
  return mx::array(std::move(shape), x.dtype(), std::move(op), std::move(inputs.arrays));
}

std::vector<mx::array> packed_argmax(const mx::array& x, const Packed& weight, const ProductOptions& options) {
  Inputs inputs;
  MatrixPlace matrix = place(weight, inputs);
  ActivationsPlace activations = place(x, options, 1, matrix.shape, inputs);
  require(matrix.shape.rows > 0, "the matrix has no rows");
  auto op = std::make_shared<Argmax>(cpu_stream(), activations, matrix);
  auto shapes = op->output_shapes(inputs.arrays);
  return mx::array::make_arrays(std::move(shapes), {mx::uint32, mx::float32}, op, inputs.arrays);
}

mx::array packed_gather(const mx::array& x, const Packed& weight, const mx::array& indices, int experts,
                        int activation_bits) {
  require(indices.dtype() == mx::int32 || indices.dtype() == mx::uint32, "indices must be int32 or uint32");
  require(x.ndim() == 2 && indices.ndim() == 1, "x must be (M, K) and indices (P,)");
  Inputs inputs;
  MatrixPlace matrix = place(weight, inputs);
  require(experts > 0 && matrix.shape.rows % experts == 0, experts, " experts can't share ", matrix.shape.rows, " rows");
  ActivationsPlace activations = place(x, {std::nullopt, 0, std::nullopt, {}, activation_bits}, 1, matrix.shape, inputs);
  const int vectors = x.shape(0), pairs = indices.shape(0);
  require(vectors > 0 ? pairs % vectors == 0 : pairs == 0, pairs, " pairs aren't a multiple of ", vectors, " vectors");
  auto op = std::make_shared<Gather>(cpu_stream(), activations, matrix, inputs.add(indices), experts);
  auto shapes = op->output_shapes(inputs.arrays);
  return mx::array(std::move(shapes[0]), x.dtype(), std::move(op), std::move(inputs.arrays));
}

mx::array packed_embedding(const mx::array& tokens, const Packed& weight, mx::Dtype dtype) {
  require(tokens.dtype() == mx::int32 || tokens.dtype() == mx::uint32, "tokens must be int32 or uint32");
  Inputs inputs;
  MatrixPlace matrix = place(weight, inputs);
  int place = inputs.add(tokens);
  require(matrix.shape.rows > 0 || tokens.size() == 0, "the matrix has no rows");
  Number type = number_type(mx::array(0.0f, dtype), "the result");
  auto op = std::make_shared<Embedding>(cpu_stream(), place, matrix, type);
  auto shapes = op->output_shapes(inputs.arrays);
  return mx::array(std::move(shapes[0]), dtype, std::move(op), std::move(inputs.arrays));
}

}  // namespace afm
