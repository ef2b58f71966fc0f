// out[m, n] = residual[m, n] + x'[m] . W[n] + B[n] . hidden[m],  x' = rms_norm(x) * norm
// or, of a pair of matrices, silu(gate) * up.  ROWS vectors, all in registers.
//
// A and B are those of the adapter of m; hidden[m] = scale * A x'[m] is an input or, with SHRINK, found by
// every threadgroup for itself.
//
// A simdgroup has CODE_ROWS rows of codes, of a pair half as many of each matrix. Preparing a vector costs
// about as much as two rows of 2-bit codes.

constexpr uint OUTPUTS = PAIR ? CODE_ROWS / 2 : CODE_ROWS;
using F = Format<BITS, MODE, GRANULARITY, GROUP, ALIGNED>;

threadgroup float inner[SHRINK ? 1024 : 1];

const uint out_dims = codes_shape[0];
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
const uint start = (threadgroup_position_in_grid.y * SIMDGROUPS + simdgroup) * OUTPUTS;

auto first = make_matrix<F>(codes, scales, biases, out_dims, codes_shape[1], scales_shape[0]);
auto second = make_matrix<F>(codes2, scales2, biases2, out_dims, codes_shape[1], scales_shape[0]);
auto vectors = make_vectors<NORM>(x, norm, eps[0]);

// Rows past the last repeat it, so that all lanes go one way.
uint rows[CODE_ROWS];
UNROLL for (uint r = 0; r < CODE_ROWS; r++) rows[r] = min(start + r % OUTPUTS, out_dims - 1);

float sums[ROWS][CODE_ROWS];
lane_products<F, ROWS, CODE_ROWS, PAIR>(vectors, first, second, rows, lane, sums);

if (LOW_RANK) {
  auto table = make_parts(parts);
  // A threadgroup needs the products with A of the sections that its own rows lie in.
  const uint group_start = threadgroup_position_in_grid.y * SIMDGROUPS * OUTPUTS;
  const uint group_end = min(group_start + SIMDGROUPS * OUTPUTS, out_dims);
  const uint begin = SHRINK ? table.section(group_start) : 0;
  const uint end = SHRINK ? table.section(group_end - 1) + 1 : table.sections();
  // Which adapter a vector uses, and where its products with A begin.
  uint of[ROWS], places[ROWS];
  uint place = 0;
  UNROLL for (uint m = 0; m < ROWS; m++) {
    of[m] = slots[m * slots_shape[0] / ROWS];
    places[m] = SHRINK ? place : m * table.width();
    place += (end - begin) * table.rank(of[m], 0) + (PAIR ? table.rank(of[m], 1) : 0);
  }
  // An adapter is read once for all vectors that use it.
  for (uint slot = 0; slot < (SHRINK ? table.adapters() : 0); slot++) {
    bool mine[ROWS], used = false;
    UNROLL for (uint m = 0; m < ROWS; m++) used |= mine[m] = of[m] == slot;
    if (!used) continue;
    auto numbers = adapter_of(
        slot, adapter0, adapter1, adapter2, adapter3, adapter4, adapter5, adapter6, adapter7);
    uint start_of[ROWS];
    UNROLL for (uint m = 0; m < ROWS; m++) start_of[m] = places[m];
    for (uint matrix = 0; matrix < (PAIR ? 2u : 1u); matrix++) {
      const uint rank = table.rank(slot, matrix);
      if (rank == 0) continue;
      const uint n_rows = matrix ? rank : (end - begin) * rank;
      shrink_together(
          vectors, mine, numbers + table.a(slot, matrix), matrix ? 0 : begin * rank, n_rows,
          first.in_dims(), adapter_scales[slot], lane, simdgroup, SIMDGROUPS, start_of, inner);
      UNROLL for (uint m = 0; m < ROWS; m++) start_of[m] += n_rows;
    }
  }
  if (SHRINK) threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL for (uint m = 0; m < ROWS; m++) {
    auto numbers = adapter_of(
        of[m], adapter0, adapter1, adapter2, adapter3, adapter4, adapter5, adapter6, adapter7);
    const uint rank = table.rank(of[m], 0);
    const uint rank2 = PAIR ? table.rank(of[m], 1) : 0;
    UNROLL for (uint r = 0; r < CODE_ROWS; r++) {
      const uint matrix = PAIR && r >= OUTPUTS ? 1 : 0;
      const uint own = matrix ? rank2 : rank;
      if (own == 0) continue;
      const uint before = matrix ? (end - begin) * rank : (table.section(rows[r]) - begin) * rank;
      auto b = numbers + table.b(of[m], matrix);
      sums[m][r] += SHRINK ? expand(b, own, rows[r], inner + places[m] + before, lane, LANES)
                           : expand(b, own, rows[r], hidden + places[m] + before, lane, LANES);
    }
  }
}

UNROLL for (uint m = 0; m < ROWS; m++) {
  UNROLL for (uint r = 0; r < OUTPUTS; r++) {
    float y = simd_sum(sums[m][r]);
    if (PAIR) {
      const float up = simd_sum(sums[m][(r + OUTPUTS) % CODE_ROWS]);
      y = silu(y) * up;
    }
    if (lane == 0 && start + r < out_dims) {
      const uint i = m * out_dims + start + r;
      if (RESIDUAL) y += float(residual[i]);
      out[i] = static_cast<T>(y);
    }
  }
}
