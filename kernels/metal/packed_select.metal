// The count[0] largest numbers of each 4096 neighbours in a row, in order, and what they are called.
//
// Equal numbers keep their order. 256 threads hold 16 numbers each and find the largest count[0] times.

constexpr uint PER_THREAD = 16;
constexpr uint THREADS = 256;
threadgroup float tops[THREADS / LANES];
threadgroup uint top_places[THREADS / LANES];

const uint length = values_shape[1];
const uint selected = count[0];
const uint chunk = threadgroup_position_in_grid.x;
const uint row = threadgroup_position_in_grid.y;
const uint thread_id = thread_index_in_threadgroup;

float mine[PER_THREAD];
uint alive = 0;
UNROLL for (uint i = 0; i < PER_THREAD; i++) {
  const uint place = (chunk * PER_THREAD + i) * THREADS + thread_id;
  mine[i] = place < length ? ranked(values[row * length + place]) : -INFINITY;
  alive |= place < length ? 1u << i : 0;
}

for (uint j = 0; j < selected; j++) {
  float best = -INFINITY;
  uint best_place = NOWHERE;
  UNROLL for (uint i = 0; i < PER_THREAD; i++) {
    const uint place = (chunk * PER_THREAD + i) * THREADS + thread_id;
    if ((alive >> i & 1) && is_better(mine[i], place, best, best_place)) {
      best = mine[i];
      best_place = place;
    }
  }
  const float top = simd_max(best);
  const uint top_place = simd_min(best == top ? best_place : NOWHERE);
  if (thread_index_in_simdgroup == 0) {
    tops[simdgroup_index_in_threadgroup] = top;
    top_places[simdgroup_index_in_threadgroup] = top_place;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  best = tops[0];
  best_place = top_places[0];
  for (uint i = 1; i < THREADS / LANES; i++) {
    if (is_better(tops[i], top_places[i], best, best_place)) {
      best = tops[i];
      best_place = top_places[i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // A last chunk may have fewer numbers: the rest is nowhere, and loses against all that is somewhere.
  if (best_place % THREADS == thread_id && best_place != NOWHERE) {
    alive &= ~(1u << (best_place / THREADS % PER_THREAD));
  }
  if (thread_id == 0) {
    const uint i = (row * threadgroups_per_grid.x + chunk) * selected + j;
    const bool found = best_place != NOWHERE;
    top_values[i] = best;
    top_indices[i] = !found ? NOWHERE : NAMED ? indices[row * length + best_place] : best_place;
  }
}
