// The largest product of each simdgroup's rows of codes with up to ROWS vectors, and its row: the lowest on a tie.
//
// Vectors are shared among threadgroups as in packed_vector.
//
// A simdgroup takes TILES times CODE_ROWS neighbouring rows, so that few winners are left to compare.

#if ROWS > 1
const uint passes = threadgroups_per_grid.x;
const uint all_rows = x_shape[0];
const uint first_row = (threadgroup_position_in_grid.x * all_rows + passes - 1) / passes;
const uint count = ((threadgroup_position_in_grid.x + 1) * all_rows + passes - 1) / passes - first_row;
#define EACH_ROW(m) \
  UNROLL for (uint m = 0; m < ROWS; m++) \
    if (m < count)
#define ROW(m) (first_row + m)
#else
#define EACH_ROW(m) UNROLL for (uint m = 0; m < ROWS; m++)
#define ROW(m) m
#endif
const uint out_dims = codes_shape[0];
const uint lane = thread_index_in_simdgroup;
const uint winner = thread_position_in_grid.y;
const uint winners = threads_per_grid.y;

#if MODE == PALETTE
const uint table_rows = out_dims / scales_shape[0];
#else
constexpr uint table_rows = 0;
#endif
auto matrix = make_matrix(codes, scales, biases, codes_shape[1], table_rows);
auto vectors = make_vectors(x, norm, eps[0]);
#if ROWS > 1
vectors.x += first_row * matrix.in_dims();
#endif

// A lane keeps the best of its own row of every tile.
constexpr uint SHARERS = LANES / CODE_ROWS;
float best[ROWS];
uint places[ROWS];
UNROLL for (uint m = 0; m < ROWS; m++) {
  best[m] = -INFINITY;
  places[m] = NOWHERE;
}
for (uint tile = 0; tile < TILES; tile++) {
  const uint start = (winner * TILES + tile) * CODE_ROWS;
  if (start >= out_dims) break;
  uint rows[CODE_ROWS];
  UNROLL for (uint r = 0; r < CODE_ROWS; r++) rows[r] = min(start + r, out_dims - 1);
  Products products;
#if ROWS > 1
  multiply_some(vectors, count, matrix, matrix, rows, steps_of(lane, 0, 1), products);
#else
  multiply<1>(vectors, matrix, matrix, rows, steps_of(lane, 0, 1), products);
#endif
  const uint row = min(start + lane / SHARERS, out_dims - 1);
  EACH_ROW(m) {
    float y = products.scaled(matrix, row, m, sum_of_lane(products.sums[m], lane));
#if NORM
    y *= vectors.inverse_rms(simd_sum(products.squares[m]), matrix.in_dims());
#endif
    if (is_better(ranked(y), row, best[m], places[m])) {
      best[m] = ranked(y);
      places[m] = row;
    }
  }
}
EACH_ROW(m) {
  UNROLL for (uint n = LANES / 2; n >= SHARERS; n /= 2) {
    const float y = simd_shuffle_xor(best[m], n);
    const uint place = simd_shuffle_xor(places[m], n);
    if (is_better(y, place, best[m], places[m])) {
      best[m] = y;
      places[m] = place;
    }
  }
  if (lane == 0) {
    values[ROW(m) * winners + winner] = best[m];
    indices[ROW(m) * winners + winner] = places[m];
  }
}
