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
