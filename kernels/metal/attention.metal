// Attention of one query over int8 keys that come one after the other, in base 2.

// Below every score, and finite, so that no difference of two is NaN.
constant constexpr float LOWEST = -3.0e38f;

constant constexpr int SIMDGROUPS = 8;

inline float4 widened(char4 x) {
  return float4(float(x.x), float(x.y), float(x.z), float(x.w));
}

inline float total(float4 x) {
  return (x.x + x.y) + (x.z + x.w);
}

// Sum over each run of RUN lanes, a power of two; every lane of a run gets it.
inline float run_sum(float x) {
  UNROLL for (ushort distance = 1; distance < RUN; distance *= 2) {
    x += simd_shuffle_xor(x, distance);
  }
  return x;
}

// Codes of one KV head: `start` columns of keys are in a long buffer, and the rest in a tail; a key's value lies
// `distance` further on. A column has `stride` times four dimensions.
struct Columns {
  const device char4* keys;
  const device char4* tail;
  size_t distance;
  size_t tail_distance;
  int start;
  int stride;
};

// Of the KV head `head` of buffers that have `heads` of them for keys, and as many for values.
inline Columns make_columns(
    const device int8_t* buffer, const device int8_t* tail, int head, int heads, int row, int capacity,
    int tail_capacity, int start, int head_dim) {
  const size_t key = size_t(row) * 2 * heads + head;
  const size_t plane = size_t(capacity) * (head_dim / 4);
  const size_t tail_plane = size_t(tail_capacity) * (head_dim / 4);
  return {(const device char4*)buffer + key * plane, (const device char4*)tail + key * tail_plane,
          heads * plane, heads * tail_plane, start, head_dim / 4};
}

// A lane's share of a key and its value: UNITS times four dimensions.
struct Codes {
  char4 key[UNITS];
  char4 value[UNITS];

  // Units `first` .. `first` + UNITS of a column; those from `inside` on belong to no head.
  void load(Columns columns, int column, int first, int inside) {
    const bool in_tail = column >= columns.start;
    const size_t at = size_t(in_tail ? column - columns.start : column) * columns.stride + first;
    const device char4* keys = (in_tail ? columns.tail : columns.keys) + at;
    take(keys, keys + (in_tail ? columns.tail_distance : columns.distance), inside);
  }

  template <typename Units>
  void take(Units keys, Units values, int inside) {
    UNROLL for (int u = 0; u < UNITS; u++) {
      key[u] = u < inside ? keys[u] : char4(0, 0, 0, 0);
      value[u] = u < inside ? values[u] : char4(0, 0, 0, 0);
    }
  }
};

// A lane's share of a query, with everything that multiplies a key's codes folded in, so that a sum of
// products is a score in base 2.
struct Query {
  float4 units[UNITS];

  void load(threadgroup const float4* numbers, int inside) {
    UNROLL for (int u = 0; u < UNITS; u++) {
      units[u] = u < inside ? numbers[u] : float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }

  float score(thread const char4* key) const {
    float4 products = units[0] * widened(key[0]);
    UNROLL for (int u = 1; u < UNITS; u++) {
      products += units[u] * widened(key[u]);
    }
    return run_sum(total(products));
  }
};

// Attention of some lanes to the keys they saw: the largest score, the sum of exp2(score - maximum), and
// the sum of the values weighted by it, UNITS times four dimensions per lane.
//
// Fast exponentials: one per key, and what is wrong with a weight is wrong in both sums.
struct OnlineSoftmax {
  float maximum;
  float sum;
  float4 values[UNITS];

  void clear() {
    maximum = LOWEST;
    sum = 0.0f;
    UNROLL for (int u = 0; u < UNITS; u++) {
      values[u] = float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }

  void rescale(float top) {
    const float keep = metal::fast::exp2(maximum - top);
    maximum = top;
    sum *= keep;
    UNROLL for (int u = 0; u < UNITS; u++) {
      values[u] *= keep;
    }
  }

  void add(float score, thread const char4* value) {
    if (score > maximum) {
      rescale(score);
    }
    const float weight = metal::fast::exp2(score - maximum);
    sum += weight;
    UNROLL for (int u = 0; u < UNITS; u++) {
      values[u] += widened(value[u]) * weight;
    }
  }

  // Merge with the lane `distance` away; all lanes of the simdgroup call it.
  void merge(ushort distance) {
    rescale(metal::max(maximum, simd_shuffle_xor(maximum, distance)));
    sum += simd_shuffle_xor(sum, distance);
    UNROLL for (int u = 0; u < UNITS; u++) {
      UNROLL for (int c = 0; c < 4; c++) {
        values[u][c] += simd_shuffle_xor(values[u][c], distance);
      }
    }
  }
};

// The part of attention that a threadgroup of 8 simdgroups computes: HEADS query heads of one KV head, up to TOKENS
// tokens of a row, which follow each other, and one range of the columns. Query t * HEADS + h is token t's in head h.
//
// In a simdgroup, each run of RUN lanes takes a column of its own, every lane UNITS * 4 dimensions of it; the
// simdgroups take turns over the columns, and their sums are merged at the end.
static constant constexpr const int QUERIES = HEADS * TOKENS;
static constant constexpr const int KEYS = 32 / RUN;  // per simdgroup and step
static constant constexpr const int STEP = SIMDGROUPS * KEYS;

struct DecodeAttention {
  Query query[QUERIES];
  OnlineSoftmax seen[QUERIES];
  int used;  // queries of tokens that exist
  int lane;
  int simdgroup;
  int first;   // of the lane's units
  int inside;  // units from there to the end of a head

#if TOKENS == 1
#define EACH_QUERY UNROLL for (int q = 0; q < QUERIES; q++)
#else
#define EACH_QUERY \
  UNROLL for (int q = 0; q < QUERIES; q++) \
    if (q < used)
#endif

