"""Metal text as clang takes it: what is Metal's and not C++'s, spelled as calls of the shim."""

from __future__ import annotations

import re

from .toolchain import CompileError

_THREADGROUP = re.compile(r"(?:^|(?<=[;{}]))[ \t]*(threadgroup\s)", re.MULTILINE)
_DECLARATION = re.compile(
    r"\s*(?P<type>.*?)\s*\b(?P<name>\w+)\s*(?P<dims>(?:\[.*\])?)\s*", re.DOTALL
)


def split(text: str, separator: str = ",") -> list[str]:
    """Parts of a text at a separator outside of brackets."""
    parts, depth, begin = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "<([{") - (c in ">)]}")
        if c == separator and depth == 0:
            parts.append(text[begin:i])
            begin = i + 1
    return [*parts, text[begin:]]


def closing(text: str, at: int) -> int:
    """Index of the bracket that closes the one at `at`; other kinds are not counted."""
    opening, depth = text[at], 0
    other = {"(": ")", "{": "}", "[": "]"}[opening]
    for i in range(at, len(text)):
        depth += (text[i] == opening) - (text[i] == other)
        if depth == 0:
            return i
    line = text.count("\n", 0, at) + 1
    raise CompileError(f"no `{other}` for the `{opening}` of line {line}")


def declaration_end(text: str, begin: int) -> int | None:
    """Where a declaration of variables ends, or None for a pointer, a parameter or an expression."""
    depth = 0
    for i in range(begin, len(text)):
        c = text[i]
        depth += (c in "[(") - (c in "])")
        if c == ";":
            return i
        if depth < 0 or (depth == 0 and c in "*&=){}") or (depth == 1 and c == "("):
            return None
    return None


def _threadgroup_variables(declaration: str) -> str:
    """`T x[N], y` as references into memory that the emulator owns."""
    first, *others = split(declaration)
    parsed = _DECLARATION.fullmatch(first)
    if parsed is None:
        raise CompileError(f"can't read the declaration `threadgroup {declaration};`")
    result = ""
    for declarator in (f"{parsed['name']}{parsed['dims']}", *others):
        name, dims = re.fullmatch(r"\s*(\w+)\s*(.*?)\s*", declarator, re.DOTALL).groups()
        alias = f"{name}_threadgroup_type"
        result += (
            f"typedef {parsed['type']} {alias}{dims}; threadgroup {alias}& {name} = "
            f"*(threadgroup {alias}*)emulator::emulator_threadgroup_variable(__COUNTER__, "
            f'"{name}", sizeof({alias}));'
        )
    # On as many lines as before, so that messages give the right one.
    return result.replace("\n", " ") + "\n" * declaration.count("\n")


def _declare_threadgroup_memory(text: str) -> str:
    result, done = "", 0
    for match in _THREADGROUP.finditer(text):
        end = declaration_end(text, match.end())
        if end is not None and match.start() >= done:
            result += text[done : match.start(1)] + _threadgroup_variables(text[match.end() : end])
            done = end + 1
    return result + text[done:]


# Parameters that are arrays with an address space, which clang wants as the pointers that they are.
_ARRAY_PARAMETER = re.compile(
    r"\b((?:constant|device|threadgroup)\b[^,;(){}\[\]]*?)\s(\w+)\[\w*\](?=\s*[,)])"
)

# clang reads a vector's constructor as a cast of its bits.
_CONSTRUCTOR = re.compile(r"\b(?:metal::)?vec<([^<>()]+)>\(")

# Structs that are copied from device to threadgroup memory.
_COPY = re.compile(
    r"\*\(\((threadgroup \w+\*)\)\(([^;]*?)\)\)\s*=\s*\*\(\((const device \w+\*)\)\(([^;]*?)\)\);"
)


# Structs that are copied from device memory to a variable.
_LOAD = re.compile(r"\b(\w+)\s*=\s*\*\(\((?:const )?device (\w+)\*\)\s*(\w+)\);")


def translate(text: str) -> str:
    """Metal text as clang takes it: what is Metal's and not C++'s is spelled as calls of the shim."""
    text = _declare_threadgroup_memory(text)
    text = _ARRAY_PARAMETER.sub(r"\1* \2", text)
    text = _COPY.sub(r"emulator::copy((\1)(\2), (\3)(\4));", text)
    text = _LOAD.sub(r"emulator::load(\1, (const device \2*)(\3));", text)
    text = re.sub(r"\[\[threadgroup\(\d+\)\]\]", "", text)
    return _CONSTRUCTOR.sub(r"metal::make<metal::vec<\1>>(", text)


def entry(instance: str, parameters: str) -> str:
    """A C function that calls a kernel with buffers and attributes, read from its parameter list."""
    arguments = []
    for position, parameter in enumerate(split(parameters)):
        declaration, _, attribute = parameter.partition("[[")
        buffer = re.match(r"\s*buffer\((\d+)\)", attribute)
        if attribute and not buffer:
            kind, name = declaration.split()[-2], re.match(r"\s*(\w+)", attribute)[1]
            values = (f"t->{name}[{i}]" for i in range(int(kind[-1]) if kind[-1] in "23" else 1))
            arguments.append(f"{kind}({', '.join(values)})")
            continue
        kind = "Reference" if "&" in declaration else "Pointer"
        arguments.append(f"emulator::{kind}{{b[{buffer[1] if buffer else position}]}}")
    return _ENTRY % (instance, ", ".join(arguments))


# Arguments take whatever pointer or reference a parameter is; the library tells where it lies.
_ENTRY = """
namespace emulator {
struct Pointer {
  void* p;
  template <typename T> operator T*() const { return (T*)p; }
};
struct Reference {
  void* p;
  template <typename T> operator const constant T&() const { return *(const constant T*)p; }
};
}
extern "C" __attribute__((visibility("hidden"))) char __ehdr_start[], _end[];
extern "C" void emulator_range(unsigned long* r) {
  r[0] = (unsigned long)__ehdr_start;
  r[1] = (unsigned long)_end;
}
extern "C" __attribute__((no_sanitize("thread"))) void emulator_entry(const emulator::Thread* t, void** b) {
  %s(%s);
}
"""
