// The shim has the overloads for bfloat itself.
#pragma once
#include <metal_stdlib>
