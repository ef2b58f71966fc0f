// What `isa_avx512.cpp` takes from processors that have AVX512-VBMI as well.
#pragma once

#include <cstdint>

namespace afm {

// The high and the low bytes that `count` codes of 8 bits stand for, by a table of 256 high bytes and 256 low ones. Up
// to the next multiple of 64, code 0 follows; `high` and `low` are on boundaries of 64 bytes.
using ExpandBytes = void (*)(const uint8_t* codes, int64_t count, const uint8_t* table, uint8_t* high, uint8_t* low);

// Null where the unit was compiled for another processor. It runs where `has_vbmi`.
ExpandBytes vbmi_expand_bytes();
bool has_vbmi();

}  // namespace afm
