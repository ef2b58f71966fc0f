// Which product comes first: the larger one, of equals the one of the lower row.

static constant constexpr const uint NOWHERE = 0xffffffff;

/// A number for comparisons: what isn't one comes first, so that whoever looks at the largest sees it.
inline float ranked(float y) { return y == y ? y : INFINITY; }

inline bool is_better(float y, uint place, float best, uint best_place) {
  return y > best || (y == best && place < best_place);
}
