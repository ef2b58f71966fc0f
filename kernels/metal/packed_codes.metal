// Packed matrices and the vectors that they multiply, as a lane of a simdgroup sees them.
//
// Buffers are in `device` or, below 8 elements, in `constant` memory: every pointer's type is a parameter.
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
///
/// Codes become floats without a conversion, which costs as much as four other operations. Codes `i` and
/// `i + PAIRS` of a word lie at the same bits of its two halves. Where all bits of the exponents are set, a mask
/// leaves both codes, and those bits of the exponents with which a half is 2^(10 - place) + code.
template <int BITS_, int MODE_, int GRANULARITY_, int GROUP_, bool ALIGNED_>
struct Format {
  static constant constexpr const int BITS = BITS_;
  static constant constexpr const int MODE = MODE_;
  static constant constexpr const int GRANULARITY = GRANULARITY_;
  static constant constexpr const uint GROUP = GROUP_;
  static constant constexpr const bool ALIGNED = ALIGNED_;
  static constant constexpr const uint PER_WORD = 32 / BITS_;
  static constant constexpr const uint PAIRS = PER_WORD / 2;
  static constant constexpr const uint WORDS = VALUES / PER_WORD;  // of a lane's step
  static constant constexpr const uint MASK = (1u << BITS_) - 1;
  static constant constexpr const uint EXPONENTS = 0x7c007c00;
  static constant constexpr const uint DIGITS = 10;  // of a half, below its exponent
  static constant constexpr const uint SHIFT = 6;

  /// True if pair `i` lies above the digits of a half, so that its word is shifted by SHIFT.
  static constexpr bool is_high(uint i) { return BITS * (i + 1) > DIGITS; }

  /// The lowest bit of pair `i` in the halves.
  static constexpr uint place(uint i) { return BITS * i - (is_high(i) ? SHIFT : 0); }

  static constexpr uint mask(uint i) {
    return ((MASK << place(i)) | ((15 + DIGITS - place(i)) << DIGITS)) * 0x10001u;
  }

  /// What the halves of pair `i` are above its codes, or above a balanced matrix's levels.
  static constexpr float offset(uint i) {
    return float(1u << (DIGITS - place(i))) + (MODE == BALANCED ? 0.5f * float(MASK) : 0.0f);
  }

  /// Codes `i` and `i + PAIRS` of a word, each with `offset(i)` added.
  static half2 pair(uint word, uint i) {
    const uint halves = (is_high(i) ? word >> SHIFT : word) | EXPONENTS;
    return as_type<half2>(halves & mask(i));
  }
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

  /// Word `at` of a row of codes, 0 past its last.
#if ALIGNED
  uint word(uint row, uint at) const { return codes[row * words + at]; }
#else
  uint word(uint row, uint at) const { return at < words ? codes[row * words + at] : 0; }
#endif

#if MODE == PALETTE
  /// Where the table of a row begins.
  uint table(uint row) const { return row / (out_dims / tables) * (F::MASK + 1); }

  /// The numbers of codes `i` and `i + PAIRS` of a word in a table.
  float2 pair(uint word, uint i, uint table) const {
    const uint low = (word >> (F::BITS * i)) & F::MASK;
    const uint high = (word >> (F::BITS * (i + F::PAIRS))) & F::MASK;
    return float2(float(scales[table + low]), float(scales[table + high]));
  }

  float2 exact_pair(uint word, uint i, uint table) const { return pair(word, i, table); }

  /// The number that a code stands for.
  float number(uint row, uint, uint code) const { return float(scales[table(row) + code]); }

  // Of other matrices.
  float scale(uint, uint) const { return 1.0f; }
  float bias(uint, uint) const { return 0.0f; }
#else
  /// Where the scale of row `row` and input `k` lies.
#if GRANULARITY == PER_TENSOR
  uint scale_index(uint, uint) const { return 0; }
#else
#if GRANULARITY == PER_ROW
  uint scale_index(uint row, uint) const { return row; }
#else
  uint scale_index(uint row, uint k) const { return row * (in_dims() / F::GROUP) + k / F::GROUP; }
#endif
#endif

  float scale(uint row, uint k) const { return float(scales[scale_index(row, k)]); }

  /// What is added to scale * code.
#if MODE == AFFINE
  float bias(uint row, uint k) const { return float(biases[scale_index(row, k)]); }
#else
  float bias(uint row, uint k) const { return -0.5f * float(F::MASK) * scale(row, k); }
#endif

  /// Codes `i` and `i + PAIRS` of a word, with `offset(i)` added.
  float2 pair(uint word, uint i, uint) const {
    const half2 codes = F::pair(word, i);
    return float2(float(codes.x), float(codes.y));
  }

  /// The same without `offset(i)`: codes of an affine matrix, levels of a balanced one.
  float2 exact_pair(uint word, uint i, uint) const { return pair(word, i, 0) - F::offset(i); }

