// out[n, k] = the number of row start[0] + n and input k. One thread per word.

const uint words = codes_shape[1];
const uint w = thread_position_in_grid.x;
const uint n = thread_position_in_grid.y;
if (w >= words) return;

#if MODE == PALETTE
const uint table_rows = codes_shape[0] / scales_shape[0];
#else
constexpr uint table_rows = 0;
#endif
auto matrix = make_matrix(codes, scales, biases, words, table_rows);
const uint row = start[0] + n;
const uint word = codes[row * words + w];
UNROLL for (uint i = 0; i < PER_WORD; i++) {
  const uint k = w * PER_WORD + i;
  const float number = matrix.number(row, k, (word >> (BITS * i)) & MASK);
  out[n * words * PER_WORD + k] = static_cast<T>(number);
}
