"""Faults that are put into the exporter: execution finds each of them."""

import contextlib

import numpy as np
import pytest

from afm_mlx.converters import graph_source
from afm_mlx.converters.convert import convert
from afm_mlx.converters.coreai import adapter_file, constants, functions
from afm_mlx.converters.coreai.functions import FunctionBuilder
from afm_mlx.coreai.bundle import CoreAIBundle
from tests.converters.coreai.test_execution import LENGTH, run_both
from tests.tools.compare import error
from tests.tools.coreai import Executed
from tests.tools.exports import decoded, packable, rules_of


def changed(function, change):
    """A function whose result is changed; `change` gets the result and the arguments."""

    def faulty(*arguments, **options):
        return change(function(*arguments, **options), *arguments)

    return faulty


def swapped_paths(function, one, other):
    def faulty(self, x, path):
        for a, b in ((one, other), (other, one)):
            if path.endswith(a):
                return function(self, x, path.replace(a, b))
        return function(self, x, path)

    return faulty


def columns_late(function):
    """The states are written one column late; everything else is right."""

    def faulty(self, name, block, heads, columns):
        late = (functions.coreai.broadcasting_add(c, functions.ints(1)) for c in columns[:2])
        return function(
            self,
            name,
            block,
            heads,
            columns._replace(**dict(zip(("first", "after"), late, strict=True))),
        )

    return faulty


def other_columns(**shift):
    """RoPE or the mask of columns that are one too far."""

    def wrap(function):
        def faulty(self, first, after, read, columns, every):
            one = functions.coreai.broadcasting_add(columns, functions.ints(1))
            right = function(self, first, after, read, columns, every)
            wrong = function(self, first, after, read, one, every)
            return right._replace(**{name: getattr(wrong, name) for name in shift})

        return faulty

    return wrap


def wrong_scales(part, change):
    def wrap(function):
        def faulty(packed, rows):
            found = dict(function(packed, rows))
            if part in found:
                found[part] = change(found[part])
            return found

        return faulty

    return wrap


def kv_scales(change):
    return lambda function: changed(function, lambda found, *_: change(*found))


def to_first_row(function):
    """The reuse blocks run for the first token of a prompt, not for the last."""
    zero, one = (lambda: functions.ints(0)), (lambda: functions.ints(1))
    return lambda self, x, start, after: function(self, x, zero(), one())


def no_negation(function):
    """RoPE without the minus sign: both halves are sums."""

    def faulty(self, heads, columns):
        minus = functions.coreai.broadcasting_mul(columns.sin, np.array(-1, np.float32))
        return function(self, heads, columns._replace(sin=minus))

    return faulty


def b_of_next_projection(function):
    def faulty(arrays, path, found, own, rank):
        b = found.b
        if len(b) == 3:
            b = (b[0], b[2], b[1])
        return function(arrays, path, type(found)(found.key, found.a, b), own, rank)

    return faulty


FAULTS = {
    "an offset of the grid": (constants, "_mapping", wrong_scales("offset", lambda o: o * (5 / 3))),
    "scales of the next rows": (
        constants,
        "_mapping",
        wrong_scales("scale", lambda s: np.roll(s, 1, 0)),
    ),
    "states one column late": (FunctionBuilder, "_write", columns_late),
    "RoPE of the next position": (FunctionBuilder, "_columns", other_columns(cos=1, sin=1)),
    "a mask that shows the next token": (FunctionBuilder, "_columns", other_columns(mask=1)),
    "RoPE backwards": (FunctionBuilder, "_rotated", no_negation),
    "gate and up exchanged": (
        FunctionBuilder,
        "_linear",
        lambda f: swapped_paths(f, "gate_proj", "up_proj"),
    ),
    "scales of keys and values exchanged": (
        FunctionBuilder,
        "_kv_scales",
        kv_scales(lambda k, v: (v, k)),
    ),
    "values of half the size": (FunctionBuilder, "_kv_scales", kv_scales(lambda k, v: (k, 1.0))),
    "the first token for the last": (FunctionBuilder, "_rows", to_first_row),
    "norms without the order of heads": (functions, "half_split", lambda f: np.arange),
    "rows without the order of heads": (graph_source, "half_split_rows", lambda f: lambda *_: None),
    "values' B for keys": (adapter_file, "_fill", b_of_next_projection),
    "an adapter of twice the strength": (
        adapter_file,
        "_fill",
        lambda f: (
            lambda arrays, path, found, own, rank: f(
                arrays, path, type(found)(found.key, 2 * found.a, found.b), own, rank
            )
        ),
    ),
}


@pytest.mark.slow
def test_execution_finds_each_fault(rng, write_model, tmp_path, monkeypatch):
    config = packable(
        rng, context_length=40, num_layers=3, num_kv_reuse_layers=1, num_heads=4, num_kv_heads=2
    )
    folder = write_model(config, rules_of("2 bits"), adapters=["a"])
    model = decoded(folder, config)
    errors = {}
    for number, name in enumerate([None, *FAULTS]):
        path = tmp_path / str(number)
        with monkeypatch.context() if name else contextlib.nullcontext() as patch:
            if name:
                owner, attribute, fault = FAULTS[name]
                patch.setattr(owner, attribute, fault(getattr(owner, attribute)))
            options = {"dtype": "float32", "prompt_lengths": [LENGTH], "adapter_rank": 4}
            convert(folder, path, to="coreai", **options)
            adapter_file.write_adapter_file(
                folder / "adapters" / "a", CoreAIBundle.read(path), path / "adapter.safetensors"
            )
        with Executed(path) as executed:
            found = run_both(
                np.random.default_rng(1), executed, model, folder, adapter="a", steps=3
            )
        errors[name] = error(found.logits, found.wanted)
    right = errors.pop(None)
    missed = {name: bad for name, bad in errors.items() if not bad > 20 * max(right, 1e-3)}
    assert right < 1e-2, right
    assert not missed, (right, missed)
