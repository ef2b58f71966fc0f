// Drives the kernels: activations to integers, rows of codes shared out among threads, and all that happens
// to a product before it is written.
#include "matmul.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "isa.h"
#include "low_rank.h"
#include "pool.h"
#include "scratch.h"

namespace afm {
namespace {

enum class Path {
  vector,  // integer kernels, one vector at a time
  matrix,  // integer kernels, several vectors at a time
  floats,  // rows are turned into float32: palettes, and groups that no register holds a whole number of
};

int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

int64_t row_bytes(const PackedMatrix& w) { return w.cols * w.bits / 8; }

const uint8_t* codes_of(const PackedMatrix& w, int64_t row) {
  return reinterpret_cast<const uint8_t*>(w.codes) + row * row_bytes(w);
}

bool is_grouped(const PackedMatrix& w) { return w.groups > 1; }

Path path_of(const PackedMatrix& w, int64_t vectors) {
  if (w.mode == Mode::palette) return Path::floats;
  if (!is_grouped(w)) return vectors > 1 && kernels().matrix != nullptr ? Path::matrix : Path::vector;
  const int64_t bits = w.cols / w.groups * w.bits, reg = 8 * kernels().vector_bytes;
  const bool fits = bits % reg == 0 || (reg % bits == 0 && bits % 32 == 0);
  return fits ? Path::vector : Path::floats;
}

// ---- Activations

// Vectors [start, start + count) of the activations, as the kernels want them.
struct Prepared {
  Path path = Path::vector;
  Layout layout;
  int64_t count = 0;
  int64_t digit_bytes = 0;      // of one vector
  const int8_t* digits = nullptr;
  const float* scales = nullptr;  // (count,) value of one unit
  const float* sums = nullptr;    // (count, sum_groups)
  int64_t sum_groups = 1;
  const float* floats = nullptr;  // (count, K), for Path::floats and adapters; null where nothing needs them

  const int8_t* vector(int64_t m) const { return digits + m * digit_bytes; }
};

struct PrepareScratch {
  Scratch digits, arranged, scales, sums, floats, norm;
  LowRankScratch low_rank[2];
};

const float* loaded(Floats from, int64_t count, Scratch& scratch) {
  if (!from) return nullptr;
  float* out = scratch.get<float>(count);
  kernels().load(from, 0, count, out);
  return out;
}

// `adapted`: whether adapters need the vectors as floats.
Prepared prepare(const Activations& x, const PackedMatrix& w, bool adapted, int64_t start, int64_t count,
                 PrepareScratch& scratch) {
  const Kernels& k = kernels();
  const int64_t cols = w.cols;
  Prepared out;
  out.path = path_of(w, x.rows);
  out.count = count;
  out.layout.bits = w.bits;
  out.layout.digits = x.digits;
  out.layout.bytes = out.path == Path::matrix ? 8 * w.bits : k.vector_bytes;
  out.sum_groups = is_grouped(w) ? w.groups : 1;
  const bool integers = out.path != Path::floats;
  out.digit_bytes = integers ? digit_bytes(out.layout, cols) : 0;

  const float* norm = loaded(x.norm, cols, scratch.norm);
  int8_t* digits = scratch.digits.get<int8_t>(count * out.digit_bytes);
  float* scales = scratch.scales.get<float>(count);
  float* sums = scratch.sums.get<float>(count * out.sum_groups);
  float* floats = adapted || !integers ? scratch.floats.get<float>(count * cols) : nullptr;

  auto prepare_vectors = [&](int64_t begin, int64_t end) {
    static thread_local Scratch own;
    for (int64_t m = begin; m < end; ++m) {
      float* v = floats == nullptr ? own.get<float>(cols) : floats + m * cols;
      k.load(x.x, (start + m) * x.stride, cols, v);
      if (norm != nullptr) k.rms_norm(v, norm, x.eps, cols);
      if (integers) {
        k.quantize(v, cols, out.layout, out.sum_groups, digits + m * out.digit_bytes, scales + m,
                   sums + m * out.sum_groups);
      }
    }
  };
  ThreadPool& pool = ThreadPool::shared();
  if (count > 1) {
    pool.parallel_for(count, 4, prepare_vectors, cols);
  } else {
    prepare_vectors(0, count);
  }

  out.digits = digits;
  if (out.path == Path::matrix && k.arrange != nullptr) {
    const int64_t step = k.matrix_vectors;
    const int64_t stride = std::min(step, count) * out.digit_bytes;
    int8_t* arranged = scratch.arranged.get<int8_t>((count + step - 1) / step * stride);
    pool.parallel_for((count + step - 1) / step, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        k.arrange(digits + b * step * out.digit_bytes, std::min(step, count - b * step),
                  std::min(step, count), out.digit_bytes, arranged + b * stride);
      }
    }, stride);
    out.digits = arranged;
  }
  out.scales = scales;
  out.sums = sums;
  out.floats = floats;
  return out;
}

