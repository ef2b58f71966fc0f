// What packed_vector computes, for up to 8 * BLOCKS vectors: each code is unpacked once for all of them.
//
// A simdgroup owns 16 rows of codes, of a pair 8 of each matrix, and multiplies 8x8 matrices: codes (n, k)
// by inputs (k, m). Inputs are in threadgroup memory; codes go from their words straight into the
// matrices. For that a lane takes 16 neighbouring inputs of a row, two in each of eight matrices, whose codes
// one mask takes out of a word together, and inputs are stored in that order.

constexpr uint STEP = 64;  // inputs
constexpr uint LOADED = 8;  // inputs that a thread loads of every eighth vector
constexpr uint ROWS = 8 * BLOCKS;
constexpr uint STRIDE = ROWS + 4;  // spreads the rows of a matrix over the memory's banks
constexpr uint OUTPUTS = PAIR ? 8 : 16;
using F = Format<BITS, MODE, GRANULARITY, GROUP, ALIGNED>;
// Levels of a balanced matrix are multiplied with a row's scale in the end.
constexpr bool SCALED_LATE = MODE == BALANCED && GRANULARITY != PER_GROUP;
constexpr bool SCALED = MODE != PALETTE && !SCALED_LATE;

threadgroup float inputs[STEP * STRIDE];
threadgroup float all_squares[ROWS];

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
#ifdef LOW_RANK
auto table = make_parts(parts);
#endif
const uint in_dims = first.in_dims();

// Rows past the last repeat it.
const uint outputs[2] = {
    min(start + row, out_dims - 1), min(start + (PAIR ? 0 : 8) + row, out_dims - 1)};

uint tables[2];
simdgroup_matrix<float, 8, 8> sums[2][BLOCKS];
UNROLL for (uint r = 0; r < 2; r++) {
  tables[r] = MODE == PALETTE ? (PAIR && r ? second : first).table(outputs[r]) : 0;
  UNROLL for (uint b = 0; b < BLOCKS; b++) sums[r][b] = simdgroup_matrix<float, 8, 8>(0.0f);
}
float squares[BLOCKS];
UNROLL for (uint b = 0; b < BLOCKS; b++) squares[b] = 0.0f;

// Where a thread stores its first input. From there, the others are as far away in every thread: constants,
// which take no registers.
const uint offset = thread_id % 8 * LOADED;
const uint first_place = offset % VALUES / F::PER_WORD * F::PAIRS * 8 + offset / VALUES * 2 +
                         offset % F::PER_WORD / F::PAIRS;
threadgroup float* const stored = inputs + first_place * STRIDE + thread_id / 8;

for (uint step = 0; step < in_dims; step += STEP) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL for (uint i = 0; i < LOADED; i++) {
    const uint code = i % F::PER_WORD;
    const uint place = (i / F::PER_WORD * F::PAIRS + code % F::PAIRS) * 8 + code / F::PAIRS;
    const uint input = step + offset + i;
    const float factor = input < in_dims ? vectors.factor(input) : 0.0f;
    UNROLL for (uint b = 0; b < BLOCKS; b++) {
      const uint m = 8 * b + thread_id / 8;
      const float value = input < in_dims && m < rows ? float(x[m * in_dims + input]) : 0.0f;
      if (NORM) squares[b] += value * value;
      stored[place * STRIDE + 8 * b] = value * factor;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const uint k = step + column / 2 * VALUES;
  uint words[2][F::WORDS];
  float scale_of[2], bias_of[2];
  UNROLL for (uint r = 0; r < 2; r++) {
    auto matrix = PAIR && r ? second : first;
    scale_of[r] = SCALED && k < in_dims ? matrix.scale(outputs[r], k) : 1.0f;
    bias_of[r] = SCALED && MODE == AFFINE && k < in_dims ? matrix.bias(outputs[r], k) : 0.0f;
    UNROLL for (uint w = 0; w < F::WORDS; w++) {
      const uint word = k / F::PER_WORD + w;
      words[r][w] = word < first.words ? matrix.codes[outputs[r] * first.words + word] : 0;
    }
  }
  UNROLL for (uint f = 0; f < 8; f++) {
    simdgroup_matrix<float, 8, 8> left[2];
    UNROLL for (uint r = 0; r < 2; r++) {
      // Codes past the last are multiplied with inputs of 0.
      float2 pair = (PAIR && r ? second : first)
                        .exact_pair(words[r][f / F::PAIRS], f % F::PAIRS, tables[r]);
      if (SCALED) pair = scale_of[r] * pair + bias_of[r];
      left[r].thread_elements()[0] = pair.x;
      left[r].thread_elements()[1] = pair.y;
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
  UNROLL for (uint b = 0; b < BLOCKS; b++) {
    float sum = squares[b];
    UNROLL for (uint n = 4; n > 0; n /= 2) sum += simd_shuffle_xor(sum, n);
    if (lane % 8 == 0) all_squares[8 * b + thread_id / 8] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

UNROLL for (uint b = 0; b < BLOCKS; b++) {
  UNROLL for (uint e = 0; e < 2; e++) {
    const uint m = 8 * b + column + e;
    if (m >= rows) continue;
    const float scale = NORM ? vectors.inverse_rms(all_squares[m], in_dims) : 1.0f;
    float y[2];
    UNROLL for (uint r = 0; r < 2; r++) {
      y[r] = sums[r][b].thread_elements()[e] * scale;
      if (SCALED_LATE) y[r] *= (PAIR && r ? second : first).scale(outputs[r], 0);
#ifdef LOW_RANK
      {
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
#endif
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
