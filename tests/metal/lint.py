"""What Metal refuses and the emulator can't see: a reading of `.metal` texts, rule by rule.

The rules follow the Metal Shading Language Specification (section 1.4 on what it leaves out of C++, section 4
on address spaces) and what the versions accept that MLX compiles for: 3.1, 3.2, 4.0 and 4.1 (`texts.VERSIONS`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from .translation import closing, declaration_end, split


class Problem(NamedTuple):
    rule: str
    line: int
    text: str


# Functions of float that Metal has twice, with different accuracy (section 8.4, tables 8.1 and 8.2).
TRANSCENDENTAL = (
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "cospi", "divide"),
    *("exp", "exp2", "exp10", "fmod", "log", "log2", "log10", "pow", "powr", "rsqrt", "sin"),
    *("sincos", "sinh", "sinpi", "sqrt", "tan", "tanh", "tanpi"),
)

_TOKENS = {
    "double": r"\bdouble\b",
    "long double or long long": r"\blong\s+(?:double|long)\b",
    "virtual functions": r"\bvirtual\b",
    "new and delete": r"\b(?:new|delete)\b",
    "goto": r"\bgoto\b",
    "thread_local": r"\bthread_local\b",
    "inline assembly": r"\b(?:asm|__asm__)\b",
    "volatile": r"\bvolatile\b",
    "atomics": r"\batomic\w*",
    # bfloat's arithmetic needs newer GPUs, and conversions to it must be spelled out: kernels compute in float.
    "bfloat by name": r"\bbfloat\w*",
    "a lambda": (
        r"\[\s*(?:[&=]|\w+(?:\s*,\s*[&\w]+)*)?\s*\]\s*(?:\([^()]*\)\s*)?"
        r"(?:mutable\s*|->\s*\w+\s*)?\{(?!\s*\{)"
    ),
    # Casts of vectors reinterpret bits for one compiler and convert for another; constructors convert for both.
    "a cast to a vector": (
        r"(?:static_cast<|\()\s*(?:metal::)?(?:u?(?:char|short|int|long)|half|float)[234]\s*"
        r"(?:>|\)\s*[\w(])"
    ),
    "a keyword of Metal as a name": (
        r"\b(?:vertex|fragment|kernel|visible|stitchable|intersection|sampler|patch|texture\w*|depth2d\w*|"
        r"imageblock|ray_data|object_data|threadgroup_imageblock)\b"
    ),
    # With `using namespace metal`, the library's names and a kernel's own could be taken for each other.
    "a name that Metal has from 3.2 or 4.0 on": (
        r"\b(?:coherent|tensor|tensor_\w+|cooperative_tensor\w*|d?extents|dynamic_extent|execution_\w+|mpp)\b"
    ),
    # Without a namespace, macOS 15 and later take the fast ones, and earlier versions the precise ones.
    "a function that is neither fast nor precise": (
        rf"(?<![\w.])(?<!fast::)(?<!precise::)(?:{'|'.join(TRANSCENDENTAL)})\s*\("
    ),
    # What a weight of attention is off by is off in numerator and denominator alike; nothing else may be.
    "a fast function other than exp2": r"\bfast::(?!exp2\b)\w+",
    "fast or precise by a using-directive": r"\busing\b[^;]*\bmetal::(?:fast|precise)\b",
    "a GCC extension": r"\b(?:__attribute__|__restrict|typeof|__typeof__)\b",
    "a literal of type double": r"(?<![\w.])(?:\d+\.\d*|\.\d+|\d+(?=[eE][+-]?\d))(?:[eE][+-]?\d+)?(?![\w.])",
}

_SIMDGROUP_CALL = re.compile(r"\b(?:simd|quad)_(?!any\b|all\b|ballot\b|vote\b)\w+\s*\(")
_REFUSED_TYPE = r"(?:bool|u?long|u?int64_t|size_t|u?intptr_t|ptrdiff_t)"
_TRUTH = re.compile(r"[<>!=]=|&&|\|\||(?<![<\w-])<(?![<\w])|(?<![>-])>(?!>)|!|\b(?:true|false)\b")

_SPACE = re.compile(r"\b(?:device|constant|threadgroup|thread)\b")
_FUNCTION = re.compile(r"\b(\w+)\s*\(")
# A variable that is a pointer or reference, from the start of its statement.
_DECLARED = re.compile(
    r"(?:^|[;{}(])\s*((?:const\s+)?(?:auto|[A-Za-z_]\w*(?:<[^;<>]*>)?)(?:\s+const)?\s*[*&]\s*\w+\s*"
    r"(?:=[^=]|;|\{))"
)
_NOT_FUNCTIONS = set(
    "if for while switch return sizeof alignas static_assert decltype _Pragma".split()
)


def without_comments(text: str) -> str:
    """The text with comments and strings blanked, and every line where it was."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    return re.sub(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", blank, text, flags=re.DOTALL)


