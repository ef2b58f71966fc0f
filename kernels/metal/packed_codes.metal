// Packed matrices and the vectors that they multiply, as a lane of a simdgroup sees them.
//
// Buffers lie in `device` or, below 8 elements, in `constant` memory: every pointer's type is a parameter.
// All arithmetic is float, whatever the buffers hold.

static constant constexpr const int BALANCED = 0;
static constant constexpr const int AFFINE = 1;
static constant constexpr const int PALETTE = 2;

static constant constexpr const int PER_TENSOR = 0;
static constant constexpr const int PER_ROW = 1;
static constant constexpr const int PER_GROUP = 2;

// Inputs that a lane takes in one step: 1, 2 or 4 words. More would cost occupancy.
static constant constexpr const uint VALUES = 16;

/// What is known of a matrix when a kernel is compiled; ALIGNED: a row has a multiple of VALUES inputs.
template <int BITS_, int MODE_, int GRANULARITY_, int GROUP_, bool ALIGNED_>
struct Format {
  static constant constexpr const int BITS = BITS_;
  static constant constexpr const int MODE = MODE_;
  static constant constexpr const int GRANULARITY = GRANULARITY_;
  static constant constexpr const uint GROUP = GROUP_;
  static constant constexpr const bool ALIGNED = ALIGNED_;
  static constant constexpr const uint PER_WORD = 32 / BITS_;
  static constant constexpr const uint MASK = (1u << BITS_) - 1;
};

/// Codes (out_dims, words) and what turns them into numbers; `scales` are the tables of a palette.
template <typename F, typename Codes, typename Scales, typename Biases>
struct Matrix {
  Codes codes;
  Scales scales;
  Biases biases;
  uint out_dims;
  uint words;
  uint tables;

  uint in_dims() const { return words * F::PER_WORD; }

  /// Where the scale of row `row` and input `k` lies.
  uint scale_index(uint row, uint k) const {
    constexpr uint GROUP = F::GROUP > 0 ? F::GROUP : 1;
    if (F::GRANULARITY == PER_TENSOR) return 0;
    if (F::GRANULARITY == PER_ROW) return row;
    return row * (in_dims() / GROUP) + k / GROUP;
  }

  float scale(uint row, uint k) const { return float(scales[scale_index(row, k)]); }

  /// What is added to scale * code.
  float bias(uint row, uint k) const {
    if (F::MODE == AFFINE) return float(biases[scale_index(row, k)]);
    return -0.5f * float(F::MASK) * scale(row, k);
  }

  /// Where the table of a row begins.
  uint table(uint row) const { return row / (out_dims / tables) * (F::MASK + 1); }

  /// The number that a code stands for.
  float number(uint row, uint k, uint code) const {
    if (F::MODE == PALETTE) return float(scales[table(row) + code]);
    return scale(row, k) * float(code) + bias(row, k);
  }
};

template <typename F, typename Codes, typename Scales, typename Biases>
Matrix<F, Codes, Scales, Biases> make_matrix(
    Codes codes, Scales scales, Biases biases, uint out_dims, uint words, uint tables) {
  Matrix<F, Codes, Scales, Biases> matrix;
  matrix.codes = codes;
  matrix.scales = scales;
  matrix.biases = biases;
  matrix.out_dims = out_dims;
  matrix.words = words;
  matrix.tables = tables;
  return matrix;
}

/// Vectors (rows, in_dims) that go through an RMSNorm.
template <bool NORM_, typename X, typename Norm>
struct Vectors {
  static constant constexpr const bool NORM = NORM_;
  X x;
  Norm norm;
  float eps;

  /// What input `k` is multiplied by on its way in; 1 / rms comes last, from the sum of squares.
  float factor(uint k) const { return NORM ? float(norm[k]) : 1.0f; }

  float inverse_rms(float squares, uint in_dims) const {
    return NORM ? metal::precise::rsqrt(squares / float(in_dims) + eps) : 1.0f;
  }
};

template <bool NORM, typename X, typename Norm>
Vectors<NORM, X, Norm> make_vectors(X x, Norm norm, float eps) {
  Vectors<NORM, X, Norm> vectors;
  vectors.x = x;
  vectors.norm = norm;
  vectors.eps = eps;
  return vectors;
}

/// A lane's share of one step: ROWS vectors' inputs k .. k + VALUES, zeros past the last.
///
/// A code is masked, not shifted, out of its word, so inputs are divided by its place there: exact.
template <typename F, int ROWS>
struct Share {
  float values[ROWS][VALUES];
  float sums[ROWS];

  template <typename V>
  void load(V vectors, uint k, uint in_dims, thread float (&squares)[ROWS]) {
    UNROLL for (int m = 0; m < ROWS; m++) sums[m] = 0.0f;
    UNROLL for (uint i = 0; i < VALUES; i++) {
      const bool inside = F::ALIGNED || k + i < in_dims;
      const float factor = inside ? vectors.factor(k + i) : 0.0f;
      const float place = F::MODE == PALETTE ? 1.0f : float(1u << (F::BITS * (i % F::PER_WORD)));
      UNROLL for (int m = 0; m < ROWS; m++) {
        const float x = inside ? float(vectors.x[m * in_dims + k + i]) : 0.0f;
        if (V::NORM) squares[m] += x * x;
        const float value = x * factor;
        sums[m] += value;
        values[m][i] = value * (1.0f / place);
      }
    }
  }