  void begin(threadgroup const float4* queries, int tokens, uint lane_, uint simdgroup_) {
    used = HEADS * tokens;
    lane = int(lane_);
    simdgroup = int(simdgroup_);
    first = lane % RUN * UNITS;
    inside = HEAD_DIM / 4 - first;
    EACH_QUERY {
      query[q].load(queries + q * (HEAD_DIM / 4) + first, inside);
      seen[q].clear();
    }
  }

  // Columns [begin, end), of which token t sees those before `shown + t`. Lanes past the end go along with the
  // last one, since shuffles need all of them. Codes are fetched a step ahead.
  void add(Columns columns, int begin, int end, int shown) {
    int column = begin + simdgroup * KEYS + lane / RUN;
    Codes next;
    next.load(columns, metal::clamp(column, 0, metal::max(end - 1, 0)), first, inside);
    for (int base = begin + simdgroup * KEYS; base < end; base += STEP) {
      const Codes codes = next;
      next.load(columns, metal::min(column + STEP, end - 1), first, inside);
      EACH_QUERY {
        const float score = query[q].score(codes.key);
#if TOKENS == 1
        if (column < end) seen[q].add(score, codes.value);
#else
        if (column < metal::min(end, shown + q / HEADS)) seen[q].add(score, codes.value);
#endif
      }
      column += STEP;
    }
  }

  // Columns of new tokens, in the threadgroup's memory, of which token t sees `shown + t`, and the last token all.
  void add_new(threadgroup const char4* fresh, int shown) {
    for (int column = simdgroup; column < shown + used / HEADS - 1; column += SIMDGROUPS) {
      Codes codes;
      threadgroup const char4* key = fresh + column * (HEAD_DIM / 2) + first;
      codes.take(key, key + HEAD_DIM / 4, inside);
      EACH_QUERY {
#if TOKENS > 1
        if (column >= shown + q / HEADS) continue;
#endif
        const float score = query[q].score(codes.key);
        if (lane < RUN) seen[q].add(score, codes.value);
      }
    }
  }

  // Merge all lanes and simdgroups, and write for each query, of which `n_heads` are a token's, the `range` that was
  // attended to: the weighted sum of codes, the largest score, and the sum of weights; or, of a single range,
  // attention's result as O.
  void finish(
      device float* out, size_t first_query, int n_heads, int range, int ranges, float value_scale,
      threadgroup float4* sums, threadgroup float* maxima, threadgroup float* weights) {
    const int dim = 32 * simdgroup + lane;
    EACH_QUERY {
      UNROLL for (ushort distance = RUN; distance < 32; distance *= 2) {
        seen[q].merge(distance);
      }
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      UNROLL for (int u = 0; u < UNITS; u++) {
        if (lane < RUN && u < inside) sums[simdgroup * (HEAD_DIM / 4) + first + u] = seen[q].values[u];
      }
      if (lane == 0) {
        maxima[simdgroup] = seen[q].maximum;
        weights[simdgroup] = seen[q].sum;
      }
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      if (dim < HEAD_DIM) {
        float top = LOWEST;
        UNROLL for (int s = 0; s < SIMDGROUPS; s++) {
          top = metal::max(top, maxima[s]);
        }
        float sum = 0.0f;
        float weight = 0.0f;
        UNROLL for (int s = 0; s < SIMDGROUPS; s++) {
          const float share = metal::fast::exp2(maxima[s] - top);
          sum += share * ((threadgroup float*)sums)[s * HEAD_DIM + dim];
          weight += share * weights[s];
        }
        const size_t at = first_query + q / HEADS * n_heads + q % HEADS;
        if (ranges > 1) {
          device float* target = out + (at * ranges + range) * (HEAD_DIM + 2);
          target[dim] = sum;
          if (dim == 0) {
            target[HEAD_DIM] = top;
            target[HEAD_DIM + 1] = weight;
          }
        } else {
          ((device O*)out)[at * HEAD_DIM + dim] = static_cast<O>(sum / weight * value_scale);
        }
      }
    }
  }
};
