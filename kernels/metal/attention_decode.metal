// L new tokens per row against int8 keys and values: grid (256 * n_heads / heads, B * ceil(L / tokens), splits).
//
// A threadgroup has `heads` query heads of one KV head, up to `tokens` tokens of a row, and one of the ranges that the
// row's columns are divided into; its simdgroups prepare the queries in turn.
//
// queries        (B, L, n_heads, head_dim), raw ones with `rope`;
//                without `several`, (B, n_heads, 1, head_dim)
// kv             (B, 2 n_kv_heads, capacity, head_dim) int8: keys, then values
// tail           (B, 2 n_kv_heads, T, head_dim) int8: the columns after those
// starts         (B,): columns of the row in `kv`
// lengths        (B,): columns that the first token sees; each token after it sees one more
// key_scale      0-d, and value_scale
// norm_weight    (head_dim,) with `rope`
// constants      (head_dim / 2 + 2,): frequency of each pair, eps, and what a score is multiplied by
// out            (B, L, n_heads, head_dim) O in the memory of floats; of several splits,
//                (B, L, n_heads, splits, head_dim + 2): weighted sum of codes, largest score, sum of weights
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
const uint3 place = threadgroup_position_in_grid;
const uint3 places = threadgroups_per_grid;
const int first_head = place.x * heads;
const int range = place.z;
const int ranges = places.z;
const int count = several ? queries_shape[1] : 1;
const int groups = (count + tokens - 1) / tokens;
const int row = int(place.y) / groups;
const int first_token = int(place.y) % groups * tokens;
const int own = metal::min(tokens, count - first_token);
const int n_heads = several ? queries_shape[2] : queries_shape[1];
const int n_kv_heads = kv_shape[1] / 2;
const int length = int(lengths[row]) + first_token;  // columns that this threadgroup's first token sees

threadgroup float4 shared_queries[tokens * heads * head_dim / 4];
for (int q = simdgroup; q < own * heads; q += SIMDGROUPS) {
  const int token = q / heads;
  const size_t head = size_t(row * count + first_token + token) * n_heads + first_head + q % heads;
  Head<head_dim> x;
  x.load(queries, head * head_dim, lane);
  if (rope) {
    x.rope_norm(norm_weight, constants, float(length - 1 + token), lane);
  }
  const float factor = float(key_scale) * constants[head_dim / 2 + 1];
  x.template store<float>((threadgroup float*)shared_queries, q * head_dim, factor, lane);
}
threadgroup_barrier(metal::mem_flags::mem_threadgroup);

DecodeAttention<head_dim, heads, tokens, lanes, units> attention;
attention.begin(shared_queries, own, lane, simdgroup);
const int seen = length + own - 1;
const int range_size = (seen + ranges - 1) / ranges;
const int kv_head = first_head / (n_heads / n_kv_heads);
const Columns columns = make_columns(
    kv, tail, kv_head, n_kv_heads, row, kv_shape[2], tail_shape[2], int(starts[row]), head_dim);
attention.add(columns, range_size * range, metal::min(range_size * (range + 1), seen), length);

threadgroup float4 sums[SIMDGROUPS * head_dim / 4];
threadgroup float maxima[SIMDGROUPS];
threadgroup float weights[SIMDGROUPS];
attention.template finish<O>(
    out, size_t(row * count + first_token) * n_heads + first_head, n_heads, range, ranges, float(value_scale),
    sums, maxima, weights);
