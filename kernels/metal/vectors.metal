// Vectors that matrices multiply.
//
// Buffers are in `device` or, below 8 elements, in `constant` memory: every pointer's type is a parameter.

/// Vectors (rows, in_dims), which go through an RMSNorm with NORM.
template <typename X, typename Norm>
struct Vectors {
  X x;
#if NORM
  Norm norm;
  float eps;

  /// What input `k` is multiplied by on its way in; 1 / rms comes last, from the sum of squares.
  float factor(uint k) const { return float(norm[k]); }

  float inverse_rms(float squares, uint in_dims) const {
    // Where the squares overflow, 1 / rms would make zeros of all numbers; NaN is seen in the logits.
    return squares == INFINITY ? NAN : metal::precise::rsqrt(squares / float(in_dims) + eps);
  }
#else
  float factor(uint) const { return 1.0f; }
#endif
};

template <typename X, typename Norm>
#if NORM
Vectors<X, Norm> make_vectors(X x, Norm norm, float eps) { return {x, norm, eps}; }
#else
Vectors<X, Norm> make_vectors(X x, Norm, float) { return {x}; }
#endif
