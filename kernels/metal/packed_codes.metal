// Packed matrices, as a lane of a simdgroup sees them. All arithmetic is float, whatever the buffers hold.

static constant constexpr const int BALANCED = 0;
static constant constexpr const int AFFINE = 1;
static constant constexpr const int PALETTE = 2;

static constant constexpr const int PER_TENSOR = 0;
static constant constexpr const int PER_ROW = 1;
static constant constexpr const int PER_GROUP = 2;

// Inputs that a lane takes in one step: 1, 2 or 4 words. More would cost occupancy.
static constant constexpr const uint VALUES = 16;

// What is known of a matrix when a kernel is compiled are its BITS, MODE, GRANULARITY, GROUP, and ALIGNED: that a row
// has a multiple of VALUES inputs.
//
// Codes become floats without a conversion, which costs as much as four other operations. Codes `i` and
// `i + PAIRS` of a word lie at the same bits of its two halves. Where all bits of the exponents are set, a mask
// leaves both codes, and those bits of the exponents with which a half is 2^(10 - place) + code.
static constant constexpr const uint PER_WORD = 32 / BITS;
static constant constexpr const uint PAIRS = PER_WORD / 2;
static constant constexpr const uint WORDS = VALUES / PER_WORD;  // of a lane's step
static constant constexpr const uint MASK = (1u << BITS) - 1;
static constant constexpr const uint EXPONENTS = 0x7c007c00;
static constant constexpr const uint DIGITS = 10;  // of a half, below its exponent
static constant constexpr const uint SHIFT = 6;

/// True if pair `i` lies above the digits of a half, so that its word is shifted by SHIFT.
constexpr bool is_high(uint i) { return BITS * (i + 1) > DIGITS; }

/// The lowest bit of pair `i` in the halves.
constexpr uint place(uint i) { return BITS * i - (is_high(i) ? SHIFT : 0); }

constexpr uint mask(uint i) {
  return ((MASK << place(i)) | ((15 + DIGITS - place(i)) << DIGITS)) * 0x10001u;
}

/// What the halves of pair `i` are above its codes, or above a balanced matrix's levels.
#if MODE == BALANCED
constexpr float offset(uint i) { return float(1u << (DIGITS - place(i))) + 0.5f * float(MASK); }
#else
constexpr float offset(uint i) { return float(1u << (DIGITS - place(i))); }
#endif

/// Codes `i` and `i + PAIRS` of a word, each with `offset(i)` added.
inline half2 pair_of(uint word, uint i) {
  const uint halves = (is_high(i) ? word >> SHIFT : word) | EXPONENTS;
  return as_type<half2>(halves & mask(i));
}

/// Codes (out_dims, words) and what turns them into numbers; `scales` are the tables of a palette.
template <typename Codes, typename Scales, typename Biases>
struct Matrix {
  Codes codes;
  Scales scales;
  uint words;
#if MODE == AFFINE
  Biases biases;
#endif
#if MODE == PALETTE
  uint table_rows;  // that share a table
#endif

  uint in_dims() const { return words * PER_WORD; }

  /// Word `at` of a row of codes, 0 past its last.
#if ALIGNED
  uint word(uint row, uint at) const { return codes[row * words + at]; }
#else
  uint word(uint row, uint at) const { return at < words ? codes[row * words + at] : 0; }
#endif

#if MODE == PALETTE
  /// Where the table of a row begins.
  uint table(uint row) const { return row / table_rows * (MASK + 1); }

  /// The numbers of codes `i` and `i + PAIRS` of a word in a table.
  float2 pair(uint word, uint i, uint table) const {
    const uint low = (word >> (BITS * i)) & MASK;
    const uint high = (word >> (BITS * (i + PAIRS))) & MASK;
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
  uint scale_index(uint row, uint k) const { return row * (in_dims() / GROUP) + k / GROUP; }
#endif
#endif

  float scale(uint row, uint k) const { return float(scales[scale_index(row, k)]); }

  /// What is added to scale * code.
#if MODE == AFFINE
  float bias(uint row, uint k) const { return float(biases[scale_index(row, k)]); }
#else
  float bias(uint row, uint k) const { return -0.5f * float(MASK) * scale(row, k); }
#endif

  /// Codes `i` and `i + PAIRS` of a word, with `offset(i)` added.
  float2 pair(uint word, uint i, uint) const {
    const half2 codes = pair_of(word, i);
    return float2(float(codes.x), float(codes.y));
  }

  /// The same without `offset(i)`: codes of an affine matrix, levels of a balanced one.
  float2 exact_pair(uint word, uint i, uint) const { return pair(word, i, 0) - offset(i); }

  /// The number that a code stands for.
  float number(uint row, uint k, uint code) const { return scale(row, k) * float(code) + bias(row, k); }

  uint table(uint) const { return 0; }
#endif
};

template <typename Codes, typename Scales, typename Biases>
Matrix<Codes, Scales, Biases> make_matrix(Codes codes, Scales scales, Biases biases, uint words, uint table_rows) {
#if MODE == PALETTE
  return {codes, scales, words, table_rows};
#else
#if MODE == AFFINE
  return {codes, scales, words, biases};
#else
  return {codes, scales, words};
#endif
#endif
}

// Precise, since the exponential of what overflows must be infinity, and nothing else: one per output costs little.
inline float silu(float x) { return x / (1.0f + metal::precise::exp(-x)); }
