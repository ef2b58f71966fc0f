#include "activations.h"

#include <algorithm>
#include <numeric>

#include "pool.h"

namespace afm {
namespace {

// Turns the vectors of one call into integers, pass by pass.
class Preparation {
 public:
  Preparation(const Activations& x, const PackedMatrix& w, int64_t start, int64_t count, Prepared& out,
              PrepareScratch& scratch)
      : x_(x), cols_(w.cols), start_(start), count_(count), out_(out), scratch_(scratch) {
    const bool own_matrix = out.path == Path::matrix && w.mode != Mode::palette && !is_grouped(w);
    const bool as_vector = out.path == Path::vector || (own_matrix && w.bits <= kernels().matrix_as_vector);
    layout_.bits = w.bits;
    layout_.bytes = as_vector ? kernels().vector_bytes : 8 * w.bits;
    may_be_words_ = out.path == Path::matrix && kernels().words &&
                    (w.mode == Mode::palette || !is_grouped(w) || w.bits > kernels().grouped_as_digits);
    always_words_ = !as_vector;
    scratch.passes.clear();
    if (x.norm) {
      float* norm = scratch.norm.get<float>(cols_);
      kernels().load(x.norm, 0, cols_, norm);
      norm_ = norm;
    }
  }

  // All vectors as floats (count, K).
  void load(float* floats, const TakeFloats* take) {
    each_vector(floats, take, [&](int64_t m, float* v) { load(m, v); });
  }

  // All vectors as integers; as floats, too, unless `floats` is null.
  void quantize(float* floats, const TakeFloats* take) {
    std::vector<Extra>& extras = scratch_.extras;
    extras.resize(count_);
    scratch_.outliers.resize(count_);
    const Pass pass = add_pass(count_, x_.digits);
    each_vector(floats, take, [&](int64_t m, float* own) {
      const float* v = load(m, own);
      extras[m] = find_outliers(v, cols_, x_.digits, scratch_.outliers[m]);
      if (extras[m] == Extra::outliers) v = without(scratch_.outliers[m], v);
      quantize_into(pass, m, v, nullptr);
    });
    if (std::count(extras.begin(), extras.end(), Extra::outliers) > 0) out_.outliers = scratch_.outliers.data();
    if (std::count(extras.begin(), extras.end(), Extra::passes) > 0) add_passes(pass);
    out_.passes = &scratch_.passes;
  }

 private:
  // Calls work(m, room for vector m as floats), which is in `floats` unless that is null, and then `take`, if any.
  template <class Work>
  void each_vector(float* floats, const TakeFloats* take, Work work) {
    auto some = [&](int64_t begin, int64_t end) {
      static thread_local Scratch own;
      float* room = floats != nullptr ? floats + begin * cols_ : own.get<float>((end - begin) * cols_);
      for (int64_t m = begin; m < end; ++m) work(m, room + (m - begin) * cols_);
      if (take != nullptr) (*take)(room, begin, end - begin);
    };
    if (take == nullptr) return each(count_, [&](int64_t m) { some(m, m + 1); });
    ThreadPool& pool = ThreadPool::shared();
    pool.parallel_for(count_, std::clamp<int64_t>(count_ / (2 * pool.threads()), 4, kTogether), some, cols_);
  }

  template <class Work>
  void each(int64_t count, Work work) {
    auto body = [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; ++m) work(m);
    };
    if (count > 1) {
      ThreadPool::shared().parallel_for(count, 4, body, cols_);
    } else {
      body(0, count);
    }
  }

  const float* load(int64_t m, float* v) const {
    const int64_t place = x_.order != nullptr ? x_.order[start_ + m] : start_ + m;
    kernels().load(x_.x, place * x_.stride, cols_, v);
    if (norm_ != nullptr) kernels().rms_norm(v, norm_, x_.eps, cols_);
    return v;
  }

  const float* without(const Outliers& outliers, const float* v) const {
    static thread_local Scratch own;
    float* rest = own.get<float>(cols_);
    std::copy_n(v, cols_, rest);
    for (int64_t i = 0; i < outliers.count; ++i) rest[outliers.columns[i]] = 0;
    return rest;
  }

  bool words(int digits) const { return may_be_words_ && (digits == 2 || always_words_); }

