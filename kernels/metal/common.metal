// What every kernel needs. MLX puts `metal_stdlib` and `using namespace metal` before each text.

#define UNROLL _Pragma("clang loop unroll(full)")

static constant constexpr const uint LANES = 32;
