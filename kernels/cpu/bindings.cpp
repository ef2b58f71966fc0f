// The Python module `_afm_cpu`: thin, as one token goes through it hundreds of times.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <atomic>

#include "attention.h"
#include "dense.h"
#include "huge_pages.h"
#include "isa.h"
#include "matmul.h"
#include "mlx/version.h"
#include "pool.h"
#include "primitives.h"
#include "replay.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Optional = std::optional<afm::mx::array>;

Optional optional(nb::handle item) { return item.is_none() ? Optional() : Optional(nb::cast<afm::mx::array>(item)); }

// From the named tuples of `kernels/operands.py`.
afm::Packed packed(const nb::tuple& w) {
  return {nb::cast<afm::mx::array>(w[0]), nb::cast<int>(w[1]), nb::cast<std::string>(w[2]), optional(w[3]),
          optional(w[4]),                 optional(w[5])};
}

afm::LowRank low_rank(const nb::tuple& t) {
  std::vector<afm::Part> parts;
  for (nb::handle part : nb::cast<nb::tuple>(t[1])) {
    auto numbers = nb::cast<nb::tuple>(part);
    parts.push_back({nb::cast<int64_t>(numbers[0]), nb::cast<int64_t>(numbers[1]), nb::cast<int64_t>(numbers[2])});
  }
  return {nb::cast<std::vector<afm::mx::array>>(t[0]), std::move(parts), nb::cast<afm::mx::array>(t[2]),
          nb::cast<afm::mx::array>(t[3]), nb::cast<std::vector<int64_t>>(t[4])};
}

afm::ProductOptions product_options(const nb::tuple& t) {
  std::vector<afm::LowRank> adapters;
  for (nb::handle of_matrix : nb::cast<nb::tuple>(t[3])) adapters.push_back(low_rank(nb::cast<nb::tuple>(of_matrix)));
  return {optional(t[0]), nb::cast<float>(t[1]), optional(t[2]), std::move(adapters), nb::cast<int>(t[4])};
}

afm::HeadOptions head_options(const nb::tuple& t) {
  auto array = [&](int i) { return nb::cast<afm::mx::array>(t[i]); };
  auto scale = [&](int i) { return nb::cast<afm::Scale>(t[i]); };
  return {array(0), array(1), scale(2), scale(3), nb::cast<int>(t[4]), nb::cast<float>(t[5]), nb::cast<float>(t[6])};
}

void define_products(nb::module_& m) {
  m.def("packed_matmul",
        [](const afm::mx::array& x, const nb::tuple& weight, const nb::tuple& options) {
          return afm::packed_matmul(x, {packed(weight)}, product_options(options))[0];
        },
        "x"_a, "weight"_a, "options"_a);
  m.def("packed_matmul_each",
        [](const afm::mx::array& x, const nb::sequence& weights, const nb::tuple& options) {
          std::vector<afm::Packed> matrices;
          for (nb::handle weight : weights) matrices.push_back(packed(nb::cast<nb::tuple>(weight)));
          return afm::packed_matmul(x, matrices, product_options(options));
        },
        "x"_a, "weights"_a, "options"_a);
  m.def("packed_swiglu",
        [](const afm::mx::array& x, const nb::tuple& gate, const nb::tuple& up, const nb::tuple& options) {
          return afm::packed_swiglu(x, packed(gate), packed(up), product_options(options));
        },
        "x"_a, "gate"_a, "up"_a, "options"_a);
  m.def("packed_argmax",
        [](const afm::mx::array& x, const nb::tuple& weight, const nb::tuple& options) {
          auto out = afm::packed_argmax(x, packed(weight), product_options(options));
          return nb::make_tuple(out[0], out[1]);
        },
        "x"_a, "weight"_a, "options"_a);
  m.def("packed_gather",
        [](const afm::mx::array& x, const nb::tuple& weight, const afm::mx::array& indices, int experts,
           int activation_bits) { return afm::packed_gather(x, packed(weight), indices, experts, activation_bits); },
        "x"_a, "weight"_a, "indices"_a, "experts"_a, "activation_bits"_a);
  m.def("packed_embedding",
        [](const afm::mx::array& tokens, const nb::tuple& weight, afm::mx::Dtype dtype) {
          return afm::packed_embedding(tokens, packed(weight), dtype);
        },
        "tokens"_a, "weight"_a, "dtype"_a);
}

