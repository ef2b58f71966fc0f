// Low-rank adapters: flat arrays of numbers, and the offsets of A and B of a kernel's matrices in them.
//
// parts   number of adapters, number of sections, width of `hidden`; last row + 1 of every section; then
//         a, b and rank of every adapter; the same again for a pair's second matrix
// hidden  scale * A x of every vector: the sections' numbers one after the other, then the second matrix's
//
// A is (sections * rank, in_dims). B[n, j] lies at ((n / 16) * rank + j) * 16 + n % 16.

static constant constexpr const uint BLOCK = 16;

/// The adapter of `slot`; for a slot without one, the first adapter, which is then not read.
template <typename Numbers>
Numbers adapter_of(
    uint slot,
    Numbers adapter0,
    Numbers adapter1,
    Numbers adapter2,
    Numbers adapter3,
    Numbers adapter4,
    Numbers adapter5,
    Numbers adapter6,
    Numbers adapter7) {
  // No array of pointers: a variable index would force it into memory.
  const Numbers low = slot == 1 ? adapter1 : slot == 2 ? adapter2 : slot == 3 ? adapter3 : adapter0;
  const Numbers high = slot == 5 ? adapter5 : slot == 6 ? adapter6 : slot == 7 ? adapter7 : adapter4;
  return slot >= 4 && slot < 8 ? high : low;
}

/// The table of parts.
template <typename Table>
struct Parts {
  Table table;

  uint adapters() const { return table[0]; }
  uint sections() const { return table[1]; }
  uint width() const { return table[2]; }

  /// Index of the section, one of the projections that share a matrix, that row `row` belongs to.
  uint section(uint row) const {
    uint section = 0;
    for (uint i = 0; i + 1 < sections(); i++) section += row >= uint(table[3 + i]);
    return section;
  }

  uint entry(uint slot, uint matrix) const {
    return 3 + sections() + (matrix * adapters() + slot) * 3;
  }

  /// Rank of an adapter for the first (0) or second (1) matrix; 0 for no adapter.
  uint rank(uint slot, uint matrix) const {
    return slot < adapters() ? table[entry(slot, matrix) + 2] : 0;
  }

  // Where A and B begin, of an adapter whose rank isn't 0.
  uint a(uint slot, uint matrix) const { return table[entry(slot, matrix)]; }
  uint b(uint slot, uint matrix) const { return table[entry(slot, matrix) + 1]; }
};

template <typename Table>
Parts<Table> make_parts(Table table) {
  Parts<Table> parts;
  parts.table = table;
  return parts;
}

/// Terms `first`, `first + stride`, ... of the product of row `row` of B with `hidden`.
template <typename Numbers, typename Hidden>
float expand(Numbers b, uint rank, uint row, Hidden hidden, uint first, uint stride) {
  const uint start = row / BLOCK * rank * BLOCK + row % BLOCK;
  float sum = 0.0f;
  for (uint j = first; j < rank; j += stride) sum += float(b[start + j * BLOCK]) * hidden[j];
  return sum;
}

#if SHRINK
/// Products of the vectors with COUNT rows of A from `row` on, in every lane; rows past the last of `n_rows` repeat
/// it. Vectors that aren't `mine` are left alone.
///
/// A row of inputs that can be packed, and so one of A, has a multiple of four.
template <int COUNT, typename V, typename Numbers>
void shrink(
    V vectors,
    const thread bool (&mine)[ROWS],
    Numbers a,
    uint row,
    uint n_rows,
    uint in_dims,
    uint lane,
    thread float (&sums)[ROWS][COUNT]) {
#if NORM
  float squares[ROWS] = {};
#endif
  UNROLL for (uint m = 0; m < ROWS; m++) {
    UNROLL for (uint r = 0; r < COUNT; r++) sums[m][r] = 0.0f;
  }
  for (uint start = lane * 4; start < in_dims; start += LANES * 4) {
    UNROLL for (uint k = start; k < start + 4; k++) {
      const float factor = vectors.factor(k);
      float numbers[COUNT];
      UNROLL for (uint r = 0; r < COUNT; r++) {
        numbers[r] = float(a[(row + min(r, n_rows - 1)) * in_dims + k]);
      }
      UNROLL for (uint m = 0; m < ROWS; m++) {
        if (!mine[m]) continue;
        const float x = float(vectors.x[m * in_dims + k]);
        const float value = x * factor;
#if NORM
        squares[m] += x * x;
#endif
        UNROLL for (uint r = 0; r < COUNT; r++) sums[m][r] += value * numbers[r];
      }
    }
  }
  UNROLL for (uint m = 0; m < ROWS; m++) {
    if (!mine[m]) continue;
#if NORM
    const float norm = vectors.inverse_rms(simd_sum(squares[m]), in_dims);
#else
    constexpr float norm = 1.0f;
#endif
    UNROLL for (uint r = 0; r < COUNT; r++) sums[m][r] = simd_sum(sums[m][r]) * norm;
  }
}

/// `scale` times `shrink`, for rows `row` to `row + n_rows` of A by all simdgroups of a threadgroup; products of
/// vector m go to `hidden` from `places[m]` on.
template <typename V, typename Numbers>
void shrink_together(
    V vectors,
    const thread bool (&mine)[ROWS],
    Numbers a,
    uint row,
    uint n_rows,
    uint in_dims,
    float scale,
    uint lane,
    uint simdgroup,
    uint n_simdgroups,
    const thread uint (&places)[ROWS],
    threadgroup float* hidden) {
  for (uint j = simdgroup * 4; j < n_rows; j += n_simdgroups * 4) {
    float sums[ROWS][4];
    shrink<4>(vectors, mine, a, row + j, n_rows - j, in_dims, lane, sums);
    UNROLL for (uint m = 0; m < ROWS; m++) {
      UNROLL for (uint r = 0; r < 4; r++) {
        if (mine[m] && lane == r && j + r < n_rows) hidden[places[m] + j + r] = scale * sums[m][r];
      }
    }
  }
}
#endif
