// Products of a simdgroup with 8x8 matrices: inputs (m, k) by codes (k, n), put together in registers.
//
// The eight k of a matrix are one input of each of eight runs of VALUES neighbouring inputs, so that a lane reads
// whole words of codes and neighbouring inputs. Matrix f has input f of each run; one mask leaves the codes of
// matrices f and f + PAIRS.

#include <metal_simdgroup_matrix>

/// The row of a lane's two elements of an 8x8 matrix, and the column of the first.
inline uint row_in_tile(uint lane) { return ((lane / 4) & 4) + (lane / 2) % 4; }
inline uint column_in_tile(uint lane) { return ((lane / 4) & 2) * 2 + (lane % 2) * 2; }

static constant constexpr const uint BLOCKS = 2;  // of 8 vectors
static constant constexpr const uint TILES = CODE_ROWS / 8;
// Levels of a balanced matrix are multiplied with a row's scale in the end.
static constant constexpr const bool SCALED_LATE = MODE == BALANCED && GRANULARITY != PER_GROUP;
static constant constexpr const bool SCALED = MODE != PALETTE && !SCALED_LATE;

/// The products of up to 8 * BLOCKS vectors with CODE_ROWS rows of codes. With PAIR, the second half of the tiles is
/// `second`'s; WHOLE: a row has a multiple of 8 * VALUES inputs.
struct Tiles {
  simdgroup_matrix<float, 8, 8> sums[BLOCKS][TILES];
#if NORM
  float squares[BLOCKS];  // of the inputs of a lane's vectors that the lane has read
#endif

  void clear() {
    UNROLL for (int b = 0; b < BLOCKS; b++) {
#if NORM
      squares[b] = 0.0f;
#endif
      UNROLL for (int t = 0; t < TILES; t++) sums[b][t] = simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }

  /// Add 8 * VALUES inputs from `step` on of 8 * USED vectors. `rows` are the lane's rows of codes in each tile. Vectors
  /// past the last of `count` repeat it.
  template <int USED, typename V, typename M>
  void add(
      V vectors,
      uint count,
      M first,
      M second,
      const thread uint (&rows)[TILES][2],
      const thread uint (&tables)[TILES][2],
      uint lane,
      uint step) {
    const uint in_dims = first.in_dims();
    const uint k = step + row_in_tile(lane) * VALUES;
    uint words[TILES][2][WORDS];
    float scales[TILES][2], biases[TILES][2];
    UNROLL for (int t = 0; t < TILES; t++) {
      const M matrix = PAIR && t >= TILES / 2 ? second : first;
      UNROLL for (uint e = 0; e < 2; e++) {
        UNROLL for (uint w = 0; w < WORDS; w++) {
          const uint word = k / PER_WORD + w;
          words[t][e][w] = WHOLE || word < matrix.words ? matrix.codes[rows[t][e] * matrix.words + word] : 0;
        }
        scales[t][e] = SCALED && (WHOLE || k < in_dims) ? matrix.scale(rows[t][e], k) : 1.0f;
        biases[t][e] = SCALED && MODE == AFFINE && (WHOLE || k < in_dims) ? matrix.bias(rows[t][e], k) : 0.0f;
      }
    }
    const uint run = step + column_in_tile(lane) * VALUES;
    UNROLL for (uint w = 0; w < WORDS; w++) {
      UNROLL for (uint i = 0; i < PAIRS; i++) {
        simdgroup_matrix<float, 8, 8> left[2][USED], right[2][TILES];
        UNROLL for (uint half = 0; half < 2; half++) {
          const uint f = w * PER_WORD + i + half * PAIRS;
          UNROLL for (uint e = 0; e < 2; e++) {
            const bool inside = WHOLE || run + e * VALUES + (ALIGNED ? 0 : f) < in_dims;
            const float factor = inside ? vectors.factor(run + e * VALUES + f) : 0.0f;
            UNROLL for (int b = 0; b < USED; b++) {
              const uint m = min(8 * b + row_in_tile(lane), count - 1);
              const float x = inside ? float((vectors.x + m * in_dims + run)[e * VALUES + f]) : 0.0f;
#if NORM
              squares[b] += x * x;
#endif
              left[half][b].thread_elements()[e] = x * factor;
            }
          }
        }
        UNROLL for (int t = 0; t < TILES; t++) {
          UNROLL for (uint e = 0; e < 2; e++) {
            // Codes past the last are multiplied with inputs of 0.
            float2 pair =
                (PAIR && t >= TILES / 2 ? second : first).exact_pair(words[t][e][w], i, tables[t][e]);
            if (SCALED) pair = scales[t][e] * pair + biases[t][e];
            right[0][t].thread_elements()[e] = pair.x;
            right[1][t].thread_elements()[e] = pair.y;
          }
        }
        UNROLL for (uint half = 0; half < 2; half++) {
          UNROLL for (int t = 0; t < TILES; t++) {
            UNROLL for (int b = 0; b < USED; b++) {
              simdgroup_multiply_accumulate(sums[b][t], left[half][b], right[half][t], sums[b][t]);
            }
          }
        }
      }
    }
  }
};

/// The products of 8 * USED vectors with the lane's rows, of steps `part`, `part + n_parts`, ...
template <int USED, typename V, typename M>
void multiply_tiles(
    V vectors,
    uint count,
    M first,
    M second,
    const thread uint (&rows)[TILES][2],
    uint lane,
    uint part,
    uint n_parts,
    thread Tiles& tiles) {
  uint tables[TILES][2];
  UNROLL for (int t = 0; t < TILES; t++) {
    UNROLL for (uint e = 0; e < 2; e++) {
      tables[t][e] = MODE == PALETTE ? (PAIR && t >= TILES / 2 ? second : first).table(rows[t][e]) : 0;
    }
  }
  for (uint step = part * (8 * VALUES); step < first.in_dims(); step += n_parts * (8 * VALUES)) {
    tiles.template add<USED>(vectors, count, first, second, rows, tables, lane, step);
  }
}