// The arrays in dicts, lists and tuples, depth first.
void add_leaves(nb::handle tree, std::vector<afm::mx::array>& leaves) {
  if (nb::isinstance<afm::mx::array>(tree)) {
    leaves.push_back(nb::cast<afm::mx::array>(tree));
  } else if (nb::isinstance<nb::dict>(tree)) {
    for (auto item : nb::borrow<nb::dict>(tree)) add_leaves(item.second, leaves);
  } else if (nb::isinstance<nb::list>(tree)) {
    for (nb::handle item : nb::borrow<nb::list>(tree)) add_leaves(item, leaves);
  } else if (nb::isinstance<nb::tuple>(tree)) {
    for (nb::handle item : nb::borrow<nb::tuple>(tree)) add_leaves(item, leaves);
  }
}

std::vector<afm::mx::array> leaves(nb::handle tree) {
  std::vector<afm::mx::array> found;
  add_leaves(tree, found);
  return found;
}

void define_replay(nb::module_& m) {
  m.def("leaves", &leaves, "tree"_a, "The arrays of a tree in the order of `Replay`'s.");
  m.def("placeholders", [](nb::handle tree) { return afm::placeholders(leaves(tree)); }, "tree"_a,
        "An array for each of the tree, to build a graph on.");
  nb::class_<afm::Replay>(m, "Replay", "See `kernels/replay.py`.")
      .def("__init__",
           [](afm::Replay* self, nb::handle inputs, nb::handle placeholders, nb::handle outputs) {
             new (self) afm::Replay(leaves(inputs), leaves(placeholders), leaves(outputs));
           },
           "inputs"_a, "placeholders"_a, "outputs"_a)
      .def("__call__", [](const afm::Replay& self, nb::handle inputs) { return self(leaves(inputs)); }, "inputs"_a);
}

}  // namespace

#define AFM_TEXT(x) #x
#define AFM_NUMBER(x) AFM_TEXT(x)

