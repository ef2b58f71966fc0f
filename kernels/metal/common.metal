// What every kernel needs.

#include <metal_stdlib>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>

using namespace metal;

#define UNROLL _Pragma("clang loop unroll(full)")

static constant constexpr const uint LANES = 32;
