// L new tokens per row, 8 at most, from their projection to attention's output, and into the tail of the int8 keys and
// values: grid (256 * n_heads / HEADS, B * ceil(L / TOKENS), splits).
//
// A threadgroup has HEADS query heads of one KV head, up to TOKENS tokens of a row, and one of the ranges that the
// row's older columns are divided into. Its simdgroups prepare the queries in turn, and then the new keys and values
// that these see: each threadgroup for itself, which costs less than another dispatch. Threadgroups of the first range
// attend to the new columns, too.
//
// qkv            (B, L, (n_heads + 2 n_kv_heads) * head_dim)
// kv             (B, 2 n_kv_heads, capacity, head_dim) int8: keys, then values
// tail           (B, 2 n_kv_heads, T, head_dim) int8: the columns after those
// starts         (B,): columns of the row in `kv`
// lengths        (B,): columns in use, the first new one included
// q_weight       (head_dim,), and k_weight
// key_scale      0-d, and value_scale
// constants      (head_dim / 2 + 2,): frequency of each pair, eps, and what a score is multiplied by
// out            (B, L, n_heads, head_dim) O in the memory of floats; of several splits,
//                (B, L, n_heads, splits, head_dim + 2): weighted sum of codes, largest score, sum of weights
// new_tail       `tail` with the new columns
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
const uint3 place = threadgroup_position_in_grid;
const uint3 places = threadgroups_per_grid;
const int first_head = place.x * HEADS;
const int range = place.z;
const int ranges = places.z;
#if SEVERAL
constexpr int MOST = 8;
const int count = qkv_shape[1];
const int groups = (count + TOKENS - 1) / TOKENS;
const int row = int(place.y) / groups;
const int first_token = int(place.y) % groups * TOKENS;
const int own = metal::min(TOKENS, count - first_token);
#else
constexpr int MOST = 1, count = 1, groups = 1, first_token = 0, own = 1;
const int row = place.y;
#endif
const int n_kv_heads = kv_shape[1] / 2;
const int n_heads = qkv_shape[2] / HEAD_DIM - 2 * n_kv_heads;
const int kv_head = first_head / (n_heads / n_kv_heads);
const int older = int(lengths[row]) - 1;
const int start = int(starts[row]);

threadgroup float4 shared_queries[TOKENS * HEADS * HEAD_DIM / 4];
threadgroup char4 fresh[MOST * HEAD_DIM / 2];
for (int i = simdgroup; i < own * HEADS + 2 * (first_token + own); i += SIMDGROUPS) {
  const bool is_query = i < own * HEADS;
  const int column = i - own * HEADS;  // a token's key, then its value
  const bool is_key = column % 2 == 0;
  const int token = is_query ? first_token + i / HEADS : column / 2;
  const int head = is_query ? first_head + i % HEADS : n_heads + (is_key ? 0 : n_kv_heads) + kv_head;
  const float position = float(older + token);
  Head x;
  x.load(qkv, (size_t(row * count + token) * (n_heads + 2 * n_kv_heads) + head) * HEAD_DIM, lane);
  if (is_query) {
    x.rope_norm(q_weight, constants, position, lane);
    const float factor = float(key_scale) * constants[HEAD_DIM / 2 + 1];
    x.store<float>((threadgroup float*)shared_queries, i * HEAD_DIM, factor, lane);
  } else {
    if (is_key) x.rope_norm(k_weight, constants, position, lane);
    const float scale = is_key ? float(key_scale) : float(value_scale);
    x.store_codes((threadgroup int8_t*)fresh, column * HEAD_DIM, scale, lane);
  }
}
threadgroup_barrier(metal::mem_flags::mem_threadgroup);

DecodeAttention attention;
attention.begin(shared_queries, own, lane, simdgroup);
const int range_size = (older + ranges - 1) / ranges;
const Columns columns = make_columns(
    kv, tail, kv_head, n_kv_heads, row, kv_shape[2], tail_shape[2], start, HEAD_DIM);
attention.add(columns, range_size * range, metal::min(range_size * (range + 1), older), older);
if (range == 0) {
  attention.add_new(fresh, first_token + 1);
}

threadgroup float4 sums[SIMDGROUPS * HEAD_DIM / 4];
threadgroup float maxima[SIMDGROUPS];
threadgroup float weights[SIMDGROUPS];
attention.finish(
    out, size_t(row * count + first_token) * n_heads + first_head, n_heads, range, ranges, float(value_scale),
    sums, maxima, weights);

// The row's threadgroups copy the other columns of its tail together, in runs of four numbers. The new columns are
// written by the first threadgroup of each KV head that has the last token, and so all of them.
const int units_per_head = tail_shape[2] * (HEAD_DIM / 4);
const int first_unit = row * 2 * n_kv_heads * units_per_head;
const device char4* from = (const device char4*)tail + first_unit;
device char4* to = (device char4*)new_tail + first_unit;
const int mine = 32 * int(simdgroup) + int(lane);
const int group = int(place.x) +
    int(places.x) * (range + ranges * (first_token / TOKENS));
const int threads = 256 * int(places.x) * ranges * groups;
const int new_unit = (older - start) * (HEAD_DIM / 4);
for (int i = 256 * group + mine; i < 2 * n_kv_heads * units_per_head; i += threads) {
  const int unit = i % units_per_head - new_unit;
  if (unit < 0 || unit >= count * (HEAD_DIM / 4)) {
    to[i] = from[i];
  }
}
if (range == 0 && first_head % (n_heads / n_kv_heads) == 0 && first_token + own == count) {
  for (int i = mine; i < count * (HEAD_DIM / 2); i += 256) {
    const int column = i / (HEAD_DIM / 4);  // a token's key, then its value
    const int unit = column / 2 * (HEAD_DIM / 4) + i % (HEAD_DIM / 4);
    const int at = (kv_head + column % 2 * n_kv_heads) * units_per_head + new_unit + unit;
    to[at] = fresh[i];
  }
}
