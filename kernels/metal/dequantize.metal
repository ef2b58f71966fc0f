// out[n, k] = the number of row start[0] + n and input k. One thread per word.

using F = Format<BITS, MODE, GRANULARITY, GROUP, true>;

const uint words = codes_shape[1];
const uint w = thread_position_in_grid.x;
const uint n = thread_position_in_grid.y;
if (w >= words) return;

auto matrix = make_matrix<F>(codes, scales, biases, codes_shape[0], words, scales_shape[0]);
const uint row = start[0] + n;
const uint word = codes[row * words + w];
UNROLL for (uint i = 0; i < F::PER_WORD; i++) {
  const uint k = w * F::PER_WORD + i;
  const float number = matrix.number(row, k, (word >> (BITS * i)) & F::MASK);
  out[n * words * F::PER_WORD + k] = static_cast<T>(number);
}
