// out[m, j] = a[slot of m, j] . x'[m],  x' = rms_norm(x) * norm; the rows of a second adapter follow.
//
// One simdgroup per number: ranks are small, and 32 lanes per row of A keep the chip busy.

const uint width = threads_per_grid.y;
const uint rows = threads_per_grid.z;
const uint j = thread_position_in_grid.y;
const uint m = thread_position_in_grid.z;
const uint lane = thread_index_in_simdgroup;
const uint first_width = lora_a_shape[1];
const uint in_dims = lora_a_shape[2];
const uint batch = slots_shape[0];
auto vectors = make_vectors<NORM, false>(x, norm, norm, eps[0]);

const bool is_second = PAIR && j >= first_width;
const int slot = is_second ? slots2[m * batch / rows] : slots[m * batch / rows];
float sums[1] = {0.0f};
if (slot >= 0 && is_second) {
  const uint row = slot * (width - first_width) + j - first_width;
  shrink<1>(vectors, m, lora_a2, row, 1, in_dims, lane, sums);
} else if (slot >= 0) {
  shrink<1>(vectors, m, lora_a, slot * first_width + j, 1, in_dims, lane, sums);
}
if (lane == 0) out[m * width + j] = sums[0];
