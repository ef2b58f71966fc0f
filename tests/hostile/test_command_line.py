"""Arguments that are huge, of another kind, or no text at all, for every command."""

import contextlib
import io
import sys
from unittest import mock

import pytest

from afm_mlx.cli import main
from afm_mlx.cli.arguments import Unavailable, json_object, parse
from tests.hostile.harness import Case, run_cases
from tests.tools.arguments import actions_of, commands, draw_value
from tests.tools.cli import lines

# What runs to its end or its error in milliseconds, whatever the arguments.
RUN = ["info", "perplexity", "evaluate", "generate", "adapter info", "adapter verify"]
RUN += ["adapter compose"]
TRAIN = ["lora", "qat"]


def draw_arguments(actions, rng) -> list[str]:
    argv = []
    # Few arguments take JSON, and much can be wrong in it.
    actions = [a for a in actions for _ in range(20 if a.type is json_object else 1)]
    for action in rng.choice(actions, int(rng.integers(1, 5))):
        values = [] if action.nargs == 0 else [draw_value(action, rng)]
        if action.nargs in ("+", "*"):
            values += [draw_value(action, rng) for _ in range(rng.integers(3))]
        flag = str(rng.choice(action.option_strings)) if action.option_strings else None
        if flag is None:
            argv += values
        elif values and rng.random() < 0.7:
            argv += [f"{flag}={values[0]}", *values[1:]]
        else:
            argv += [flag, *values]
        if rng.random() < 0.05:
            argv.append(
                str(rng.choice(["--max-token", "-", "--", "--=", "-x5", "--\ud800", "x" * 5000]))
            )
    return [text.replace("\0", "") for text in argv]  # no process has such arguments


def test_arguments_of_every_command(rng):
    modules = [(name, module, actions_of(module)) for name, module in commands().items()]

    def generate(rng):
        name, module, actions = modules[int(rng.integers(len(modules)))]
        argv = draw_arguments(actions, rng)
        return Case(f"{name} {argv!r}", lambda: parse(name, module, argv))

    run_cases(generate, rng, 0.07)


@pytest.mark.parametrize("name", RUN + TRAIN)
def test_commands_that_run(rng, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "data.jsonl", {"prompt": "a", "completion": "b"})
    if name in TRAIN:
        monkeypatch.setattr(f"afm_mlx.cli.{name}.run_training", lambda *args: None)
    actions = [a for a in actions_of(commands()[name]) if not isinstance(a, Unavailable)]

    def generate(rng):
        argv = [*name.split(), *draw_arguments(actions, rng)]
        argv += {"generate": ["-m", "2"], "perplexity": ["--data-path", "no.txt"]}.get(name, [])
        argv += {"evaluate": ["--data", "no.jsonl"]}.get(name, [])
        argv += ["--data", "data.jsonl"] * (name in TRAIN)
        return Case(repr(argv), lambda: _run(argv))

    run_cases(generate, rng, 0.03 / len(RUN + TRAIN))


def _run(argv):
    out, err, nothing = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(3))
    stdin = mock.patch.object(sys, "stdin", nothing)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), stdin:
        status = main(argv)
    err.seek(0)
    text = err.read()
    assert status in (0, 2)
    if status == 2:
        assert text.count("\n") == 1
        assert text.startswith("afm-mlx: error: ")
        assert len(text) < 1300
