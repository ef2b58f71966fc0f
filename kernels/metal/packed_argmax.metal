// The largest product of each simdgroup's rows of codes with a vector, and its row: the lowest on a tie.
//
// A simdgroup takes TILES times CODE_ROWS neighbouring rows, so that few winners are left to compare. Several vectors
// and their best rows would not fit into a lane's registers.

const uint out_dims = codes_shape[0];
const uint lane = thread_index_in_simdgroup;
const uint winner = thread_position_in_grid.y;

#if MODE == PALETTE
const uint table_rows = out_dims / scales_shape[0];
#else
constexpr uint table_rows = 0;
#endif
auto matrix = make_matrix(codes, scales, biases, codes_shape[1], table_rows);
auto vectors = make_vectors(x, norm, eps[0]);

// A lane keeps the best of its own row of every tile.
constexpr uint SHARERS = LANES / CODE_ROWS;
float best = -INFINITY;
uint place = NOWHERE;
for (uint tile = 0; tile < TILES; tile++) {
  const uint start = (winner * TILES + tile) * CODE_ROWS;
  if (start >= out_dims) break;
  uint rows[CODE_ROWS];
  UNROLL for (uint r = 0; r < CODE_ROWS; r++) rows[r] = min(start + r, out_dims - 1);
  Products products;
  multiply<1>(vectors, matrix, matrix, rows, steps_of(lane, 0, 1), products);
  const uint row = min(start + lane / SHARERS, out_dims - 1);
  float y = products.scaled(matrix, row, 0, sum_of_lane(products.sums[0], lane));
#if NORM
  y *= vectors.inverse_rms(simd_sum(products.squares[0]), matrix.in_dims());
#endif
  if (is_better(ranked(y), row, best, place)) {
    best = ranked(y);
    place = row;
  }
}
UNROLL for (uint n = LANES / 2; n >= SHARERS; n /= 2) {
  const float y = simd_shuffle_xor(best, n);
  const uint other = simd_shuffle_xor(place, n);
  if (is_better(y, other, best, place)) {
    best = y;
    place = other;
  }
}
if (lane == 0) {
  values[winner] = best;
  indices[winner] = place;
}
