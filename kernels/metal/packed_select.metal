// The largest of each 4096 neighbours in a row, the first on a tie, and its index. 256 threads look at 16 numbers
// each. An index is `indices`' number at the place; of `indices` with one axis, the place.

constexpr uint PER_THREAD = 16;
constexpr uint THREADS = 256;
threadgroup float tops[THREADS / LANES];
threadgroup uint top_places[THREADS / LANES];

const uint length = values_shape[1];
const uint chunk = threadgroup_position_in_grid.x;
const uint row = threadgroup_position_in_grid.y;
const uint thread_id = thread_index_in_threadgroup;

float best = -INFINITY;
uint best_place = NOWHERE;
UNROLL for (uint i = 0; i < PER_THREAD; i++) {
  const uint place = (chunk * PER_THREAD + i) * THREADS + thread_id;
  if (place < length) {
    const float y = ranked(values[row * length + place]);
    if (is_better(y, place, best, best_place)) {
      best = y;
      best_place = place;
    }
  }
}
const float top = simd_max(best);
const uint top_place = simd_min(best == top ? best_place : NOWHERE);
if (thread_index_in_simdgroup == 0) {
  tops[simdgroup_index_in_threadgroup] = top;
  top_places[simdgroup_index_in_threadgroup] = top_place;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (thread_id == 0) {
  for (uint i = 0; i < THREADS / LANES; i++) {
    if (is_better(tops[i], top_places[i], best, best_place)) {
      best = tops[i];
      best_place = top_places[i];
    }
  }
  const uint i = row * threadgroups_per_grid.x + chunk;
  top_values[i] = best;
  top_indices[i] = indices_ndim > 1 ? indices[row * length + best_place] : best_place;
}
