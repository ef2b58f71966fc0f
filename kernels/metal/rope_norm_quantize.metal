// One simdgroup per head and token: grid (32, n_heads + 2 n_kv_heads, B * L).
//
// qkv            (B, L, (n_heads + 2 n_kv_heads) * head_dim)
// offset         (B,), or (1,) for all rows: position of the first of the L tokens
// q_weight       (head_dim,), and k_weight
// key_scale      0-d, and value_scale
// constants      (head_dim / 2 + 2,): frequency of each pair, eps, and a factor for scores
// queries        (B, n_heads, L, head_dim) T
// codes          (B, 2 n_kv_heads, L, head_dim) int8: keys, then values
constexpr uint ALL_HEADS = N_HEADS + 2 * N_KV_HEADS;

const uint lane = thread_index_in_simdgroup;
const uint head = thread_position_in_grid.y;
const uint token = thread_position_in_grid.z;
const uint length = qkv_shape[1];
const uint row = token / length;
const uint step = token % length;
const bool is_query = head < N_HEADS;
const bool is_value = head >= N_HEADS + N_KV_HEADS;

Head x;
x.load(qkv, (size_t(token) * ALL_HEADS + head) * HEAD_DIM, lane);
const float position = float(int(offset[offset_shape[0] > 1 ? row : 0]) + int(step));
if (is_query) {
  x.rope_norm(q_weight, constants, position, lane);
  x.store<T>(queries, ((size_t(row) * N_HEADS + head) * length + step) * HEAD_DIM, 1.0f, lane);
} else {
  if (!is_value) x.rope_norm(k_weight, constants, position, lane);
  const size_t kv_head = size_t(row) * 2 * N_KV_HEADS + head - N_HEADS;
  const float scale = is_value ? float(value_scale) : float(key_scale);
  x.store_codes(codes, (kv_head * length + step) * HEAD_DIM, scale, lane);
}
