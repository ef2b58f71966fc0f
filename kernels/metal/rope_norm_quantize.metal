// One simdgroup per head and token: grid (32, n_heads + 2 n_kv_heads, B * L).
//
// qkv            (B, L, (n_heads + 2 n_kv_heads) * head_dim)
// offset         (B,), or (1,) for all rows: position of the first of the L tokens
// q_weight       (head_dim,), and k_weight
// key_scale      0-d, and value_scale
// constants      log2(theta), eps
// queries        (B, n_heads, L, head_dim) T
// codes          (B, 2 n_kv_heads, L, head_dim) int8: keys, then values
constexpr uint PAIRS = head_dim / 2;
constexpr uint STEPS = (PAIRS + 31) / 32;
constexpr uint HEADS = n_heads + 2 * n_kv_heads;

const uint lane = thread_index_in_simdgroup;
const uint head = thread_position_in_grid.y;
const uint token = thread_position_in_grid.z;
const uint length = qkv_shape[1];
const uint row = token / length;
const uint step = token % length;
const bool is_query = head < n_heads;

const size_t source = (size_t(token) * HEADS + head) * head_dim;
float2 x[STEPS];
for (uint i = 0; i < STEPS; i++) {
  const uint pair = i * 32 + lane;
  x[i] = pair < PAIRS ? float2(float(qkv[source + 2 * pair]), float(qkv[source + 2 * pair + 1]))
                      : float2(0.0f, 0.0f);
}

if (head < n_heads + n_kv_heads) {
  const float position = float(int(offset[offset_shape[0] > 1 ? row : 0]) + int(step));
  float squares = 0.0f;
  for (uint i = 0; i < STEPS; i++) {
    x[i] = rotated(x[i], i * 32 + lane, head_dim, position, constants[0]);
    squares += x[i].x * x[i].x + x[i].y * x[i].y;
  }
  const float scale = metal::precise::rsqrt(simd_sum(squares) / head_dim + constants[1]);
  for (uint i = 0; i < STEPS; i++) {
    const uint pair = i * 32 + lane;
    if (pair < PAIRS) {
      x[i].x *= scale * (is_query ? float(q_weight[2 * pair]) : float(k_weight[2 * pair]));
      x[i].y *= scale * (is_query ? float(q_weight[2 * pair + 1]) : float(k_weight[2 * pair + 1]));
    }
  }
}

const bool is_key = !is_query && head < n_heads + n_kv_heads;
const size_t kv_head = size_t(row) * 2 * n_kv_heads + head - n_heads;
const size_t kv_target = (kv_head * length + step) * head_dim;
const float kv_scale = is_key ? float(key_scale) : float(value_scale);
const size_t q_target = ((size_t(row) * n_heads + head) * length + step) * head_dim;
for (uint i = 0; i < STEPS; i++) {
  const uint dim = 2 * (i * 32 + lane);
  if (dim < head_dim) {
    if (is_query) {
      queries[q_target + dim] = static_cast<T>(x[i].x);
      queries[q_target + dim + 1] = static_cast<T>(x[i].y);
    } else {
      codes[kv_target + dim] = int8_code(x[i].x, kv_scale);
      codes[kv_target + dim + 1] = int8_code(x[i].y, kv_scale);
    }
  }
}