// ---- Rows of the matrix

float middle(const PackedMatrix& w) { return static_cast<float>((1 << w.bits) - 1) / 2; }

// Scales or biases of rows [begin, end), (end - begin, groups) or, ungrouped, (end - begin,).
void load_per_row(const PackedMatrix& w, Floats from, int64_t begin, int64_t end, int64_t stride, float* out) {
  const Kernels& k = kernels();
  if (w.groups == 0) {
    float value;
    k.load(from, 0, 1, &value);
    std::fill(out, out + (end - begin), value);
  } else if (!is_grouped(w)) {
    k.load(from, begin, end - begin, out);
  } else {
    for (int64_t n = begin; n < end; ++n, out += stride) {
      k.load(from, n * w.groups, w.groups, out);
      std::fill(out + w.groups, out + stride, 0.0f);
    }
  }
}

// Row `row` as float32.
void expand_row(const PackedMatrix& w, int64_t row, float* out) {
  const Kernels& k = kernels();
  static thread_local Scratch of_table, of_scales, of_biases;
  const int64_t values = int64_t{1} << w.bits;
  float* table = of_table.get<float>(values);
  if (w.mode == Mode::palette) {
    k.load(w.table, row * w.tables / w.rows * values, values, table);
    k.look_up(codes_of(w, row), w.bits, table, w.cols, out);
    return;
  }
  for (int64_t i = 0; i < values; ++i) table[i] = static_cast<float>(i);
  const int64_t groups = std::max<int64_t>(w.groups, 1), size = w.cols / groups;
  float* scales = of_scales.get<float>(groups);
  float* biases = of_biases.get<float>(groups);
  load_per_row(w, w.scales, row, row + 1, groups, scales);
  if (w.mode == Mode::affine) load_per_row(w, w.biases, row, row + 1, groups, biases);
  k.look_up(codes_of(w, row), w.bits, table, w.cols, out);
  for (int64_t g = 0; g < groups; ++g, out += size) {
    const float scale = scales[g], shift = w.mode == Mode::affine ? 0 : middle(w);
    const float bias = w.mode == Mode::affine ? biases[g] : 0;
    for (int64_t i = 0; i < size; ++i) out[i] = scale * (out[i] - shift) + bias;
  }
}

struct RowScratch {
  Scratch product, second, scales, biases, row, residual;
};

// out (count, end - begin) = products of all vectors with rows [begin, end)
void multiply_floats(const Prepared& x, const PackedMatrix& w, int64_t begin, int64_t end, float* out,
                     RowScratch& scratch) {
  float* row = scratch.row.get<float>(w.cols);
  for (int64_t n = begin; n < end; ++n) {
    expand_row(w, n, row);
    for (int64_t m = 0; m < x.count; ++m) {
      out[m * (end - begin) + n - begin] =
          kernels().dot(row, x.floats + m * w.cols, w.cols);
    }
  }
}

