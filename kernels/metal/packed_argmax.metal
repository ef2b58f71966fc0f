// The largest product of each simdgroup's rows with ROWS vectors, and its row: the lowest on a tie.
//
// A simdgroup takes TILES times CODE_ROWS neighbouring rows, so that few winners are left to compare.

using F = Format<BITS, MODE, GRANULARITY, GROUP, ALIGNED>;

const uint out_dims = codes_shape[0];
const uint lane = thread_index_in_simdgroup;
const uint winner = thread_position_in_grid.y;
const uint winners = threads_per_grid.y;

auto matrix = make_matrix<F>(codes, scales, biases, out_dims, codes_shape[1], scales_shape[0]);
auto vectors = make_vectors<NORM>(x, norm, eps[0]);

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
  float sums[ROWS][CODE_ROWS];
  lane_products<F, ROWS, CODE_ROWS, false>(vectors, matrix, matrix, rows, lane, sums);
  UNROLL for (uint m = 0; m < ROWS; m++) {
    UNROLL for (uint r = 0; r < CODE_ROWS; r++) {
      const float y = ranked(simd_sum(sums[m][r]));
      if (is_better(y, rows[r], best[m], places[m])) {
        best[m] = y;
        places[m] = rows[r];
      }
    }
  }
}
if (lane == 0) {
  UNROLL for (uint m = 0; m < ROWS; m++) {
    values[m * winners + winner] = best[m];
    indices[m * winners + winner] = places[m];
  }
}
