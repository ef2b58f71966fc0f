"""YAML files of arguments that are damaged, huge, or say what no argument can be."""

import json
from contextlib import contextmanager

import pytest

from afm_mlx.cli.arguments import parse
from afm_mlx.errors import AFMError
from tests.hostile.harness import Case, run_cases
from tests.tools.arguments import actions_of, commands, draw_value

# Bits of YAML that mean something somewhere.
PIECES = [
    ": ", "- ", "? ", "&a ", "*a", "!!int ", "!x ", "[", "]", "{", "}", ",", "#", "|", ">", "'", '"',
    "%YAML 1.1\n", "---\n", "...\n", "<<: ", "\n", "  ", "\t", "\x00", "\x85", "\u2028", "\ufeff",
    '"\\UFFFFFFFF"', '"\\uD800"', '"\\0"', "2001-13-45", "9" * 5000, "0x_", ".inf", ".nan", "1:30",
    "[" * 2000, "{" * 2000, "- " * 2000, "a: " * 500, "x" * 70000, "\n" * 3000, "é", "!!binary x",
    "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "!!python/object/apply:os.system [x]", "!!timestamp x",
]  # fmt: skip


def draw_yaml(actions, rng) -> str:
    lines = []
    for action in rng.choice(actions, int(rng.integers(1, 6))):
        value = draw_value(action, rng)
        kind = rng.integers(5)
        if kind == 0:
            value = json.dumps(value)
        elif kind == 1:
            value = f"[{value}, {draw_value(action, rng)}]"
        elif kind == 2:
            value = f"\n  - {value}\n  - {{a: {value}}}"
        key = action.dest if rng.random() < 0.95 else str(rng.choice(["max_token", "5", "", "<<"]))
        lines.append(f"{key}: {value}")
    return "\n".join(lines) + "\n"


def damaged(text: str, rng) -> bytes:
    for _ in range(rng.integers(5)):
        at, to = sorted(int(n) for n in rng.integers(0, len(text) + 1, 2))
        kind = rng.integers(4)
        if kind <= 1:
            text = text[:at] + str(rng.choice(PIECES)) + text[at:]
        elif kind == 2:
            text = text[:at] + text[to:]
        else:
            text = text[:at] + text[at:to] * int(rng.integers(2, 60)) + text[to:]
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        data = data[: rng.integers(len(data) + 1)] + rng.bytes(int(rng.integers(1, 30)))
    return data


@contextmanager
def naming(words):
    """Errors in here have to have these words."""
    try:
        yield
    except AFMError as error:
        if words not in str(error):
            pytest.fail(f"{error} does not say {words}")
        raise


def test_files_that_are_damaged(rng, tmp_path):
    """Every one gives arguments or one error that names the file."""
    modules = [(name, module, actions_of(module)) for name, module in commands().items()]
    file = tmp_path / "c.yaml"

    def generate(rng):
        name, module, actions = modules[int(rng.integers(len(modules)))]
        data = damaged(draw_yaml(actions, rng), rng)
        needed = [(a.choices or ["x"])[0] for a in actions if not a.option_strings and a.required]

        def run():
            file.write_bytes(data)
            with naming("c.yaml"):
                parse(name, module, [*needed, "-c", str(file)])

        return Case(f"{name} -c {data!r}", run)

    run_cases(generate, rng, 0.12)
