"""The lint over the project's Metal sources; and that each of its rules fires."""

import importlib
import itertools

from afm_mlx.kernels.metal import products
from afm_mlx.kernels.metal.runtime import FOLDER, Kernel, _read
from tests.metal.lint import problems
from tests.metal.machine import MAX_BUFFERS

MODULES = [
    importlib.import_module(f"afm_mlx.kernels.metal.{path.stem}")
    for path in sorted(FOLDER.glob("*.py"))
    if path.stem not in ("__init__", "runtime")
]
KERNELS = {
    kernel.name: kernel
    for module in MODULES
    for kernel in vars(module).values()
    if isinstance(kernel, Kernel)
}
KERNELS |= {n: products._kernel(n, *products._OPTIONAL) for n in ("packed_vector", "packed_matrix")}
FILES = sorted(FOLDER.glob("*.metal"))


def test_every_file_is_used():
    used = {name for kernel in KERNELS.values() for name in (kernel.name, *kernel.headers)}
    assert used == {path.stem for path in FILES}


def test_sources():
    for path in FILES:
        found = problems(path.read_text(encoding="utf-8"), is_header=path.stem not in KERNELS)
        assert not found, "\n".join(f"{path.name}:{p.line}: {p.rule}: {p.text}" for p in found)


def test_buffers():
    for name, kernel in KERNELS.items():
        more = itertools.product(kernel.inputs, ("shape", "strides", "ndim"))
        extra = sum(f"{x}_{what}" in _read(name) for x, what in more)
        assert len(kernel.inputs) + len(kernel.outputs) + extra <= MAX_BUFFERS, name


def test_parameters_end_where_they_should():
    """MLX generates a broken list for shapes and several outputs, unless the kernel names an attribute."""
    for name, kernel in KERNELS.items():
        assert len(kernel.outputs) == 1 or "thread" in _read(name), name


BODIES = {
    "double": "double x = 1;",
    "long double or long long": "long long x = 1;",
    "new and delete": "thread int* p = new int;",
    "goto": "goto end; end: ;",
    "thread_local": "thread_local int x;",
    "inline assembly": 'asm("nop");',
    "volatile": "volatile int x = 1;",
    "atomics": "atomic_fetch_add_explicit(out, 1, memory_order_relaxed);",
    "bfloat by name": "bfloat x = bfloat(1.0f);",
    "a lambda": "auto f = [&](int x) { return x; };",
    "a cast to a vector": "float4 y = (float4)x;",
    "a keyword of Metal as a name": "float fragment = 0.0f;",
    "a function that is neither fast nor precise": "float x = metal::exp(y);",
    "a fast function other than exp2": "float x = metal::fast::rsqrt(y);",
    "fast or precise by a using-directive": "using namespace metal::fast;",
    "a character that isn't ASCII": "// 2 \u03c0",
    "a 64-bit or bool operand of a simdgroup function": "ulong x = 1; x = simd_sum(x);",
    "a GCC extension": "float x __attribute__((aligned(4)));",
    "a literal of type double": "float x = 1.0;",
    "a pointer or reference without address space": "float* p = q;",
    "a static variable of a function": "static int calls = 0;",
}
HEADERS = {
    "a pointer or reference without address space": "inline float f(const float* x) { return *x; }\n",
    "recursion": "int f(int n);\nint g(int n) { return f(n - 1); }\nint f(int n) { return g(n); }\n",
    "a variable of the program that isn't constant": "constexpr int N = 4;\n",
    "threadgroup memory declared outside of a kernel": "inline void f() { threadgroup float x[4]; }\n",
    "a static variable of a function": "inline int f() { static int n = 0; return ++n; }\n",
    "a header that doesn't end its last line": "// the signature would join this comment",
    "a name that Metal has from 3.2 or 4.0 on": "inline float tensor(float x) { return x; }\n",
    "virtual functions": "struct A { virtual int f() { return 1; } };\n",
}
MEMBERS = "a member in thread memory of a method that isn't `thread`"
BOUND = [
    "struct A { float v[4]; thread float& at(int i) { return v[i]; } };\n",
    "inline void f(thread float* x) { *x = 1; }\nstruct A { float v[4]; void g() { f(v); } };\n",
    "inline void f(int n, thread float& x) { x = n; }\nstruct A { float v; void g() { f(1, this->v); } };\n",
    "struct A { float v[4]; float g() { thread float& x = v[1]; return x; } };\n",
]
ALLOWED = [
    "struct A { float v[4]; thread float& at(int i) thread { return v[i]; } };\n",
    "inline void f(thread float* x) { *x = 1; }\nstruct A { float v[4]; void g() thread { f(v); } };\n",
    "inline void f(thread float* x) { *x = 1; }\nstruct A { float v[4]; void g() { float v[4]; f(v); } };\n",
    "inline float f(float x) { return x; }\nstruct A { float v[4]; float g() { return f(v[1]); } };\n",
    "struct A { float v; void g(thread float* x) { x[0] = v; } };\n",
]
MORE = [
    ("a lambda", "auto f = [=] { return 1; };"),
    ("a lambda", "auto f = [](float x) -> float { return x; };"),
    ("a lambda", "auto f = [x, &y](float z) { return z; };"),
    ("a cast to a vector", "uint4 y = static_cast<uint4>(x);"),
    ("a literal of type double", "float x = 1e-6;"),
    ("a literal of type double", "float x = 2.5e3 * y;"),
    ("a pointer or reference without address space", "for (auto& x : y) { }\nauto& z = y[0];"),
    ("long double or long long", "long double x;"),
    *(
        ("a function that is neither fast nor precise", f"float x = {call};")
        for call in ("rsqrt(y)", "sin (y)", "1.0f / sqrt(y)", "metal::pow(y, 2.0f)", "-cos(y)")
    ),
    *(
        ("a 64-bit or bool operand of a simdgroup function", text)
        for text in (
            "float y = simd_sum(x > 0.0f);",
            "int y = simd_or(a && b);",
            "y = simd_shuffle_xor(bool(x), 1);",
            "y = simd_max(ulong(x));",
            "bool used[4]; y = simd_broadcast(used[2], 0);",
            "y = quad_sum(!x);",
        )
    ),
]


def test_every_rule_fires():
    bodies = ((rule, text, False) for rule, text in [*BODIES.items(), *MORE])
    for rule, text, is_header in (*bodies, *((*each, True) for each in HEADERS.items())):
        assert rule in {p.rule for p in problems(text, is_header=is_header)}, text


def test_a_member_is_bound_to_thread_memory_by_thread_methods_only():
    for text in BOUND:
        assert MEMBERS in {p.rule for p in problems(text, is_header=True)}, text
    for text in ALLOWED:
        assert not problems(text, is_header=True), text