void multiply_grouped(const Prepared& x, const PackedMatrix& w, int64_t begin, int64_t end, float* out,
                      RowScratch& scratch) {
  const Kernels& k = kernels();
  const int64_t rows = end - begin;
  const int64_t stride = round_up(w.groups, 16) + 16;  // kernels load 16 scales at a time
  float* scales = scratch.scales.get<float>(rows * stride);
  load_per_row(w, w.scales, begin, end, stride, scales);
  float* biases = scales;
  if (w.mode == Mode::affine) {
    biases = scratch.biases.get<float>(rows * stride);
    load_per_row(w, w.biases, begin, end, stride, biases);
  }
  const float factor = w.mode == Mode::affine ? 1 : -middle(w);
  const int64_t group_bytes = row_bytes(w) / w.groups;
  for (int64_t m = 0; m < x.count; ++m, out += rows) {
    k.vector({codes_of(w, begin), rows, row_bytes(w), x.vector(m), x.layout.digits, w.bits, scales, stride,
              group_bytes, out});
    const float* sums = x.sums + m * x.sum_groups;
    for (int64_t n = 0; n < rows; ++n) {
      const float offset = k.dot(biases + n * stride, sums, w.groups);
      out[n] = x.scales[m] * out[n] + factor * offset;
    }
  }
}

void multiply_rows(const Prepared& x, const PackedMatrix& w, int64_t begin, int64_t end, const PrefetchRows& ahead,
                   float* out, RowScratch& scratch) {
  const Kernels& k = kernels();
  const int64_t rows = end - begin;
  if (x.path == Path::matrix) {
    uint8_t* bytes = scratch.row.get<uint8_t>(kScratchRows * x.digit_bytes / x.layout.digits);
    k.matrix({codes_of(w, begin), rows, row_bytes(w), x.digits, x.count, x.digit_bytes, x.layout.digits,
              w.bits, out, rows, bytes, ahead});
  } else {
    Prefetcher(ahead, 0, rows, 1).next_share();
    for (int64_t m = 0; m < x.count; ++m) {
      k.vector({codes_of(w, begin), rows, row_bytes(w), x.vector(m), x.layout.digits, w.bits, nullptr, 0, 0,
                out + m * rows});
    }
  }
  float* slopes = scratch.scales.get<float>(rows);
  float* offsets = scratch.biases.get<float>(rows);
  load_per_row(w, w.scales, begin, end, 1, slopes);
  if (w.mode == Mode::affine) {
    load_per_row(w, w.biases, begin, end, 1, offsets);
  } else {
    for (int64_t n = 0; n < rows; ++n) offsets[n] = -middle(w) * slopes[n];
  }
  for (int64_t m = 0; m < x.count; ++m) {
    k.finish(out + m * rows, slopes, x.scales[m], offsets, x.sums[m], rows);
  }
}

// out (count, end - begin) = products of all vectors with rows [begin, end); prefetches `ahead` meanwhile
void multiply(const Prepared& x, const PackedMatrix& w, int64_t begin, int64_t end, const PrefetchRows& ahead,
              float* out, RowScratch& scratch) {
  if (x.path == Path::floats) return multiply_floats(x, w, begin, end, out, scratch);
  if (is_grouped(w)) return multiply_grouped(x, w, begin, end, out, scratch);
  multiply_rows(x, w, begin, end, ahead, out, scratch);
}

// ---- Sharing the work

// Vectors whose digits stay in the second-level cache while the whole matrix goes by.
int64_t vectors_at_once(const Activations& x, const PackedMatrix& w) {
  constexpr int64_t kCached = 1 << 20;
  const int64_t fit = kCached / std::max<int64_t>(w.cols * x.digits, 1) / 16 * 16;
  return std::min(x.rows, std::max<int64_t>(fit, 64));
}