  // Room for the integers of `count` vectors.
  Pass add_pass(int64_t count, int digits) {
    const size_t index = scratch_.passes.size();
    if (scratch_.of_passes.size() <= index) scratch_.of_passes.emplace_back();
    PrepareScratch::OfPass& room = scratch_.of_passes[index];
    layout_.digits = digits;
    layout_.words = words(digits);
    Pass pass;
    pass.count = count;
    pass.digits = digits;
    pass.digit_bytes = digit_bytes(layout_, cols_);
    pass.x = room.digits.get<int8_t>(count * pass.digit_bytes);
    pass.scales = room.scales.get<float>(count);
    pass.sums = room.sums.get<float>(count * out_.sum_groups);
    scratch_.passes.push_back(pass);
    return pass;
  }

  // The integers of vector i of a pass.
  void quantize_into(const Pass& pass, int64_t i, const float* v, float* rest) {
    Layout layout = layout_;
    layout.digits = pass.digits;
    layout.words = words(pass.digits);
    kernels().quantize(v, cols_, layout, out_.sum_groups, const_cast<int8_t*>(pass.vector(i)),
                       const_cast<float*>(pass.scales) + i, const_cast<float*>(pass.sums) + i * out_.sum_groups, rest);
  }

  // What rounding leaves of the vectors that need it becomes integers in its turn, until they need no more.
  void add_passes(const Pass& first) {
    std::vector<int32_t> vectors;
    for (int64_t m = 0; m < count_; ++m) {
      if (scratch_.extras[m] == Extra::passes) vectors.push_back(static_cast<int32_t>(m));
    }
    const int64_t count = static_cast<int64_t>(vectors.size());
    float* whole = scratch_.spread.get<float>(count * cols_);
    float* rests = scratch_.rests.get<float>(count * cols_);
    each(count, [&](int64_t i) {
      quantize_into(first, vectors[i], load(vectors[i], whole + i * cols_), rests + i * cols_);
    });
    std::vector<int32_t> left(count);  // indices of `vectors`
    std::iota(left.begin(), left.end(), 0);
    for (int further = 1; !left.empty(); ++further) {
      const Pass pass = add_pass(static_cast<int64_t>(left.size()), 1);
      std::vector<int32_t>& which = scratch_.of_passes[further].vectors;
      which.clear();
      for (const int32_t i : left) which.push_back(vectors[i]);
      scratch_.passes.back().vectors = which.data();
      each(pass.count, [&](int64_t i) {
        float* rest = rests + left[i] * cols_;
        quantize_into(pass, i, rest, rest);
      });
      auto enough = [&](int32_t i) { return !needs_pass(whole + i * cols_, cols_, x_.digits, further); };
      left.erase(std::remove_if(left.begin(), left.end(), enough), left.end());
    }
  }

  const Activations& x_;
  const int64_t cols_, start_, count_;
  Prepared& out_;
  PrepareScratch& scratch_;
  Layout layout_;
  bool may_be_words_, always_words_;
  const float* norm_ = nullptr;
};

}  // namespace

Path path_of(const PackedMatrix& w, int64_t vectors) {
  if (w.mode == Mode::palette) {
    if (w.bits > kernels().palette_bits) return Path::floats;
    return vectors > 1 ? Path::matrix : Path::vector;
  }
  if (!is_grouped(w)) return vectors > 1 && kernels().matrix != nullptr ? Path::matrix : Path::vector;
  const int64_t bits = w.cols / w.groups * w.bits;
  auto fits = [&](int64_t reg) { return bits % reg == 0 || (reg % bits == 0 && bits % 32 == 0); };
  if (vectors > 1 && kernels().grouped_matrix != nullptr && fits(64 * w.bits)) return Path::matrix;
  return fits(8 * kernels().vector_bytes) ? Path::vector : Path::floats;
}

Prepared prepare(const Activations& x, const PackedMatrix& w, bool adapted, int64_t start, int64_t count,
                 PrepareScratch& scratch, const TakeFloats& take) {
  Prepared out;
  out.path = path_of(w, x.rows);
  out.count = count;
  out.sum_groups = is_grouped(w) ? w.groups : 1;
  const bool integers = out.path != Path::floats;
  const bool together = adapted && count > kTogether;
  const bool as_floats = (adapted && !together) || !integers || w.mode == Mode::palette;
  float* floats = as_floats ? scratch.floats.get<float>(count * w.cols) : nullptr;
  Preparation preparation(x, w, start, count, out, scratch);
  if (integers) {
    preparation.quantize(floats, together ? &take : nullptr);
  } else {
    preparation.load(floats, together ? &take : nullptr);
  }
  out.floats = floats;
  return out;
}

}  // namespace afm
