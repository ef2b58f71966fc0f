// hidden[m, j] = scale * A[j] . x'[m] of the adapter of m,  x' = rms_norm(x) * norm; see low_rank.metal.
//
// One simdgroup per number: ranks are small, and 32 lanes per row of A keep the chip busy.

const uint in_dims = x_shape[1];
const uint rows = threads_per_grid.z;
const uint j = thread_position_in_grid.y;
const uint m = thread_position_in_grid.z;
const uint lane = thread_index_in_simdgroup;
auto vectors = make_vectors<NORM>(x, norm, eps[0]);
auto table = make_parts(parts);

const uint slot = slots[m * slots_shape[0] / rows];
const uint first_width = table.sections() * table.rank(slot, 0);
const uint matrix = PAIR && j >= first_width ? 1 : 0;
const uint row = j - matrix * first_width;
float sums[1][1] = {{0.0f}};
// Adapters of a lower rank leave the end of their rows empty.
if (row < (matrix ? table.rank(slot, 1) : first_width)) {
  auto numbers = adapter_of(
      slot, adapter0, adapter1, adapter2, adapter3, adapter4, adapter5, adapter6, adapter7);
  const bool mine[1] = {true};
  shrink<1, 1>(vectors, m, mine, numbers + table.a(slot, matrix), row, 1, in_dims, lane, sums);
  sums[0][0] *= adapter_scales[slot];
}
if (lane == 0) hidden[m * table.width() + j] = sums[0][0];