  /// The number that a code stands for.
  float number(uint row, uint k, uint code) const { return scale(row, k) * float(code) + bias(row, k); }

  uint table(uint) const { return 0; }
#endif
};

template <typename F, typename Codes, typename Scales, typename Biases>
Matrix<F, Codes, Scales, Biases> make_matrix(
    Codes codes, Scales scales, Biases biases, uint out_dims, uint words, uint tables) {
  return {codes, scales, biases, out_dims, words, tables};
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
    // Where the squares overflow, 1 / rms would make zeros of all numbers; NaN is seen in the logits.
    if (NORM && squares == INFINITY) return NAN;
    return NORM ? metal::precise::rsqrt(squares / float(in_dims) + eps) : 1.0f;
  }
};

template <bool NORM, typename X, typename Norm>
Vectors<NORM, X, Norm> make_vectors(X x, Norm norm, float eps) {
  return {x, norm, eps};
}

/// What a lane has added up of the products of up to MOST vectors with COUNT rows of codes.
template <typename F, int MOST, int COUNT>
struct Products {

#if MODE != PALETTE && GRANULARITY == PER_GROUP
  static constant constexpr const bool SCALED = true;  // numbers that are added up
#else
  static constant constexpr const bool SCALED = false;
#endif

  float sums[MOST][COUNT];  // of scaled numbers, with scales per group; else of levels or codes
#if MODE == AFFINE
  float totals[MOST];  // of inputs
#endif
  float squares[MOST];

  void clear() {
    UNROLL for (int m = 0; m < MOST; m++) {
      squares[m] = 0.0f;
#if MODE == AFFINE
      totals[m] = 0.0f;
#endif
      UNROLL for (int r = 0; r < COUNT; r++) sums[m][r] = 0.0f;
    }
  }

  /// Add inputs k .. k + VALUES of USED vectors, zeros past the last. PAIR: the second half of the rows is
  /// `second`'s.
  template <int USED, bool PAIR, typename V, typename M>
  void add(V vectors, M first, M second, const thread uint (&rows)[COUNT], uint k) {
    // Offsets of codes are taken off every code, or off the sum of a step, which rounds less than inputs of 16 bits
    // have been. For more than two vectors, that is no less work.
    constexpr bool EXACT = sizeof(vectors.x[0]) > 2 || USED > 2;
    uint words[COUNT][F::WORDS];
    const uint start = k / F::PER_WORD;
    UNROLL for (int r = 0; r < COUNT; r++) {
      const M matrix = PAIR && r >= COUNT / 2 ? second : first;
      UNROLL for (uint w = 0; w < F::WORDS; w++) words[r][w] = matrix.word(rows[r], start + w);
    }
    float products[USED][COUNT], offsets[USED];
    UNROLL for (int m = 0; m < USED; m++) {
      offsets[m] = 0.0f;
      UNROLL for (int r = 0; r < COUNT; r++) products[m][r] = SCALED ? 0.0f : sums[m][r];
    }
#if MODE == AFFINE
    float step[USED];
    UNROLL for (int m = 0; m < USED; m++) step[m] = 0.0f;
#endif
    UNROLL for (uint w = 0; w < F::WORDS; w++) {
      UNROLL for (uint i = 0; i < F::PAIRS; i++) {
        float inputs[USED][2];
        load(vectors, k + w * F::PER_WORD + i, first.in_dims(), inputs);
        UNROLL for (int m = 0; m < USED; m++) {
#if MODE == AFFINE
          step[m] += inputs[m][0] + inputs[m][1];
#endif
#if MODE != PALETTE
          if (!EXACT) offsets[m] += F::offset(i) * (inputs[m][0] + inputs[m][1]);
#endif
        }
        UNROLL for (int r = 0; r < COUNT; r++) {
          const M matrix = PAIR && r >= COUNT / 2 ? second : first;
          const uint table = matrix.table(rows[r]);
          const float2 numbers =
              EXACT ? matrix.exact_pair(words[r][w], i, table) : matrix.pair(words[r][w], i, table);
          UNROLL for (int m = 0; m < USED; m++) {
            products[m][r] += numbers.x * inputs[m][0];
            products[m][r] += numbers.y * inputs[m][1];
          }
        }
      }
    }
#if MODE != PALETTE && GRANULARITY == PER_GROUP
    UNROLL for (int r = 0; r < COUNT; r++) {
      const M matrix = PAIR && r >= COUNT / 2 ? second : first;
      const float scale = matrix.scale(rows[r], k);
      UNROLL for (int m = 0; m < USED; m++) {
        sums[m][r] += scale * (products[m][r] - offsets[m]);
#if MODE == AFFINE
        sums[m][r] += matrix.bias(rows[r], k) * step[m];
#endif
      }
    }
#else
    UNROLL for (int m = 0; m < USED; m++) {
      UNROLL for (int r = 0; r < COUNT; r++) sums[m][r] = products[m][r] - offsets[m];
#if MODE == AFFINE
      totals[m] += step[m];
#endif
    }
#endif
  }

