// The order of products: the larger one wins, and on a tie the one of the lower row.

static constant constexpr const uint NOWHERE = 0xffffffff;

/// A product for comparisons: a NaN becomes infinity, so that whoever looks at the largest sees it.
inline float ranked(float y) { return y == y ? y : INFINITY; }

inline bool is_better(float y, uint place, float best, uint best_place) {
  return y > best || (y == best && place < best_place);
}
