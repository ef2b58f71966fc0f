// Tables of palettes as integers that vectors' integers are multiplied with.
#pragma once

#include <cstdint>
#include <vector>

#include "isa.h"
#include "matmul.h"
#include "scratch.h"

namespace afm {

// Tables of some rows: a number is slope * integer + offset, with an integer in [0, 65535] for each code.
struct Palette {
  const uint8_t* bytes;  // (tables, table_bytes(bits))
  const float* numbers;  // (tables, 2**bits)
  const float* slopes;   // (rows,)
  const float* offsets;  // (rows,)
  int64_t rows_per_table;
  int64_t first;  // rows of the first table that come before these
  bool coarse;    // whether integers are no good for some table, of which slope and offset are NaN then

  int64_t table_of(int64_t row) const { return (first + row) / rows_per_table; }
};

struct PaletteScratch {
  Scratch bytes, numbers, slopes, offsets;
};

// Integers of rows [begin, end). An integer is off by up to half of 1/65534 of its table's range; a table more than 3/8 of
// whose numbers that are not 0 are below 128 of those steps is coarse, and so is one with an infinity or a NaN.
Palette palette_of(const PackedMatrix& w, int64_t begin, int64_t end, PaletteScratch& scratch);

}  // namespace afm
