// One new token per row against int8 keys and values: grid (256 * n_heads / heads, B, splits).
//
// A threadgroup has `heads` query heads of one KV head and one of the ranges that a row's columns are divided into;
// each of its first simdgroups prepares a query.
//
// queries        (B, n_heads, 1, head_dim), raw ones with `rope`
// kv             (B, 2 n_kv_heads, capacity, head_dim) int8: keys, then values
// tail           (B, 2 n_kv_heads, T, head_dim) int8: the columns after those
// starts         (B,): columns of the row in `kv`
// lengths        (B,): columns in use
// key_scale      0-d, and value_scale
// norm_weight    (head_dim,) with `rope`
// constants      (head_dim / 2 + 1,): frequency of each pair, then eps
// out            (B, n_heads, 1, head_dim) O; with `split`, (B, n_heads, splits, head_dim + 2) float:
//                weighted sum of codes, largest score, sum of weights
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
const int first_head = threadgroup_position_in_grid.x * heads;
const int row = threadgroup_position_in_grid.y;
const int range = threadgroup_position_in_grid.z;
const int ranges = threadgroups_per_grid.z;
const int n_heads = queries_shape[1];
const int n_kv_heads = kv_shape[1] / 2;
const int length = int(lengths[row]);

threadgroup float shared_queries[heads * head_dim];
if (simdgroup < heads) {
  Head<head_dim> x;
  x.load(queries, size_t(row * n_heads + first_head + simdgroup) * head_dim, lane);
  if (rope) {
    x.rope_norm(norm_weight, constants, float(length - 1), lane);
  }
  // log2(e), so that weights are powers of two.
  const float factor = float(key_scale) * metal::precise::rsqrt(float(head_dim)) * 1.44269504089f;
  x.template store<float>(shared_queries, simdgroup * head_dim, factor, lane);
}
threadgroup_barrier(metal::mem_flags::mem_threadgroup);

DecodeAttention<head_dim, heads, lanes, units> attention;
attention.begin(shared_queries, lane, simdgroup);
const int range_size = (length + ranges - 1) / ranges;
const int kv_head = first_head / (n_heads / n_kv_heads);
const Columns columns = make_columns(
    kv, tail, kv_head, n_kv_heads, row, kv_shape[2], tail_shape[2], int(starts[row]), head_dim);
attention.add(
    columns, range_size * range, metal::min(range_size * (range + 1), length));

threadgroup float sums[SIMDGROUPS * head_dim];
threadgroup float maxima[SIMDGROUPS];
threadgroup float weights[SIMDGROUPS];
const size_t stride = split ? size_t(ranges) * (head_dim + 2) : head_dim;
const size_t target = (row * n_heads + first_head) * stride + (split ? range * (head_dim + 2) : 0);
attention.template finish<split>(out + target, stride, float(value_scale), sums, maxima, weights);
