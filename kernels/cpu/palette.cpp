#include "palette.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace afm {
namespace {

constexpr float kSteps = 65534;  // one less than fit, as the lowest number may be rounded up

struct Line {
  float slope, offset;
};

// The integers of `count` numbers as high and low bytes. A 0 stays 0, so that it costs nothing with outliers.
Line quantize_table(const float* numbers, int count, uint8_t* high, uint8_t* low) {
  float least = numbers[0], most = numbers[0];
  for (int i = 1; i < count; ++i) {
    least = numbers[i] < least ? numbers[i] : least;
    most = numbers[i] > most ? numbers[i] : most;
  }
  const float unit = (most - least) / kSteps, inverse = most > least ? kSteps / (most - least) : 0;
  int zeros = 0, small = 0;
  bool finite = std::isfinite(inverse);
  for (int i = 0; i < count; ++i) {
    const float magnitude = std::fabs(numbers[i]);
    finite = finite && std::isfinite(numbers[i]);
    zeros += magnitude == 0;
    small += magnitude < 128 * unit;
  }
  if (!finite || !std::isfinite(unit) || 8 * (small - zeros) > 3 * (count - zeros)) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    return {nan, nan};
  }
  const bool spans_zero = least < 0 && most > 0;
  const float lowest = spans_zero ? -unit * static_cast<float>(static_cast<int32_t>(0.5f - least * inverse)) : least;
  for (int i = 0; i < count; ++i) {
    const int32_t integer = static_cast<int32_t>(std::max((numbers[i] - lowest) * inverse, 0.0f) + 0.5f);
    high[i] = static_cast<uint8_t>(integer >> 8);
    low[i] = static_cast<uint8_t>(integer);
  }
  return {unit, lowest};
}

}  // namespace

Palette palette_of(const PackedMatrix& w, int64_t begin, int64_t end, PaletteScratch& scratch) {
  Palette palette;
  const int64_t rows = end - begin, count = int64_t{1} << w.bits;
  palette.rows_per_table = w.rows / w.tables;
  palette.first = begin % palette.rows_per_table;
  const int64_t first_table = begin / palette.rows_per_table, tables = palette.table_of(rows - 1) + 1;
  const int64_t size = table_bytes(w.bits);
  uint8_t* bytes = scratch.bytes.get<uint8_t>(tables * size);
  float* numbers = scratch.numbers.get<float>(tables * count);
  float* slopes = scratch.slopes.get<float>(rows);
  float* offsets = scratch.offsets.get<float>(rows);
  kernels().load(w.table, first_table * count, tables * count, numbers);
  std::fill(bytes, bytes + tables * size, uint8_t{0});
  palette.coarse = false;
  for (int64_t t = 0, row = 0; t < tables; ++t) {
    uint8_t* high = bytes + t * size;
    const Line line = quantize_table(numbers + t * count, static_cast<int>(count), high, high + size / 2);
    palette.coarse = palette.coarse || std::isnan(line.slope);
    for (; row < rows && palette.table_of(row) == t; ++row) {
      slopes[row] = line.slope;
      offsets[row] = line.offset;
    }
  }
  palette.bytes = bytes;
  palette.numbers = numbers;
  palette.slopes = slopes;
  palette.offsets = offsets;
  return palette;
}

}  // namespace afm
