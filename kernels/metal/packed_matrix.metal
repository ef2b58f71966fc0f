// What packed_vector computes, for up to 8 * BLOCKS vectors of each threadgroup; of more, neighbouring threadgroups
// have a part each. A code is unpacked once for all vectors of its threadgroup.
//
// A simdgroup has CODE_ROWS rows of codes, of a pair half as many of each matrix. With SPLIT, all simdgroups of a
// threadgroup have the same ones, and each multiplies a part of the inputs.

constexpr uint OUT_TILES = PAIR ? TILES / 2 : TILES;  // of the results
constexpr uint JOINED = BLOCKS * TILES * 2;  // numbers of a lane

threadgroup float joined[SPLIT ? SIMDGROUPS * JOINED * LANES : 1];
threadgroup float all_squares[SPLIT && NORM ? SIMDGROUPS * BLOCKS * 8 : 1];

const uint all_rows = x_shape[0];
const uint all_blocks = (all_rows + 7) / 8;
const uint pass_blocks = (all_blocks + threadgroups_per_grid.x - 1) / threadgroups_per_grid.x;
const uint first_row = threadgroup_position_in_grid.x * pass_blocks * 8;
const uint count = min(all_rows - first_row, pass_blocks * 8);
const uint out_dims = codes_shape[0];
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
const uint start = (threadgroup_position_in_grid.y * (SPLIT ? 1 : SIMDGROUPS) + (SPLIT ? 0 : simdgroup)) * OUT_TILES * 8;
const uint row = row_in_tile(lane);
const uint column = column_in_tile(lane);

#if MODE == PALETTE
const uint table_rows = out_dims / scales_shape[0];
#else
constexpr uint table_rows = 0;
#endif
auto first = make_matrix(codes, scales, biases, codes_shape[1], table_rows);
#if PAIR
auto second = make_matrix(codes2, scales2, biases2, codes_shape[1], table_rows);
#else
auto second = first;
#endif
const uint in_dims = first.in_dims();
auto vectors = make_vectors(x + first_row * in_dims, norm, eps[0]);
#ifdef LOW_RANK
auto table = make_parts(parts);
#endif

// Rows past the last repeat it.
uint rows[TILES][2];
UNROLL for (uint t = 0; t < TILES; t++) {
  UNROLL for (uint e = 0; e < 2; e++) rows[t][e] = min(start + t % OUT_TILES * 8 + column + e, out_dims - 1);
}
Tiles tiles;
tiles.clear();
const uint part = SPLIT ? simdgroup : 0, n_parts = SPLIT ? SIMDGROUPS : 1;
if (count <= 8) {
  multiply_tiles<1>(vectors, count, first, second, rows, lane, part, n_parts, tiles);
} else {
  multiply_tiles<2>(vectors, count, first, second, rows, lane, part, n_parts, tiles);
}

#if NORM
UNROLL for (uint b = 0; b < BLOCKS; b++) {
  // The other columns of a row.
  tiles.squares[b] += simd_shuffle_xor(tiles.squares[b], 1);
  tiles.squares[b] += simd_shuffle_xor(tiles.squares[b], 8);
  if (SPLIT && column == 0) all_squares[(simdgroup * BLOCKS + b) * 8 + row] = tiles.squares[b];
}
#endif
if (SPLIT) {
  threadgroup float* own = joined + simdgroup * JOINED * LANES + lane;
  UNROLL for (uint i = 0; i < JOINED; i++) {
    own[i * LANES] = tiles.sums[i / 2 / TILES][i / 2 % TILES].thread_elements()[i % 2];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

UNROLL for (uint tile = 0; tile < BLOCKS * OUT_TILES; tile++) {
  // Simdgroups that share inputs share the results, too.
  if (SPLIT && tile % SIMDGROUPS != simdgroup) continue;
  const uint b = tile / OUT_TILES, t = tile % OUT_TILES;
  const uint m = 8 * b + row;
  if (m >= count) continue;
#if NORM
  float squares = SPLIT ? 0.0f : tiles.squares[b];
  if (SPLIT) {
    for (uint s = 0; s < SIMDGROUPS; s++) squares += all_squares[(s * BLOCKS + b) * 8 + row];
  }
  const float scale = vectors.inverse_rms(squares, in_dims);
#endif
  UNROLL for (uint e = 0; e < 2; e++) {
    const uint n = start + 8 * t + column + e;
    if (n >= out_dims) continue;
    float y[2];
    UNROLL for (uint r = 0; r < (PAIR ? 2 : 1); r++) {
      const uint place = b * TILES + t + r * OUT_TILES;
      y[r] = SPLIT ? 0.0f : tiles.sums[b][t + r * OUT_TILES].thread_elements()[e];
      if (SPLIT) {
        for (uint s = 0; s < SIMDGROUPS; s++) y[r] += joined[(s * JOINED + place * 2 + e) * LANES + lane];
      }
#if NORM
      y[r] *= scale;
#endif
      if (SCALED_LATE) y[r] *= (r ? second : first).scale(n, 0);
#ifdef LOW_RANK
      {
        const uint slot = slots[(first_row + m) * slots_shape[0] / all_rows];
        const uint rank = table.rank(slot, r);
        if (rank == 0) continue;
        auto numbers = adapter_of(
            slot, adapter0, adapter1, adapter2, adapter3, adapter4, adapter5, adapter6, adapter7);
        // Sections come before a second matrix, of which there are none in a pair.
        const uint before = r ? table.rank(slot, 0) : table.section(n) * rank;
        y[r] += expand(
            numbers + table.b(slot, r), rank, n, hidden + (first_row + m) * table.width() + before, 0, 1);
      }
#endif
    }
    if (PAIR) y[0] = silu(y[0]) * y[1];
    const uint i = (first_row + m) * out_dims + n;
    out[i] = static_cast<T>(RESIDUAL ? y[0] + float(residual[i]) : y[0]);
  }
}
