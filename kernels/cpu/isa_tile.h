// Rows of codes times several vectors; part of the units that include it after `isa_common.h`, and compiled like them.
//
// Codes become numbers that the processor multiplies, kLines rows and a strip of columns at a time, and meet all
// vectors while they are in the first-level cache. Four lines of them and some vectors have their sums in registers. A strip is
// so short that no sum overflows: what comes out of it is added up in float32.
//
// The unit defines Tile<BITS, DIGITS> for codes with one scale per row, WideTile<BITS, DIGITS> for palettes, and
// GroupTile<BITS, DIGITS> for codes with several scales per row, which takes nothing off:
//   kVectors        vectors that meet four lines at once
//   kNumberBytes    bytes of a number
//   kXBytes         bytes that 64 columns of a vector take
//   kStripBlocks    of 64 columns, in a strip
//   kShift          what is taken off every number, and added again here; kByteShift, off every byte of a palette
//   unpack(codes, out)                    the numbers of 64 codes
//   look_up(codes, table, out, gap)  of a palette: the high bytes, and the low bytes gap bytes behind
//   multiply(lines, line_bytes, blocks, x, lanes)
//                   lanes[4 * v + r]: sums of line r and vector v, over `blocks` times 64 columns
//   kUnitCols, multiply_unit(lines, line_bytes, x, unit, lanes)
//                   of a GroupTile: the same over one of a block's units, where a lane adds up neighbouring columns
// and for a palette's codes times one vector, PaletteRow<BITS, DIGITS>:
//   kPlane          digits of a plane, see Layout
//   kShift          what is taken off every number, and added again here
//   prepare(x, bytes, room)               the digits as `multiply` takes them; `room` has two bytes for each column
//   multiply(codes, row_bytes, table, x)  lanes that a row's products add up to
#include <cstring>

namespace afm {
namespace {

constexpr int kTileLines = 4, kLines = 8;

typedef float Floats4 __attribute__((vector_size(16)));

// Lines of plain codes: one per row.
template <class TILE, int BITS>
struct CodeLines {
  using Tile = TILE;
  static constexpr int kPerRow = 1, kBits = BITS, kShift = Tile::kShift;
  const MatrixJob& job;

  void unpack(int64_t, const uint8_t* codes, uint8_t* out, int64_t) const { Tile::unpack(codes, out); }
  void multiply(const uint8_t* numbers, int64_t line_bytes, int64_t, int64_t count, const int8_t* const* x, int64_t,
                int64_t, Isa::Lanes* lanes) const {
    Tile::multiply(numbers, line_bytes, count, x, lanes);
  }
  static void add(const Floats4& sums, int64_t rows, float* out) {
    if (rows >= kTileLines) {
      Floats4 v;
      std::memcpy(&v, out, sizeof v);
      v += sums;
      std::memcpy(out, &v, sizeof v);
    } else {
      for (int64_t r = 0; r < rows; ++r) out[r] += sums[r];
    }
  }
};

// Lines of codes with several scales each.
template <class TILE, int BITS>
struct GroupLines : CodeLines<TILE, BITS> {
  using Tile = TILE;
  static constexpr int kShift = 0;
  const GroupedJob& grouped;

  GroupLines(const GroupedJob& of) : CodeLines<TILE, BITS>{of.job}, grouped(of) {}

  // Blocks [begin, begin + count) of rows [row, row + rows): groups end at any of them, or several times within one.
  void multiply(const uint8_t* numbers, int64_t line_bytes, int64_t begin, int64_t count, const int8_t* const* x,
                int64_t row, int64_t rows, Isa::Lanes* lanes) const {
    constexpr int kSums = Tile::kVectors * kTileLines;
    const int64_t group_cols = grouped.group_bytes * (8 / BITS);
    const float* scales[kTileLines];  // rows past the last repeat it
    for (int64_t r = 0; r < kTileLines; ++r) {
      scales[r] = grouped.scales + (row + smaller(r, rows - 1)) * grouped.scale_stride;
    }
    Isa::Lanes sums[kSums];
    for (int i = 0; i < kSums; ++i) lanes[i] = Isa::zero();
    const int8_t* part[Tile::kVectors];
    for (int64_t b = 0; b < count;) {
      const uint8_t* at = numbers + b * 64 * Tile::kNumberBytes;
      for (int v = 0; v < Tile::kVectors; ++v) part[v] = x[v] + b * Tile::kXBytes;
      if (group_cols >= 64) {
        const int64_t blocks = group_cols / 64, group = (begin + b) / blocks;
        const int64_t some = smaller(count - b, (group + 1) * blocks - (begin + b));
        Tile::multiply(at, line_bytes, some, part, sums);
        for (int i = 0; i < kSums; ++i) {
          lanes[i] = Isa::multiply_add(sums[i], Isa::set1(scales[i % kTileLines][group]), lanes[i]);
        }
        b += some;
        continue;
      }
      for (int unit = 0; unit < 64 / Tile::kUnitCols; ++unit) {
        const int64_t group = ((begin + b) * 64 + unit * Tile::kUnitCols) / group_cols;
        const int within = static_cast<int>(Tile::kUnitCols / group_cols);
        Tile::multiply_unit(at, line_bytes, part, unit, sums);
        Isa::Lanes scale[kTileLines];
        for (int r = 0; r < kTileLines; ++r) {
          scale[r] = within > 1 ? Isa::spread(Isa::from_floats(scales[r] + group), within) : Isa::set1(scales[r][group]);
        }
        for (int i = 0; i < kSums; ++i) lanes[i] = Isa::multiply_add(sums[i], scale[i % kTileLines], lanes[i]);
      }
      ++b;
    }
  }
};

// Lines of a palette: the high bytes that a row's codes stand for, and the low ones.
template <class TILE, int BITS>
struct PaletteLines {
  using Tile = TILE;
  static constexpr int kPerRow = 2, kBits = BITS, kShift = 257 * Tile::kByteShift;
  const MatrixJob& job;
  const PaletteJob& palette;

