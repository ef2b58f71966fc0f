// Attention of one query over int8 keys that come one after the other, in base 2.

// Below every score, and finite, so that no difference of two is NaN.
constant constexpr float LOWEST = -3.0e38f;

inline float4 widened(char4 x) {
  return float4(float(x.x), float(x.y), float(x.z), float(x.w));
}

inline float total(float4 x) {
  return (x.x + x.y) + (x.z + x.w);
}

// Sum over each run of `lanes` lanes, a power of two; every lane of a run gets it.
template <int lanes>
inline float run_sum(float x) {
  for (ushort distance = 1; distance < lanes; distance *= 2) {
    x += simd_shuffle_xor(x, distance);
  }
  return x;
}

// A lane's share of a key and its value: UNITS times four dimensions.
template <int UNITS>
struct Codes {
  char4 key[UNITS];
  char4 value[UNITS];

  // Dimensions from `inside` units on belong to no head.
  void load(const device char4* keys, const device char4* values, int inside) {
    for (int u = 0; u < UNITS; u++) {
      key[u] = u < inside ? keys[u] : char4(0, 0, 0, 0);
      value[u] = u < inside ? values[u] : char4(0, 0, 0, 0);
    }
  }
};

// A lane's share of a query, with everything that multiplies a key's codes folded in, so that a sum of
// products is a score in base 2.
template <int UNITS>
struct Query {
  float4 units[UNITS];

  template <typename Numbers>
  void load(Numbers numbers, int first_dim, int head_dim) {
    for (int u = 0; u < UNITS; u++) {
      const int dim = first_dim + 4 * u;
      units[u] = float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (dim < head_dim) {
        units[u] = float4(
            float(numbers[dim]),
            float(numbers[dim + 1]),
            float(numbers[dim + 2]),
            float(numbers[dim + 3]));
      }
    }
  }

  // Rotary embedding, then RMSNorm over all lanes of the run.
  template <int lanes, typename Numbers, typename Constants>
  void rope_norm(Numbers weight, Constants constants, int position, int first_dim, int head_dim) {
    Query gain;
    gain.load(weight, first_dim, head_dim);
    float squares = 0.0f;
    for (int u = 0; u < UNITS; u++) {
      const uint pair = (first_dim + 4 * u) / 2;
      const float2 even = rotated(
          float2(units[u].x, units[u].y), pair, head_dim, float(position), constants[0]);
      const float2 odd = rotated(
          float2(units[u].z, units[u].w), pair + 1, head_dim, float(position), constants[0]);
      units[u] = float4(even.x, even.y, odd.x, odd.y);
      squares += total(units[u] * units[u]);
    }
    const float mean = run_sum<lanes>(squares) / float(head_dim);
    scale(metal::precise::rsqrt(mean + constants[1]));
    for (int u = 0; u < UNITS; u++) {
      units[u] *= gain.units[u];
    }
  }

  void scale(float factor) {
    for (int u = 0; u < UNITS; u++) {
      units[u] *= factor;
    }
  }

  template <int lanes>
  float score(thread const char4* key) const {
    float4 products = units[0] * widened(key[0]);
    for (int u = 1; u < UNITS; u++) {
      products += units[u] * widened(key[u]);
    }
    return run_sum<lanes>(total(products));
  }
};

// Attention of some lanes to the keys they saw: the largest score, the sum of exp2(score - maximum), and
// the sum of the values weighted by it, UNITS times four dimensions per lane.
//
// Fast exponentials: one per key, and what is wrong with a weight is wrong in both sums.
template <int UNITS>
struct OnlineSoftmax {
  float maximum;
  float sum;
  float4 values[UNITS];

  void clear() {
    maximum = LOWEST;
    sum = 0.0f;
    for (int u = 0; u < UNITS; u++) {
      values[u] = float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }

  void rescale(float top) {
    const float keep = metal::fast::exp2(maximum - top);
    maximum = top;
    sum *= keep;
    for (int u = 0; u < UNITS; u++) {
      values[u] *= keep;
    }
  }

  void add(float score, thread const char4* value) {
    if (score > maximum) {
      rescale(score);
    }
    const float weight = metal::fast::exp2(score - maximum);
    sum += weight;
    for (int u = 0; u < UNITS; u++) {
      values[u] += widened(value[u]) * weight;
    }
  }

  // Merge with the lane `distance` away; all lanes of the simdgroup call it.
  void merge(ushort distance) {
    rescale(metal::max(maximum, simd_shuffle_xor(maximum, distance)));
    sum += simd_shuffle_xor(sum, distance);
    for (int u = 0; u < UNITS; u++) {
      for (int c = 0; c < 4; c++) {
        values[u][c] += simd_shuffle_xor(values[u][c], distance);
      }
    }
  }
};