  /// products[m] = sum of code * input over one row of codes; of a palette's numbers * input.
  template <typename M>
  void multiply(M matrix, uint row, uint k, thread float (&products)[ROWS]) const {
    const uint first = k / F::PER_WORD;
    const uint table = F::MODE == PALETTE ? matrix.table(row) : 0;
    UNROLL for (int m = 0; m < ROWS; m++) products[m] = 0.0f;
    UNROLL for (uint w = 0; w < VALUES / F::PER_WORD; w++) {
      const bool inside = F::ALIGNED || first + w < matrix.words;
      const uint word = inside ? matrix.codes[row * matrix.words + first + w] : 0;
      UNROLL for (uint i = 0; i < F::PER_WORD; i++) {
        const float code = F::MODE == PALETTE
            ? float(matrix.scales[table + ((word >> (F::BITS * i)) & F::MASK)])
            : float(word & (F::MASK << (F::BITS * i)));
        UNROLL for (int m = 0; m < ROWS; m++) {
          products[m] += code * values[m][w * F::PER_WORD + i];
        }
      }
    }
  }
};

/// What a lane adds to the products of ROWS vectors with COUNT rows; their `simd_sum` is the product.
///
/// PAIR: the second half of the rows are those of `second`, a matrix of the same format.
template <typename F, int ROWS, int COUNT, bool PAIR, typename V, typename M>
void lane_products(
    V vectors,
    M first,
    M second,
    const thread uint (&rows)[COUNT],
    uint lane,
    thread float (&sums)[ROWS][COUNT]) {
  const uint in_dims = first.in_dims();
  constexpr bool by_group = F::MODE != PALETTE && F::GRANULARITY == PER_GROUP;
  float totals[ROWS], squares[ROWS];
  UNROLL for (int m = 0; m < ROWS; m++) {
    totals[m] = squares[m] = 0.0f;
    UNROLL for (int r = 0; r < COUNT; r++) sums[m][r] = 0.0f;
  }
  for (uint k = lane * VALUES; k < in_dims; k += LANES * VALUES) {
    Share<F, ROWS> share;
    share.load(vectors, k, in_dims, squares);
    UNROLL for (int m = 0; m < ROWS; m++) totals[m] += share.sums[m];
    UNROLL for (int r = 0; r < COUNT; r++) {
      const M matrix = PAIR && r >= COUNT / 2 ? second : first;
      float products[ROWS];
      share.multiply(matrix, rows[r], k, products);
      const float scale = by_group ? matrix.scale(rows[r], k) : 1.0f;
      const float bias = by_group ? matrix.bias(rows[r], k) : 0.0f;
      UNROLL for (int m = 0; m < ROWS; m++) {
        sums[m][r] += by_group ? scale * products[m] + bias * share.sums[m] : products[m];
      }
    }
  }
  UNROLL for (int m = 0; m < ROWS; m++) {
    const float norm = V::NORM ? vectors.inverse_rms(simd_sum(squares[m]), in_dims) : 1.0f;
    UNROLL for (int r = 0; r < COUNT; r++) {
      const M matrix = PAIR && r >= COUNT / 2 ? second : first;
      if (F::MODE != PALETTE && !by_group) {
        sums[m][r] = matrix.scale(rows[r], 0) * sums[m][r] + matrix.bias(rows[r], 0) * totals[m];
      }
      sums[m][r] *= norm;
    }
  }
}

/// The numbers of one row's codes k .. k + VALUES, zeros past the last.
template <typename F, typename Codes, typename Scales, typename Biases>
void unpack(
    Matrix<F, Codes, Scales, Biases> matrix, uint row, uint k, thread float (&numbers)[VALUES]) {
  const uint first = k / F::PER_WORD;
  const bool scaled = F::MODE != PALETTE && k < matrix.in_dims();
  const uint table = F::MODE == PALETTE ? matrix.table(row) : 0;
  const float scale = scaled ? matrix.scale(row, k) : 0.0f;
  const float bias = scaled ? matrix.bias(row, k) : 0.0f;
  UNROLL for (uint w = 0; w < VALUES / F::PER_WORD; w++) {
    const bool inside = first + w < matrix.words;
    const uint word = inside ? matrix.codes[row * matrix.words + first + w] : 0;
    UNROLL for (uint i = 0; i < F::PER_WORD; i++) {
      const uint code = (word >> (F::BITS * i)) & F::MASK;
      const float number = F::MODE == PALETTE ? float(matrix.scales[table + code])
                                              : scale * float(code) + bias;
      numbers[w * F::PER_WORD + i] = inside ? number : 0.0f;
    }
  }
}

// Precise, since the exponential of what overflows must be infinity, and nothing else: one per output costs little.
inline float silu(float x) { return x / (1.0f + metal::precise::exp(-x)); }
