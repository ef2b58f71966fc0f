// L new tokens per row against int8 keys and values: grid (256 * n_heads / HEADS, B * ceil(L / TOKENS), splits).
//
// A threadgroup has HEADS query heads of one KV head, up to TOKENS tokens of a row, and one of the ranges that the
// row's columns are divided into; its simdgroups prepare the queries in turn.
//
// queries        (B, L, n_heads, head_dim), raw ones with ROPE;
//                without SEVERAL, (B, n_heads, 1, head_dim)
// kv             (B, 2 n_kv_heads, capacity, head_dim) int8: keys, then values
// tail           (B, 2 n_kv_heads, T, head_dim) int8: the columns after those
// starts         (B,): columns of the row in `kv`
// lengths        (B,): columns that the first token sees; each token after it sees one more
// key_scale      0-d, and value_scale
// norm_weight    (head_dim,) with ROPE
// constants      (head_dim / 2 + 2,): frequency of each pair, eps, and what a score is multiplied by
// out            (B, L, n_heads, head_dim) O in the memory of floats; of several splits,
//                (B, L, n_heads, splits, head_dim + 2): weighted sum of codes, largest score, sum of weights
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
const uint3 place = threadgroup_position_in_grid;
const uint3 places = threadgroups_per_grid;
const int first_head = place.x * HEADS;
const int range = place.z;
const int ranges = places.z;
#if SEVERAL
const int count = queries_shape[1];
const int groups = (count + TOKENS - 1) / TOKENS;
const int row = int(place.y) / groups;
const int first_token = int(place.y) % groups * TOKENS;
const int own = metal::min(TOKENS, count - first_token);
const int n_heads = queries_shape[2];
#else
constexpr int count = 1, first_token = 0, own = 1;
const int row = place.y;
const int n_heads = queries_shape[1];
#endif
const int n_kv_heads = kv_shape[1] / 2;
const int length = int(lengths[row]) + first_token;  // columns that this threadgroup's first token sees

threadgroup float4 shared_queries[TOKENS * HEADS * HEAD_DIM / 4];
for (int q = simdgroup; q < own * HEADS; q += SIMDGROUPS) {
  const int token = q / HEADS;
  const size_t head = size_t(row * count + first_token + token) * n_heads + first_head + q % HEADS;
  Head x;
  x.load(queries, head * HEAD_DIM, lane);
#if ROPE
  x.rope_norm(norm_weight, constants, float(length - 1 + token), lane);
#endif
  const float factor = float(key_scale) * constants[HEAD_DIM / 2 + 1];
  x.store<float>((threadgroup float*)shared_queries, q * HEAD_DIM, factor, lane);
}
threadgroup_barrier(metal::mem_flags::mem_threadgroup);

DecodeAttention attention;
attention.begin(shared_queries, own, lane, simdgroup);
const int seen = length + own - 1;
const int range_size = (seen + ranges - 1) / ranges;
const int kv_head = first_head / (n_heads / n_kv_heads);
const Columns columns = make_columns(
    kv, tail, kv_head, n_kv_heads, row, kv_shape[2], tail_shape[2], int(starts[row]), HEAD_DIM);
attention.add(columns, range_size * range, metal::min(range_size * (range + 1), seen), length);

threadgroup float4 sums[SIMDGROUPS * HEAD_DIM / 4];
threadgroup float maxima[SIMDGROUPS];
threadgroup float weights[SIMDGROUPS];
attention.finish(
    out, size_t(row * count + first_token) * n_heads + first_head, n_heads, range, ranges, float(value_scale),
    sums, maxima, weights);
