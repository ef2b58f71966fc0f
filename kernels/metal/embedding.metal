// Rows of a packed matrix: grid (words of a row, rounded up to threadgroups, tokens), one thread per word.
//
// tokens         (tokens,) integers
// codes          (N, K * bits / 32) uint32
// scales         (1,), (N,) or (N * K / group_size,), and biases with `affine`
// table          (T * 2 ** bits,) with `palette`; N / T rows share a table
// out            (tokens, K) O
constexpr uint CODES = 32 / bits;

const uint words = codes_shape[1];
const uint rows = codes_shape[0];
const uint row_groups = uint(scales_shape[0]) / rows;  // 0 for one scale of all
const uint group_size = words * CODES / metal::max(row_groups, 1u);
const uint table_rows = rows / metal::max(uint(table_shape[0]) >> bits, 1u);

const uint word = thread_position_in_grid.x;
const uint token = thread_position_in_grid.y;
if (word < words) {
  const uint row = uint(tokens[token]);
  uint packed = codes[size_t(row) * words + word];
  for (uint i = 0; i < CODES; i++) {
    const uint column = word * CODES + i;
    const uint code = packed & ((1u << bits) - 1);
    packed >>= bits;
    float value;
    if (palette) {
      value = float(table[((row / table_rows) << bits) + code]);
    } else {
      const uint group = row * row_groups + column / group_size;
      value = affine ? float(scales[group]) * float(code) + float(biases[group])
                     : float(scales[group]) * (float(code) - float((1 << bits) - 1) * 0.5f);
    }
    out[(size_t(token) * words + word) * CODES + i] = static_cast<O>(value);
  }
}
