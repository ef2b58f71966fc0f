"""Texts of kernels: what is decided, left out and shortened, and that the same is left."""

import re

import pytest

from afm_mlx.kernels.metal import runtime, text
from afm_mlx.kernels.metal.runtime import Kernel
from tests.tools.cases import each

HEADER = """#include <metal_stdlib>
using namespace metal;
#define UNROLL _Pragma("clang loop unroll(full)")
static constant constexpr const uint LANES = 32;
static constant constexpr const uint UNUSED = 64;
constexpr bool is_exact(uint bytes) { return bytes > 2; }
template <typename Numbers>
struct Head {
static constant constexpr const uint SIZE = LANES / 2;
Numbers numbers;
float total[SIZE];
float norm(uint lane) const {
return total[lane % SIZE];
}
template <typename Weight>
float scaled(Weight weight) const { return norm(0) * float(weight); }
};
template <typename Numbers>
Head<Numbers> make_head(Numbers numbers) {
Head<Numbers> head;
head.numbers = numbers;
return head;
}
inline float lonely(float value) { return value; }
"""


@each(
    "condition, wanted",
    (
        ("ROWS", True),
        ("ROWS > 1 && !PAIR", True),
        ("ROWS == 1 || PAIR", False),
        ("!(ROWS != 2)", True),
        ("MISSING", False),
    ),
)
def test_conditions_are_decided_and_lines_stay(condition, wanted):
    lines = f"a\n#if {condition}\nb\n#ifdef MISSING\nc\n#else\nd\n#endif\n#else\ne\n#endif\nf"
    kept = "a\n\nb\n\n\n\nd\n\n\n\n\nf" if wanted else "a\n\n\n\n\n\n\n\n\ne\n\nf"
    assert text.resolved(lines, {"ROWS": 2, "PAIR": 0}) == kept


def test_a_condition_that_is_no_arithmetic_is_an_error():
    with pytest.raises(ValueError, match="only names, numbers and comparisons"):
        text.resolved("#if ROWS / 2\n#endif", {})


def test_definitions_and_members_that_nothing_mentions_are_left_out():
    kept = text.reached(HEADER, "out[0] = make_head(x).norm(3);")
    for name in ("LANES", "UNROLL", "Head", "SIZE", "numbers", "total", "norm", "make_head"):
        assert (name in kept) == (name != "UNROLL"), name
    assert not re.search(r"UNUSED|is_exact|scaled|lonely", kept)
    assert kept.count("template") == 2
    assert "template <typename Weight>\nfloat scaled" in text.reached(
        HEADER, "make_head(x).scaled(2);"
    )
    # Includes stay.
    assert text.reached(HEADER, "") == "#include <metal_stdlib>\nusing namespace metal;\n"


def test_names_are_short_and_the_same_everywhere():
    body = """
const uint lane = thread_index_in_simdgroup;
threadgroup float shared[32];
auto head = make_head(numbers_in + numbers_in_shape[0]);
UNROLL for (uint i = 0; i < LANES; i++) shared[i] = simd_sum(head.norm(lane)) - -1.0f;
out[lane] = shared[0] > 0 ? head.scaled(weight) : metal::precise::exp(x.x);
"""
    buffers = ("x", "numbers_in", "weight", "out")
    header, body, short = text.shortened(HEADER, body, buffers)
    assert short[0] == "x"
    assert all(len(name) == 1 for name in short)
    assert len(set(short)) == 4
    assert f"({short[1]}+{short[1]}_shape[0])" in body
    assert body.count(f"{short[3]}[") == 1
    assert len(header) + len(body) < 800
    names = "LANES Head make_head norm head shared lane scaled is_exact weight out numbers_in"
    for name in names.split():
        assert not re.search(rf"\b{name}\b", header + body), name
    # Other people's names, and what differs by a blank, are as they were.
    others = (
        "thread_index_in_simdgroup",
        "simd_sum(",
        "precise::exp(x.x)",
        "threadgroup float",
    )
    for part in (*others, "- -1.f"):
        assert part in body, part
    assert '_Pragma("clang loop unroll(full)")' in header
    assert "\n#define" in header
    # A name that is free in one text is none that another text uses.
    header, body, _ = text.shortened("int number = a;", "b = number;", ())
    assert len(set(re.findall(r"\b[a-z]\b", header + body))) == 3


def test_what_is_said_often_becomes_a_macro():
    loops = "\n".join(f"UNROLL for (int {i} = 0; {i} < SIZES; {i}++) x[{i}] = {i};" for i in "jklm")
    constants = "\n".join(f"static constant constexpr const uint S{i} = {i};" for i in range(9))
    header = f'#include <metal_stdlib>\n#define UNROLL _Pragma("y")\nconstexpr int SIZES = 3;\n{constants}'
    header += "\n#include <metal_tensor>\n"
    header, body, _ = text.shortened(header, loops, ("x",))
    first, second, *defined = header.splitlines()
    # What is included sees no macro.
    assert (first, second) == ("#include <metal_stdlib>", "#include <metal_tensor>")
    assert len([line for line in defined if line.startswith("#define")]) == 3
    (loop,) = re.findall(r"#define (\w+)\((\w+), (\w+), (\w+)\) (\w+) for \((.*)\)", header)
    name, type_, i, count, unroll, head = loop
    assert head == f"{type_} {i} = 0; {i} < {count}; {i}++"
    assert f'#define {unroll} _Pragma("y")' in header
    size = re.search(r"constexpr int (\w)=3", header)[1]
    assert body == "".join(f"{name}(int,{i},{size})x[{i}]={i};" for i in "jklm")
    assert header.count("static constant constexpr const") == 1


def test_arguments_are_written_into_texts_and_missing_inputs_into_a_body(monkeypatch):
    files = {
        "probe": "#if ROWS > 1\nx[0] = ROWS;\n#else\nx[0] = T(b[0]) + HAS;\n#endif",
        "head": "int b[ROWS];\nstatic constant constexpr const int MOST = 2;\n"
        "#if ROWS == MOST\nint two;\n#endif",
    }
    monkeypatch.setattr(runtime, "_read", files.__getitem__)
    kernel = Kernel("probe", ("a",), ("x",), ("head",), (("b", "c"), ("c", "a"), ("FLAG", "1")))
    one = (("T", runtime.mx.float16), ("ROWS", 1), ("HAS", True))
    assert kernel.decided(one, "probe") == "\n\n\nx[0] = float16_t(a[0]) + true;\n"
    constant = "static constant constexpr const int MOST = 2;"
    assert kernel.decided(one, "head") == f"int b[1];\n{constant}\n\n\n"  # macros are the body's
    two = (("T", runtime.mx.float16), ("ROWS", 2), ("HAS", True))
    assert kernel.decided(two, "probe") == "\nx[0] = 2;\n\n\n"
    assert kernel.decided(two, "head") == f"int b[2];\n{constant}\n\nint two;\n"
    names = {kernel.function(one), kernel.function(two), Kernel("probe", ("a",), ("x",)).function()}
    assert len(names) == 3