  /// The product of vector m with row `row`, from the sum over all lanes of its `sums`.
  template <typename M>
  float scaled(M matrix, uint row, int m, float sum) const {
#if MODE == PALETTE || GRANULARITY == PER_GROUP
    return sum;
#else
#if MODE == AFFINE
    return matrix.scale(row, 0) * sum + matrix.bias(row, 0) * simd_sum(totals[m]);
#else
    return matrix.scale(row, 0) * sum;
#endif
#endif
  }

  /// Inputs `k` and `k + PAIRS` of every vector, multiplied with the norm's weight.
  template <typename V, int USED>
  void load(V vectors, uint k, uint in_dims, thread float (&inputs)[USED][2]) {
    UNROLL for (uint e = 0; e < 2; e++) {
      const uint place = k + e * F::PAIRS;
#if ALIGNED
      constexpr bool inside = true;
#else
      const bool inside = place < in_dims;
#endif
      const float factor = inside ? vectors.factor(place) : 0.0f;
      UNROLL for (int m = 0; m < USED; m++) {
        // A row's address first: the rest of the index is then a constant of the load.
        const float x = inside ? float((vectors.x + m * in_dims + k)[e * F::PAIRS]) : 0.0f;
        if (V::NORM) squares[m] += x * x;
        inputs[m][e] = x * factor;
      }
    }
  }
};

/// Inputs `first`, `first + stride`, ... of a row, in steps of all lanes.
struct Steps {
  uint first;
  uint stride;
};

/// Of `n_parts` simdgroups that share the inputs of their rows.
inline Steps steps_of(uint lane, uint part, uint n_parts) {
  return {(part * LANES + lane) * VALUES, n_parts * LANES * VALUES};
}

/// A lane's share of the products of USED vectors with COUNT rows.
///
/// PAIR: the second half of the rows is `second`'s, a matrix of the same format.
template <int USED, typename F, bool PAIR, typename V, typename M, int MOST, int COUNT>
void multiply(
    V vectors,
    M first,
    M second,
    const thread uint (&rows)[COUNT],
    Steps steps,
    thread Products<F, MOST, COUNT>& products) {
  products.clear();
  const uint in_dims = first.in_dims();
  for (uint k = steps.first; k < in_dims; k += steps.stride) {
    products.template add<USED, PAIR>(vectors, first, second, rows, k);
  }
}

/// The same for `used` vectors, 2 to MOST: a loop for each number, so that one kernel has them all.
template <typename F, bool PAIR, typename V, typename M, int MOST, int COUNT>
void multiply_some(
    V vectors,
    uint used,
    M first,
    M second,
    const thread uint (&rows)[COUNT],
    Steps steps,
    thread Products<F, MOST, COUNT>& products) {
  switch (used) {
    case 2: multiply<2, F, PAIR>(vectors, first, second, rows, steps, products); break;
#if ROWS > 3
    case 3: multiply<3, F, PAIR>(vectors, first, second, rows, steps, products); break;
    case 4: multiply<4, F, PAIR>(vectors, first, second, rows, steps, products); break;
    case 5: multiply<5, F, PAIR>(vectors, first, second, rows, steps, products); break;
#endif
    default: multiply<MOST, F, PAIR>(vectors, first, second, rows, steps, products);
  }
}

/// The sum over a simdgroup of number r of COUNT, a power of two, in lanes r * LANES / COUNT and up.
///
/// In each round a lane hands on what it won't need: 41 cycles for eight numbers, where `simd_sum` takes 116.
template <int COUNT>
float sum_of_lane(const thread float (&numbers)[COUNT], uint lane) {
  float sums[COUNT];
  UNROLL for (uint i = 0; i < COUNT; i++) sums[i] = numbers[i];
  UNROLL for (uint round = 0; round < 5; round++) {
    const uint distance = LANES >> (round + 1);
    const uint kept = COUNT >> (round + 1);
    if (kept == 0) sums[0] += simd_shuffle_xor(sums[0], distance);
    UNROLL for (uint i = 0; i < COUNT; i++) {
      if (i >= kept) continue;
      const bool upper = (lane & distance) > 0;
      const float own = upper ? sums[i + kept] : sums[i];
      sums[i] = own + simd_shuffle_xor(upper ? sums[i] : sums[i + kept], distance);
    }
  }
  return sums[0];
}

// Precise, since the exponential of what overflows must be infinity, and nothing else: one per output costs little.
inline float silu(float x) { return x / (1.0f + metal::precise::exp(-x)); }
