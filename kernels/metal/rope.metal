// A head with rotary embedding and norm, as the lanes of a simdgroup hold it, and int8 codes.

// One pair (x[2p], x[2p + 1]), turned by an angle.
//
// Precise functions, which are within 4 ulps for any angle; the fast ones promise nothing outside of [-pi, pi].
inline float2 rotated(float2 x, float angle) {
  const float cosine = metal::precise::cos(angle);
  const float sine = metal::precise::sin(angle);
  return float2(x.x * cosine - x.y * sine, x.x * sine + x.y * cosine);
}

// clamp(round(x / scale), -128, 127), half to even.
inline int8_t int8_code(float x, float scale) {
  return static_cast<int8_t>(metal::clamp(metal::rint(x / scale), -128.0f, 127.0f));
}

// A head of HEAD_DIM numbers over the 32 lanes of a simdgroup: lane l has the pairs l, l + 32, ...
static constant constexpr const uint PAIRS = HEAD_DIM / 2;
static constant constexpr const uint STEPS = (PAIRS + 31) / 32;

struct Head {
  float2 x[STEPS];

#define EACH_PAIR UNROLL for (uint i = 0, pair = lane; i < STEPS; i++, pair += 32) if (pair < PAIRS)

  template <typename Numbers>
  void load(Numbers numbers, size_t at, uint lane) {
    EACH_PAIR x[i] = float2(float(numbers[at + 2 * pair]), float(numbers[at + 2 * pair + 1]));
  }

  // Rotary embedding, then RMSNorm; all lanes call it. `constants` begin with a frequency for each pair, then the eps.
  template <typename Weight, typename Constants>
  void rope_norm(Weight weight, Constants constants, float position, uint lane) {
    float squares = 0.0f;
    EACH_PAIR {
      x[i] = rotated(x[i], position * constants[pair]);
      squares += x[i].x * x[i].x + x[i].y * x[i].y;
    }
    squares = simd_sum(squares);
    // Where the squares overflow, 1 / rms would make zeros of all numbers; NaN is seen in the logits.
    const float scale =
        squares == INFINITY ? NAN : metal::precise::rsqrt(squares / float(HEAD_DIM) + constants[PAIRS]);
    EACH_PAIR {
      x[i].x *= scale * float(weight[2 * pair]);
      x[i].y *= scale * float(weight[2 * pair + 1]);
    }
  }

  // Every number times a factor.
  template <typename Number, typename Out>
  void store(Out out, size_t at, float factor, uint lane) const {
    EACH_PAIR {
      out[at + 2 * pair] = static_cast<Number>(x[i].x * factor);
      out[at + 2 * pair + 1] = static_cast<Number>(x[i].y * factor);
    }
  }

  template <typename Out>
  void store_codes(Out out, size_t at, float scale, uint lane) const {
    EACH_PAIR {
      out[at + 2 * pair] = int8_code(x[i].x, scale);
      out[at + 2 * pair + 1] = int8_code(x[i].y, scale);
    }
  }
};
