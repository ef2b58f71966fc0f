"""The function that MLX builds around a kernel's source, letter for letter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

TYPES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.float32: "float",
    mx.bfloat16: "bfloat16_t",
    mx.complex64: "complex64_t",
}


def _template_value(value: Any) -> tuple[str, str]:
    """Kind and value of a template argument; a bool is an int as well, so it comes first."""
    if isinstance(value, bool):
        return "bool", str(int(value))
    if isinstance(value, int):
        return "int", str(value)
    if value in TYPES:
        return "typename", TYPES[value]
    raise TypeError(f"template arguments are int, bool or Dtype, got {value!r}")


def generate(
    name: str,
    source: str,
    inputs: Sequence[tuple[str, mx.array]],
    outputs: Sequence[tuple[str, mx.Dtype]],
    template: Sequence[tuple[str, Any]] = (),
    atomic_outputs: bool = False,
) -> tuple[str, str, str]:
    """Name, signature (up to its brace) and instantiation that MLX generates around a kernel's source.

    After `mlx/backend/metal/custom_kernel.cpp`: inputs with fewer than 8 elements are `constant`, those without
    axes are references; shapes, strides and attributes appear when the source names them.
    """
    full = f"custom_kernel_{name}"
    kinds = [
        (kind, key, value) for key, (kind, value) in ((k, _template_value(v)) for k, v in template)
    ]
    if kinds:
        full += "_" + "".join(f"_{re.sub(r'[^A-Za-z0-9_]', '_', value)}" for _, _, value in kinds)
    parameters: list[str] = []

    def add(text: str) -> None:
        parameters.append(f"  {text} [[buffer({len(parameters)})]]")

    for key, array in inputs:
        is_scalar, is_small = array.ndim == 0, array.size < 8
        full += f"_{TYPES[array.dtype]}{'s' if is_scalar else 'c' if is_small else ''}"
        space = "constant" if is_small else "device"
        add(f"const {space} {TYPES[array.dtype]}{'&' if is_scalar else '*'} {key}")
        if array.ndim > 0:
            if f"{key}_shape" in source:
                add(f"const constant int* {key}_shape")
            if f"{key}_strides" in source:
                add(f"const constant int64_t* {key}_strides")
            if f"{key}_ndim" in source:
                add(f"const constant int& {key}_ndim")
    n_inputs = len(parameters)
    for key, dtype in outputs:
        full += f"_{TYPES[dtype]}"
        add(f"device {f'atomic<{TYPES[dtype]}>' if atomic_outputs else TYPES[dtype]}* {key}")
    attributes = [f"  {kind} {key} [[{key}]]" for key, kind in ATTRIBUTES.items() if key in source]
    # MLX counts arrays where it should count buffers: with shapes, several outputs and no attribute its list of
    # parameters ends too early. The text here ends where MLX's does, and fails to compile as on a Mac.
    last = len(parameters) if attributes else max(len(inputs) + len(outputs) - 1, n_inputs)
    lines = "".join(f"{p},\n" for p in parameters[:last]) + "".join(
        f"{p}) {{\n" for p in parameters[last:]
    )
    if attributes:
        lines += ",\n".join(attributes) + ") {\n"
    signature = f"[[kernel]] void {full}(\n{lines}"
    if not kinds:
        return full, signature, full
    names = ", ".join(f"{kind} {key}" for kind, key, _ in kinds)
    arguments = ", ".join(value for _, _, value in kinds)
    return full, f"template <{names}>\n{signature}", f"{full}<{arguments}>"
