// Merges the ranges of `attention_decode`: grid (threads, n_heads, B), one thread per dimension,
// a threadgroup per head.
//
// partial        (B, n_heads, splits, head_dim + 2) float
// value_scale    0-d
// out            (B, n_heads, 1, head_dim) O
const uint dim = thread_position_in_threadgroup.x;
const uint head = threadgroup_position_in_grid.z * threadgroups_per_grid.y + threadgroup_position_in_grid.y;
const uint splits = partial_shape[2];
const uint stride = HEAD_DIM + 2;
const device float* ranges = partial + size_t(head) * splits * stride;

float top = -INFINITY;
for (uint s = thread_index_in_simdgroup; s < splits; s += 32) {
  top = metal::max(top, ranges[s * stride + HEAD_DIM]);
}
top = simd_max(top);

if (dim < HEAD_DIM) {
  float sum = 0.0f;
  float weight = 0.0f;
  for (uint s = 0; s < splits; s++) {
    const device float* range = ranges + s * stride;
    const float share = metal::fast::exp2(range[HEAD_DIM] - top);
    sum += share * range[dim];
    weight += share * range[HEAD_DIM + 1];
  }
  out[head * HEAD_DIM + dim] = static_cast<O>(sum / weight * float(value_scale));
}
