// Products of up to ROWS vectors with a simdgroup's CODE_ROWS rows of codes. With PAIR, the second half of the rows is
// `second`'s, a matrix of the same format; without, `first` is both.

#if PAIR
#define MATRIX(r) (r >= CODE_ROWS / 2 ? second : first)
#else
#define MATRIX(r) first
#endif

/// What a lane has added up.
struct Products {
#if MODE != PALETTE && GRANULARITY == PER_GROUP
  static constant constexpr const bool SCALED = true;  // numbers that are added up
#else
  static constant constexpr const bool SCALED = false;
#endif

  float sums[ROWS][CODE_ROWS];  // of scaled numbers, with scales per group; else of levels or codes
#if MODE == AFFINE
  float totals[ROWS];  // of inputs
#endif
#if NORM
  float squares[ROWS];
#endif

  void clear() {
    UNROLL for (int m = 0; m < ROWS; m++) {
#if NORM
      squares[m] = 0.0f;
#endif
#if MODE == AFFINE
      totals[m] = 0.0f;
#endif
      UNROLL for (int r = 0; r < CODE_ROWS; r++) sums[m][r] = 0.0f;
    }
  }

  /// Add inputs k .. k + VALUES of USED vectors, zeros past the last.
  template <int USED, typename V, typename M>
  void add(V vectors, M first, M second, const thread uint (&rows)[CODE_ROWS], uint k) {
    // Offsets of codes are taken off every code, or off the sum of a step, which rounds less than inputs of 16 bits
    // have been. For more than two vectors, that is no less work.
    constexpr bool EXACT = sizeof(vectors.x[0]) > 2 || USED > 2;
    uint words[CODE_ROWS][WORDS];
    const uint start = k / PER_WORD;
    UNROLL for (int r = 0; r < CODE_ROWS; r++) {
      UNROLL for (uint w = 0; w < WORDS; w++) words[r][w] = MATRIX(r).word(rows[r], start + w);
    }
    float products[USED][CODE_ROWS], offsets[USED];
    UNROLL for (int m = 0; m < USED; m++) {
      offsets[m] = 0.0f;
      UNROLL for (int r = 0; r < CODE_ROWS; r++) products[m][r] = SCALED ? 0.0f : sums[m][r];
    }
#if MODE == AFFINE
    float step[USED];
    UNROLL for (int m = 0; m < USED; m++) step[m] = 0.0f;
#endif
    UNROLL for (uint w = 0; w < WORDS; w++) {
      UNROLL for (uint i = 0; i < PAIRS; i++) {
        float inputs[USED][2];
        load(vectors, k + w * PER_WORD + i, first.in_dims(), inputs);
        UNROLL for (int m = 0; m < USED; m++) {
#if MODE == AFFINE
          step[m] += inputs[m][0] + inputs[m][1];
#endif
#if MODE != PALETTE
          if (!EXACT) offsets[m] += offset(i) * (inputs[m][0] + inputs[m][1]);
#endif
        }
        UNROLL for (int r = 0; r < CODE_ROWS; r++) {
          const uint table = MATRIX(r).table(rows[r]);
          const float2 numbers =
              EXACT ? MATRIX(r).exact_pair(words[r][w], i, table) : MATRIX(r).pair(words[r][w], i, table);
          UNROLL for (int m = 0; m < USED; m++) {
            products[m][r] += numbers.x * inputs[m][0];
            products[m][r] += numbers.y * inputs[m][1];
          }
        }
      }
    }
#if MODE != PALETTE && GRANULARITY == PER_GROUP
    UNROLL for (int r = 0; r < CODE_ROWS; r++) {
      const float scale = MATRIX(r).scale(rows[r], k);
      UNROLL for (int m = 0; m < USED; m++) {
        sums[m][r] += scale * (products[m][r] - offsets[m]);
#if MODE == AFFINE
        sums[m][r] += MATRIX(r).bias(rows[r], k) * step[m];
#endif
      }
    }
#else
    UNROLL for (int m = 0; m < USED; m++) {
      UNROLL for (int r = 0; r < CODE_ROWS; r++) sums[m][r] = products[m][r] - offsets[m];
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
      const uint place = k + e * PAIRS;
#if ALIGNED
      constexpr bool inside = true;
#else
      const bool inside = place < in_dims;
#endif
      const float factor = inside ? vectors.factor(place) : 0.0f;
      UNROLL for (int m = 0; m < USED; m++) {
        // A row's address first: the rest of the index is then a constant of the load.
        const float x = inside ? float((vectors.x + m * in_dims + k)[e * PAIRS]) : 0.0f;
#if NORM
        squares[m] += x * x;
#endif
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

/// A lane's share of the products of USED vectors.
template <int USED, typename V, typename M>
void multiply(
    V vectors,
    M first,
    M second,
    const thread uint (&rows)[CODE_ROWS],
    Steps steps,
    thread Products& products) {
  products.clear();
  const uint in_dims = first.in_dims();
  for (uint k = steps.first; k < in_dims; k += steps.stride) {
    products.template add<USED>(vectors, first, second, rows, k);
  }
}

/// The same for `used` vectors, 2 to ROWS: a loop for each number, so that one kernel has them all.
template <typename V, typename M>
void multiply_some(
    V vectors,
    uint used,
    M first,
    M second,
    const thread uint (&rows)[CODE_ROWS],
    Steps steps,
    thread Products& products) {
  switch (used) {
    case 2: multiply<2>(vectors, first, second, rows, steps, products); break;
#if ROWS > 3
    case 3: multiply<3>(vectors, first, second, rows, steps, products); break;
    case 4: multiply<4>(vectors, first, second, rows, steps, products); break;
    case 5: multiply<5>(vectors, first, second, rows, steps, products); break;
#endif
    default: multiply<ROWS>(vectors, first, second, rows, steps, products);
  }
}

/// The sum over a simdgroup of number r of CODE_ROWS, a power of two, in lanes r * LANES / CODE_ROWS and up.
///
/// In each round a lane hands on what it won't need: 41 cycles for eight numbers, where `simd_sum` takes 116.
inline float sum_of_lane(const thread float (&numbers)[CODE_ROWS], uint lane) {
  float sums[CODE_ROWS];
  UNROLL for (uint i = 0; i < CODE_ROWS; i++) sums[i] = numbers[i];
  UNROLL for (uint round = 0; round < 5; round++) {
    const uint distance = LANES >> (round + 1);
    const uint kept = CODE_ROWS >> (round + 1);
    if (kept == 0) sums[0] += simd_shuffle_xor(sums[0], distance);
    UNROLL for (uint i = 0; i < CODE_ROWS; i++) {
      if (i >= kept) continue;
      const bool upper = (lane & distance) > 0;
      const float own = upper ? sums[i + kept] : sums[i];
      sums[i] = own + simd_shuffle_xor(upper ? sums[i] : sums[i + kept], distance);
    }
  }
  return sums[0];
}

