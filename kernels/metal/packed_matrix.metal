// What packed_vector computes, for up to 8 * BLOCKS vectors: each code is unpacked once for all of them.
//
// A simdgroup owns 16 rows of codes, of a pair 8 of each matrix, and multiplies 8x8 matrices: codes (n, k)
// by inputs (k, m). Inputs lie in threadgroup memory; codes go from their words straight into the
// matrices. For that a lane takes 16 neighbouring inputs of a row, two in each of eight matrices, and
// inputs are stored in that order.

constexpr uint STEP = 64;  // inputs, one per thread
constexpr uint ROWS = 8 * BLOCKS;
constexpr uint STRIDE = ROWS + 4;  // spreads the rows of a matrix over the memory's banks
constexpr uint OUTPUTS = PAIR ? 8 : 16;
using F = Format<BITS, MODE, GRANULARITY, GROUP, ALIGNED>;

threadgroup float inputs[STEP * STRIDE];
threadgroup float partial_squares[2 * ROWS];

const uint rows = x_shape[0];
const uint out_dims = codes_shape[0];
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
const uint thread_id = thread_index_in_threadgroup;
const uint start = (threadgroup_position_in_grid.y * 2 + simdgroup) * OUTPUTS;
// Where a lane's two elements of an 8x8 matrix lie.
const uint row = ((lane / 4) & 4) + (lane / 2) % 4;
const uint column = ((lane / 4) & 2) * 2 + (lane % 2) * 2;

auto first = make_matrix<F>(codes, scales, biases, out_dims, codes_shape[1], scales_shape[0]);
auto second = make_matrix<F>(codes2, scales2, biases2, out_dims, codes_shape[1], scales_shape[0]);
auto vectors = make_vectors<NORM>(x, norm, eps[0]);
auto table = make_parts(parts);
const uint in_dims = first.in_dims();

// Rows past the last repeat it.
const uint outputs[2] = {
    min(start + row, out_dims - 1), min(start + (PAIR ? 0 : 8) + row, out_dims - 1)};

simdgroup_matrix<float, 8, 8> sums[2][BLOCKS];
float squares[ROWS];
UNROLL for (uint r = 0; r < 2; r++) {
  UNROLL for (uint b = 0; b < BLOCKS; b++) sums[r][b] = simdgroup_matrix<float, 8, 8>(0.0f);
}
UNROLL for (uint m = 0; m < ROWS; m++) squares[m] = 0.0f;

for (uint step = 0; step < in_dims; step += STEP) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint place = (thread_id % 16 / 2) * 8 + thread_id / 16 * 2 + thread_id % 2;
  const uint input = step + thread_id;
  const float factor = input < in_dims ? vectors.factor(input) : 0.0f;
  UNROLL for (uint m = 0; m < ROWS; m++) {
    const float value = input < in_dims && m < rows ? float(x[m * in_dims + input]) : 0.0f;
    if (NORM) squares[m] += value * value;
    inputs[place * STRIDE + m] = value * factor;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  float numbers[2][VALUES];
  const uint k = step + column / 2 * VALUES;
  unpack(first, outputs[0], k, numbers[0]);
  unpack(PAIR ? second : first, outputs[1], k, numbers[1]);
  UNROLL for (uint f = 0; f < 8; f++) {
    simdgroup_matrix<float, 8, 8> left[2];
    UNROLL for (uint r = 0; r < 2; r++) {
      left[r].thread_elements()[0] = numbers[r][2 * f];
      left[r].thread_elements()[1] = numbers[r][2 * f + 1];
    }
    UNROLL for (uint b = 0; b < BLOCKS; b++) {
      simdgroup_matrix<float, 8, 8> right;
      simdgroup_load(right, inputs + f * 8 * STRIDE + 8 * b, STRIDE);
      UNROLL for (uint r = 0; r < 2; r++) {
        simdgroup_multiply_accumulate(sums[r][b], left[r], right, sums[r][b]);
      }
    }
  }
}

if (NORM) {
  UNROLL for (uint m = 0; m < ROWS; m++) {
    const float sum = simd_sum(squares[m]);
    if (lane == 0) partial_squares[simdgroup * ROWS + m] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

UNROLL for (uint b = 0; b < BLOCKS; b++) {
  UNROLL for (uint e = 0; e < 2; e++) {
    const uint m = 8 * b + column + e;
    if (m >= rows) continue;
    const float scale =
        NORM ? vectors.inverse_rms(partial_squares[m] + partial_squares[ROWS + m], in_dims) : 1.0f;
    float y[2];
    UNROLL for (uint r = 0; r < 2; r++) {
      y[r] = sums[r][b].thread_elements()[e] * scale;
      if (LOW_RANK) {
        const uint slot = slots[m * slots_shape[0] / rows];
        const uint matrix = PAIR ? r : 0;
        const uint rank = table.rank(slot, matrix);
        if (rank == 0) continue;
        auto numbers = adapter_of(
            slot, adapter0, adapter1, adapter2, adapter3, adapter4, adapter5, adapter6, adapter7);
        // Sections come before a second matrix, of which there are none in a pair.
        const uint before = matrix ? table.rank(slot, 0) : table.section(outputs[r]) * rank;
        y[r] += expand(
            numbers + table.b(slot, matrix), rank, outputs[r], hidden + m * table.width() + before,
            0, 1);
      }
    }
    if (PAIR) y[0] = silu(y[0]) * y[1];
    UNROLL for (uint r = 0; r < (PAIR ? 1 : 2); r++) {
      const uint n = start + 8 * r + row;
      if (n >= out_dims) continue;
      const uint i = m * out_dims + n;
      out[i] = static_cast<T>(RESIDUAL ? y[r] + float(residual[i]) : y[r]);
    }
  }
}
