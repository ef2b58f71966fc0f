// What MLX compiles before the source of every `metal_kernel`, as far as kernels of this project may use it.
#pragma once

#include <metal_stdlib>

using namespace metal;

typedef half float16_t;
typedef bfloat bfloat16_t;

struct complex64_t {
  float real, imag;
};
