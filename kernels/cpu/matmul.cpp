// Drives the kernels: activations to integers, rows of codes shared out among threads, and all that happens
// to a product before it is written.
#include "matmul.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <numeric>

#include "activations.h"
#include "isa.h"
#include "low_rank.h"
#include "palette.h"
#include "pool.h"
#include "scratch.h"

namespace afm {
namespace {

int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

const uint8_t* codes_of(const PackedMatrix& w, int64_t row) {
  return reinterpret_cast<const uint8_t*>(w.codes) + row * row_bytes(w);
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
  } else if (w.groups == stride) {
    k.load(from, begin * stride, (end - begin) * stride, out);
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
  Scratch product, second, further, scales, biases, row, residual, blocks, vectors;
  PaletteScratch palette;
};

// out[m * stride] = product of vector m with row n, in float32
void multiply_row(const Prepared& x, const PackedMatrix& w, int64_t n, float* out, int64_t stride,
                  RowScratch& scratch) {
  float* row = scratch.row.get<float>(w.cols);
  expand_row(w, n, row);
  for (int64_t m = 0; m < x.count; ++m) out[m * stride] = kernels().dot(row, x.floats + m * w.cols, w.cols);
}

// out (count, end - begin) = products of all vectors with rows [begin, end)
void multiply_floats(const Prepared& x, const PackedMatrix& w, int64_t begin, int64_t end, float* out,
                     RowScratch& scratch) {
  for (int64_t n = begin; n < end; ++n) multiply_row(x, w, n, out + n - begin, end - begin, scratch);
}

// Factors that turn codes of rows [begin, end) into numbers: slope * code + factor * offset, of row n and group g
// at (n - begin) * stride + g.
struct Grid {
  const float* slopes;
  const float* offsets;
  float factor = 1;
  int64_t stride = 1;
};

Grid grid_of_groups(const PackedMatrix& w, int64_t begin, int64_t end, RowScratch& scratch) {
  Grid grid;
  grid.stride = round_up(w.groups, 16);
  const int64_t count = (end - begin) * grid.stride + 16;  // kernels load 16 scales at a time
  float* slopes = scratch.scales.get<float>(count);
  load_per_row(w, w.scales, begin, end, grid.stride, slopes);
  grid.slopes = grid.offsets = slopes;
  grid.factor = -middle(w);
  if (w.mode == Mode::affine) {
    float* offsets = scratch.biases.get<float>(count);
    load_per_row(w, w.biases, begin, end, grid.stride, offsets);
    grid.offsets = offsets;
    grid.factor = 1;
  }
  return grid;
}

Grid grid_of_rows(const PackedMatrix& w, int64_t begin, int64_t end, RowScratch& scratch) {
  const int64_t rows = end - begin;
  float* slopes = scratch.scales.get<float>(rows);
  float* offsets = scratch.biases.get<float>(rows);
  load_per_row(w, w.scales, begin, end, 1, slopes);
  if (w.mode == Mode::affine) {
    load_per_row(w, w.biases, begin, end, 1, offsets);
  } else {
    for (int64_t n = 0; n < rows; ++n) offsets[n] = -middle(w) * slopes[n];
  }
  return {slopes, offsets};
}

// out (pass.count, rows) = unit of each vector * out + what the grid's offsets add
void add_offsets(const Pass& pass, int64_t groups, const Grid& grid, int64_t rows, float* out, RowScratch& scratch) {
  const Kernels& k = kernels();
  // An adapter's B is stored in blocks of 16 rows; hidden values are multiplied with it as sums are with offsets.
  float* blocks = scratch.blocks.get<float>(round_up(rows, kBlock) * groups);
  for (int64_t n = 0; n < rows; ++n) {
    float* to = blocks + n / kBlock * kBlock * groups + n % kBlock;
    for (int64_t g = 0; g < groups; ++g) to[g * kBlock] = grid.factor * grid.offsets[n * grid.stride + g];
  }
  int32_t* all = scratch.vectors.get<int32_t>(pass.count);
  for (int64_t i = 0; i < pass.count; ++i) {
    all[i] = static_cast<int32_t>(i);
    for (int64_t n = 0; n < rows; ++n) out[i * rows + n] *= pass.scales[i];
  }
  k.expand({{blocks, Number::float32}, 0, groups, 0, rows, pass.sums, groups, all, pass.count, out, rows});
}

void multiply_grouped(const Prepared& x, const Pass& pass, const PackedMatrix& w, const Grid& grid, int64_t begin,
                      int64_t end, const PrefetchRows& ahead, float* out, RowScratch& scratch) {
  const Kernels& k = kernels();
  const int64_t rows = end - begin, group_bytes = row_bytes(w) / w.groups;
  if (x.path == Path::matrix) {
    uint8_t* bytes = scratch.row.get<uint8_t>(kScratchRows * pass.digit_bytes / pass.digits);
    k.grouped_matrix({{codes_of(w, begin), rows, row_bytes(w), pass.x, pass.count, pass.digit_bytes, pass.digits, w.bits,
                       out, rows, bytes, ahead}, grid.slopes, grid.stride, group_bytes});
    return add_offsets(pass, w.groups, grid, rows, out, scratch);
  }
  float* sums = scratch.blocks.get<float>(grid.stride);
  std::fill(sums + w.groups, sums + grid.stride, 0.0f);
  for (int64_t i = 0; i < pass.count; ++i, out += rows) {
    for (int64_t g = 0; g < w.groups; ++g) sums[g] = grid.factor * pass.sums[i * w.groups + g];
    k.vector({codes_of(w, begin), rows, row_bytes(w), pass.vector(i), pass.digits, w.bits, {grid.slopes}, grid.stride,
              group_bytes, out, {grid.offsets}, sums, pass.scales[i]});
  }
}

void multiply_rows(const Prepared& x, const Pass& pass, const PackedMatrix& w, const Grid& grid, int64_t begin,
                   int64_t end, const PrefetchRows& ahead, float* out, RowScratch& scratch) {
  const Kernels& k = kernels();
  const int64_t rows = end - begin;
  if (x.path == Path::matrix) {
    uint8_t* bytes = scratch.row.get<uint8_t>(kScratchRows * pass.digit_bytes / pass.digits);
    k.matrix({codes_of(w, begin), rows, row_bytes(w), pass.x, pass.count, pass.digit_bytes, pass.digits, w.bits, out,
              rows, bytes, ahead});
  } else {
    constexpr int64_t kPart = 32;  // rows between two shares of what is prefetched
    const int64_t step = ahead.count > 0 ? kPart : rows;
    Prefetcher prefetcher(ahead, 0, rows, (rows + step - 1) / step);
    for (int64_t row = 0; row < rows; row += step) {
      prefetcher.next_share();
      for (int64_t i = 0; i < pass.count; ++i) {
        k.vector({codes_of(w, begin + row), std::min(step, rows - row), row_bytes(w), pass.vector(i), pass.digits,
                  w.bits, {}, 0, 0, out + i * rows + row, {}, nullptr, 1});
      }
    }
  }
  for (int64_t i = 0; i < pass.count; ++i) {
    k.finish(out + i * rows, grid.slopes, pass.scales[i], grid.offsets, pass.sums[i], rows);
  }
}

// out (count, rows) += the products of further passes (pass.count, rows)
void add_pass(const Pass& pass, int64_t rows, const float* product, float* out) {
  for (int64_t i = 0; i < pass.count; ++i, product += rows) {
    float* to = out + pass.vectors[i] * rows;
    for (int64_t n = 0; n < rows; ++n) to[n] += product[n];
  }
}

// Products of one pass with rows of a palette.
void multiply_palette_pass(const Prepared& x, const Pass& pass, const PackedMatrix& w, const Palette& palette,
                           int64_t begin, int64_t rows, const PrefetchRows& ahead, float* out, RowScratch& scratch) {
  const Kernels& k = kernels();
  PaletteJob job = {{codes_of(w, begin), rows, row_bytes(w), pass.x, pass.count, pass.digit_bytes, pass.digits, w.bits,
                     out, rows, scratch.row.get<uint8_t>(kScratchRows * pass.digit_bytes / pass.digits), ahead},
                    palette.bytes, palette.rows_per_table, palette.first};
  if (x.path == Path::matrix) {
    k.palette_matrix(job);
  } else {
    Prefetcher(ahead, 0, rows, 1).next_share();
    k.palette_vector(job);
  }
  for (int64_t i = 0; i < pass.count; ++i) {
    k.finish(out + i * rows, palette.slopes, pass.scales[i], palette.offsets, pass.sums[i], rows);
  }
}

void multiply_palette(const Prepared& x, const PackedMatrix& w, int64_t begin, int64_t end, const PrefetchRows& ahead,
                      float* out, RowScratch& scratch) {
  const int64_t rows = end - begin;
  const Palette palette = palette_of(w, begin, end, scratch.palette);
  for (const Pass& pass : *x.passes) {
    const bool first = pass.vectors == nullptr;
    float* product = first ? out : scratch.further.get<float>(pass.count * rows);
    multiply_palette_pass(x, pass, w, palette, begin, rows, first ? ahead : PrefetchRows{}, product, scratch);
    if (!first) add_pass(pass, rows, product, out);
  }
  for (int64_t m = 0; x.outliers != nullptr && m < x.count; ++m) {
    const Outliers& apart = x.outliers[m];
    for (int64_t i = 0; i < apart.count; ++i) {
      const int64_t bit = int64_t{apart.columns[i]} * w.bits;
      for (int64_t n = 0; n < rows; ++n) {
        const int code = codes_of(w, begin + n)[bit / 8] >> (bit % 8) & ((1 << w.bits) - 1);
        out[m * rows + n] += apart.values[i] * palette.numbers[(palette.table_of(n) << w.bits) + code];
      }
    }
  }
  for (int64_t n = 0; palette.coarse && n < rows; ++n) {
    if (std::isnan(palette.slopes[n])) multiply_row(x, w, begin + n, out + n, rows, scratch);
  }
}

// out (count, end - begin) += what vectors have apart from their integers
void add_outliers(const Prepared& x, const PackedMatrix& w, const Grid& grid, int64_t begin, int64_t end, float* out) {
  const int64_t rows = end - begin, group_cols = w.cols / std::max<int64_t>(w.groups, 1);
  for (int64_t m = 0; m < x.count; ++m) {
    const Outliers& apart = x.outliers[m];
    if (apart.count == 0) continue;
    kernels().add_columns({codes_of(w, begin), rows, row_bytes(w), w.bits, apart.columns, apart.values, apart.count,
                           grid.slopes, grid.offsets, grid.factor, grid.stride, group_cols, out + m * rows});
  }
}

// Rows whose scales and biases as float32 stay in the first-level cache until one vector meets them.
constexpr int64_t kGridRows = 32;

// How many rows, from the first on, have scales and biases that `VectorJob` can read in place: 16 more numbers follow in
// the arrays. 0 if scales and biases have different types.
int64_t rows_in_place(const PackedMatrix& w) {
  if (w.mode == Mode::affine && w.biases.type != w.scales.type) return 0;
  return std::max<int64_t>(w.rows - (15 + w.groups) / w.groups, 0);
}

// out (end - begin,) = products of one vector with rows [begin, end), end <= rows_in_place(w). Scales and biases are
// read in place, together with the codes: converted to float32 before, they took half as long as the codes.
void multiply_in_place(const Prepared& x, const PackedMatrix& w, int64_t begin, int64_t end, float* out,
                       RowScratch& scratch) {
  const bool affine = w.mode == Mode::affine;
  const float factor = affine ? 1 : -middle(w);
  const int64_t rows = end - begin, padded = round_up(w.groups, 16);
  const auto from_begin = [&](Floats of) {
    return Floats{static_cast<const char*>(of.data) + begin * w.groups * size_of(of.type), of.type};
  };
  const Floats scales = from_begin(w.scales), offsets = affine ? from_begin(w.biases) : scales;
  float* sums = scratch.blocks.get<float>(padded);
  for (const Pass& pass : *x.passes) {
    const bool first = pass.vectors == nullptr;
    float* product = first ? out : scratch.further.get<float>(rows);
    for (int64_t g = 0; g < padded; ++g) sums[g] = g < w.groups ? factor * pass.sums[g] : 0;
    kernels().vector({codes_of(w, begin), rows, row_bytes(w), pass.vector(0), pass.digits, w.bits, scales, w.groups,
                      row_bytes(w) / w.groups, product, offsets, sums, pass.scales[0]});
    if (!first) add_pass(pass, rows, product, out);
  }
  if (x.outliers == nullptr || x.outliers->count == 0) return;
  for (int64_t row = begin, count; row < end; row += count, out += count) {
    count = std::min(kGridRows, end - row);
    add_outliers(x, w, grid_of_groups(w, row, row + count, scratch), row, row + count, out);
  }
}

// Prefetches scales and biases of up to `rows` rows from `begin` on.
void prefetch_grid(const PackedMatrix& w, int64_t begin, int64_t rows) {
  for (const Floats& of : {w.scales, w.biases}) {
    const int64_t row = w.groups * size_of(of.type), end = std::min(begin + rows, w.rows) * row;
    const char* const data = static_cast<const char*>(of.data);
    for (int64_t at = begin * row; of && at < end; at += 64) __builtin_prefetch(data + at);
  }
}

// out (count, end - begin) = products of all vectors with rows [begin, end); prefetches `ahead` meanwhile
void multiply(const Prepared& x, const PackedMatrix& w, int64_t begin, int64_t end, const PrefetchRows& ahead,
              float* out, RowScratch& scratch) {
  if (x.path == Path::floats) return multiply_floats(x, w, begin, end, out, scratch);
  if (w.mode == Mode::palette) return multiply_palette(x, w, begin, end, ahead, out, scratch);
  if (x.path == Path::vector && x.count == 1 && is_grouped(w)) {
    if (const int64_t split = std::clamp(rows_in_place(w), begin, end); begin < split) {
      multiply_in_place(x, w, begin, split, out, scratch);
      if (split < end) multiply(x, w, split, end, ahead, out + (split - begin), scratch);
      return;
    }
    if (end - begin > kGridRows) {
      for (; begin < end; begin += kGridRows, out += kGridRows) {
        multiply(x, w, begin, std::min(begin + kGridRows, end), ahead, out, scratch);
      }
      return;
    }
  }
  if (is_grouped(w)) prefetch_grid(w, end, end - begin);
  const Grid grid = is_grouped(w) ? grid_of_groups(w, begin, end, scratch) : grid_of_rows(w, begin, end, scratch);
  for (const Pass& pass : *x.passes) {
    const bool first = pass.vectors == nullptr;
    float* product = first ? out : scratch.further.get<float>(pass.count * (end - begin));
    if (is_grouped(w)) {
      multiply_grouped(x, pass, w, grid, begin, end, first ? ahead : PrefetchRows{}, product, scratch);
    } else {
      multiply_rows(x, pass, w, grid, begin, end, first ? ahead : PrefetchRows{}, product, scratch);
    }
    if (!first) add_pass(pass, end - begin, product, out);
  }
  if (x.outliers != nullptr) add_outliers(x, w, grid, begin, end, out);
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
  if (vectors > kFew || (vectors > 1 && is_grouped(w))) return 2 * kStep;
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

// The place of piece `index` of `count`, which threads take in turn: pieces that follow each other in memory mostly go to
// one thread, so that what it prefetches at the end of a piece is its own next one.
int64_t place_of(int64_t index, int64_t count) {
  const int64_t threads = ThreadPool::shared().threads(), run = index % threads;
  return run * (count / threads) + std::min(run, count % threads) + index / threads;
}

// Calls body(matrix, begin, end) for stretches of the rows of matrices that are alike, on all threads, after the
// adapters' pieces. `cols`: what a row of one of them has to multiply.
template <class Body>
void for_rows(const std::vector<const PackedMatrix*>& matrices, int64_t vectors, std::deque<LowRankProduct>& adapters,
              int64_t cols, Body body) {
  PackedMatrix all = *matrices[0];
  for (size_t i = 1; i < matrices.size(); ++i) all.rows += matrices[i]->rows;
  const int64_t step = rows_at_once(all, vectors);
  const auto stretches_of = [&](const PackedMatrix& w) { return (w.rows + step - 1) / step; };
  int64_t stretches = 0, pieces = 0;
  for (const PackedMatrix* w : matrices) stretches += stretches_of(*w);
  for (const LowRankProduct& adapter : adapters) pieces += adapter.pieces();
  auto take = [&](int64_t piece, int64_t) {
    if (piece < pieces) {
      auto adapter = adapters.begin();
      for (; piece >= adapter->pieces(); ++adapter) piece -= adapter->pieces();
      return adapter->shrink(piece);
    }
    int64_t place = place_of(piece - pieces, stretches);
    size_t matrix = 0;
    for (; place >= stretches_of(*matrices[matrix]); ++matrix) place -= stretches_of(*matrices[matrix]);
    body(matrix, place * step, std::min((place + 1) * step, matrices[matrix]->rows));
  };
  ThreadPool::shared().parallel_for(pieces + stretches, 1, take, step * cols * vectors);
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

void matmul(const Activations& x, const std::vector<Product>& products, Floats residual, Number type) {
  static thread_local PrepareScratch scratch;
  static thread_local std::deque<LowRankScratch> low_rank_scratch;
  while (low_rank_scratch.size() < products.size()) low_rank_scratch.emplace_back();
  std::vector<const PackedMatrix*> matrices;
  for (const Product& product : products) matrices.push_back(&product.weight);
  for_vectors(x, *matrices[0], [&](int64_t start, int64_t count) {
    std::deque<LowRankProduct> low_ranks;
    bool adapted = false;
    for (size_t i = 0; i < products.size(); ++i) {
      low_ranks.emplace_back(products[i].adapters, *matrices[i], start, count, x.rows, low_rank_scratch[i]);
      adapted = adapted || !low_ranks.back().empty();
    }
    const TakeFloats take = [&](const float* v, int64_t first, int64_t n) {
      for (const LowRankProduct& low_rank : low_ranks) low_rank.shrink(v, first, n);
    };
    const Prepared prepared = prepare(x, *matrices[0], adapted, start, count, scratch, take);
    for (LowRankProduct& low_rank : low_ranks) {
      if (count <= kTogether) low_rank.read(prepared.floats);
    }
    for_rows(matrices, count, low_ranks, matrices[0]->cols, [&](size_t matrix, int64_t begin, int64_t end) {
      static thread_local RowScratch own;
      const PackedMatrix& w = *matrices[matrix];
      const LowRankProduct& low_rank = low_ranks[matrix];
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
      write(product, start, count, begin, end, w.rows, products[matrix].y, type);
    });
  });
}

void swiglu(const Activations& x, const PackedMatrix& gate, const PackedMatrix& up, const Adapters& of_gate,
            const Adapters& of_up, void* y, Number type) {
  static thread_local PrepareScratch scratch, second_scratch;
  static thread_local LowRankScratch gate_scratch, up_scratch;
  // One set of digits serves both unless bits or groups differ, or one is a palette.
  const bool alike = gate.groups == up.groups && gate.bits == up.bits &&
                     path_of(gate, x.rows) == path_of(up, x.rows) &&
                     (gate.mode == Mode::palette) == (up.mode == Mode::palette);
  for_vectors(x, gate, [&](int64_t start, int64_t count) {
    std::deque<LowRankProduct> low_ranks;
    LowRankProduct& gate_low_rank = low_ranks.emplace_back(of_gate, gate, start, count, x.rows, gate_scratch);
    LowRankProduct& up_low_rank = low_ranks.emplace_back(of_up, up, start, count, x.rows, up_scratch);
    const TakeFloats take = [&](const float* v, int64_t first, int64_t n) {
      gate_low_rank.shrink(v, first, n);
      up_low_rank.shrink(v, first, n);
    };
    const bool adapted = !gate_low_rank.empty() || !up_low_rank.empty();
    const Prepared of_g = prepare(x, gate, adapted, start, count, scratch, take);
    const Prepared of_u = alike ? of_g : prepare(x, up, false, start, count, second_scratch);
    if (count <= kTogether) {
      gate_low_rank.read(of_g.floats);
      up_low_rank.read(of_g.floats);
    }
    for_rows({&gate}, count, low_ranks, 2 * gate.cols, [&](size_t, int64_t begin, int64_t end) {
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

namespace {

// Pairs [start, start + count) of those sorted by expert: some of the vectors of one expert.
struct GatherJob {
  int64_t expert, start, count;
};

}  // namespace

void gather(const Activations& x, const PackedMatrix& w, int64_t experts, const int32_t* indices, int64_t pairs,
            void* y, Number type) {
  constexpr size_t kJobs = 32;  // whose digits are in memory at a time
  static thread_local std::vector<PrepareScratch> of_caller(kJobs);
  std::vector<PrepareScratch>& scratch = of_caller;  // of this thread, in loops of all threads
  const int64_t of_expert = w.rows / experts;
  auto expert_of = [&](int64_t pair) {
    const int64_t index = indices[pair] < 0 ? indices[pair] + experts : indices[pair];
    return std::clamp<int64_t>(index, 0, experts - 1);
  };
  std::vector<int64_t> sorted(pairs), vectors(pairs);
  std::iota(sorted.begin(), sorted.end(), 0);
  std::stable_sort(sorted.begin(), sorted.end(), [&](int64_t a, int64_t b) { return expert_of(a) < expert_of(b); });
  for (int64_t i = 0; i < pairs; ++i) vectors[i] = sorted[i] * x.rows / pairs;

  std::vector<GatherJob> jobs;
  Activations all = x;
  all.rows = pairs;
  for (int64_t start = 0, count; start < pairs; start += count) {
    const int64_t expert = expert_of(sorted[start]), most = vectors_at_once(all, w);
    for (count = 1; count < most && start + count < pairs && expert_of(sorted[start + count]) == expert;) ++count;
    jobs.push_back({expert, start, count});
  }
  ThreadPool& pool = ThreadPool::shared();
  std::vector<Prepared> prepared(kJobs);
  for (size_t first = 0; first < jobs.size(); first += kJobs) {
    const int64_t n_jobs = static_cast<int64_t>(std::min(kJobs, jobs.size() - first));
    const GatherJob* wave = jobs.data() + first;
    pool.parallel_for(n_jobs, 1, [&](int64_t j, int64_t) {
      Activations own = x;
      own.rows = wave[j].count;
      own.order = vectors.data() + wave[j].start;
      prepared[j] = prepare(own, w, false, 0, wave[j].count, scratch[j]);
    }, w.cols);
    int64_t most = 0;
    for (int64_t j = 0; j < n_jobs; ++j) most = std::max(most, wave[j].count);
    PackedMatrix read = w;  // about as many rows as all jobs read
    read.rows = of_expert * n_jobs;
    const int64_t step = rows_at_once(read, most), pieces = (of_expert + step - 1) / step;
    pool.parallel_for(n_jobs * pieces, 1, [&](int64_t piece, int64_t) {
      static thread_local RowScratch own;
      const GatherJob& job = wave[piece / pieces];
      const int64_t begin = piece % pieces * step, rows = std::min(step, of_expert - begin);
      const int64_t row = job.expert * of_expert + begin;
      float* product = own.product.get<float>(job.count * rows);
      multiply(prepared[piece / pieces], w, row, row + rows, {}, product, own);
      for (int64_t m = 0; m < job.count; ++m) {
        kernels().store(product + m * rows, rows, y, sorted[job.start + m] * of_expert + begin, type);
      }
    }, step * w.cols * most);
  }
}

void dequantize_row(const PackedMatrix& w, int64_t row, void* out, Number type) {
  static thread_local Scratch scratch;
  float* values = scratch.get<float>(w.cols);
  expand_row(w, row, values);
  kernels().store(values, w.cols, out, 0, type);
}

}  // namespace afm
