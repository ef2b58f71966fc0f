// hidden[m, j] = scale * A[j] . x'[m] of the adapter of m,  x' = rms_norm(x) * norm; see low_rank.metal.
//
// A threadgroup has one number, whose inputs its simdgroups share: ranks are small, and this keeps the chip busy. With
// PARTIALS, x is attention's output in partials, (rows, heads, parts, HEAD_DIM + 2).

threadgroup float sums[SIMDGROUPS], squares[SIMDGROUPS];

#if PARTIALS
constexpr uint in_dims = K;
threadgroup float shares[K / HEAD_DIM * MAX_PARTIALS];
#else
const uint in_dims = x_shape[1];
#endif
const uint rows = threads_per_grid.z;
const uint j = threadgroup_position_in_grid.y;
const uint m = thread_position_in_grid.z;
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
auto vectors = make_vectors(x, norm, eps[0]);
#if PARTIALS
const uint n_parts = x_shape[2];
const Partials partials = {x + m * (K / HEAD_DIM) * n_parts * PARTIAL, K / HEAD_DIM, n_parts};
partials.weigh(float(value_scale), 32 * simdgroup + lane, 32 * SIMDGROUPS, shares);
threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
auto table = make_parts(parts);

const uint slot = slots[m * slots_shape[0] / rows];
const uint first_width = table.sections() * table.rank(slot, 0);
const uint matrix = PAIR && j >= first_width ? 1 : 0;
const uint row = j - matrix * first_width;
float total = 0.0f;
// Adapters of a lower rank leave the end of their rows empty.
if (row < (matrix ? table.rank(slot, 1) : first_width)) {
  auto numbers = adapter_of(
      slot, adapter0, adapter1, adapter2, adapter3, adapter4, adapter5, adapter6, adapter7);
  auto a = numbers + table.a(slot, matrix) + row * in_dims;
  float sum = 0.0f, square = 0.0f;
  // A row of inputs that can be packed, and so one of A, has a multiple of four.
  for (uint start = (simdgroup * LANES + lane) * 4; start < in_dims; start += SIMDGROUPS * LANES * 4) {
    UNROLL for (uint k = 0; k < 4; k++) {
#if PARTIALS
      const float value = partials.merged(start + k, shares);
#else
      const float value = float((x + m * in_dims + start)[k]);
#endif
      square += value * value;
      sum += value * vectors.factor(start + k) * float((a + start)[k]);
    }
  }
  sum = simd_sum(sum);
  if (lane == 0) sums[simdgroup] = sum;
#if NORM
  square = simd_sum(square);
  if (lane == 0) squares[simdgroup] = square;
#endif
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL for (uint s = 0; s < SIMDGROUPS; s++) total += sums[s];
  total *= adapter_scales[slot];
#if NORM
  square = 0.0f;
  UNROLL for (uint s = 0; s < SIMDGROUPS; s++) square += squares[s];
  total *= vectors.inverse_rms(square, in_dims);
#endif
}
if (lane == 0 && simdgroup == 0) hidden[m * table.width() + j] = total;
