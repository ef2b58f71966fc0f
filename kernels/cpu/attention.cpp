#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "attention_kernel.h"
#include "pool.h"

namespace afm {
namespace {

// Queries of a tile: one KV head's query heads, for some consecutive tokens.
constexpr int64_t kTileRows = 32;
// Keys of one piece of work where there are few tiles: long enough to pay for the merging.
constexpr int64_t kSplitKeys = 512;
constexpr float kNothingSeen = -std::numeric_limits<float>::infinity();

std::atomic<const AttentionKernels*> kernels{&kAttentionPortable};

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Attention of a tile's rows to some of the keys.
struct Partial {
  std::vector<float> top, sum;  // (rows,) largest exponent; sum of the weights relative to it
  std::vector<float> values;    // (rows, dim) weighted sums

  Partial(int64_t rows, int64_t dim) : top(rows, kNothingSeen), sum(rows), values(rows * dim) {}
};

class Attention {
 public:
  explicit Attention(const AttentionArguments& arguments);
  void run();

 private:
  struct Tile {
    int64_t batch, kv_head, first, tokens;  // queries [first, first + tokens)
    int64_t rows;                           // tokens * group; row = token * group + head
    int64_t keys;                           // number that its last query sees
  };
  struct Piece {
    int64_t tile, begin, end;  // keys [begin, end)
  };

  // Tokens that a row's last query sees.
  int64_t length(int64_t batch) const;
  // Tokens of a row in the buffers; later ones are in the tail.
  int64_t start(int64_t batch) const;
  // Keys that a row of a tile sees.
  int64_t seen(const Tile& tile, int64_t row) const;
  // What a score is multiplied by: exp becomes a power of 2.
  float score_scale() const { return a_.key_scale / std::sqrt(static_cast<float>(a_.head_dim)) * 1.44269504f; }
  void work(const Piece& piece, Partial& partial) const;
  void work_floats(const Piece& piece, Partial& partial) const;
  // A tile's query as float32 with RoPE and norm, (head_dim,); `scratch` has room for two of them.
  void query(const Tile& tile, int64_t row, float* scratch, float* out) const;
  void quantize(const Tile& tile, int16_t* q, float* scales) const;
  // `count` tokens from `token` on, as rows of `dim_` codes or floats: where they are, or copied with zeros behind.
  const int8_t* block(const Columns& buffer, const Columns& tail, const Tile& tile, int64_t token, int64_t count,
                      std::vector<int8_t>* copy, int64_t* stride) const;
  const float* block_floats(const Columns& buffer, const Columns& tail, const Tile& tile, int64_t token, int64_t count,
                            std::vector<float>* copy, int64_t* stride) const;
  // A token's codes, where they are.
  const int8_t* codes_at(const Columns& buffer, const Columns& tail, const Tile& tile, int64_t token) const;
  // True if some of `count` tokens are in the buffer and others in the tail.
  bool straddles(const Tile& tile, int64_t token, int64_t count) const;
  // Address of a token's keys or values: the head's array, and the index of the token's first number in it.
  int64_t place(const Columns& buffer, const Columns& tail, const Tile& tile, int64_t token,
                const Columns** columns) const;
  void merge(Partial& into, const Partial& other) const;
  void finish(const Tile& tile, const Partial& partial) const;

