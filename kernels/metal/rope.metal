// Rotary embedding of adjacent pairs, and int8 codes.

// One pair (x[2p], x[2p + 1]), turned by the angle position * theta ** (-2p / head_dim).
//
// Precise functions: an error of the frequency is multiplied by the position, and the fast sine and cosine promise
// nothing outside of [-pi, pi].
inline float2 rotated(float2 x, uint pair, int head_dim, float position, float log2_theta) {
  const float frequency = metal::precise::exp2(-2.0f * float(pair) / float(head_dim) * log2_theta);
  const float angle = position * frequency;
  const float cosine = metal::precise::cos(angle);
  const float sine = metal::precise::sin(angle);
  return float2(x.x * cosine - x.y * sine, x.x * sine + x.y * cosine);
}

// clamp(round(x / scale), -128, 127), half to even.
inline int8_t int8_code(float x, float scale) {
  return static_cast<int8_t>(metal::clamp(metal::rint(x / scale), -128.0f, 127.0f));
}
