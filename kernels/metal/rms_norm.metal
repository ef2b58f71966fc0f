// out[m] = rms_norm(x[m]) * norm. One simdgroup per row: grid (32, rows).

const uint in_dims = x_shape[1];
const uint m = thread_position_in_grid.y;
const uint lane = thread_index_in_simdgroup;
auto vectors = make_vectors(x, norm, eps[0]);

const size_t first = size_t(m) * in_dims;
float squares = 0.0f;
for (uint k = lane; k < in_dims; k += LANES) {
  const float number = float(x[first + k]);
  squares += number * number;
}
const float factor = vectors.inverse_rms(simd_sum(squares), in_dims);
for (uint k = lane; k < in_dims; k += LANES) {
  out[first + k] = static_cast<T>(float(x[first + k]) * factor * vectors.factor(k));
}
