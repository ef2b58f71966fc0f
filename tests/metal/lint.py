"""What Metal refuses and the emulator can't see: a reading of `.metal` texts, rule by rule.

The rules follow the Metal Shading Language Specification (section 1.4 on what it leaves out of C++, section 4
on address spaces) and what MLX's compiler versions accept (3.1 on macOS 14 and later ones).
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
    # Without a namespace, macOS 15 and later take the fast ones, and earlier versions the precise ones.
    "a function that is neither fast nor precise": (
        rf"(?<![\w.])(?<!fast::)(?<!precise::)(?:{'|'.join(TRANSCENDENTAL)})\s*\("
    ),
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