// Rows that a thread takes at a time. With few vectors, memory is the limit: long stretches keep the prefetchers going,
// but must leave something for every thread at the end. With many vectors, the codes stay in the second-level cache;
// where each vector reads them again, in the first-level cache.
int64_t rows_at_once(const PackedMatrix& w, int64_t vectors) {
  constexpr int64_t kBytes = 256 << 10, kStep = 32, kFew = 16;
  if (vectors > 1 && path_of(w, vectors) != Path::matrix) return kStep;
  if (vectors > kFew) return 2 * kStep;
  const int64_t by_size = kBytes / std::max<int64_t>(row_bytes(w), 1) / kStep * kStep;
  const int64_t by_share = w.rows / (8 * ThreadPool::shared().threads()) / kStep * kStep;
  return std::clamp<int64_t>(std::min(by_size, by_share), kStep, 2048);
}

// Calls work(start, count) for parts of the M vectors.
template <class Work>
void for_vectors(const Activations& x, const PackedMatrix& w, Work work) {
  const int64_t step = vectors_at_once(x, w);
  for (int64_t start = 0; start < x.rows; start += step) work(start, std::min(step, x.rows - start));
}

// Calls body(begin, end) for stretches of the matrix's rows on all threads, after the adapters' pieces.
template <class Body>
void for_rows(const PackedMatrix& w, int64_t vectors, LowRankProduct& first, LowRankProduct* second, Body body) {
  const int64_t step = rows_at_once(w, vectors), stretches = (w.rows + step - 1) / step;
  const int64_t of_first = first.pieces(), pieces = of_first + (second != nullptr ? second->pieces() : 0);
  auto take = [&](int64_t piece, int64_t) {
    if (piece < of_first) return first.shrink(piece);
    if (piece < pieces) return second->shrink(piece - of_first);
    const int64_t begin = (piece - pieces) * step;
    body(begin, std::min(begin + step, w.rows));
  };
  ThreadPool::shared().parallel_for(pieces + stretches, 1, take,
                                     step * w.cols * vectors * (second != nullptr ? 2 : 1));
}

// Rows [begin, end) of `count` vectors from `start` on into y (M, N).
void write(const float* product, int64_t start, int64_t count, int64_t begin, int64_t end, int64_t n, void* y,
           Number type) {
  const int64_t rows = end - begin;
  for (int64_t m = 0; m < count; ++m) {
    kernels().store(product + m * rows, rows, y, (start + m) * n + begin, type);
  }
}

}  // namespace

void matmul(const Activations& x, const PackedMatrix& w, Floats residual, const Adapters& adapters, void* y,
            Number type) {
  static thread_local PrepareScratch scratch;
  for_vectors(x, w, [&](int64_t start, int64_t count) {
    const Prepared prepared = prepare(x, w, adapters.count > 0, start, count, scratch);
    LowRankProduct low_rank(adapters, w, prepared.floats, start, count, x.rows, scratch.low_rank[0]);
    for_rows(w, count, low_rank, nullptr, [&](int64_t begin, int64_t end) {
      static thread_local RowScratch own;
      const int64_t rows = end - begin;
      float* product = own.product.get<float>(count * rows);
      multiply(prepared, w, begin, end, low_rank.ahead(begin), product, own);
      low_rank.add(begin, end, product, rows);
      if (residual) {
        float* added = own.residual.get<float>(rows);
        for (int64_t m = 0; m < count; ++m) {
          kernels().load(residual, (start + m) * w.rows + begin, rows, added);
          for (int64_t n = 0; n < rows; ++n) product[m * rows + n] += added[n];
        }
      }
      write(product, start, count, begin, end, w.rows, y, type);
    });
  });
}

