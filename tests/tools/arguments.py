"""All commands, and values that their arguments accept or must refuse."""

import numpy as np

from afm_mlx.cli import COMMANDS, find_commands
from afm_mlx.cli.arguments import Parser, Unavailable, add_tables, json_object

NUMBERS = "0 1 -1 3 0.5 1e-5 8 2147483647 2147483648 -9223372036854775809 100000000000000".split()
NUMBERS += [*"1e400 -0.0 nan inf -inf 0x10 1_000 ٣".split(), "9" * 5000]
TEXTS = "- -- a no/such/file x=y = a=b=c afm-nano None true 2001-13-45 ~ %s%n{0} '\" * ~nobody/x".split()
TEXTS += [
    "",
    " ",
    "\n",
    "\x1b[31m",
    "\ufeff",
    "\U0001f600",
    "\udce9",
    "a\ud800",
    "cosine",
    "balanced",
]
TEXTS += ["a" * 5000, "ä" * 300, "/" * 300, "../" * 50]
JSONS = [
    "{}", "[]", '{"rank": 8}', '{"keys": [1]}', "{", '{"a": NaN}', '{"a": "\\ud800"}', "[" * 3000,
    '{"a": 1e999}', '{"adamw": {"betas": [1]}}', '{"name": "cosine_decay", "arguments": [1e-3]}',
    '{"rank": -1}', '{"scale": "x", "dropout": 2}', '{"a": ' + "9" * 5000 + "}", '{"\\u0000": 1}',
    '{"name": "step_decay", "arguments": [1e-3, 2, 0], "warmup": 99999999999}',
    '{"name": "linear_schedule", "arguments": [1, 1, 0]}', '{"adamw": 5}',
    '{"adamw": {"betas": [1e999, -1]}}', '{"name": ["x"], "arguments": [true]}', '{"adamw": {"eps": "x"}}',
    '{"adam": {"weight_decay": "x"}}', '{"name": "cosine_decay", "arguments": [1e-3, 0]}',
    '{"adamw": {"betas": [0.9, 0.9], "eps": -1}}',
    '{"name": "exponential_decay", "arguments": [1' + "0" * 400 + ", 2]}", '{"rank": 1' + "0" * 400 + "}",
    '{"name": "cosine_decay", "arguments": [1e-3, -5, "x"], "warmup_init": -1}', '{"dropout": NaN}',
]  # fmt: skip


def commands():
    """All commands by name, including `adapter info` and its like."""
    return {full: command for name in COMMANDS for full, command in find_commands(name).items()}


def actions_of(module):
    """The arguments of a command, without --help."""
    parser = Parser(prog="p", add_help=False)
    add_tables(parser, module.ARGUMENTS)
    return parser._actions


def draw_value(action, rng: np.random.Generator) -> str:
    """Draw a value for an argument, valid or not."""
    if action.type is json_object and rng.random() < 0.8:
        return str(rng.choice(JSONS))
    if action.choices is not None and rng.random() < 0.6:
        return str(rng.choice(list(map(str, action.choices))))
    if not isinstance(action, Unavailable) and rng.random() < 0.3:
        return str(rng.choice(["1", "2", "0.5", "true", "a=b", "{}", "64,128"]))
    return str(rng.choice([NUMBERS, TEXTS, JSONS][int(rng.integers(3))]))