def problems(text: str, *, is_header: bool) -> list[Problem]:
    """What is wrong with the text of a `.metal` file: a header's functions, or a kernel's body."""
    code = without_comments(text)
    found = [*_tokens(code), *_pointers(code), *_recursion(code), *_simdgroup_operands(code)]
    found += _generic_members(code)
    # Comments too: MLX hands the text over as a C string, whose encoding is the system's.
    foreign = re.finditer(r"[^\x00-\x7f]", text)
    found += [_problem("a character that isn't ASCII", text, match.start()) for match in foreign]
    if is_header:
        found += [*_program_scope(code), *_threadgroup_in_functions(code)]
        if text and not text.endswith("\n"):
            found.append(_problem("a header that doesn't end its last line", code, len(code)))
    found += _static_variables(code, is_header)
    return sorted(set(found), key=lambda p: (p.line, p.rule))


def _problem(rule: str, code: str, at: int) -> Problem:
    line = code.count("\n", 0, at) + 1
    return Problem(rule, line, code.splitlines()[line - 1].strip())


def _tokens(code: str) -> Iterator[Problem]:
    for rule, pattern in _TOKENS.items():
        for match in re.finditer(pattern, code):
            yield _problem(rule, code, match.start())


def _simdgroup_operands(code: str) -> Iterator[Problem]:
    """Functions of a simdgroup take numbers of 8 to 32 bits; the emulator's compiler sees what no text shows.

    `simd_any`, `simd_all` and `simd_ballot` take a bool.
    """
    names = re.findall(rf"\b{_REFUSED_TYPE}(?:\s*[&*]\s*|\s+)(\w+)\s*[=;,)\[({{]", code)
    refused = re.compile(
        rf"\s*(?:{_REFUSED_TYPE}\s*\(|(?:{'|'.join(names) or '$^'})\s*(?:\[[^\]]*\])?\s*$)"
    )
    for match in _SIMDGROUP_CALL.finditer(code):
        operand = split(code[match.end() : closing(code, match.end() - 1)])[0]
        chosen = operand.partition("?")[2] or operand
        if refused.match(operand) or _TRUTH.search(chosen):
            yield _problem("a 64-bit or bool operand of a simdgroup function", code, match.start())


class Function(NamedTuple):
    name: str
    parameters: tuple[int, int]
    body: tuple[int, int]


def functions(code: str) -> list[Function]:
    """Definitions of functions, methods included: a name, parentheses, perhaps `const`, and a body."""
    result = []
    for match in _FUNCTION.finditer(code):
        if match[1] in _NOT_FUNCTIONS:
            continue
        close = closing(code, match.end() - 1)
        after = re.match(
            r"\s*(?:const\s*)?(?:thread\s*|device\s*|constant\s*|threadgroup\s*)?(?::[^{;]*)?\{",
            code[close + 1 :],
        )
        if after:
            begin = close + after.end()
            result.append(Function(match[1], (match.end(), close), (begin, closing(code, begin))))
    return result


def _pointers(code: str) -> Iterator[Problem]:
    """Pointers and references need an address space, as parameters and as variables."""
    rule = "a pointer or reference without address space"
    for function in functions(code):
        begin, end = function.parameters
        at = begin
        for parameter in split(code[begin:end]):
            if re.search(r"[*&]", re.sub(r"\[[^\]]*\]", "", parameter)) and not _SPACE.search(
                parameter
            ):
                yield _problem(rule, code, at + len(parameter) - len(parameter.lstrip()))
            at += len(parameter) + 1
    for match in _DECLARED.finditer(code):
        if not re.match(r"\s*return\b", match[1]):
            yield _problem(rule, code, match.start(1))


