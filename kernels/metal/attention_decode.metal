// One new token per row against int8 keys and values: grid (256 * n_heads / heads, B, splits).
//
// A threadgroup has `heads` query heads of one KV head and one of the ranges that a row's columns are
// divided into. In a simdgroup, each run of `lanes` lanes takes a key of its own, every lane `units` * 4
// dimensions of it; eight simdgroups take turns over the keys. Their sums are merged at the end.
//
// queries        (B, n_heads, 1, head_dim), raw ones with `rope`
// kv             (B, 2 n_kv_heads, capacity, head_dim) int8: keys, then values
// lengths        (B,): columns in use
// key_scale      0-d, and value_scale
// norm_weight    (head_dim,) with `rope`
// constants      log2(theta), eps
// out            (B, n_heads, 1, head_dim) O; with `split`, (B, n_heads, splits, head_dim + 2) float:
//                weighted sum of codes, largest score, sum of weights
constexpr int SIMDGROUPS = 8;
constexpr int KEYS = 32 / lanes;  // per simdgroup and step
constexpr int STEP = SIMDGROUPS * KEYS;

const int lane = thread_index_in_simdgroup;
const int simdgroup = simdgroup_index_in_threadgroup;
const int first_unit = lane % lanes * units;
const int inside = head_dim / 4 - first_unit;
const int first_head = threadgroup_position_in_grid.x * heads;
const int row = threadgroup_position_in_grid.y;
const int range = threadgroup_position_in_grid.z;
const int ranges = threadgroups_per_grid.z;
const int n_heads = queries_shape[1];
const int n_kv_heads = kv_shape[1] / 2;
const int group = n_heads / n_kv_heads;
const int length = int(lengths[row]);

Query<units> query[heads];
OnlineSoftmax<units> seen[heads];
for (int h = 0; h < heads; h++) {
  query[h].load(queries + (row * n_heads + first_head + h) * head_dim, 4 * first_unit, head_dim);
  if (rope) {
    query[h].template rope_norm<lanes>(norm_weight, constants, length - 1, 4 * first_unit, head_dim);
  }
  // log2(e), so that weights are powers of two.
  query[h].scale(float(key_scale) * metal::precise::rsqrt(float(head_dim)) * 1.44269504089f);
  seen[h].clear();
}

const int range_size = (length + ranges - 1) / ranges;
const int end = metal::min(range_size * (range + 1), length);
const size_t plane = size_t(kv_shape[2]) * head_dim;
const size_t kv_head = size_t(row) * 2 * n_kv_heads + first_head / group;
const device char4* all_keys = (const device char4*)(kv + kv_head * plane) + first_unit;
const device char4* all_values = (const device char4*)(kv + (kv_head + n_kv_heads) * plane) + first_unit;

// Lanes past the end go along with the last column, since shuffles need all of them. Codes are fetched a
// step ahead.
int column = range_size * range + simdgroup * KEYS + lane / lanes;
Codes<units> next;
size_t at = size_t(metal::min(column, end - 1)) * (head_dim / 4);
next.load(all_keys + at, all_values + at, inside);
for (int base = range_size * range + simdgroup * KEYS; base < end; base += STEP) {
  const Codes<units> codes = next;
  at = size_t(metal::min(column + STEP, end - 1)) * (head_dim / 4);
  next.load(all_keys + at, all_values + at, inside);
  for (int h = 0; h < heads; h++) {
    const float score = query[h].template score<lanes>(codes.key);
    if (column < end) {
      seen[h].add(score, codes.value);
    }
  }
  column += STEP;
}

threadgroup float sums[SIMDGROUPS * head_dim];
threadgroup float maxima[SIMDGROUPS];
threadgroup float weights[SIMDGROUPS];
const int dim = thread_index_in_threadgroup;
for (int h = 0; h < heads; h++) {
  for (ushort distance = lanes; distance < 32; distance *= 2) {
    seen[h].merge(distance);
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  for (int u = 0; u < units; u++) {
    if (lane < lanes && u < inside) {
      for (int c = 0; c < 4; c++) {
        sums[simdgroup * head_dim + 4 * (first_unit + u) + c] = seen[h].values[u][c];
      }
    }
  }
  if (lane == 0) {
    maxima[simdgroup] = seen[h].maximum;
    weights[simdgroup] = seen[h].sum;
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  if (dim < head_dim) {
    float top = LOWEST;
    for (int s = 0; s < SIMDGROUPS; s++) {
      top = metal::max(top, maxima[s]);
    }
    float sum = 0.0f;
    float weight = 0.0f;
    for (int s = 0; s < SIMDGROUPS; s++) {
      const float share = metal::fast::exp2(maxima[s] - top);
      sum += share * sums[s * head_dim + dim];
      weight += share * weights[s];
    }
    const int head = row * n_heads + first_head + h;
    if (split) {
      const size_t target = (size_t(head) * ranges + range) * (head_dim + 2);
      out[target + dim] = static_cast<O>(sum);
      if (dim == 0) {
        out[target + head_dim] = static_cast<O>(top);
        out[target + head_dim + 1] = static_cast<O>(weight);
      }
    } else {
      out[head * head_dim + dim] = static_cast<O>(sum / weight * float(value_scale));
    }
  }
}
