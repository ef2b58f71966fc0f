// Products with the two matrices of an adapter; part of `isa_common.h`, and compiled like it.
//
// Each number is summed in one order, by k or by j, whatever else is computed: a vector's results don't
// depend on the batch that it is in.

namespace afm {
namespace {

// ---- A

// Four pending sums hide an addition's latency, and reads of four rows the memory's: asking ahead gained nothing.
constexpr int kShrinkRows = 4;

// hidden of kShrinkRows rows and VECTORS vectors; a row is `count` numbers from rows[r] on.
template <Number TYPE, int VECTORS>
inline void shrink_tile(const void* numbers, const int64_t* rows, int64_t count, const float* const* x, float* out) {
  constexpr int kSums = kShrinkRows * VECTORS, kRound = (kSums + Isa::kLanes - 1) / Isa::kLanes * Isa::kLanes;
  Isa::Lanes sums[kRound];
  for (auto& sum : sums) sum = Isa::zero();
  int64_t k = 0;
  for (; k + Isa::kLanes <= count; k += Isa::kLanes) {
    Isa::Lanes v[VECTORS];
#pragma GCC unroll 4
    for (int i = 0; i < VECTORS; ++i) v[i] = Isa::from_floats(x[i] + k);
#pragma GCC unroll 4
    for (int r = 0; r < kShrinkRows; ++r) {
      const Isa::Lanes a = lanes_at<TYPE>(numbers, rows[r] + k);
#pragma GCC unroll 4
      for (int i = 0; i < VECTORS; ++i) {
        sums[i * kShrinkRows + r] = Isa::multiply_add(a, v[i], sums[i * kShrinkRows + r]);
      }
    }
  }
  if (k < count) {
    float rest[kShrinkRows + VECTORS][Isa::kLanes] = {};
    for (int r = 0; r < kShrinkRows; ++r) load({numbers, TYPE}, rows[r] + k, count - k, rest[r]);
    for (int i = 0; i < VECTORS; ++i) std::memcpy(rest[kShrinkRows + i], x[i] + k, (count - k) * sizeof(float));
    for (int s = 0; s < kSums; ++s) {
      sums[s] = Isa::multiply_add(Isa::from_floats(rest[s % kShrinkRows]),
                                  Isa::from_floats(rest[kShrinkRows + s / kShrinkRows]), sums[s]);
    }
  }
  alignas(64) float totals[kRound];
  for (int s = 0; s < kRound; s += Isa::kLanes) Isa::reduce(sums + s, totals + s);
  std::memcpy(out, totals, kSums * sizeof(float));
}

template <Number TYPE, int VECTORS>
inline void shrink_vectors(const ShrinkJob& job, const int32_t* vectors) {
  const float* x[VECTORS];
  for (int i = 0; i < VECTORS; ++i) x[i] = job.x + vectors[i] * job.x_stride;
  float out[kShrinkRows * VECTORS];
  for (int64_t row = 0; row < job.rows; row += kShrinkRows) {
    const int64_t count = smaller(kShrinkRows, job.rows - row);
    int64_t rows[kShrinkRows];  // rows past the last repeat it
    for (int64_t r = 0; r < kShrinkRows; ++r) rows[r] = job.start + (row + smaller(r, count - 1)) * job.cols;
    shrink_tile<TYPE, VECTORS>(job.numbers.data, rows, job.cols, x, out);
    for (int i = 0; i < VECTORS; ++i) {
      float* hidden = job.hidden + vectors[i] * job.hidden_stride + row;
      for (int64_t r = 0; r < count; ++r) hidden[r] = job.scale * out[i * kShrinkRows + r];
    }
  }
}

// Many vectors: numbers of A become floats once for all of them, as many columns at a time so that these and the vectors'
// stay in the first-level cache. Sums wait in memory meanwhile, and grow in the same order.
constexpr int kManyVectors = 16;
constexpr int64_t kManyColumns = 256;
constexpr int kManyRows = Isa::kShrinkVectors == 4 ? 8 : 4;  // times two vectors: the same number of sums

// `count` numbers as floats, zeros behind up to a whole register.
template <Number TYPE>
inline void widen(const void* numbers, int64_t start, int64_t count, float* out) {
  int64_t k = 0;
  for (; k + Isa::kLanes <= count; k += Isa::kLanes) Isa::store(out + k, lanes_at<TYPE>(numbers, start + k));
  if (k == count) return;
  for (int64_t i = k; i < k + Isa::kLanes; ++i) out[i] = 0;
  load({numbers, TYPE}, start + k, count - k, out + k);
}

// sums[i * kManyRows + r] += a[r] * x[i] over `count` columns
inline void shrink_columns(const float* a, int64_t count, const float* const* x, Isa::Lanes* sums) {
  Isa::Lanes own[2 * kManyRows];
#pragma GCC unroll 16
  for (int s = 0; s < 2 * kManyRows; ++s) own[s] = sums[s];
  for (int64_t k = 0; k < count; k += Isa::kLanes) {
    const Isa::Lanes first = Isa::from_floats(x[0] + k), second = Isa::from_floats(x[1] + k);
#pragma GCC unroll 8
    for (int r = 0; r < kManyRows; ++r) {
      const Isa::Lanes row = Isa::from_floats(a + r * kManyColumns + k);
      own[r] = Isa::multiply_add(row, first, own[r]);
      own[kManyRows + r] = Isa::multiply_add(row, second, own[kManyRows + r]);
    }
  }
#pragma GCC unroll 16
  for (int s = 0; s < 2 * kManyRows; ++s) sums[s] = own[s];
}

// Columns [k, k + count) of all vectors, two by two; an odd one's partner is itself.
inline void shrink_chunk(const ShrinkJob& job, const int32_t* vectors, int64_t n, const float* a, int64_t k,
                         int64_t count, Isa::Lanes* sums) {
  const int64_t whole = count / Isa::kLanes * Isa::kLanes;
  for (int64_t i = 0; i < n; i += 2, sums += 2 * kManyRows) {
    const float* x[2];
    for (int64_t v = 0; v < 2; ++v) x[v] = job.x + vectors[smaller(i + v, n - 1)] * job.x_stride + k;
    shrink_columns(a, whole, x, sums);
    if (whole == count) continue;
    float rest[2][Isa::kLanes] = {};
    for (int v = 0; v < 2; ++v) std::memcpy(rest[v], x[v] + whole, (count - whole) * sizeof(float));
    const float* last[2] = {rest[0], rest[1]};
    shrink_columns(a + whole, Isa::kLanes, last, sums);
  }
}

// For up to kManyVectors vectors.
template <Number TYPE>
void shrink_many(const ShrinkJob& job, const int32_t* vectors, int64_t n) {
  alignas(64) float a[kManyRows * kManyColumns];
  Isa::Lanes sums[kManyVectors * kManyRows];
  alignas(64) float out[(2 * kManyRows + Isa::kLanes - 1) / Isa::kLanes * Isa::kLanes];
  for (int64_t row = 0; row < job.rows; row += kManyRows) {
    const int64_t rows = smaller(kManyRows, job.rows - row);
    for (auto& sum : sums) sum = Isa::zero();
    for (int64_t k = 0; k < job.cols; k += kManyColumns) {
      const int64_t count = smaller(kManyColumns, job.cols - k);
      for (int64_t r = 0; r < kManyRows; ++r) {  // rows past the last repeat it
        const int64_t from = job.start + (row + smaller(r, rows - 1)) * job.cols + k;
        widen<TYPE>(job.numbers.data, from, count, a + r * kManyColumns);
      }
      shrink_chunk(job, vectors, n, a, k, count, sums);
    }
    for (int64_t i = 0; i < n; i += 2) {
      for (int s = 0; s < 2 * kManyRows; s += Isa::kLanes) Isa::reduce(sums + i * kManyRows + s, out + s);
      for (int64_t v = 0; v < smaller(2, n - i); ++v) {
        float* hidden = job.hidden + vectors[i + v] * job.hidden_stride + row;
        for (int64_t r = 0; r < rows; ++r) hidden[r] = job.scale * out[v * kManyRows + r];
      }
    }
  }
}

template <Number TYPE>
void typed_shrink(const ShrinkJob& job) {
  int64_t i = 0;
  for (; i + kManyVectors / 2 <= job.count; i += kManyVectors) {
    shrink_many<TYPE>(job, job.vectors + i, smaller(kManyVectors, job.count - i));
  }
  if (i >= job.count) return;
  if constexpr (Isa::kShrinkVectors == 4) {
    for (; i + 4 <= job.count; i += 4) shrink_vectors<TYPE, 4>(job, job.vectors + i);
  }
  for (; i + 2 <= job.count; i += 2) shrink_vectors<TYPE, 2>(job, job.vectors + i);
  for (; i < job.count; ++i) shrink_vectors<TYPE, 1>(job, job.vectors + i);
}

void shrink(const ShrinkJob& job) {
  if (job.numbers.type == Number::float32) return typed_shrink<Number::float32>(job);
  if (job.numbers.type == Number::bfloat16) return typed_shrink<Number::bfloat16>(job);
  typed_shrink<Number::float16>(job);
}

// ---- B

// Pending sums, as in `shrink`: one vector alone takes several blocks at once for that.
constexpr int kExpandParts = static_cast<int>(kBlock) / Isa::kLanes;
constexpr int kExpandBlocks = kExpandParts < 4 ? 4 / kExpandParts : 1;

// Rows [begin, end) of the BLOCKS blocks whose numbers start at `start`, for VECTORS vectors.
template <Number TYPE, int VECTORS, int BLOCKS>
inline void expand_tile(const ExpandJob& job, int64_t start, const float* const* hidden, float* const* out,
                        int64_t begin, int64_t end) {
  constexpr int kParts = BLOCKS * kExpandParts;
  Isa::Lanes sums[VECTORS][kParts];
  for (auto& vector : sums) {
    for (auto& part : vector) part = Isa::zero();
  }
  for (int64_t j = 0; j < job.rank; ++j) {
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
      const int64_t block = p / kExpandParts, part = p % kExpandParts;
      const Isa::Lanes b =
          lanes_at<TYPE>(job.numbers.data, start + (block * job.rank + j) * kBlock + part * Isa::kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < VECTORS; ++i) sums[i][p] = Isa::multiply_add(Isa::set1(hidden[i][j]), b, sums[i][p]);
    }
  }
  for (int i = 0; i < VECTORS; ++i) {
    if (end - begin == BLOCKS * kBlock) {
      for (int p = 0; p < kParts; ++p) {
        float* to = out[i] + p * Isa::kLanes;
        Isa::store(to, Isa::add(Isa::from_floats(to), sums[i][p]));
      }
      continue;
    }
    alignas(64) float all[BLOCKS * kBlock];
    for (int p = 0; p < kParts; ++p) Isa::store(all + p * Isa::kLanes, sums[i][p]);
    for (int64_t n = begin; n < end; ++n) out[i][n - begin] += all[n];
  }
}

template <Number TYPE, int VECTORS, int BLOCKS>
inline void expand_vectors(const ExpandJob& job, int64_t block, const int32_t* vectors) {
  const int64_t first = block * kBlock, start = job.start + first * job.rank;
  const int64_t begin = job.begin > first ? job.begin - first : 0;
  const float* hidden[VECTORS];
  float* out[VECTORS];
  for (int i = 0; i < VECTORS; ++i) {
    hidden[i] = job.hidden + vectors[i] * job.hidden_stride;
    out[i] = job.out + vectors[i] * job.out_stride + (first + begin - job.begin);
  }
  expand_tile<TYPE, VECTORS, BLOCKS>(job, start, hidden, out, begin, smaller(BLOCKS * kBlock, job.end - first));
}

// Many vectors: numbers of B become floats once for all of them, kManyBlocks blocks at a time, as far as they fit into
// the first-level cache.
constexpr int64_t kManyRank = 64;
constexpr int kManyBlocks = Isa::kExpandVectors == 8 ? kExpandBlocks : 1;

template <Number TYPE>
int64_t expand_many(const ExpandJob& job, int64_t block, int64_t blocks) {
  alignas(64) float b[kManyBlocks * kManyRank * kBlock];
  for (; block + kManyBlocks <= blocks; block += kManyBlocks) {
    const int64_t numbers = job.rank * kBlock;
    widen<TYPE>(job.numbers.data, job.start + block * numbers, kManyBlocks * numbers, b);
    ExpandJob of_floats = job;
    of_floats.numbers = {b, Number::float32};
    of_floats.start = -block * numbers;
    int64_t i = 0;
    for (; i + 4 <= job.count; i += 4) {
      expand_vectors<Number::float32, 4, kManyBlocks>(of_floats, block, job.vectors + i);
    }
    for (; i < job.count; ++i) expand_vectors<Number::float32, 1, kManyBlocks>(of_floats, block, job.vectors + i);
  }
  return block;
}

template <Number TYPE>
void typed_expand(const ExpandJob& job) {
  const int64_t blocks = (job.end + kBlock - 1) / kBlock;
  int64_t block = job.begin / kBlock;
  if (job.count >= kManyVectors && job.rank <= kManyRank) block = expand_many<TYPE>(job, block, blocks);
  if (job.count == 1) {
    for (; block + kExpandBlocks <= blocks; block += kExpandBlocks) {
      expand_vectors<TYPE, 1, kExpandBlocks>(job, block, job.vectors);
    }
  }
  for (; block < blocks; ++block) {
    int64_t i = 0;
    for (; i + Isa::kExpandVectors <= job.count; i += Isa::kExpandVectors) {
      expand_vectors<TYPE, Isa::kExpandVectors, 1>(job, block, job.vectors + i);
    }
    for (; i + 2 <= job.count; i += 2) expand_vectors<TYPE, 2, 1>(job, block, job.vectors + i);
    for (; i < job.count; ++i) expand_vectors<TYPE, 1, 1>(job, block, job.vectors + i);
  }
}

void expand(const ExpandJob& job) {
  if (job.numbers.type == Number::float32) return typed_expand<Number::float32>(job);
  if (job.numbers.type == Number::bfloat16) return typed_expand<Number::bfloat16>(job);
  typed_expand<Number::float16>(job);
}

}  // namespace
}  // namespace afm