NB_MODULE(_afm_cpu, m) {
  m.doc() = "The operations of afm_mlx.kernels.reference as primitives for MLX's CPU backend.";
  m.attr("mlx_version") =
      AFM_NUMBER(MLX_VERSION_MAJOR) "." AFM_NUMBER(MLX_VERSION_MINOR) "." AFM_NUMBER(MLX_VERSION_PATCH);
  m.attr("nanobind_version") = AFM_NANOBIND_VERSION;
  m.attr("compiler") = AFM_COMPILER;
  m.attr("max_head_dim") = afm::kMaxHeadDim;

  m.def("probe", [](const afm::mx::array& a) { return a.size(); }, "a"_a,
        "Size of an array: works only when MLX's own module shares its types with this one.");
  m.def("threads", [] { return afm::ThreadPool::shared().threads(); });
  m.def("set_threads", &afm::ThreadPool::configure, "count"_a);
  afm::share_with_blas();
  m.def("self_test",
        [](int64_t count) {
          std::atomic<int64_t> sum{0};
          afm::ThreadPool::shared().parallel_for(count, 1, [&](int64_t i, int64_t) { sum += i; });
          return sum.load();
        },
        "count"_a, "The sum of 0, 1, ... below `count`, each added by whichever thread comes first.");
  m.def("use_huge_pages",
        [](const std::vector<afm::mx::array>& arrays) {
          std::vector<std::pair<const void*, size_t>> ranges;
          for (auto& a : arrays) ranges.emplace_back(a.data<char>(), a.nbytes());
          nb::gil_scoped_release release;
          return afm::use_huge_pages(std::move(ranges));
        },
        "arrays"_a, "Bytes of huge pages that the system put under evaluated arrays.");
  m.def("stop_huge_pages", &afm::stop_huge_pages, "Ends `use_huge_pages` wherever it runs, for good.");
  m.def("unfilled",
        [](int size, bool huge_pages) {
          const size_t bytes = size_t(size) * afm::mx::float16.size();
          auto data = afm::mx::allocator::malloc(bytes);
          if (huge_pages) afm::expect_huge_pages(data.buffer().raw_ptr(), bytes);
          return afm::mx::array(std::move(data), afm::mx::Shape{size}, afm::mx::float16);
        },
        "size"_a, "huge_pages"_a, "A float16 array whose memory nobody has touched yet.");
  m.def("available_cores", &afm::ThreadPool::available_cores);

  m.def("instruction_sets", [] {
    std::vector<std::string> names;
    for (const afm::Kernels* table : afm::usable_kernels()) names.emplace_back(table->name);
    return names;
  });
  m.def("instruction_set", [] { return afm::kernels().name; });
  m.def("use_instruction_set",
        [](const char* name) {
          if (!afm::use_kernels(name)) return false;
          afm::use_attention_kernels(name);
          return true;
        },
        "name"_a);
  afm::use_attention_kernels(afm::kernels().name);

  define_replay(m);
  define_products(m);
  m.def("decode_attention",
        [](const afm::mx::array& queries, const afm::mx::array& kv, const afm::Scale& key_scale,
           const afm::Scale& value_scale, const afm::mx::array& lengths,
           const std::optional<afm::mx::array>& codes, const std::optional<afm::mx::array>& starts,
           const std::optional<afm::mx::array>& weight, float theta, float eps) {
          std::optional<afm::Tail> tail;
          if (codes && starts) tail = afm::Tail{*codes, *starts};
          std::optional<afm::Rope> rope;
          if (weight) rope = afm::Rope{*weight, theta, eps};
          return afm::decode_attention(queries, kv, key_scale, value_scale, lengths, tail, rope);
        },
        "queries"_a, "kv"_a, "key_scale"_a.none(), "value_scale"_a.none(), "lengths"_a, "tail"_a = nb::none(),
        "starts"_a = nb::none(), "weight"_a = nb::none(), "theta"_a = 0.0f, "eps"_a = 0.0f);
  m.def("causal_attention", &afm::causal_attention, "queries"_a, "kv"_a, "key_scale"_a.none(),
        "value_scale"_a.none());
  m.def("gelu", &afm::gelu, "x"_a);
  m.def("write_tokens", &afm::write_tokens, "buffer"_a, "tokens"_a, "lengths"_a);
  m.def("rope_norm_quantize",
        [](const afm::mx::array& qkv, const afm::Offset& offset, const nb::tuple& options) {
          auto out = afm::rope_norm_quantize(qkv, offset, head_options(options));
          return nb::make_tuple(out[0], out[1]);
        },
        "qkv"_a, "offset"_a, "options"_a);
  m.def("norm_rope_attend",
        [](const afm::mx::array& queries, const afm::mx::array& keys, const afm::mx::array& values,
           const afm::mx::array& periods, const nb::tuple& kv, const afm::mx::array& lengths,
           const std::optional<std::vector<afm::mx::array>>& norms, float eps) {
          // A `KeyValues` of `kernels/operands.py`.
          const afm::Tail tail = {nb::cast<afm::mx::array>(kv[3]), nb::cast<afm::mx::array>(kv[4])};
          auto out = afm::norm_rope_attend({queries, keys, values}, periods, nb::cast<afm::mx::array>(kv[0]), tail,
                                           lengths, norms, eps);
          return nb::make_tuple(out[0], out[1]);
        },
        "queries"_a, "keys"_a, "values"_a, "periods"_a, "kv"_a, "lengths"_a, "norms"_a = nb::none(),
        "eps"_a = 0.0f);
  m.def("norm_rope", &afm::norm_rope, "heads"_a, "periods"_a, "offset"_a, "weight"_a = nb::none(), "eps"_a = 0.0f);
}
