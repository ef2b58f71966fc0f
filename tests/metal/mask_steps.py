"""Predicted decode steps of the 3B under a task mask on Apple's GPUs: gathered matrices, or an index.

    python -m tests.metal.mask_steps

Gathered matrices have the kept channels alone, and run in the kernels of any other matrix. A kernel that reads
the whole matrices through an index would read the same rows of `gate` and `up`. In `down`, a row's kept words
are scattered: with random groups of one word, a line of 128 bytes has some kept word at every share from 0.25
on, so all lines are read. Here the indexed step is the gathered one with the whole model's `down`, and its
index and broken-up loads cost nothing: a lower bound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from afm_mlx.config import PRESETS
from afm_mlx.model.model import Model
from afm_mlx.quantization.rule import AFM_EMBEDDING_RULE, AFM_RULE
from bench.apple_gpus import CHIPS, Chip, chain
from bench.targets import markdown
from tests.tools.graph import decode_cost

from . import launches
from .prediction_data import _Counted

PRESET, CONTEXT = "afm-3b", 512
SHARES = (1.0, 0.5, 0.25)
SHOWN = ("m1", "m3-pro", "m4-max", "m5")


def masked_model(share: float) -> Model:
    """A model whose feed-forwards have the kept channels alone; its arrays are never computed."""
    config = PRESETS[PRESET]
    factor = config.hidden_dim_scale_factor * share
    return launches.shapes_only(
        dataclasses.replace(config, hidden_dim_scale_factor=factor), AFM_RULE, AFM_EMBEDDING_RULE
    )


def is_down(call: launches.Recorded, model: Model) -> bool:
    """True if a launch multiplies by a block's `down`."""
    shape = model.layers[0].mlp.down_proj.weight.shape
    return any(x.dtype == mx.uint32 and x.shape == shape for x in call.inputs)


def steps() -> dict[str, tuple[list[list[int]], int]]:
    """Launches of a step, `[count, number]`, and other dispatches, by way and share; and all launches."""
    counted, found, whole_down = _Counted(), {}, None
    for share in SHARES:
        model = masked_model(share)
        calls = launches.decode_step(model, CONTEXT - 1)
        tokens, cache = mx.zeros((1, 1), mx.int32), launches.cache_of(model, CONTEXT - 1, CONTEXT)
        others = decode_cost(model, Model.greedy, tokens, cache).dispatches - len(calls)
        down = [call for call in calls if is_down(call, model)]
        whole_down = whole_down or down[0]
        found[f"gathered {share:g}"] = counted.steps(calls), others
        indexed = [whole_down if is_down(call, model) else call for call in calls]
        found[f"index {share:g}"] = counted.steps(indexed), others
    return {name: (listed, others) for name, (listed, others) in found.items()} | {
        "launches": (
            [each._replace(operations=dict(each.operations)) for each in counted.launches],
            0,
        )
    }


def rows(found: dict[str, Any]) -> Iterator[list[str]]:
    """The table's rows: dispatches, and milliseconds on some chips."""
    every, _ = found["launches"]
    yield ["step", "dispatches", *(f"{name}, ms" for name in SHOWN)]
    for name, (listed, others) in found.items():
        if name in ("launches", "index 1"):
            continue
        times = (_seconds(listed, others, every, CHIPS[chip]) * 1e3 for chip in SHOWN)
        dispatches = others + sum(count for count, _ in listed)
        yield [name, str(dispatches), *(f"{t:.2f}" for t in times)]


def _seconds(listed: Sequence[Any], others: int, every: Sequence[Any], chip: Chip) -> float:
    return chain([(count, [every[n]]) for count, n in listed], others, chip).total


if __name__ == "__main__":
    print(markdown(list(rows(steps()))))
