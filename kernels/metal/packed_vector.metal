// out[m, n] = residual[m, n] + x'[m] . W[n] + B[n] . hidden[m],  x' = rms_norm(x) * norm
// or, of a pair of matrices, silu(gate) * up.
//
// A threadgroup has up to ROWS vectors in registers; more are shared among neighbouring threadgroups, of which
// the later ones find the codes in a cache. ROWS is 1, or as many as there are registers for: the number in use is
// a value, so that two texts are all that is compiled.
//
// A and B belong to the adapter of m; hidden[m] = scale * A x'[m] is an input.
//
// A simdgroup has CODE_ROWS rows of codes, of a pair half as many of each matrix. With SPLIT, all simdgroups
// of a threadgroup have the same ones, and each multiplies a part of the inputs: so a small matrix keeps a whole
// chip busy, and yet inputs are prepared for many rows. To prepare them costs as much as two or three rows.

constexpr uint OUTPUTS = PAIR ? CODE_ROWS / 2 : CODE_ROWS;
constexpr uint GROUP_OUTPUTS = OUTPUTS * (SPLIT ? 1 : SIMDGROUPS);
constexpr uint SHARERS = LANES / CODE_ROWS;  // lanes that finish a row together
constexpr uint JOINED = ROWS * (CODE_ROWS + 1);

threadgroup float joined[SPLIT ? SIMDGROUPS * JOINED : 1];

#if ROWS > 1
const uint passes = threadgroups_per_grid.x;
const uint all_rows = x_shape[0];
const uint first_row = (threadgroup_position_in_grid.x * all_rows + passes - 1) / passes;
const uint count = ((threadgroup_position_in_grid.x + 1) * all_rows + passes - 1) / passes - first_row;
#define EACH_ROW(m) \
  UNROLL for (uint m = 0; m < ROWS; m++) \
    if (m < count)
#define ROW(m) (first_row + m)
#else
#define EACH_ROW(m) UNROLL for (uint m = 0; m < ROWS; m++)
#define ROW(m) m
#endif
const uint out_dims = codes_shape[0];
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
const uint group_start = threadgroup_position_in_grid.y * GROUP_OUTPUTS;
const uint start = group_start + (SPLIT ? 0 : simdgroup * OUTPUTS);

#if MODE == PALETTE
const uint table_rows = out_dims / scales_shape[0];
#else
constexpr uint table_rows = 0;
#endif
auto first = make_matrix(codes, scales, biases, codes_shape[1], table_rows);
#if PAIR
auto second = make_matrix(codes2, scales2, biases2, codes_shape[1], table_rows);
#else
auto second = first;
#endif
#ifdef PARTIALS
// Of up to two vectors, merged once for the whole threadgroup.
#if ROWS > 1
constexpr uint MERGED = 2;
#else
constexpr uint MERGED = 1, count = 1;
#endif
threadgroup float shares[MERGED * K / HEAD_DIM * MAX_PARTIALS];
threadgroup T merged[MERGED * K];
const Partials partials = {x, count * K / HEAD_DIM, uint(x_shape[2])};
const uint first_thread = 32 * simdgroup + lane;
partials.weigh(float(value_scale), first_thread, 32 * SIMDGROUPS, shares);
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint i = first_thread; i < count * K; i += 32 * SIMDGROUPS) merged[i] = static_cast<T>(partials.merged(i, shares));
threadgroup_barrier(mem_flags::mem_threadgroup);
auto vectors = make_vectors((const threadgroup T*)merged, norm, eps[0]);
#else
auto vectors = make_vectors(x, norm, eps[0]);
#if ROWS > 1
vectors.x += first_row * first.in_dims();
#endif
#endif

// Rows past the last repeat it, so that all lanes go one way.
uint rows[CODE_ROWS];
UNROLL for (uint r = 0; r < CODE_ROWS; r++) rows[r] = min(start + r % OUTPUTS, out_dims - 1);

Products products;
const Steps steps = steps_of(lane, SPLIT ? simdgroup : 0, SPLIT ? SIMDGROUPS : 1);
#if ROWS > 1
multiply_some(vectors, count, first, second, rows, steps, products);
#else
multiply<1>(vectors, first, second, rows, steps, products);
#endif

// From here on a lane has one row of codes.
const uint own = lane / SHARERS;
const bool is_second = PAIR && own >= OUTPUTS;
const uint output = start + own % OUTPUTS;
const uint row = min(output, out_dims - 1);
float sums[ROWS];
EACH_ROW(m) {
  const float sum = sum_of_lane(products.sums[m], lane);
  sums[m] = products.scaled(is_second ? second : first, row, m, sum);
#if NORM
  products.squares[m] = simd_sum(products.squares[m]);
#endif
}
#if SPLIT
EACH_ROW(m) {
  threadgroup float* part = joined + simdgroup * JOINED + m * (CODE_ROWS + 1);
  if (lane % SHARERS == 0) part[own] = sums[m];
  sums[m] = 0.0f;
#if NORM
  if (lane == 0) part[CODE_ROWS] = products.squares[m];
  products.squares[m] = 0.0f;
#endif
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (simdgroup > 0) return;
for (uint part = 0; part < SIMDGROUPS; part++) {
  EACH_ROW(m) {
    sums[m] += joined[part * JOINED + m * (CODE_ROWS + 1) + own];
#if NORM
    products.squares[m] += joined[part * JOINED + m * (CODE_ROWS + 1) + CODE_ROWS];
#endif
  }
}
#endif
#if NORM
EACH_ROW(m) sums[m] *= vectors.inverse_rms(products.squares[m], first.in_dims());
#endif

#ifdef LOW_RANK
{
  auto table = make_parts(parts);
  EACH_ROW(m) {
#if ROWS > 1
    const uint slot = slots[ROW(m) * slots_shape[0] / all_rows];
#else
    const uint slot = slots[0];
#endif
    const uint rank = table.rank(slot, is_second);
    float sum = 0.0f;
    if (rank > 0) {
      auto numbers = adapter_of(
          slot, adapter0, adapter1, adapter2, adapter3, adapter4, adapter5, adapter6, adapter7);
      // Sections come before a second matrix, of which there are none in a pair.
      const uint before = is_second ? table.rank(slot, 0) : table.section(row) * rank;
      sum = expand(
          numbers + table.b(slot, is_second), rank, row, hidden + ROW(m) * table.width() + before, lane % SHARERS,
          SHARERS);
    }
    UNROLL for (uint n = SHARERS / 2; n > 0; n /= 2) sum += simd_shuffle_xor(sum, n);
    sums[m] += sum;
  }
}
#endif

EACH_ROW(m) {
  float y = sums[m];
#if PAIR
  y = silu(y) * simd_shuffle_xor(y, LANES / 2);
#endif
  if (lane % SHARERS == 0 && own < OUTPUTS && output < out_dims) {
    const uint i = ROW(m) * out_dims + output;
#if RESIDUAL
    y += float(residual[i]);
#endif
    out[i] = static_cast<T>(y);
  }
}