  void unpack(int64_t row, const uint8_t* codes, uint8_t* out, int64_t gap) const {
    Tile::look_up(codes, table_of(palette, row), out, gap);
  }
  void multiply(const uint8_t* numbers, int64_t line_bytes, int64_t, int64_t count, const int8_t* const* x, int64_t,
                int64_t, Isa::Lanes* lanes) const {
    Tile::multiply(numbers, line_bytes, count, x, lanes);
  }
  static void add(const Floats4& sums, int64_t rows, float* out) {
    out[0] += 256 * sums[0] + sums[1];
    if (rows > 1) out[1] += 256 * sums[2] + sums[3];
  }
};

// The sum of a vector's integers, of which each block has a plane of `cols` digits or two.
inline float sum_of_integers(const int8_t* x, int64_t bytes, int cols, int digits) {
  int64_t sum = 0;
  for (int64_t plane = 0; plane * cols < bytes; ++plane, x += cols) {
    int32_t part = 0;
    for (int i = 0; i < cols; ++i) part += x[i];
    sum += int64_t{part} * (plane % digits < digits - 1 ? 256 : 1);
  }
  return static_cast<float>(sum);
}

// Blocks [begin, begin + count) of a row's codes as numbers; the last one is filled up with zeros.
template <class Lines>
inline void unpack_strip(const Lines& lines, int64_t row, int64_t begin, int64_t count, uint8_t* out, int64_t gap) {
  constexpr int64_t kStep = 8 * Lines::kBits, kAhead = kLines / Lines::kPerRow;
  const MatrixJob& job = lines.job;
  const uint8_t* codes = job.codes + row * job.row_bytes + begin * kStep;
  const int64_t whole = smaller(count, job.row_bytes / kStep - begin);
  for (int64_t b = 0; b < count; ++b, codes += kStep, out += 64 * Lines::Tile::kNumberBytes) {
    Isa::prefetch(codes + kAhead * job.row_bytes);  // the strip that is next after all vectors, a line for every block
    if (b < whole) {
      lines.unpack(row, codes, out, gap);
    } else {
      uint8_t last[kStep] = {};
      std::memcpy(last, codes, job.row_bytes % kStep);
      lines.unpack(row, last, out, gap);
    }
  }
}

// `count` blocks of numbers times all vectors, added to rows [row, row + rows) of the products.
template <class Lines>
inline void multiply_strip(const Lines& lines, const uint8_t* numbers, int64_t line_bytes, int64_t begin, int64_t count,
                           int64_t row, int64_t rows) {
  using Tile = typename Lines::Tile;
  const MatrixJob& job = lines.job;
  constexpr int kVectors = Tile::kVectors;
  alignas(64) float sums[kVectors * kTileLines];
  Isa::Lanes products[kVectors * kTileLines];
  for (int64_t m = 0; m < job.vectors; m += kVectors) {
    const int64_t vectors = smaller(kVectors, job.vectors - m);
    const int8_t* x[kVectors];
    for (int64_t v = 0; v < kVectors; ++v) {  // vectors past the last repeat it
      x[v] = job.x + (m + smaller(v, vectors - 1)) * job.x_row_bytes + begin * Tile::kXBytes;
    }
    for (int64_t r = 0; r < rows; r += kTileLines / Lines::kPerRow) {
      const uint8_t* first = numbers + r * Lines::kPerRow * line_bytes;
      lines.multiply(first, line_bytes, begin, count, x, row + r, rows - r, products);
      for (int i = 0; i < kVectors * kTileLines; i += Isa::kLanes) Isa::reduce(products + i, sums + i);
      for (int64_t v = 0; v < vectors; ++v) {
        Floats4 of_vector;
        std::memcpy(&of_vector, sums + kTileLines * v, sizeof of_vector);
        Lines::add(of_vector, rows - r, job.out + (m + v) * job.out_stride + row + r);
      }
    }
  }
}

template <class Lines>
void multiply_lines(const Lines& lines) {
  using Tile = typename Lines::Tile;
  constexpr int64_t kRows = kLines / Lines::kPerRow, kStrip = Tile::kStripBlocks;
  constexpr int64_t kLineBytes = kStrip * 64 * Tile::kNumberBytes;
  alignas(64) uint8_t numbers[kLines * kLineBytes];
  const MatrixJob& job = lines.job;
  const int64_t blocks = job.x_row_bytes / Tile::kXBytes;
  for (int64_t m = 0; m < job.vectors; ++m) {
    float start = 0;
    if constexpr (Lines::kShift != 0) {
      start = Lines::kShift * sum_of_integers(job.x + m * job.x_row_bytes, job.x_row_bytes, 64, job.digits);
    }
    for (int64_t n = 0; n < job.rows; ++n) job.out[m * job.out_stride + n] = start;
  }
  Prefetcher prefetcher(job.ahead, 0, job.rows, (job.rows + kRows - 1) / kRows);
  for (int64_t row = 0; row < job.rows; row += kRows) {
    prefetcher.next_share();
    const int64_t rows = smaller(kRows, job.rows - row);
    if (rows < kRows) std::memset(numbers, 0, sizeof numbers);
    for (int64_t begin = 0; begin < blocks; begin += kStrip) {
      const int64_t count = smaller(kStrip, blocks - begin);
      for (int64_t r = 0; r < rows; ++r) {
        unpack_strip(lines, row + r, begin, count, numbers + r * Lines::kPerRow * kLineBytes, kLineBytes);
      }
      multiply_strip(lines, numbers, kLineBytes, begin, count, row, rows);
    }
  }
}

template <int BITS, int DIGITS>
void multiply_matrix(const MatrixJob& job) {
  multiply_lines(CodeLines<Tile<BITS, DIGITS>, BITS>{job});
}

void matrix(const MatrixJob& job) {
  const bool two = job.digits == 2;
  if (job.bits == 2) return two ? multiply_matrix<2, 2>(job) : multiply_matrix<2, 1>(job);
  if (job.bits == 4) return two ? multiply_matrix<4, 2>(job) : multiply_matrix<4, 1>(job);
  return two ? multiply_matrix<8, 2>(job) : multiply_matrix<8, 1>(job);
}

template <int BITS, int DIGITS>
void multiply_grouped_matrix(const GroupedJob& grouped) {
  multiply_lines(GroupLines<GroupTile<BITS, DIGITS>, BITS>(grouped));
}

void grouped_matrix(const GroupedJob& job) {
  const bool two = job.job.digits == 2;
  if (job.job.bits == 2) return two ? multiply_grouped_matrix<2, 2>(job) : multiply_grouped_matrix<2, 1>(job);
  if (job.job.bits == 4) return two ? multiply_grouped_matrix<4, 2>(job) : multiply_grouped_matrix<4, 1>(job);
  return two ? multiply_grouped_matrix<8, 2>(job) : multiply_grouped_matrix<8, 1>(job);
}

// ---- Palettes

// One vector.
template <int BITS, int DIGITS>
void multiply_palette_vector(const PaletteJob& palette) {
  using Row = PaletteRow<BITS, DIGITS>;
  const MatrixJob& job = palette.job;
  const int8_t* x = Row::prepare(job.x, job.x_row_bytes, reinterpret_cast<int8_t*>(job.scratch));
  const float start = Row::kShift * sum_of_integers(job.x, job.x_row_bytes, Row::kPlane, DIGITS);
  alignas(64) float out[Isa::kLanes];
  for (int64_t row = 0; row < job.rows; row += Isa::kLanes) {
    Isa::Lanes lanes[Isa::kLanes];
    const int64_t count = smaller(Isa::kLanes, job.rows - row);
    for (int64_t r = 0; r < count; ++r) {
      lanes[r] = Row::multiply(job.codes + (row + r) * job.row_bytes, job.row_bytes, table_of(palette, row + r), x);
    }
    for (int64_t r = count; r < Isa::kLanes; ++r) lanes[r] = Isa::zero();
    Isa::reduce(lanes, out);
    for (int64_t r = 0; r < count; ++r) job.out[row + r] = out[r] + start;
  }
}

void palette_vector(const PaletteJob& palette) {
  const bool two = palette.job.digits == 2, short_codes = palette.job.bits == 2;
  if (short_codes) return two ? multiply_palette_vector<2, 2>(palette) : multiply_palette_vector<2, 1>(palette);
  return two ? multiply_palette_vector<4, 2>(palette) : multiply_palette_vector<4, 1>(palette);
}

template <int BITS, int DIGITS>
void multiply_palette_matrix(const PaletteJob& palette) {
  multiply_lines(PaletteLines<WideTile<BITS, DIGITS>, BITS>{palette.job, palette});
}

void palette_matrix(const PaletteJob& palette) {
  const bool two = palette.job.digits == 2, short_codes = palette.job.bits == 2;
  if (short_codes) return two ? multiply_palette_matrix<2, 2>(palette) : multiply_palette_matrix<2, 1>(palette);
  return two ? multiply_palette_matrix<4, 2>(palette) : multiply_palette_matrix<4, 1>(palette);
}

}  // namespace
}  // namespace afm
