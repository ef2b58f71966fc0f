// What every kernel needs.

#include <metal_stdlib>
#include <metal_simdgroup>

using namespace metal;

#define UNROLL _Pragma("clang loop unroll(full)")

static constant constexpr const uint LANES = 32;