void swiglu(const Activations& x, const PackedMatrix& gate, const PackedMatrix& up, const Adapters& of_gate,
            const Adapters& of_up, void* y, Number type) {
  static thread_local PrepareScratch scratch, second_scratch;
  // One set of digits serves both unless bits or groups differ.
  const bool alike =
      gate.groups == up.groups && gate.bits == up.bits && path_of(gate, x.rows) == path_of(up, x.rows);
  for_vectors(x, gate, [&](int64_t start, int64_t count) {
    const bool adapted = of_gate.count > 0 || of_up.count > 0;
    const Prepared of_g = prepare(x, gate, adapted, start, count, scratch);
    const Prepared of_u = alike ? of_g : prepare(x, up, false, start, count, second_scratch);
    LowRankProduct gate_low_rank(of_gate, gate, of_g.floats, start, count, x.rows, scratch.low_rank[0]);
    LowRankProduct up_low_rank(of_up, up, of_g.floats, start, count, x.rows, scratch.low_rank[1]);
    for_rows(gate, count, gate_low_rank, &up_low_rank, [&](int64_t begin, int64_t end) {
      static thread_local RowScratch own;
      const int64_t rows = end - begin;
      float* g = own.product.get<float>(count * rows);
      float* u = own.second.get<float>(count * rows);
      multiply(of_g, gate, begin, end, gate_low_rank.ahead(begin), g, own);
      multiply(of_u, up, begin, end, up_low_rank.ahead(begin), u, own);
      gate_low_rank.add(begin, end, g, rows);
      up_low_rank.add(begin, end, u, rows);
      kernels().swiglu(g, u, count * rows);
      write(g, start, count, begin, end, gate.rows, y, type);
    });
  });
}

namespace {

struct Candidate {
  float value = -std::numeric_limits<float>::infinity();
  uint32_t index = std::numeric_limits<uint32_t>::max();

  // The larger value, or the lower index.
  bool beats(const Candidate& other) const {
    return value > other.value || (value == other.value && index < other.index);
  }
};

// The largest of `values`, whose indices count from `first` on.
Candidate largest(const float* values, int64_t count, int64_t first) {
  Candidate best{-std::numeric_limits<float>::infinity(), static_cast<uint32_t>(first)};
  for (int64_t i = 0; i < count; ++i) {
    // A NaN becomes the largest, so that whoever looks at the result sees it.
    const float value = std::isnan(values[i]) ? std::numeric_limits<float>::infinity() : values[i];
    if (value > best.value) best = {value, static_cast<uint32_t>(first + i)};
  }
  return best;
}

}  // namespace

void argmax(const Activations& x, const PackedMatrix& w, uint32_t* indices, float* values) {
  static thread_local PrepareScratch scratch;
  ThreadPool& pool = ThreadPool::shared();
  for_vectors(x, w, [&](int64_t start, int64_t count) {
    const Prepared prepared = prepare(x, w, false, start, count, scratch);
    std::vector<Candidate> best(static_cast<size_t>(pool.threads() * count));  // of every thread
    auto body = [&](int64_t begin, int64_t end, int thread) {
      static thread_local RowScratch own;
      const int64_t rows = end - begin;
      float* product = own.product.get<float>(count * rows);
      multiply(prepared, w, begin, end, {}, product, own);
      for (int64_t m = 0; m < count; ++m) {
        const Candidate found = largest(product + m * rows, rows, begin);
        if (found.beats(best[thread * count + m])) best[thread * count + m] = found;
      }
    };
    pool.parallel_for(w.rows, rows_at_once(w, count), body, w.cols * count);
    for (int64_t m = 0; m < count; ++m) {
      Candidate& first = best[m];
      for (int t = 1; t < pool.threads(); ++t) {
        if (best[t * count + m].beats(first)) first = best[t * count + m];
      }
      indices[start + m] = first.index;
      values[start + m] = first.value;
    }
  });
}

void dequantize_row(const PackedMatrix& w, int64_t row, void* out, Number type) {
  static thread_local Scratch scratch;
  float* values = scratch.get<float>(w.cols);
  expand_row(w, row, values);
  kernels().store(values, w.cols, out, 0, type);
}

}  // namespace afm