def _generic_members(code: str) -> Iterator[Problem]:
    """Members that become references or pointers to `thread` memory, as results, arguments or variables.

    From Metal 4.1 on, `this` may be in any address space, unless a method says `thread` after its parameters.
    """
    rule = "a member in thread memory of a method that isn't `thread`"
    defined = functions(code)
    takes_thread = {
        (function.name, len(parameters), i)
        for function in defined
        for parameters in [split(code[slice(*function.parameters)])]
        for i, parameter in enumerate(parameters)
        if re.search(r"\bthread\b.*[&*]", parameter, re.DOTALL)
    }
    for struct in re.finditer(r"\bstruct\s+\w+\s*\{", code):
        begin, end = struct.end(), closing(code, struct.end() - 1)
        fields = set(_fields(_outside_functions(code[begin:end])))
        for _, (first, last), (opening, close) in defined:
            if not begin < opening < end or re.search(r"\bthread\b", code[last:opening]):
                continue
            declared = max(code.rfind(mark, 0, first) for mark in ";{}")
            if re.search(r"\bthread\b[^()]*[&*]", code[declared:first]):
                yield _problem(rule, code, first)
            body = code[opening:close]
            members = {f for f in fields if not _declares(f"{code[first:last]};{body}", f)}
            bound = [
                (match.start(), body[match.end() :])
                for match in re.finditer(r"\bthread\b[^;=()]*[&*]\s*\w+\s*=", body)
            ]
            for call in re.finditer(r"\b(\w+)\s*(?:<[^;(){}]*>)?\s*\(", body):
                arguments = split(body[call.end() : closing(body, call.end() - 1)])
                bound += [
                    (call.start(), argument)
                    for i, argument in enumerate(arguments)
                    if (call[1], len(arguments), i) in takes_thread
                ]
            for at, value in bound:
                root = re.match(r"\s*[&*]?\s*(?:this\s*->\s*)?(\w+)", value)
                if root and root[1] in members | {"this"}:
                    yield _problem(rule, code, opening + at)


def _declares(text: str, name: str) -> bool:
    """True if a parameter or variable has this name."""
    declared = rf"(?:\b(?!return\b)\w+(?:<[^;()]*>)?[\s&*]+|\(&){name}\)?\s*(?:\[|=[^=]|[;,)]|$)"
    return re.search(declared, text) is not None


def _fields(struct: str) -> Iterator[str]:
    """Names of the variables in a struct whose methods are blanked."""
    for statement in re.split(r"[;{}]", struct):
        if not re.search(r"\bstatic\b|\(", statement):
            for declarator in split(statement):
                if named := re.search(r"(\w+)\s*(?:\[[^\]]*\]\s*)*$", declarator):
                    yield named[1]


def _recursion(code: str) -> Iterator[Problem]:
    defined = functions(code)
    names, calls = {function.name for function in defined}, {}
    for name, _, (begin, end) in defined:
        inside = re.findall(r"(?<![.\w:])(\w+)\s*(?:<[^;(){}]*>)?\s*\(", code[begin:end])
        calls.setdefault(name, set()).update(names.intersection(inside))
    for name, _, (begin, _) in defined:
        reached, todo = set(), [name]
        while todo:
            new = calls[todo.pop()] - reached
            reached |= new
            todo += new
        if name in reached:
            yield _problem("recursion", code, begin)


def _outside_functions(code: str) -> str:
    """The code with the bodies of functions and of structs blanked."""
    result, end = "", 0
    while (begin := code.find("{", end)) >= 0:
        result, close = result + code[end : begin + 1], closing(code, begin)
        result, end = result + re.sub(r"[^\n]", " ", code[begin + 1 : close]), close
    return result + code[end:]


def _program_scope(code: str) -> Iterator[Problem]:
    """Variables of the program must be in constant memory."""
    for match in re.finditer(r"[^;{}]+;", _outside_functions(code)):
        statement = re.sub(r"^\s*#.*$", "", match.group(), flags=re.MULTILINE).strip()
        statement = re.sub(r"^template\s*<.*?>\s*(?=\w)", "", statement, flags=re.DOTALL)
        declared = (
            r"(?:using|typedef|struct|class|enum|union|static_assert|friend|namespace|extern)\b"
        )
        if not statement.strip("; \n") or re.match(declared, statement):
            continue
        is_function = re.match(r"[^=]*\w\s*\([^=]*\)\s*(?:const\s*)?;$", statement)
        if not is_function and not re.search(r"\bconstant\b", statement):
            yield _problem("a variable of the program that isn't constant", code, match.end() - 1)


def _threadgroup_in_functions(code: str) -> Iterator[Problem]:
    """Threadgroup memory is declared in kernels; functions take pointers to it."""
    for match in re.finditer(r"(?:^|[;{}])\s*(threadgroup\s)", code, re.MULTILINE):
        if declaration_end(code, match.end()) is not None:
            yield _problem("threadgroup memory declared outside of a kernel", code, match.start(1))


def _static_variables(code: str, is_header: bool) -> Iterator[Problem]:
    bodies = [f.body for f in functions(code)] if is_header else [(0, len(code))]
    for begin, end in bodies:
        for match in re.finditer(r"\bstatic\b(?!_)", code[begin:end]):
            yield _problem("a static variable of a function", code, begin + match.start())
