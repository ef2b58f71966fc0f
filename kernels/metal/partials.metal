// Attention's output in partials, which are merged where it is read.

static constant constexpr const uint PARTIAL = HEAD_DIM + 2;

/// Partials (heads, n_parts, PARTIAL) of `heads` heads: sums, the largest score, and the sum of weights. The number of
/// partials is none of the text's, since it grows with the context.
struct Partials {
  const device float* numbers;
  uint heads;
  uint n_parts;

#define EACH_PART(first) UNROLL for (uint p = first; p < MAX_PARTIALS; p++) if (p < n_parts)

  /// Write what the numbers of each partial count, for threads `first`, `first + step`, ... of a threadgroup.
  void weigh(float value_scale, uint first, uint step, threadgroup float* shares) const {
    for (uint head = first; head < heads; head += step) {
      const device float* ends = numbers + head * n_parts * PARTIAL + HEAD_DIM;
      float top = ends[0], weight = 0.0f;
      EACH_PART(1) top = max(top, ends[p * PARTIAL]);
      EACH_PART(0) weight += metal::fast::exp2(ends[p * PARTIAL] - top) * ends[p * PARTIAL + 1];
      const float scale = value_scale / weight;
      EACH_PART(0) shares[head * n_parts + p] = metal::fast::exp2(ends[p * PARTIAL] - top) * scale;
    }
  }

  /// Number `i` of the heads' output.
  float merged(uint i, threadgroup const float* shares) const {
    const uint part = i / HEAD_DIM * n_parts;
    float sum = 0.0f;
    EACH_PART(0) sum += shares[part + p] * numbers[(part + p) * PARTIAL + i % HEAD_DIM];
    return sum;
  }
};