  const AttentionArguments& a_;
  const AttentionKernels& kernels_;
  const int64_t group_, dim_;  // query heads per KV head; head_dim rounded up for the kernels
  std::vector<Tile> tiles_;
  std::vector<Piece> pieces_;
};

Attention::Attention(const AttentionArguments& arguments)
    : a_(arguments),
      kernels_(attention_kernels()),
      group_(arguments.heads / arguments.kv_heads),
      dim_(divide_up(arguments.head_dim, kDimStep) * kDimStep) {
  int64_t tokens = std::max<int64_t>(1, kTileRows / group_);
  for (int64_t b = 0; b < a_.batch; ++b) {
    for (int64_t h = 0; h < a_.kv_heads; ++h) {
      for (int64_t first = 0; first < a_.queries; first += tokens) {
        Tile tile = {b, h, first, std::min(tokens, a_.queries - first), 0, 0};
        tile.rows = tile.tokens * group_;
        tile.keys = seen(tile, tile.rows - 1);
        tiles_.push_back(tile);
      }
    }
  }
  // Some pieces more than threads, so that they end together. New tokens' are cut in the same places whatever other rows
  // there are, or a row would come out in other bits.
  int64_t enough = 4 * ThreadPool::shared().threads();
  bool split = a_.lengths != nullptr || static_cast<int64_t>(tiles_.size()) < enough;
  for (size_t t = 0; t < tiles_.size(); ++t) {
    int64_t keys = tiles_[t].keys, begin = 0;
    do {
      int64_t end = split ? std::min(begin + kSplitKeys, keys) : keys;
      pieces_.push_back({static_cast<int64_t>(t), begin, end});
      begin = end;
    } while (begin < keys);
  }
  // The longest first.
  std::stable_sort(pieces_.begin(), pieces_.end(),
                   [](const Piece& x, const Piece& y) { return x.end - x.begin > y.end - y.begin; });
}

int64_t Attention::length(int64_t batch) const {
  int64_t length = a_.lengths ? a_.lengths[batch] + a_.queries - 1 : a_.capacity;
  return std::clamp<int64_t>(length, 0, start(batch) + a_.tail_capacity);
}

int64_t Attention::start(int64_t batch) const {
  return a_.starts ? std::clamp<int64_t>(a_.starts[batch], 0, a_.capacity) : a_.capacity;
}

int64_t Attention::seen(const Tile& tile, int64_t row) const {
  int64_t after = a_.queries - 1 - (tile.first + row / group_);
  return std::max<int64_t>(0, length(tile.batch) - after);
}

void Attention::run() {
  std::vector<int64_t> of_tile(tiles_.size());
  for (const Piece& piece : pieces_) ++of_tile[piece.tile];
  std::unique_ptr<std::atomic<int64_t>[]> missing(new std::atomic<int64_t>[tiles_.size()]);
  for (size_t t = 0; t < tiles_.size(); ++t) missing[t].store(of_tile[t]);
  std::vector<std::unique_ptr<Partial>> partials(pieces_.size());

  auto take = [&](int64_t i, int64_t) {
    const Piece& piece = pieces_[i];
    const Tile& tile = tiles_[piece.tile];
    partials[i].reset(new Partial(tile.rows, dim_));
    a_.floats ? work_floats(piece, *partials[i]) : work(piece, *partials[i]);
    // The thread that ends last merges the tile's pieces, in their order: sums of floats depend on it.
    if (missing[piece.tile].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    Partial* all = nullptr;
    for (size_t of = 0; of < pieces_.size(); ++of) {
      if (pieces_[of].tile != piece.tile) continue;
      if (all != nullptr) {
        merge(*all, *partials[of]);
      } else {
        all = partials[of].get();
      }
    }
    finish(tile, *all);
  };
  const Piece& longest = pieces_[0];
  ThreadPool::shared().parallel_for(static_cast<int64_t>(pieces_.size()), 1, take,
                                    (longest.end - longest.begin) * kTileRows * dim_ * 2);
}

void Attention::work(const Piece& piece, Partial& partial) const {
  const Tile& tile = tiles_[piece.tile];
  int64_t rows = tile.rows;
  std::vector<int16_t> q(rows * dim_), weights(rows * kBlock);
  std::vector<float> scales(rows), decay(rows);
  std::vector<int32_t> scores(rows * kBlock);
  std::vector<int8_t> copy;
  quantize(tile, q.data(), scales.data());
  for (int64_t begin = piece.begin, end; begin < piece.end; begin = end) {
    end = std::min(begin + kBlock, piece.end);
    int64_t count = end - begin, stride;
    const int8_t* keys = block(a_.keys, a_.tail_keys, tile, begin, count, &copy, &stride);
    const CodesAhead ahead = {codes_at(a_.values, a_.tail_values, tile, begin),
                              end < piece.end ? codes_at(a_.keys, a_.tail_keys, tile, end) : nullptr};
    kernels_.score(q.data(), rows, keys, stride, count, dim_, ahead, scores.data());
    for (int64_t r = 0; r < rows; ++r) {
      int64_t visible = std::min(count, seen(tile, r) - begin);
      int16_t* row = weights.data() + r * kBlock;
      if (visible <= 0) {
        std::fill(row, row + kBlock, 0);
        decay[r] = 1.0f;
        continue;
      }
      int64_t sum = kernels_.weigh(scores.data() + r * kBlock, visible, scales[r], &partial.top[r], &decay[r], row);
      partial.sum[r] = partial.sum[r] * decay[r] + static_cast<float>(sum);
    }
    const int8_t* values = block(a_.values, a_.tail_values, tile, begin, count, &copy, &stride);
    kernels_.add(weights.data(), rows, values, stride, count, dim_, decay.data(), partial.values.data());
  }
}

void Attention::work_floats(const Piece& piece, Partial& partial) const {
  const Tile& tile = tiles_[piece.tile];
  int64_t rows = tile.rows;
  std::vector<float> q(rows * dim_), scores(rows * kBlockFloats), decay(rows), scratch(2 * a_.head_dim), copy;
  for (int64_t r = 0; r < rows; ++r) query(tile, r, scratch.data(), q.data() + r * dim_);
  float scale = score_scale();
  for (int64_t begin = piece.begin, end; begin < piece.end; begin = end) {
    end = std::min(begin + kBlockFloats, piece.end);
    int64_t count = end - begin, stride;
    const float* keys = block_floats(a_.keys, a_.tail_keys, tile, begin, count, &copy, &stride);
    kernels_.score_floats(q.data(), rows, keys, stride, count, dim_, scores.data());
    for (int64_t r = 0; r < rows; ++r) {
      int64_t visible = std::min(count, seen(tile, r) - begin);
      float* row = scores.data() + r * kBlockFloats;
      if (visible <= 0) {
        std::fill(row, row + kBlockFloats, 0.0f);
        decay[r] = 1.0f;
        continue;
      }
      float sum = kernels_.weigh_floats(row, visible, scale, &partial.top[r], &decay[r]);
      partial.sum[r] = partial.sum[r] * decay[r] + sum;
    }
    const float* values = block_floats(a_.values, a_.tail_values, tile, begin, count, &copy, &stride);
    kernels_.add_floats(scores.data(), rows, values, stride, count, dim_, decay.data(), partial.values.data());
  }
}

void Attention::query(const Tile& tile, int64_t row, float* scratch, float* out) const {
  int64_t dim = a_.head_dim;
  int64_t head = tile.kv_head * group_ + row % group_, token = tile.first + row / group_;
  int64_t start = tile.batch * a_.q_strides[0] + head * a_.q_strides[1] + token * a_.q_strides[2];
  float* raw = a_.table ? scratch : out;
  load_numbers(a_.q, start, a_.q_strides[3], a_.type, raw, dim);
  if (a_.table) {
    int64_t position = length(tile.batch) - a_.queries + token;
    kernels_.turn(raw, a_.table->row(position, scratch + dim), a_.norm, a_.eps, dim, out);
  }
}

void Attention::quantize(const Tile& tile, int16_t* q, float* scales) const {
  std::vector<float> exact(a_.head_dim), scratch(2 * a_.head_dim);
  float scale = score_scale();
  for (int64_t r = 0; r < tile.rows; ++r) {
    query(tile, r, scratch.data(), exact.data());
    scales[r] = kernels_.to_int16(exact.data(), a_.head_dim, q + r * dim_) * scale;
  }
}

int64_t Attention::place(const Columns& buffer, const Columns& tail, const Tile& tile, int64_t token,
                         const Columns** columns) const {
  int64_t start = this->start(tile.batch);
  *columns = token < start ? &buffer : &tail;
  if (token >= start) token -= start;
  const Columns& c = **columns;
  return tile.batch * c.batch_stride + tile.kv_head * c.head_stride + token * c.token_stride;
}

bool Attention::straddles(const Tile& tile, int64_t token, int64_t count) const {
  const int64_t start = this->start(tile.batch);
  return token < start && start < token + count;
}

const int8_t* Attention::codes_at(const Columns& buffer, const Columns& tail, const Tile& tile, int64_t token) const {
  const Columns* codes;
  const int64_t first = place(buffer, tail, tile, token, &codes);
  return static_cast<const int8_t*>(codes->data) + first;
}

const int8_t* Attention::block(const Columns& buffer, const Columns& tail, const Tile& tile, int64_t token,
                               int64_t count, std::vector<int8_t>* copy, int64_t* stride) const {
  const Columns* codes;
  const int64_t first = place(buffer, tail, tile, token, &codes);
  if (a_.head_dim == dim_ && codes->step == 1 && !straddles(tile, token, count)) {
    *stride = codes->token_stride;
    return static_cast<const int8_t*>(codes->data) + first;
  }
  copy->resize(kBlock * dim_);  // nobody writes behind head_dim: zeros stay there
  for (int64_t k = 0; k < count; ++k) {
    const int64_t at = place(buffer, tail, tile, token + k, &codes);
    const int8_t* from = static_cast<const int8_t*>(codes->data) + at;
    int8_t* out = copy->data() + k * dim_;
    if (codes->step == 1) {
      std::copy_n(from, a_.head_dim, out);
    } else {
      for (int64_t d = 0; d < a_.head_dim; ++d) out[d] = from[d * codes->step];
    }
  }
  *stride = dim_;
  return copy->data();
}

const float* Attention::block_floats(const Columns& buffer, const Columns& tail, const Tile& tile, int64_t token,
                                     int64_t count, std::vector<float>* copy, int64_t* stride) const {
  const Columns* floats;
  const int64_t first = place(buffer, tail, tile, token, &floats);
  if (a_.stored == Number::float32 && a_.head_dim == dim_ && floats->step == 1 && !straddles(tile, token, count)) {
    *stride = floats->token_stride;
    return static_cast<const float*>(floats->data) + first;
  }
  copy->resize(kBlockFloats * dim_);  // nobody writes behind head_dim: zeros stay there
  for (int64_t k = 0; k < count; ++k) {
    const int64_t index = place(buffer, tail, tile, token + k, &floats);
    float* out = copy->data() + k * dim_;
    if (a_.stored != Number::float32 && floats->step == 1) {
      kernels_.widen(static_cast<const uint16_t*>(floats->data) + index, a_.stored == Number::bfloat16, a_.head_dim,
                     out);
    } else {
      load_numbers(floats->data, index, floats->step, a_.stored, out, a_.head_dim);
    }
  }
  *stride = dim_;
  return copy->data();
}

void Attention::merge(Partial& into, const Partial& other) const {
  for (size_t r = 0; r < into.top.size(); ++r) {
    float top = std::max(into.top[r], other.top[r]);
    if (top == kNothingSeen) continue;
    float mine = std::exp2(into.top[r] - top), theirs = std::exp2(other.top[r] - top);
    into.top[r] = top;
    into.sum[r] = into.sum[r] * mine + other.sum[r] * theirs;
    float* out = into.values.data() + r * dim_;
    const float* from = other.values.data() + r * dim_;
    for (int64_t d = 0; d < dim_; ++d) out[d] = out[d] * mine + from[d] * theirs;
  }
}

void Attention::finish(const Tile& tile, const Partial& partial) const {
  std::vector<float> row(a_.head_dim);
  for (int64_t r = 0; r < tile.rows; ++r) {
    float top = partial.top[r];
    float factor = top == kNothingSeen ? 0.0f : a_.value_scale / partial.sum[r];
    if (std::isnan(top)) factor = top;
    for (int64_t d = 0; d < a_.head_dim; ++d) row[d] = partial.values[r * dim_ + d] * factor;
    int64_t head = tile.kv_head * group_ + r % group_, token = tile.first + r / group_;
    int64_t index = (tile.batch * a_.heads + head) * a_.queries + token;
    store_numbers(row.data(), a_.head_dim, a_.out, index * a_.head_dim, a_.type);
  }
}

}  // namespace

const AttentionKernels& attention_kernels() { return *kernels.load(); }

void attend(const AttentionArguments& arguments) {
  if (arguments.batch * arguments.heads * arguments.queries > 0) Attention(arguments).run();
}

void use_attention_kernels([[maybe_unused]] const std::string& instruction_set) {
  const AttentionKernels* chosen = &kAttentionPortable;
#if defined(__x86_64__)
  if (instruction_set == "avx2") chosen = &kAttentionAvx2;
  if (instruction_set == "avx512") chosen = &kAttentionAvx512;
#endif
  kernels.store(chosen);
}

}  // namespace afm
