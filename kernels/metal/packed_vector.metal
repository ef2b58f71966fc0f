// out[m, n] = residual[m, n] + x'[m] . W[n] + B[slot of m][n] . hidden[m],  x' = rms_norm(x) * norm
// or, of a pair of matrices, silu(gate) * up.  ROWS vectors, all in registers.
//
// hidden = A[slot of m] x'[m] is an input or, with SHRINK, found by every threadgroup for itself.
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
auto vectors = make_vectors<NORM, COLUMN_SCALE>(x, norm, column_scale, eps[0]);

// Rows past the last repeat it, so that all lanes go one way.
uint rows[CODE_ROWS];
UNROLL for (uint r = 0; r < CODE_ROWS; r++) rows[r] = min(start + r % OUTPUTS, out_dims - 1);

float sums[ROWS][CODE_ROWS];
lane_products<F, ROWS, CODE_ROWS, PAIR>(vectors, first, second, rows, lane, sums);

if (LOW_RANK) {
  const uint batch = slots_shape[0];
  const uint rank = lora_b_shape[2];
  const uint rank2 = lora_b2_shape[2];
  // A threadgroup needs the products with A of the sections that its own rows lie in.
  const uint group_start = threadgroup_position_in_grid.y * SIMDGROUPS * OUTPUTS;
  const uint group_end = min(group_start + SIMDGROUPS * OUTPUTS, out_dims);
  const uint n_sections = sections_shape[0];
  const uint begin = SHRINK ? section_of(sections, n_sections, group_start) : 0;
  const uint end = SHRINK ? section_of(sections, n_sections, group_end - 1) + 1 : n_sections;
  const uint first_width = (end - begin) * rank;
  const uint width = first_width + (PAIR ? rank2 : 0);
  if (SHRINK) {
    auto unscaled = make_vectors<NORM, false>(x, norm, norm, eps[0]);
    const uint in_dims = first.in_dims();
    for (uint m = 0; m < ROWS; m++) {
      const int slot = slots[m * batch / ROWS];
      const int slot2 = slots2[m * batch / ROWS];
      if (slot >= 0) {
        const uint row = (slot * n_sections + begin) * rank;
        shrink_together(
            unscaled, m, lora_a, row, first_width, in_dims, lane, simdgroup, SIMDGROUPS, inner + m * width);
      }
      if (PAIR && slot2 >= 0) {
        shrink_together(
            unscaled, m, lora_a2, slot2 * rank2, rank2, in_dims, lane, simdgroup, SIMDGROUPS,
            inner + m * width + first_width);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  UNROLL for (uint m = 0; m < ROWS; m++) {
    UNROLL for (uint r = 0; r < CODE_ROWS; r++) {
      const bool is_second = PAIR && r >= OUTPUTS;
      const int slot = is_second ? slots2[m * batch / ROWS] : slots[m * batch / ROWS];
      if (slot < 0) continue;
      const uint row = slot * out_dims + rows[r];
      const uint section = section_of(sections, n_sections, rows[r]) - begin;
      const uint h = m * width + (is_second ? first_width : section * rank);
      if (SHRINK) {
        sums[m][r] += is_second ? low_rank(lora_b2, inner + h, row, rank2, lane, LANES)
                                : low_rank(lora_b, inner + h, row, rank, lane, LANES);
      } else {
        sums[m][r] += is_second ? low_rank(lora_b2, hidden + h, row, rank2, lane, LANES)
                                : low_rank(lora_b, hidden + h, row, rank, lane, LANES);
      }
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
